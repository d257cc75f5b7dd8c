// Undo and redo of everything that changes a plan: Ctrl+Z, and Ctrl+Shift+Z or Ctrl+Y.

const REST = 250; // ms: a drag is one change

/**
 * Keep the states of an instrument; read() gives the present one, which write(state) shows again.
 * Returns {note, settle, undo, redo}: note() is called after each change,
 * settle() before one that is a step of its own.
 */
export function keepHistory(cleaner, home, read, write) {
  const [past, ahead] = [[], []];
  let [now, timer] = [read(), 0];
  const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);
  function settle() {
    clearTimeout(timer);
    const next = read();
    if (same(next, now)) return;
    past.push(now);
    ahead.length = 0;
    now = next;
  }
  function go(from, to) {
    settle();
    if (!from.length) return;
    to.push(now);
    now = from.pop();
    write(now);
  }
  const undo = () => go(past, ahead);
  const redo = () => go(ahead, past);
  const keys = (event) => {
    const key = event.key.toLowerCase();
    if (!(event.ctrlKey || event.metaKey) || !["z", "y"].includes(key)) return;
    if (event.target.matches?.("textarea, input[type=text], input[list]")) return; // it undoes its own text
    event.preventDefault();
    event.stopPropagation();
    if (key === "y" || event.shiftKey) redo();
    else undo();
  };
  home.addEventListener("keydown", keys, true);
  cleaner.add(() => home.removeEventListener("keydown", keys, true));
  cleaner.add(() => clearTimeout(timer));
  return { undo, redo, settle, note() {
    clearTimeout(timer);
    timer = setTimeout(settle, REST);
  } };
}
