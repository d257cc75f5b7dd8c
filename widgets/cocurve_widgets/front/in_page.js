// A model inside the page, in a worker. What it says of the sentence and the plan it tells as a kernel would, in the trait
// `_damage`; how both texts go on, and how far a KL is measured, stands in a room of its own.

import { compared, markedWords } from "./compare.js";
import { serve } from "./inference.js";
import { assign, button, h } from "./kit.js";
import { lessOf, markOf, measurementOf } from "./measured.js";

const CALM = 250; // ms after next words were told before anything slower begins

/** Run the model of a page, packed as text, for the explorer in `root`, whose traits are `plan`. */
export async function runModel(plan, root, packed) {
  // the page's script, as no module, which a file could not start; its end answers
  const code = document.querySelector("script[type=module]").textContent.replaceAll(/^export /gm, "");
  const worker = new Worker(URL.createObjectURL(new Blob([code])));
  const ask = (...message) => new Promise((resolve) => {
    worker.onmessage = ({ data }) => resolve(data);
    worker.postMessage(message);
  });
  const texts = [0, 1].map(() => h("p", {}));
  const goes = h("div", { class: "cc-next cc-goes" }, ...texts);
  const [bar, said] = [h("progress", { "aria-label": "rows measured" }), h("span", { class: "cc-muted" })];
  const stop = button("", "KL on short rows of held-out text", () => {
    stopped = stopped ? "" : now().mark;
    work();
  });
  const line = h("div", { class: "cc-row cc-measuring" }, bar, said, stop);
  root.querySelector(".cc-next").after(goes);
  root.querySelector(".cc-kl").after(line);
  worker.onerror = ({ message }) => said.replaceChildren(`The model does not run in this browser: ${message}`);
  const rows = await ask(packed);
  const measured = {}; // by mark of a plan, the KL of its rows so far
  let [busy, told, stopped, key, next, fresh] = [false, 0, "", "", null, false];

  function now() {
    const pin = plan.get("_pin");
    const order = (pin.hand ? pin.order : plan.get("plans").present) ?? [];
    return { order, mark: markOf(order), prompt: plan.get("prompt") || plan.get("_first").sentences[0].text };
  }
  function recordOf([mark, by_row]) {
    const { difference, error } = lessOf({ by_row }, { by_row: by_row.map(() => 0) });
    return { plan: mark, risk: difference, error, by_row, rows: by_row.length, strength: null, abilities: {}, at: Date.now() / 1000,
      text: `${rows.length} rows of ${rows[0].length} tokens of held-out text` };
  }
  const tell = () => assign(plan, { _damage: { inside: true, next,
    measured: Object.entries(measured).filter(([, by_row]) => by_row.length > 1).map(recordOf) } });
  /** Do what comes next for what is shown, quick things first; false where there is nothing. */
  async function step() {
    const { order, mark, prompt } = now();
    if (key !== prompt + mark) {
      next = { prompt, plans: [mark], rows: await ask("words", prompt, order) };
      [key, fresh, goes.style.opacity] = [prompt + mark, true, 0.5]; // how they go on is still of before
      tell();
      told = performance.now();
      return true;
    }
    const found = measured[mark] ?? [];
    const wanted = found.length < rows.length && !measurementOf(plan.get("_marks"), order);
    line.style.visibility = wanted || found.length ? "" : "hidden";
    [bar.max, bar.value, stop.hidden] = [rows.length, found.length, !wanted];
    [said.textContent, stop.textContent] = [`${found.length} of ${rows.length} short rows`, stopped === mark ? "Measure" : "Stop"];
    const wait = told + CALM - performance.now();
    if (wait > 0) setTimeout(work, wait);
    else if (fresh) {
      const went = await ask("texts");
      compared(went).forEach((words, k) => texts[k].replaceChildren(...markedWords(words)));
      [fresh, goes.style.opacity] = [false, ""];
      return true;
    } else if (wanted && stopped !== mark) {
      measured[mark] = [...found, await ask("row", found.length, order)];
      tell();
      return true;
    }
    return false;
  }
  async function work() {
    if (busy) return;
    busy = true;
    while (await step());
    busy = false;
  }
  for (const name of ["plans", "_pin", "prompt"]) plan.on(`change:${name}`, work);
  work();
}

if (typeof WorkerGlobalScope !== "undefined") { // in the worker; the first message is the model
  let model = null;
  onmessage = ({ data: [name, ...values] }) => postMessage(model ? model[name](...values) : (model = serve(name)).rows);
}
