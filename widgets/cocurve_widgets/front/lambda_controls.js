// The controls of the lambda explorer: lambda and the ratio in one bar, the rest behind "More".

import { button, counted, h, labeled, menu, percent, show, typedNumber } from "./kit.js";
import { MOST } from "./solver.js";

export const STEPS = 1000; // of the lambda slider
export const CONTROLS = ["interaction_strength", "ratio", "layer_cap", "layer_cap_factor",
  "protect_first", "protect_last", "kinds", "surrogate"];

const range = (attributes) => h("input", { type: "range", min: 0, ...attributes });
const number = (attributes) => h("input", { type: "number", ...attributes });

/** "layer whole", "3 layers whole": of the guards that protect the first or the last ones. */
const wholeLayers = (n) => `${n === 1 ? "layer" : counted(n, "layer")} whole`;

const LABELS = { layer_cap: "layer cap", layer_cap_factor: "layer cap", kinds: "units",
  protect_first: "protect first layers", protect_last: "protect last layers" };
export const labelOf = (guards) => guards.split(" and ").map((name) => `“${LABELS[name]}”`).join(" and ");

/** The guards in force, in words. */
export const guardWords = (now) => [now.cap != null && `layer cap ${now.cap}`,
  now.factor != null && `layer cap ${now.factor} x ratio`,
  now.first > 0 && `first ${wholeLayers(now.first)}`, now.last > 0 && `last ${wholeLayers(now.last)}`,
  now.kinds.length === 1 && `${["attention", "ffn"][now.kinds[0]]} only`].filter(Boolean).join(", ") || "no guards";

/**
 * Make the controls. does: put(values) sets traits, slide(place) sets lambda by its place on the
 * axis, hold(whether) tells that the hand is on its slider, go(step) goes to another plan, and
 * arrows() tells whether arrow keys do. Returns the elements, and show(now, facts).
 */
export function lambdaControls(problem, strips, does) {
  const { put } = does;
  const lambda = range({ max: STEPS, step: 1, "aria-label": "lambda, weight of the edges",
    oninput: () => does.slide(lambda.value / STEPS), onkeydown: turn,
    onpointerdown: () => does.hold(true), onpointerup: () => does.hold(false),
    onpointercancel: () => does.hold(false) });
  const lambdaBox = number({ min: 0, max: 1, step: "any", "aria-label": "lambda, typed",
    onchange: () => take(lambdaBox, (value) => put({ interaction_strength: value })) });
  const ratio = range({ max: MOST, step: 0.001, "aria-label": "ratio, share of cost to remove",
    oninput: () => put({ ratio: Number(ratio.value) }) });
  const ratioBox = number({ min: 0, max: 60, step: 0.1, "aria-label": "ratio in percent, typed",
    onchange: () => take(ratioBox, (value) => put({ ratio: value / 100 })) });
  const axis = menu([["plans", "one width per plan"], ["lengths", "as wide as its lambdas"],
    ["linear", "linear"], ["logarithmic", "logarithmic"]], (value) => put({ axis: value }));
  const capMode = menu([["none", "none"], ["share", "share of a layer"], ["factor", "x ratio"]],
    () => {
      if (capMode.value !== "none") capBox.value = capMode.value === "factor" ? 1.5 : 0.4;
      setCap();
    }, { "aria-label": "layer cap" });
  const capBox = number({ min: 0.01, step: 0.05, "aria-label": "size of the cap", onchange: setCap });
  const layers = (name) => {
    const field = number({ min: 0, max: problem.numLayers, step: 1,
      onchange: () => take(field, (value) => put({ [name]: value }), Math.round) });
    return field;
  };
  const [first, last] = [layers("protect_first"), layers("protect_last")];
  const kinds = menu([["attention+ffn", "joint"], ["attention", "attention only"], ["ffn", "FFN only"]],
    (value) => put({ kinds: value.split("+") }), { "aria-label": "kinds of units" });
  const surrogate = menu(problem.surrogates.map((name, k) => [name, k ? name : `${name} (curvature)`]),
    (value) => put({ surrogate: value }));

  const guards = h("p", { class: "cc-legend" });
  const bar = h("div", { class: "cc-bar" },
    h("div", { class: "cc-sliders" },
      labeled("weight of the edges (lambda): 0 ignores them, 1 counts them in full",
        h("span", { class: "cc-row" }, lambda, lambdaBox,
          button("◀ plan", "previous plan: the next smaller lambda with another plan", () => does.go(-1)),
          button("plan ▶", "next plan: the next larger lambda with another plan", () => does.go(1)))),
      strips.lambda, strips.key, strips.doubt),
    h("div", { class: "cc-sliders cc-second" },
      labeled("share to remove (ratio)",
        h("span", { class: "cc-row" }, ratio, ratioBox, "%")),
      strips.reach, guards));
  const more = h("details", { class: "cc-more" }, h("summary", {}, "More"),
    h("div", { class: "cc-controls" },
      labeled("scale of lambda", axis),
      labeled("layer cap", h("span", { class: "cc-row" }, capMode, capBox),
        "the largest share of a layer's cost that may be removed"),
      labeled("protect first layers", first), labeled("protect last layers", last),
      labeled("units", kinds),
      problem.surrogates.length < 2 ? null : labeled("solved on", surrogate,
        "the additive KL takes seconds: it is solved on half of the sketch and priced on the rest")));

  let opened = false; // by us, not by a click

  /** Use the typed number, moved into the bounds; letters restore the old one. */
  function take(field, use, round) {
    const value = typedNumber(field, round);
    field.value = value ?? field.dataset.now;
    if (value !== null) use(value);
  }
  function setCap() {
    const mode = capMode.value;
    if (mode === "none") return put({ layer_cap: null, layer_cap_factor: null });
    capBox.max = mode === "share" ? 1 : 100;
    return take(capBox, (size) => put({ layer_cap: mode === "share" ? size : null,
      layer_cap_factor: mode === "factor" ? size : null }));
  }
  function turn(event) {
    const arrows = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 };
    // where every plan has a width of its own, a key press goes to the next one
    const step = { PageUp: 1, PageDown: -1, ...(does.arrows() && arrows) }[event.key];
    if (!step) return;
    event.preventDefault();
    does.go(step);
  }
  /** Show the traits; `place` of lambda on its axis, and `words` about it for screen readers. */
  function showAll(now, { place, words, guarded: told, axisName, chosen, solvedOn }) {
    const write = (input, value) => {
      input.dataset.now = value;
      if (document.activeElement !== input || input.type === "range") input.value = value;
    };
    axis.value = axisName;
    lambda.value = Math.round(place * STEPS);
    lambda.setAttribute("aria-valuetext", `lambda ${show(now.strength)}${words}`);
    write(lambdaBox, Number(now.strength.toPrecision(4)));
    ratio.value = now.ratio;
    ratio.setAttribute("aria-valuetext", percent(now.ratio));
    write(ratioBox, Number((100 * now.ratio).toFixed(2)));
    capMode.value = now.factor != null ? "factor" : now.cap != null ? "share" : "none";
    capBox.disabled = capMode.value === "none";
    write(capBox, now.factor ?? now.cap ?? "");
    write(first, now.first);
    write(last, now.last);
    kinds.value = chosen.join("+");
    guards.textContent = `Plans with ${told}. “More” loosens or tightens that.`;
    surrogate.value = solvedOn;
    // guards other than at first must be seen; else the field closes again, unless a hand is in it
    const guarded = capMode.value !== "none" || chosen.length < 2
      || [now.first, now.last].some((count) => count !== problem.protected)
      || solvedOn !== problem.surrogates[0];
    if (guarded && !more.open) more.open = opened = true;
    else if (!guarded && opened && !more.contains(document.activeElement)) more.open = opened = false;
  }
  return { bar, more, lambda, ratio, show: showAll };
}
