// Guided: five steps. Each sets a state and asks for one guess on the picture, then shows what is so.

import { brief } from "./compare.js";
import { button, h, percent } from "./kit.js";
import { keptRatios } from "./measured.js";
import { nameOf } from "./solver.js";

const measured = (record) => (record ? brief(record.risk) : "not measured");

/**
 * The steps: what each sets, and `then` with the answer, what it asks for ("cell", "word", "KL" or "ratio"), and what
 * it tells after the guess, about the scene as it then is.
 */
const GUIDE = [
  { set: () => ({ ratio: 0, interaction_strength: 0 }), ask: "cell",
    say: "Each cell is a part of the model: an attention head or a block of FFN channels. Which one would you remove first? Click it.",
    tell: (scene, u) => {
      const { living, next } = scene.price ?? { living: [], next: null };
      return `${nameOf(scene.problem, u)} is number ${living.indexOf(u) + 1} of ${living.length} by price. Pale cells are cheap; `
        + `${next === null ? "none" : nameOf(scene.problem, next)}, with the dot, goes first.`;
    } },
  { set: ({ sweep }) => ({ ratio: sweep, interaction_strength: 0 }), ask: "word",
    say: "Now the cheapest parts are gone, hatched. Which word does the pruned model say first? Click one of the whole model's words.",
    tell: ({ words }, word) => `${words.pruned?.[0]?.[0] === word ? "Right: the" : "The"} pruned model says “${words.pruned?.[0]?.[0].trim() ?? "?"}”, `
      + `the whole model “${words.whole?.[0]?.[0].trim() ?? "?"}”.` },
  { set: ({ sweep }) => ({ ratio: sweep, interaction_strength: 0 }), ask: "KL",
    say: "KL says how far all predictions have moved, not just this one. Drag the mark to where you expect it.",
    tell: ({ shown, mine }, x) => `You: ${brief(x)}. Measured: ${measured(shown)}. The dashed line, ${brief(mine.node + mine.edge)}, is what H predicted.` },
  { set: ({ sweep }) => ({ ratio: sweep, interaction_strength: 0 }), then: { interaction_strength: 1 }, ask: "KL",
    say: "This plan judges each part alone: λ = 0. At λ = 1, what parts cost together counts in full. Drag the mark to where λ = 1 will land.",
    tell: ({ shown, change, a }, x) => `You: ${brief(x)}. Measured at λ = 1: ${measured(shown)}; at λ = 0: ${measured(a?.shown.kl)}. `
      + `The frames mark the ${change} cells in which the two plans differ.` },
  { set: () => ({ ratio: 0, interaction_strength: 0.5 }), ask: "ratio",
    say: "Last: drag the share to where half of the right answers will be gone.",
    tell: ({ shown, broken, now }) => `You: ${percent(now.ratio, 0)}, KL ${measured(shown)}. `
      + `${broken === null ? "Where answers break was not measured." : `Answers break at ${brief(broken)}.`} Now it is yours: drag, click, undo.` },
];

const SEEN = "cocurve-guided"; // in the browser's storage, once a reader has left the tour

/**
 * The tour. does: put(values), read() and write(state) of what a tour may change, scene(), redraw(), and surprise(), a
 * sentence that the present plan ends otherwise than the whole model.
 * Returns {bar, start, asks, guessed, answer}: `asks` is what is asked for now, "" for nothing;
 * answer(what, value) is called by the picture.
 */
export function guidedTour({ put, read, write, scene, redraw, surprise }) {
  let [at, open, guess, before] = [-1, false, null, null];
  const words = h("span", { role: "status" });
  const next = button("Show", "show what is so", () => (open ? reveal() : go(at + 1)));
  const bar = h("div", { class: "cc-tour", hidden: true }, words, next, button("Skip", "leave the guided steps", () => end()));
  const start = button("Guided", "five steps, a guess in each", () => go(0));

  function go(step) {
    if (step >= GUIDE.length) return end(true);
    before ??= read();
    [at, open] = [step, true];
    const { set, ask } = GUIDE[at];
    guess = ask === "KL" ? 0.5 * scene().most : null;
    put({ _pin: {}, selected_unit: null, ...set({ sweep: sweepOf() }) });
    if (ask === "word") put({ prompt: surprise() ?? "" });
    return showAll(`${at + 1}/${GUIDE.length} ${GUIDE[at].say}`);
  }
  function reveal() {
    open = false;
    if (GUIDE[at].then) put(GUIDE[at].then);
    showAll("");
    showAll(GUIDE[at].tell(scene(), guess));
  }
  function end(stay = false) {
    [at, open, guess] = [-1, false, null];
    if (before && !stay) write(before);
    before = null;
    try {
      localStorage.setItem(SEEN, "1");
    } catch { // a page may have no storage
    }
    showAll("");
  }
  function showAll(said) {
    bar.hidden = at < 0;
    start.hidden = at >= 0;
    words.textContent = said;
    next.textContent = open ? "Show" : at === GUIDE.length - 1 ? "Done" : "Next";
    next.hidden = open && ["cell", "word"].includes(GUIDE[at].ask);
    redraw();
  }
  /** A ratio at which the plans are measured and much is gone. */
  function sweepOf() {
    const known = keptRatios(scene().marks).filter((ratio) => ratio > 0);
    return known.reduce((best, one) => (Math.abs(one - 0.2) < Math.abs(best - 0.2) ? one : best), known[0] ?? 0.2);
  }
  return { bar, start,
    get asks() { return open ? GUIDE[at].ask : ""; },
    get guessed() { return at >= 0 && GUIDE[at].ask === "KL" ? guess : null; },
    answer(what, value) {
      if (!open || GUIDE[at].ask !== what) return false;
      guess = value;
      if (what === "KL") redraw();
      else reveal();
      return true;
    },
    first() {
      let seen = location.hash.length > 1;
      try {
        seen ||= localStorage.getItem(SEEN) !== null;
      } catch { // a page may have no storage
      }
      if (!seen) go(0);
    } };
}
