// Plan A against plan B: which units join or leave, and what that does to the numbers.

import { term } from "./glossary.js";
import { COLORS, count, h, patch, percent, show, table, unbroken, unitCount } from "./kit.js";

/** The units that B removes and A keeps ("joined"), and those that A removes and B keeps ("left"). */
export function difference(a, b) {
  const [inA, inB] = [new Set(a), new Set(b)];
  return { joined: b.filter((u) => !inA.has(u)), left: a.filter((u) => !inB.has(u)) };
}

/** The layers where two plans differ, in words: "1 (+2), 3 (−1)". */
export function layersText(layers, { joined, left }) {
  const found = new Map();
  const add = (u, side) => {
    const entry = found.get(layers[u]) ?? found.set(layers[u], [0, 0]).get(layers[u]);
    entry[side] += 1;
  };
  joined.forEach((u) => add(u, 0));
  left.forEach((u) => add(u, 1));
  return [...found.keys()].sort((a, b) => a - b).map((layer) => {
    const [more, fewer] = found.get(layer);
    const parts = [more && `+${more}`, fewer && `−${fewer}`].filter(Boolean).join(" ");
    return `${layer} (${parts})`;
  }).join(", ");
}

export const CHANGE = "B\u00a0−\u00a0A"; // in one line

/** A number with its sign, for a difference. */
export function signed(x, text = show) {
  if (x === null || x === undefined || Number.isNaN(x)) return "";
  return x === 0 ? "0" : `${x < 0 ? "−" : "+"}${text(Math.abs(x))}`;
}

/** A plan's name among the measured ones; the same sum as `plan_mark` in packing.py. */
export function markOf(order) {
  let mark = 1;
  for (const u of [...order].sort((a, b) => a - b)) mark = (mark * 1000003 + u + 1) % 2147483647;
  return mark;
}

/** The newest measurement of a plan, on the text that another one was measured on if there is one. */
export function measurementOf(marks, order, text = null) {
  const mine = (marks.measured ?? []).filter((m) => m.plan === markOf(order));
  return mine.findLast((m) => m.text === text) ?? mine.at(-1) ?? null;
}

/** A measured KL with its error to two digits, as text: `plus_minus` of tables.py. */
export function withError({ risk, error }) {
  if (!error) return brief(risk);
  if (error <= 1e-6 || error >= 1e6) return `${brief(risk)} ± ${error.toExponential(1)}`;
  const places = Math.max(0, 1 - Math.floor(Math.log10(error)));
  const size = Math.abs(risk).toFixed(places);
  return `${risk < 0 && Number(size) ? "−" : ""}${size} ± ${error.toFixed(places)}`;
}

/** A number of a table: three digits are what can be told apart, and all columns then look alike. */
export const brief = (x) => show(Number(x.toPrecision(3)));

/** x − y, or 0 where the two differ in the last bits only: the same sum in another order. */
const less = (x, y) => (Math.abs(x - y) > 1e-12 * Math.abs(x) ? x - y : 0);

/**
 * The rows of the comparison: [name, A, B, B − A], each a text; null for a plan that does not exist.
 *
 * a, b: {order, node, edge, removed, realized, name} or null; marks: what was measured; paired:
 * {difference, error} of the KL, B less A, where it is known row by row.
 */
export function comparisonRows(a, b, marks, paired = null) {
  const rows = [];
  const row = (name, of, text = brief) => rows.push([name,
    ...[a, b].map((p) => (p ? text(of(p)) : "no plan")),
    a && b ? signed(less(of(b), of(a)), text) : ""]);
  row("predicted KL", (p) => p.node + p.edge);
  row("– units alone", (p) => p.node);
  row("– edges", (p) => p.edge);
  const mb = b && measurementOf(marks, b.order);
  const ma = a && measurementOf(marks, a.order, mb?.text);
  const same = ma && mb && ma.text === mb.text;
  const measured = (m) => (m ? withError(m) : "not measured");
  const uneven = same && paired && ma.rows !== mb.rows; // the plan of now has fewer as yet
  rows.push([`measured KL${uneven ? `, ${CHANGE} on the rows of both` : ""}`, measured(ma), measured(mb), !same ? "" : paired
    ? signed(paired.difference, (x) => withError({ risk: x, error: paired.error }))
    : signed(mb.risk - ma.risk, brief)]);
  row("removed", (p) => p.realized, (x) => percent(x, 2));
  row("– parameters", (p) => p.removed, count);
  row("– units", (p) => p.order.length, count);
  return rows;
}

/** The comparison as a table with A and B as colors. */
export function drawComparison(place, { a, b, marks, paired, layers }) {
  const rows = comparisonRows(a, b, marks, paired);
  const head = (letter, color, name) => [patch(color), ...unbroken(`${letter}: ${name}`)];
  const change = a && b && difference(a.order, b.order);
  place.replaceChildren(
    table([term("nats", "nats per token"), head("A", COLORS.a, a?.name ?? "no plan"),
      head("B", COLORS.b, b?.name ?? "no plan"), CHANGE], rows, { class: "cc-numbers" }),
    h("p", {}, !change ? "" : !change.joined.length && !change.left.length
      ? "A and B remove the same units."
      : `${unitCount(change.joined.length)} removed only by B, ${unitCount(change.left.length)} only ` +
        `by A; layers ${layersText(layers, change)}.`));
}
