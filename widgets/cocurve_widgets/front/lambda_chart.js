// The chart of the lambda explorer: which plans of a ratio are measured, and what they say.

import { planAt } from "./axis.js";
import { lambdaChart, ratioCharts } from "./chart.js";
import { bounded, covering, guessedSteps, guessesOn, revealed } from "./guess.js";
import { button, h } from "./kit.js";
import { cellsOfPath, keptRatios, mainText, markOf, measuredSteps, strengthsAt, verdict } from "./measured.js";
import { orderOf, riskOf } from "./solver.js";
import { place } from "./svg.js";

const LEFT = 60; // px beside the axis, as the slider's in instrument.css

/**
 * The parts of the chart, and draw(scene, width). Of the scene: a, b (plans or null), colors, marks, known
 * (what is measured), now (the controls), flip (the path), axis, first (the plan at lambda 0),
 * solvable (whether this page can solve), by (what predicts), guess and guesses (the traits; a
 * notebook has none). does: put(values), slide(place).
 */
export function chartPanel(problem, run, { put, slide }) {
  const [chart, strip] = [h("div", {}), h("div", {})];
  const others = h("div", { class: "cc-others" }, h("small", { class: "cc-muted" },
    "measured KL at all ratios, λ from 0 to 1 in each: click one to go there"), strip);
  const title = h("h4", { class: "cc-key" });
  const finding = h("p", { class: "cc-finding", role: "status" });
  const cover = covering();
  const ask = button("", "say what you expect, before you see what was measured", () => put({
    "": { interaction_strength: 0, guess: "1", guesses: [] }, 1: { guess: "shown" }, shown: { guess: "" } }[ask.dataset.mode]));
  const prices = new Map(); // of plans, by their marks
  let [drawn, panels] = ["", { key: "", list: [] }];

  function priceOf(order) {
    const mark = markOf(order);
    if (prices.size > 2000) prices.clear();
    if (!prices.has(mark)) prices.set(mark, riskOf(problem, order));
    return prices.get(mark);
  }
  /** The plans of a ratio as cells: all of them once the path is known, until then those that were measured. */
  function cellsAt({ known, now, flip, axis, first, solvable, b }) {
    const strengths = strengthsAt(known, now.ratio);
    if (!flip.stale && first && axis.cells.length === flip.breaks.length + 1) {
      return cellsOfPath(flip, first.order, strengths, axis.cells, solvable ? priceOf : () => null);
    }
    const cell = (strength, order, predicted) => ({ from: axis.place(strength), to: axis.place(strength),
      strength, own: true, order, predicted });
    if (!solvable) return b ? [cell(now.interaction_strength, b.order, b.node + b.edge)] : [];
    return [...new Set([...strengths, 0, 1])].sort((x, y) => x - y).map((strength) => {
      const order = orderOf(problem, { ...now, interaction_strength: strength }, run);
      return cell(strength, order, order && priceOf(order));
    });
  }
  /** The measured plans of every ratio under the guards, for the small charts. */
  function ratiosOf({ marks, known, now, solvable }, text) {
    const key = JSON.stringify([{ ...now, interaction_strength: 0, ratio: 0 }, text, known.measured.length]);
    if (key !== panels.key) {
      const ratios = solvable ? keptRatios(marks).filter((ratio) => ratio > 0) : [];
      const list = ratios.map((ratio) => {
        const cells = strengthsAt(known, ratio).map((strength) => ({ strength, own: true, predicted: null,
          order: orderOf(problem, { ...now, ratio, interaction_strength: strength }, run) }));
        return { ratio, points: measuredSteps(cells, known, text).map(({ strength, risk }) => ({ strength, risk })) };
      });
      panels = { key, list: list.filter(({ points }) => points.length) };
    }
    return panels.list.map((panel) => ({ ...panel, here: Math.abs(panel.ratio - now.ratio) < 5e-4 }));
  }

  function draw(facts, wide) {
    const { a, b, colors, marks, known, now, flip, axis, by, guess = "", guesses } = facts;
    const text = mainText(known);
    const cells = cellsAt(facts, text);
    cover.visit(guess, b?.order);
    const names = [a, b].map((plan) => plan && markOf(plan.order));
    const found = measuredSteps(cells, known, text);
    const [level, covered] = [found[0]?.risk, guess === "1" && guessedSteps(found).length > 0];
    const steps = found.map((step) => {
      const mark = markOf(step.order);
      return { ...step, here: mark === names[1], name: ["A", "B"].filter((_, k) => names[k] === mark).join(" "),
        covered: covered && cover.hides(step) };
    });
    const mine = guess ? guessesOn(steps, now.ratio, guesses) : [];
    const list = ratiosOf(facts, text);
    const [width, gate] = [Math.max(240, wide), marks.gate?.strength];
    const scene = { steps, colors, width, height: width > 560 ? 200 : 170, left: LEFT, right: 8,
      here: axis.place(now.interaction_strength),
      guesses: mine, open: covered, range: covered ? cover.range(level) : [],
      gate: typeof gate === "number" && !covered ? axis.place(gate) : null, gateText: `redundancy gate: ${marks.gate?.reason ?? ""}`,
      predicted: cells.filter((cell) => cell.order && cell.predicted !== null && !(covered && cover.hides(cell)))
        .map(({ from, to, predicted }) => ({ from, to, value: predicted })),
      label: "KL of the plans by lambda: measured and predicted, nats per token",
      empty: "no plan of this ratio and these guards is measured" };
    const key = JSON.stringify([scene, list, flip.stale, guess]);
    if (key === drawn) return;
    drawn = key;
    place(chart, lambdaChart({ ...scene, slide, go: (strength) => put({ interaction_strength: strength }),
      guess: (k, value) => put({ guesses: [now.ratio, ...mine.map((one, n) => (n === k ? bounded(value, level) : one.value))] }) }));
    title.replaceChildren("KL by λ (nats)", h("span", {}, h("i", { class: "cc-swatch cc-cell" }), "measured ± error"),
      h("span", {}, h("i", { class: "cc-dash" }), `predicted by ${by}`),
      h("span", { class: "cc-muted" }, flip.stale ? "the plans are being computed" : covered ? ""
        : `plan ${planAt(flip.breaks, now.interaction_strength) + 1} of ${flip.breaks.length + 1}`));
    ask.hidden = guesses === undefined || !guessedSteps(steps).length;
    ask.dataset.mode = guess;
    ask.textContent = { "": "Guess first", 1: "Reveal", shown: "Done" }[guess];
    finding.textContent = covered ? "What will the other plans cost? Drag the handles, or focus them and use the arrow keys; then reveal."
      : `${mine.length ? `${revealed(mine, by)}. ` : ""}${verdict(steps, now.ratio, by)}`;
    others.hidden = list.length < 2;
    others.style.visibility = covered ? "hidden" : "";
    if (list.length < 2) return;
    place(strip, ratioCharts({ panels: list, colors, width, height: 70, left: LEFT, choose: (ratio) => put({ ratio }) }));
  }
  return { chart, others, title: h("div", { class: "cc-row" }, title, ask), finding, draw, pictures: () => [chart.firstChild, strip.firstChild] };
}
