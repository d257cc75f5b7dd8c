// The controls of the lambda explorer: lambda, the ratio, and the guards, which are folded.

import { term } from "./glossary.js";
import { assign, counted, h, labeled, menu, percent, show, tied, typedNumber } from "./kit.js";
import { MOST } from "./solver.js";

export const STEPS = 1000; // of the lambda slider
export const CONTROLS = ["interaction_strength", "ratio", "layer_cap", "layer_cap_factor",
  "protect_first", "protect_last", "kinds"];

const range = (attributes) => h("input", { type: "range", min: 0, ...attributes });
const number = (attributes) => h("input", { type: "number", ...attributes });

/** "layer whole", "3 layers whole": of the guards that protect the first or the last ones. */
const wholeLayers = (n) => `${n === 1 ? "layer" : counted(n, "layer")} whole`;

const LABELS = { layer_cap: "layer cap", layer_cap_factor: "layer cap", kinds: "units",
  protect_first: "protect first layers", protect_last: "protect last layers" };
export const labelOf = (guards) => guards.split(" and ").map((name) => `“${LABELS[name]}”`).join(" and ");

/** The guards in force, in words. */
export const guardWords = (now) => [now.layer_cap != null && `layer cap ${now.layer_cap}`,
  now.layer_cap_factor != null && `layer cap ${now.layer_cap_factor} x ratio`,
  now.protect_first > 0 && `first ${wholeLayers(now.protect_first)}`,
  now.protect_last > 0 && `last ${wholeLayers(now.protect_last)}`,
  now.kinds.length === 1 && `${now.kinds[0]} only`].filter(Boolean).join(", ") || "no guards";

/**
 * Make the controls. does: slide(place, free) sets lambda by its place on the axis, hold(whether) tells
 * that the hand is on its slider, go(step) goes to another plan, arrows() tells whether arrow keys do,
 * and ratios() gives those the ratio snaps to; with Shift both move freely. Returns the elements, and
 * show(now, facts).
 */
export function lambdaControls(model, cleaner, problem, does) {
  const put = (values) => assign(model, values);
  const tie = (trait, control, how) => tied(model, cleaner, trait, control, how);
  const lambda = range({ max: STEPS, step: 1, "aria-label": "lambda, weight of the edges",
    oninput: () => does.slide(lambda.value / STEPS, free), onkeydown: turn, onpointermove: heed,
    title: "goes to the plans that were measured; hold Shift to move freely",
    onpointerdown: () => does.hold(true), onpointerup: () => does.hold(false),
    onpointercancel: () => does.hold(false) });
  const lambdaBox = tie("interaction_strength", number({ min: 0, max: 1, step: "any", "aria-label": "lambda, typed" }),
    { shown: (x) => Number(x.toPrecision(4)) });
  let free = false; // while Shift is held, the ratio does not snap
  const ratio = range({ max: MOST, step: 0.001, "aria-label": "ratio, share of cost to remove",
    oninput: () => {
      put({ ratio: snapped(Number(ratio.value)) });
      ratio.value = model.get("ratio"); // the thumb snaps, too
    }, onkeydown: hop,
    onpointerdown: heed, onpointermove: heed,
    title: "goes to the ratios that were measured; hold Shift to move freely" });
  const ratioBox = tie("ratio", number({ min: 0, max: 60, step: 0.1, "aria-label": "ratio in percent, typed" }),
    { shown: (x) => Number((100 * x).toFixed(2)), meant: (x) => x / 100,
      hint: (x) => (x > 0 && x < 1 ? `this is ${x} %; type ${show(100 * x)} for a share of ${x}` : "") });
  const capMode = menu([["none", "none"], ["share", "share of a layer"], ["factor", "x ratio"]],
    (mode) => setCap(mode === "factor" ? 1.5 : 0.4), { "aria-label": "layer cap" });
  const capBox = number({ min: 0.01, step: 0.05, "aria-label": "size of the cap",
    onchange: () => setCap(typedNumber(capBox)) });
  const layers = { min: 0, max: problem.numLayers, step: 1 };
  const kinds = menu([["attention,ffn", "joint"], ["attention", "attention only"], ["ffn", "FFN only"]],
    undefined, { "aria-label": "kinds of units" });

  const [reach, value, weight] = [h("span", {}), h("b", {}), h("b", {})];
  const slider = (name, input, ...words) => h("div", { class: `cc-slider ${name}` },
    input, h("div", { class: "cc-row" }, ...words)); // the slider is the first stop of Tab
  const strength = slider("cc-along", lambda, h("span", {}, term("lambda", "λ"), ", weight of pairs"), weight);
  const share_ = slider("", ratio, h("span", {}, term("ratio", "share"), " removed", reach), value);
  const exact = h("div", { class: "cc-controls" }, labeled("share to remove, %", ratioBox), labeled("λ", lambdaBox));
  const guards = h("div", { class: "cc-controls" },
    labeled("layer cap", h("span", { class: "cc-row" }, capMode, capBox),
      "the largest share of a layer's cost that may be removed"),
    labeled("protect first layers", tie("protect_first", number(layers))),
    labeled("protect last layers", tie("protect_last", number(layers))),
    labeled("units", tie("kinds", kinds, { shown: String, meant: (text) => text.split(",") })));

  function heed(event) {
    free = event.shiftKey;
  }
  /** The measured ratio nearest to one, where any were measured. */
  function snapped(value) {
    const known = free ? [] : does.ratios();
    return known.reduce((best, one) => (Math.abs(one - value) < Math.abs(best - value) ? one : best),
      known[0] ?? value);
  }
  /** Arrow keys on the ratio go to the next measured one. */
  function hop(event) {
    heed(event);
    const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    const [known, now] = [does.ratios(), model.get("ratio")];
    if (!step || free || !known.length) return;
    event.preventDefault();
    const there = step > 0 ? known.find((one) => one > now + 1e-9) : known.findLast((one) => one < now - 1e-9);
    if (there !== undefined) put({ ratio: there });
  }
  /** Set the cap in the unit of its menu, moved into its bounds; what is no number changes nothing. */
  function setCap(size) {
    const mode = capMode.value;
    const most = { share: 1, factor: 100 }[mode];
    if (size !== null) {
      put({ layer_cap: mode === "share" ? Math.min(size, most) : null,
        layer_cap_factor: mode === "factor" ? Math.min(size, most) : null });
    }
    showCap();
  }
  function showCap() {
    const [cap, factor] = [model.get("layer_cap"), model.get("layer_cap_factor")];
    capMode.value = factor != null ? "factor" : cap != null ? "share" : "none";
    capBox.disabled = capMode.value === "none";
    capBox.value = factor ?? cap ?? "";
  }
  cleaner.follow(model, ["layer_cap", "layer_cap_factor"], showCap);
  function turn(event) {
    const arrows = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 };
    // where every plan has a width of its own, a key press goes to the next one
    const step = { PageUp: 1, PageDown: -1, ...(does.arrows() && arrows) }[event.key];
    if (!step) return;
    event.preventDefault();
    does.go(step);
  }
  /** Show the sliders; `place` of lambda on its axis, and `words` about it for screen readers. */
  function showAll(now, { place, words, most }) {
    reach.textContent = most < MOST ? `, at most ${percent(most)} under the guards` : "";
    weight.textContent = show(Number(now.interaction_strength.toPrecision(2)));
    value.textContent = percent(now.ratio, Number.isInteger(Math.round(1000 * now.ratio) / 10) ? 0 : 1);
    lambda.value = Math.round(place * STEPS);
    lambda.setAttribute("aria-valuetext", `lambda ${show(now.interaction_strength)}${words}`);
    ratio.max = Math.max(does.ratios().at(-1) ?? MOST, now.ratio); // beyond, nothing is measured
    ratio.value = now.ratio;
    ratio.setAttribute("aria-valuetext", percent(now.ratio));
  }
  return { strength, share: share_, exact, guards, lambda, ratio, show: showAll };
}
