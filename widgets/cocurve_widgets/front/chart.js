// The charts of the lambda explorer: KL over the plans of a ratio, and the bars of an edge.

import { brief, withError } from "./compare.js";
import { COLORS, logAxis, show } from "./kit.js";
import { labelsBelow, levels, pointer, sheet, stop, svg, text } from "./svg.js";

const MARK = 6; // px: no measured plan is smaller, however narrow its cell

/** The logarithmic axis of KL; what is not positive stands at its beginning. */
const klAxis = (values, start, end) => logAxis(values.filter((value) => value > 0), start, end);

/**
 * KL over the plans of one ratio, on a logarithmic axis.
 *
 * steps: measured plans [{from, to, strength, risk, error, predicted, here, name}], from and to in
 * [0, 1] along the slider; predicted: [{from, to, value}]; here: place of lambda; gate: place of its
 * mark, or null; left, right: pixels beside the slider's track. go(strength) chooses a step,
 * slide(place) any other place.
 */
export function lambdaChart({ steps, predicted, here, gate, gateText, colors, width, height,
  left, right, label, empty, go, slide }) {
  const [top, base] = [16, height - 20];
  const x = (at) => left + at * (width - left - right);
  const bounds = (step) => [step.risk, step.risk + step.error, Math.max(step.risk / 3, step.risk - step.error)];
  const { at: y, marks: values } = klAxis([...steps.flatMap(bounds),
    ...predicted.map((p) => p.value)], base, top);
  let line = "";
  predicted.forEach(({ from, to, value }, k) => {
    const joined = k && Math.abs(predicted[k - 1].to - from) < 1e-9;
    const short = from === to ? MARK : 0; // a single lambda, while the cells are not known
    line += `${joined && !short ? "V" : `M${x(from) - short} `}${y(value).toFixed(1)}H${(x(to) + short).toFixed(1)}`;
  });
  const marks = steps.map((step) => {
    const wide = Math.max(MARK, x(step.to) - x(step.from));
    const middle = (x(step.from) + x(step.to)) / 2;
    const [high, low] = [step.risk + step.error, step.risk - step.error].map(y);
    return stop({ role: "button", "data-strength": step.strength, "data-here": step.here ? "1" : null,
      "aria-label": `lambda ${show(step.strength)}: ${step.words}` }, () => go(step.strength),
    svg("title", {}, `λ ${show(step.strength)}: ${step.words}`),
    svg("rect", { x: middle - Math.max(12, wide) / 2, y: Math.min(high, y(step.risk) - 12),
      width: Math.max(12, wide), height: Math.max(24, low - high), fill: "transparent" }),
    step.error > 0 && svg("path", { d: `M${middle} ${high}V${low}m-4 0h8M${middle - 4} ${high}h8`,
      stroke: colors.text, "stroke-width": 1.5 }),
    svg("rect", { class: "cc-mark", x: middle - wide / 2, y: y(step.risk) - MARK / 2, width: wide, height: MARK,
      fill: step.here ? colors.accent : colors.text, stroke: colors.back }),
    step.name && text(middle, Math.max(11, high - 5), step.name, { "text-anchor": "middle",
      "font-weight": 700, fill: step.here ? colors.accent : colors.text }));
  });
  const labels = [[x(0), "0"], ...steps.map((step) => [(x(step.from) + x(step.to)) / 2, show(Number(step.strength.toPrecision(2)))])
    .filter(([, name]) => name !== "0" && name !== "1"), [x(1), "1"]];
  return sheet(width, height, colors, { role: "group", "aria-label": label, style: "cursor:pointer",
    onclick: (event) => {
      const at = (pointer(event)[0] - left) / (width - left - right);
      slide(Math.min(1, Math.max(0, at)));
    } },
  ...levels(values, y, left, width - right, colors),
  svg("path", { class: "cc-line", d: `M${x(here)} ${top}V${base}`, stroke: colors.accent }),
  svg("path", { class: "cc-predicted", d: line, fill: "none", stroke: colors.text, "stroke-width": 1.5,
    "stroke-dasharray": "5 3" }),
  gate !== null && svg("path", { class: "cc-gate", d: `M${x(gate)} ${base - 9}l5 9h-10z`, fill: colors.text },
    svg("title", {}, gateText)),
  svg("path", { d: `M${left} ${base}H${width - right}`, stroke: colors.muted }),
  ...marks, ...labelsBelow(labels, height - 5),
  !steps.length && text((left + width - right) / 2, top + 14, empty, { "text-anchor": "middle" }));
}

/**
 * An edge as bars: rows [{name, predicted, measured, error}] of u, v, their sum and both together, and
 * what the solver counts at a lambda, with `counts` as its name. Ticks are H, whiskers measured.
 */
export function edgeChart({ rows, edge, counted, counts, colors, width, label }) {
  const [left, right, tall] = [112, 112, 19];
  const bars = rows.map((row) => ({ ...row, value: row.measured ?? row.predicted }));
  const values = [0, counted, ...bars.flatMap((row) => [row.predicted, row.value + (row.error ?? 0)])];
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const x = (value) => left + ((value - low) / (high - low || 1)) * (width - left - right);
  const color = COLORS[(edge.measured ?? edge.predicted) < 0 ? "negative" : "positive"];
  const box = (from, to, y, attributes) => svg("rect", { x: Math.min(x(from), x(to)), y: y + 3,
    width: Math.max(0.5, Math.abs(x(to) - x(from))), height: tall - 7, ...attributes });
  const gap = (from, to, y) => box(from, to, y, { class: "cc-gap", fill: "url(#cc-edge)", stroke: color });
  const named = (name, y, value) => [text(left - 8, y + 13, name, { "text-anchor": "end", fill: colors.text }),
    text(width, y + 13, value, { "text-anchor": "end" })];
  const solid = (row) => (row.measured === null ? { fill: "none", stroke: colors.muted } : { fill: colors.muted });
  const drawn = bars.flatMap((row, k) => {
    const y = k * tall;
    const start = k === 3 ? Math.min(bars[2].value, row.value) : row.value; // together, without the gap
    return [box(0, start, y, solid(row)), k === 3 && gap(bars[2].value, row.value, y),
      row.error > 0 && row.measured !== null && svg("path", { stroke: colors.text, "stroke-width": 1.5,
        d: `M${x(row.value - row.error)} ${y + 9}H${x(row.value + row.error)}` }),
      svg("path", { class: "cc-tick", stroke: colors.text, "stroke-width": 2, d: `M${x(row.predicted)} ${y + 1}v${tall - 3}` }),
      ...named(row.name, y, row.measured === null ? brief(row.predicted)
        : withError({ risk: row.measured, error: row.error }))];
  });
  const y = 4 * tall;
  const sum = rows[2].predicted;
  return sheet(width, 5 * tall + 2, colors, { role: "img", "aria-label": label },
    svg("pattern", { id: "cc-edge", width: 5, height: 5, patternUnits: "userSpaceOnUse" },
      svg("path", { d: "M0 5L5 0", stroke: color, "stroke-width": 1.5 })),
    svg("path", { d: `M${x(0)} 0V${5 * tall}`, stroke: colors.grid }), ...drawn,
    box(0, Math.min(sum, counted), y, { fill: "none", stroke: colors.muted }), gap(sum, counted, y),
    ...named(counts, y, brief(counted)));
}
