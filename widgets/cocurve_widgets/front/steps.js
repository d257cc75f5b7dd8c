// Step by step: the solver removes or returns one unit at a time, and the last plans stand in a strip.

import { TINT } from "./unit_map.js";
import { button, fit, h } from "./kit.js";
import { markOf } from "./measured.js";

const PACE = 200; // ms a step: shorter than the rest of a change, so that undo takes back a whole run
const LAST = 6; // plans in the strip

/** A plan as a small picture: layers across, a unit that is gone is empty. */
function thumbnail({ layers, kinds, places, numLayers, size }, order, colors) {
  const most = (kind) => Math.max(0, ...places.filter((_, u) => kinds[u] === kind).map((place) => place + 1));
  const [attention, ffn] = [most(0), most(1)];
  const [wide, tall] = [Math.max(2, Math.round(60 / numLayers)), 2];
  const canvas = document.createElement("canvas");
  const pen = fit(canvas, wide * numLayers, tall * (attention + ffn));
  const gone = new Set(order);
  for (let u = 0; u < size; u++) {
    pen.fillStyle = gone.has(u) ? colors.kept : TINT;
    pen.fillRect(layers[u] * wide, tall * (places[u] + (kinds[u] ? attention : 0)), wide, tall);
  }
  return canvas;
}

/**
 * The panel. does: step(by) removes the next unit or returns the last one, and tells whether there was
 * one; again() begins anew; settle(), undo() and redo() are those of the history. draw(plans, colors) fills the strip: plans as [{order, words, here, go}].
 */
export function stepsPanel(problem, cleaner, root, { step, again, settle, undo, redo }) {
  let timer = 0;
  const stop = () => {
    clearInterval(timer);
    timer = 0;
    play.textContent = "▶ Play";
  };
  const run = () => {
    if (timer) return stop();
    if (!step(1)) again();
    timer = setInterval(() => step(1) || stop(), PACE);
    play.textContent = "❚❚ Stop";
    return undefined;
  };
  const single = (by) => () => {
    stop();
    settle(); // each click is a change of its own
    step(by);
  };
  const play = button("▶ Play", "the solver removes one cell after the other", run);
  const strip = h("div", { class: "cc-strip", role: "group", "aria-label": "last plans" });
  const panel = h("div", { class: "cc-steps" }, h("div", { class: "cc-row" },
    button("↶", "undo (Ctrl+Z)", undo), button("↷", "redo (Ctrl+Shift+Z)", redo),
    button("−1", "return the cell that was removed last", single(-1)), play,
    button("+1", "remove the cell that goes next", single(1))), strip);
  const halt = (event) => timer && event.target !== play && stop(); // a hand on anything else
  root.addEventListener("pointerdown", halt, true);
  cleaner.add(stop);

  function draw(plans, colors) {
    const found = []; // of plans that are alike and follow each other, the one that is shown, or the last
    for (const plan of plans.filter(({ order }) => order)) {
      const mark = markOf(plan.order);
      if (found.at(-1)?.mark !== mark) found.push({ ...plan, mark });
      else if (!found.at(-1).here) found.splice(-1, 1, { ...plan, mark });
    }
    const first = Math.min(Math.max(0, found.length - LAST), Math.max(0, found.findIndex(({ here }) => here)));
    strip.replaceChildren(...(found.length < 2 ? [] : found.slice(first, first + LAST)).map(({ order, words, here, go }) => {
      const one = button("", words, go);
      one.setAttribute("aria-label", words);
      one.setAttribute("aria-pressed", here);
      one.append(thumbnail(problem, order, colors));
      return one;
    }));
  }
  return { panel, draw };
}
