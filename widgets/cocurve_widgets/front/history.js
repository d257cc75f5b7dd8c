// Undo and redo of everything that changes a plan: Ctrl+Z, and Ctrl+Shift+Z or Ctrl+Y.

const REST = 250; // ms: a drag is one change

/**
 * Keep the states of an instrument; read() gives the present one, null for one to leave out, which write(state) shows again, and
 * told() is called when there is another one. Returns {note, settle, undo, redo, list}: note() is
 * called after each change, settle() before one that is a step of its own, and list() gives all
 * states as [{state, here, go}].
 */
export function keepHistory(cleaner, home, read, write, told) {
  const states = [read()];
  let [at, timer] = [0, 0];
  function settle() {
    clearTimeout(timer);
    const now = read();
    if (!now || JSON.stringify(now) === JSON.stringify(states[at])) return;
    at += 1;
    states.splice(at, states.length, now);
    told();
  }
  function go(to) {
    if (!states[to]) return;
    at = to;
    write(states[at]);
    told();
  }
  const turn = (step) => () => {
    settle();
    go(at + step);
  };
  const [undo, redo] = [turn(-1), turn(1)];
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
  },
  list: () => states.map((state, k) => ({ state, here: k === at, go() {
    settle();
    go(k);
  } })) };
}
