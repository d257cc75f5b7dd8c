// The chart of the lambda explorer: which plans of a ratio are measured, and what they say.

import { planAt } from "./axis.js";
import { lambdaChart } from "./chart.js";
import { h } from "./kit.js";
import { cellsOfPath, mainText, markOf, measuredSteps, strengthsAt, verdict } from "./measured.js";
import { orderOf, partsOf } from "./solver.js";
import { place } from "./svg.js";

const LEFT = 60; // px beside the axis, as the slider's in instrument.css

/**
 * The parts of the chart, and draw(scene, width). Of the scene: a, b (plans or null), colors, marks, known
 * (what is measured), now (the controls), flip (the path), axis, first (the plan at lambda 0),
 * solvable (whether this page can solve), by (what predicts). does: put(values), slide(place).
 */
export function chartPanel(problem, run, { put, slide }) {
  const chart = h("div", {});
  const title = h("h4", { class: "cc-key" });
  const finding = h("p", { class: "cc-finding", role: "status" });
  const prices = new Map(); // of plans, by their marks
  let drawn = "";

  function priceOf(order) {
    const mark = markOf(order);
    if (prices.size > 2000) prices.clear();
    if (!prices.has(mark)) prices.set(mark, partsOf(problem, order));
    return prices.get(mark).node + prices.get(mark).edge;
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
  function draw(facts, wide) {
    const { a, b, colors, marks, known, now, flip, axis, by } = facts;
    const text = mainText(known);
    const cells = cellsAt(facts);
    const names = [a, b].map((plan) => plan && markOf(plan.order));
    const steps = measuredSteps(cells, known, text).map((step) => {
      const mark = markOf(step.order);
      return { ...step, here: mark === names[1], name: ["A", "B"].filter((_, k) => names[k] === mark).join(" ") };
    });
    const [width, gate] = [Math.max(240, wide), marks.gate?.strength];
    const scene = { steps, colors, width, height: width > 560 ? 200 : 170, left: LEFT, right: 8,
      here: axis.place(now.interaction_strength),
      gate: typeof gate === "number" ? axis.place(gate) : null, gateText: `redundancy gate: ${marks.gate?.reason ?? ""}`,
      predicted: cells.filter((cell) => cell.order && cell.predicted !== null)
        .map(({ from, to, predicted }) => ({ from, to, value: predicted })),
      label: "KL of the plans by lambda: measured and predicted, nats per token",
      empty: "no plan of this ratio and these guards is measured" };
    const key = JSON.stringify([scene, flip.stale]);
    if (key === drawn) return;
    drawn = key;
    place(chart, lambdaChart({ ...scene, slide, go: (strength) => put({ interaction_strength: strength }) }));
    title.replaceChildren("KL by λ (nats)", h("span", {}, h("i", { class: "cc-swatch cc-cell" }), "measured ± error"),
      h("span", {}, h("i", { class: "cc-dash" }), `predicted by ${by}`),
      h("span", { class: "cc-muted" }, flip.stale ? "the plans are being computed"
        : `plan ${planAt(flip.breaks, now.interaction_strength) + 1} of ${flip.breaks.length + 1}`));
    finding.textContent = verdict(steps, now.ratio, by);
  }
  return { panel: h("div", {}, title, chart, finding), key: title, finding, draw,
    pictures: () => [chart.firstChild] };
}
