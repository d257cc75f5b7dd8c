// The read-only pictures of the lambda explorer: budgets, risk curves, the strips under the sliders.

import { PATHS, clearLabels, planAt } from "./axis.js";
import { markOf } from "./compare.js";
import { COLORS, counted, drawRules, drawUpwards, fit, hatch, percent, show, ticks } from "./kit.js";
import { MOST } from "./solver.js";

export const KINDS = ["attention", "ffn"];

/** Whether H is a preview whose edges are not to be trusted at a lambda. */
export function untrusted(marks, strength) {
  return typeof marks?.trusted === "number" && strength > marks.trusted;
}

/** Draw layer numbers under a picture whose columns are layers. */
export function layerLabels(pen, { problem, geometry }, y) {
  pen.textAlign = "center";
  for (const layer of ticks(0, problem.numLayers - 1, Math.min(12, problem.numLayers))) {
    if (Number.isInteger(layer)) {
      pen.fillText(layer, geometry.left + (layer + 0.5) * geometry.cell, y);
    }
  }
  pen.textAlign = "left";
  pen.fillText("layer", 0, y);
}

/** Draw the removed share of each layer's attention and FFN cost, and the cap in force. */
export function paintBudget(canvas, { problem, colors, geometry, gone, cap }) {
  const height = 104;
  const pen = fit(canvas, geometry.width, height);
  const [top, base] = [8, height - 24];
  const totals = KINDS.map(() => new Float64Array(problem.numLayers));
  const parts = KINDS.map(() => new Float64Array(problem.numLayers));
  for (let u = 0; u < problem.size; u++) {
    totals[problem.kinds[u]][problem.layers[u]] += problem.costs[u];
    if (gone.has(u)) parts[problem.kinds[u]][problem.layers[u]] += problem.costs[u];
  }
  const across = geometry.cell * problem.numLayers;
  drawRules(pen, colors, [0, 0.5, 1], { y: (share) => base - share * (base - top),
    text: (share) => percent(share, 0), left: geometry.left, right: geometry.left + across });
  KINDS.forEach((kind, k) => {
    pen.fillStyle = COLORS[kind];
    for (let layer = 0; layer < problem.numLayers; layer++) {
      if (!totals[k][layer]) continue;
      const tall = (parts[k][layer] / totals[k][layer]) * (base - top);
      const x = geometry.left + geometry.cell * (layer + 0.1 + 0.42 * k);
      pen.fillRect(x, base - tall, geometry.cell * 0.38, tall);
    }
  });
  if (cap < 1) {
    pen.strokeStyle = colors.text;
    pen.setLineDash([4, 3]);
    pen.strokeRect(geometry.left, base - cap * (base - top), across, 0);
    pen.setLineDash([]);
  }
  pen.fillStyle = colors.muted;
  layerLabels(pen, { problem, geometry }, height - 9);
}

/**
 * Draw predicted risk over ratio: total, node and edge part of plans A and B, and the total of
 * lambda 1. curves: [{curve, color, thin}], the last on top; {plan, color} is a plan without a
 * curve, a dot.
 */
export function paintCurves(canvas, { curves: drawn, colors, ratio }, width) {
  const [curves, plans] = [drawn.filter((c) => c.curve), drawn.filter((c) => c.plan)];
  const height = Math.round(Math.max(190, Math.min(330, 0.5 * width)));
  const pen = fit(canvas, width, height);
  const [left, right, top, base] = [66, width - 16, 10, height - 38];
  const end = MOST + 0.02; // the last step overshoots a little
  const within = ({ curve }) => curve.ratio.filter((r) => r <= end).length;
  const parts = [
    [[], 1, (c, i) => c.node[i] + c.edge[i]],
    [[7, 4], 0.7, (c, i) => c.node[i]],
    [[2, 3], 0.7, (c, i) => c.edge[i]],
  ];
  const values = curves.flatMap((entry) => parts.flatMap(([, , part]) =>
    Array.from({ length: within(entry) }, (_, i) => part(entry.curve, i))));
  values.push(...plans.map(({ plan }) => plan.node + plan.edge));
  const [low, high] = [Math.min(0, ...values), Math.max(1e-12, ...values)];
  const x = (r) => left + (r / end) * (right - left);
  const y = (v) => base - ((v - low) / (high - low)) * (base - top);
  drawRules(pen, colors, ticks(low, high, 5), { y, text: show, left, right });
  pen.textAlign = "center";
  for (const r of [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]) pen.fillText(percent(r, 0), x(r), base + 12);
  pen.fillText("removed share of removable parameters", (left + right) / 2, base + 28);
  drawUpwards(pen, "nats per token", 9, (top + base) / 2);
  for (const { curve, color, thin } of curves) {
    for (const [dash, weight, part] of thin ? parts.slice(0, 1) : parts) {
      pen.strokeStyle = color;
      pen.lineWidth = (thin ? 1.2 : 2.2) * weight;
      pen.setLineDash(dash);
      pen.beginPath();
      for (let i = 0; i < within({ curve }); i++) pen.lineTo(x(curve.ratio[i]), y(part(curve, i)));
      pen.stroke();
    }
  }
  pen.setLineDash([]);
  pen.fillStyle = colors.text;
  pen.fillRect(x(ratio), top, 1, base - top);
  for (const { plan, color } of plans) {
    pen.fillStyle = color;
    pen.beginPath();
    pen.arc(x(Math.min(plan.realized, end)), y(plan.node + plan.edge), 5, 0, 7);
    pen.fill();
  }
}

/** The marks of all plans of a path, from the plan at one lambda; none while it is being computed. */
export function pathMarks({ breaks, changes, stale }, order, strength) {
  if (stale) return [];
  const here = planAt(breaks, strength);
  const walk = (steps) => {
    const plan = new Set(order);
    return steps.map((units) => {
      for (const u of units) if (!plan.delete(u)) plan.add(u);
      return markOf(plan);
    });
  };
  return [markOf(order), ...walk(changes.slice(here)), ...walk(changes.slice(0, here).reverse())];
}

/** The measured plans of a path at its ratio, which have a place on the lambda axis. */
export function measuredAt(marks, ratio, path) {
  const known = new Set(path);
  return (marks.measured ?? []).filter((m) => m.strength !== null && m.strength <= 1
    && Math.abs(m.ratio - ratio) <= 5e-4 && known.has(m.plan));
}

/** The lambdas written under an axis. */
function labelsOf(axis, flip, trusted) {
  const marked = trusted === null ? [] : [trusted];
  if (PATHS.includes(axis.kind)) return [0, ...flip.breaks, 1];
  if (axis.kind === "linear") return [0, 0.25, 0.5, 0.75, ...marked, 1];
  return [0, 1e-5, 1e-4, 1e-3, 0.01, 0.1, ...marked, 1];
}

/**
 * Draw the strip under the lambda slider: the plans as cells with the present one filled, measured
 * plans as dots, the gate as a triangle; on a preview of H, hatching over what is not to be trusted.
 */
export function paintStrip(canvas, { colors, flip, axis, marks, ratio, path, strength }, width) {
  const pen = fit(canvas, width, 38);
  const at = (place) => 8 + place * (width - 16); // the thumb is 16 wide
  const x = (lambda) => at(axis.place(lambda));
  const trusted = marks.trusted ?? null;
  if (trusted !== null) {
    pen.fillStyle = hatch(pen, colors.muted);
    pen.fillRect(x(trusted), 0, width - x(trusted), 22);
    pen.fillStyle = colors.text;
    pen.fillRect(x(trusted), 0, 1, 22);
  }
  pen.globalAlpha = flip.stale ? 0.4 : 1;
  const here = axis.place(strength);
  axis.cells.forEach(([from, to], k) => {
    const present = !flip.stale && here >= from && (here < to || k === axis.cells.length - 1);
    pen.fillStyle = present ? colors.accent : colors.kept;
    const gap = at(to) - at(from) > 3 ? 1 : 0;
    pen.fillRect(at(from) + gap / 2, 0, Math.max(0.5, at(to) - at(from) - gap), 8);
  });
  pen.globalAlpha = 1;
  const measured = measuredAt(marks, ratio, path);
  pen.fillStyle = colors.text;
  for (const m of measured) {
    pen.beginPath();
    pen.arc(x(m.strength), 15, 3.5, 0, 7);
    pen.fill();
  }
  const gate = marks.gate?.strength;
  if (gate !== null && gate !== undefined) {
    pen.beginPath();
    pen.moveTo(x(gate), 10);
    pen.lineTo(x(gate) - 5, 20);
    pen.lineTo(x(gate) + 5, 20);
    pen.fill();
  }
  pen.fillStyle = colors.muted;
  pen.textBaseline = "bottom";
  pen.textAlign = "center";
  const measure = (text) => pen.measureText(text).width;
  const labels = labelsOf(axis, flip, trusted).map((s) => [x(s), show(Number(s.toPrecision(3)))])
    .map(([place, text]) => {
      const half = measure(text) / 2;
      return [Math.min(width - half, Math.max(half, place)), text];
    });
  for (const [place, text] of clearLabels(labels, measure)) pen.fillText(text, place, 37);
  canvas.title = `${counted(flip.breaks.length + 1, "plan")} (cells)${flip.stale ? ", being computed" : ""}; ` +
    `${counted(measured.length, "measured plan")} at this ratio (dots); ` +
    `gate (${typeof gate === "number" ? "triangle" : "no mark"}): ${marks.gate?.reason ?? "unknown"}`;
}

/** Draw the strip under the ratio slider: the ratios that the guards put out of reach. */
export function paintReach(canvas, { colors, view }, width) {
  const pen = fit(canvas, width, 20);
  const x = (r) => 8 + (Math.min(r, MOST) / MOST) * (width - 16);
  pen.fillStyle = colors.grid;
  pen.fillRect(x(0), 2, x(MOST) - x(0), 3);
  if (view.reachable >= MOST) return;
  pen.fillStyle = colors.muted;
  pen.fillRect(x(view.reachable), 0, x(MOST) - x(view.reachable), 7);
  pen.textBaseline = "bottom";
  pen.textAlign = "right";
  const most = percent(view.reachable);
  const text = `out of reach above ${most}`;
  pen.fillText(pen.measureText(text).width <= width ? text : `at most ${most}`, width, 20);
}
