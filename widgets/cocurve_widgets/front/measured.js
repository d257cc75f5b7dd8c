// What was measured: a value belongs to a set of units, however a plan came to it.

import { planAt } from "./axis.js";
import { brief, withError } from "./compare.js";
import { percent, show } from "./kit.js";

/** A set of units as text: a bit for each up to the last, in base 64; `plan_mark` of packing.py. */
export function markOf(order) {
  const bytes = new Uint8Array(Math.ceil((Math.max(-1, ...order) + 1) / 8));
  for (const u of order) bytes[u >> 3] |= 1 << (u & 7);
  return btoa(String.fromCharCode(...bytes));
}

/** A ratio in words: "20 %", "12.5 %". */
export const share = (ratio) => percent(ratio, Number.isInteger(Math.round(1000 * ratio) / 10) ? 0 : 1);

/** Everything measured: what the session keeps, then what is being measured now, which wins. */
export function knownOf(marks, live) {
  return { ...marks, measured: [...(marks.measured ?? []), ...(live.measured ?? [])] };
}

/** The newest measurement of a plan, on the text that another one was measured on if there is one. */
export function measurementOf(known, order, text = null) {
  const mark = markOf(order);
  const mine = (known.measured ?? []).filter((m) => m.plan === mark);
  return mine.findLast((m) => m.text === text) ?? mine.at(-1) ?? null;
}

const onAxis = (m) => m.strength !== null && m.strength <= 1;

/** The text that most plans of some lambda were measured on; null for none. */
export function mainText(known) {
  const counts = new Map();
  for (const m of known.measured ?? []) if (onAxis(m)) counts.set(m.text, (counts.get(m.text) ?? 0) + 1);
  return [...counts].reduce((best, entry) => (entry[1] >= best[1] ? entry : best), [null, 0])[0];
}

/** The ratios at which plans were kept before, ascending, 0 among them; empty where none were. */
export function keptRatios(marks) {
  const found = (marks.measured ?? []).filter((m) => onAxis(m) && m.at === null)
    .map((m) => Number(m.ratio.toFixed(4)));
  return found.length ? [...new Set([0, ...found])].sort((x, y) => x - y) : [];
}

/** The lambdas of the plans that were measured at a ratio, ascending. */
export function strengthsAt(known, ratio) {
  const found = (known.measured ?? []).filter((m) => onAxis(m) && Math.abs(m.ratio - ratio) <= 5e-4);
  return [...new Set(found.map((m) => m.strength))].sort((x, y) => x - y);
}

/**
 * The measured ones among the plans of a ratio: [{...cell, risk, error, record, words}]. cells:
 * [{from, to, strength, own, order, predicted}]; of equal sets of units one is taken, that of a
 * measured lambda first.
 */
export function measuredSteps(cells, known, text) {
  const owned = new Set(cells.filter((cell) => cell.own && cell.order).map((cell) => markOf(cell.order)));
  const seen = new Set();
  const records = new Map((known.measured ?? []).filter((m) => m.text === text).map((m) => [m.plan, m]));
  return cells.flatMap((cell) => {
    const mark = cell.order && markOf(cell.order);
    const record = records.get(mark);
    if (!record || seen.has(mark) || (owned.has(mark) && !cell.own)) return [];
    seen.add(mark);
    const guess = cell.predicted === null ? "" : `, predicted ${brief(cell.predicted)}`;
    return [{ ...cell, record, risk: record.risk, error: record.error ?? 0,
      words: `measured KL ${withError(record)} (${rowsText(record)})${guess}` }];
  });
}

/** The cells of a path as `measuredSteps` takes them; `first` is the plan at lambda 0. */
export function cellsOfPath({ breaks, changes }, first, strengths, cells, priceOf) {
  const now = new Set(first);
  return cells.map(([from, to], k) => {
    for (const u of k ? changes[k - 1] : []) if (!now.delete(u)) now.add(u);
    const edges = [k ? breaks[k - 1] : 0, breaks[k] ?? 1];
    const own = strengths.find((s) => planAt(breaks, s) === k);
    const strength = k === 0 ? 0 : k === breaks.length ? 1 : own ?? (edges[0] + edges[1]) / 2;
    const order = [...now];
    return { from, to, strength, own: own !== undefined, order, predicted: priceOf(order) };
  });
}

/** KL of one plan less that of another: {difference, error}, row by row where the rows were kept. */
export function lessOf(record, other) {
  const rows = Math.min(record.by_row?.length ?? 0, other.by_row?.length ?? 0);
  if (rows < 2) {
    return { difference: record.risk - other.risk, error: Math.hypot(record.error ?? 0, other.error ?? 0) };
  }
  const apart_ = Array.from({ length: rows }, (_, k) => record.by_row[k] - other.by_row[k]);
  const mean = apart_.reduce((sum, x) => sum + x, 0) / rows;
  const spread = apart_.reduce((sum, x) => sum + (x - mean) ** 2, 0) / (rows - 1);
  return { difference: mean, error: Math.sqrt(spread / rows) };
}

/**
 * What the measured steps of a ratio say, in a sentence: where KL is lowest, which lambdas are level
 * with it, within two paired errors, and whether H knew.
 */
export function verdict(steps, ratio, by = "H") {
  const at = `At ${share(ratio)}`;
  if (!steps.length) return `${at} no plan of these guards is measured.`;
  if (steps.length === 1) return `${at} one plan is measured, at λ = ${show(steps[0].strength)}.`;
  const best = steps.reduce((low, step) => (step.risk < low.risk ? step : low));
  const lambda = (step) => `λ = ${brief(step.strength)}`;
  const ends = [...new Set([steps[0], steps.at(-1)])].filter((step) => step !== best);
  const isLevel = ({ difference, error }) => Math.abs(difference) < 2 * error;
  const level = steps.filter((step) => step !== best && !ends.includes(step) && isLevel(lessOf(step.record, best.record)));
  const beside = level.length ? ` (level with it: ${level.map((step) => brief(step.strength)).join(", ")})` : "";
  const said = ends.map((step) => {
    const { difference, error } = lessOf(step.record, best.record);
    const costs = `${lambda(step)} costs ${withError({ risk: difference, error })} nats more`;
    if (isLevel({ difference, error })) return `${costs}, which is inconclusive`;
    if (step.predicted === null || best.predicted === null) return costs;
    const way = step.predicted > best.predicted ? "the same way" : "the other way";
    return `${costs}; ${by} ranks them ${way}`;
  });
  return `${at} the lowest measured KL is at ${lambda(best)}${beside}; ${said.join("; ")}.`;
}

/** How many rows a record is of, and when: "kept, 6 rows", "4 of 16 rows, just now". */
export function rowsText(record, live = {}, now = Date.now() / 1000) {
  const all = record.text === live.text && record.rows !== live.rows ? ` of ${live.rows}` : "";
  const rows = record.rows ? `${record.rows}${all} ${record.rows === 1 && !all ? "row" : "rows"}` : "";
  if (record.at === null || record.at === undefined) return ["kept", rows].filter(Boolean).join(", ");
  return [rows, ageText(record.at, now)].filter(Boolean).join(", ");
}

/** How long ago a moment was, in words; both in seconds since 1970. */
export function ageText(at, now) {
  const seconds = Math.max(0, now - at); // two clocks may differ
  if (seconds < 10) return "just now";
  if (seconds < 90) return `${Math.round(seconds / 10) * 10} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}

/** The difference of A and B that the kernel measured, unless it is of earlier plans; null for none. */
export function pairedOf(live, a, b) {
  const plans = live.paired?.plans;
  return plans && a && b && plans[0] === markOf(a.order) && plans[1] === markOf(b.order)
    ? live.paired : null;
}
