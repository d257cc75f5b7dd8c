// Plans A and B in rows: measured KL, predicted KL, right answers. A row has what was measured of the
// plan itself, or says that nothing was.

import { term } from "./glossary.js";
import { CHANGE, brief, difference, layersText, signed, withError } from "./compare.js";
import { count, h, patch, percent, table, unitCount } from "./kit.js";
import { lessOf, mainText, measurementOf, pairedOf, rowsText } from "./measured.js";

/** x − y, or 0 where the two differ in the last bits only: the same sum in another order. */
const less = (x, y) => (Math.abs(x - y) > 1e-12 * Math.abs(x) ? x - y : 0);

/** A cell with a bar below its text, as long as a share of the cell. */
export const meter = (text, share_, color) => [text, h("div", {},
  h("i", { style: `width:${100 * Math.min(1, share_)}%;background:${color}` }))];

/** Right answers of a record over all abilities: [right, asked]. */
export const answersOf = (record) => Object.values(record?.abilities ?? {})
  .reduce(([right, asked], [x, n]) => [right + x, asked + n], [0, 0]);

/** The measurements of a plan that a row shows, or null: {kl, answers}, on the text of now if it is there. */
export function shownOf(plan, known, live) {
  const of = (text, has) => plan && measurementOf({ measured: (known.measured ?? []).filter(has) }, plan.order, text);
  const on = live.text && of(live.text, () => true)?.text === live.text ? live.text : mainText(known);
  return { kl: of(on, () => true), answers: of(on, (m) => answersOf(m)[1] > 0) };
}

/** How B differs from A in measured KL, as text; empty unless both were measured on one text. */
export function measuredChange(a, b, live) {
  const [one, two] = [a?.shown.kl, b?.shown.kl];
  if (!one || !two || one.text !== two.text) return "";
  const paired = pairedOf(live, a, b) ?? lessOf(two, one);
  return signed(paired.difference, (x) => withError({ risk: x, error: paired.error }));
}

/** How many more answers are right under B; empty unless both were asked the same. */
export function answersChange(a, b) {
  const [one, two] = [a?.shown.answers, b?.shown.answers];
  if (!one || !two) return "";
  const [[x, n], [y, m]] = [one, two].map(answersOf);
  return n === m ? signed(y - x) : "";
}

/** The rows that are folded: [name, A, B, B − A], each a text; a, b as plans or null. */
export function detailRows(a, b) {
  const rows = [];
  const row = (name, of, text = brief) => rows.push([name,
    ...[a, b].map((p) => (p ? text(of(p)) : "no plan")), a && b ? signed(less(of(b), of(a)), text) : ""]);
  row("predicted: units alone", (p) => p.node);
  row("predicted: edges", (p) => p.edge);
  row("removed", (p) => p.realized, (x) => percent(x, 2));
  row("removed parameters", (p) => p.removed, count);
  row("removed units", (p) => p.order.length, count);
  const names = [...new Set([a, b].flatMap((p) => Object.keys(p?.shown.answers?.abilities ?? {})))];
  for (const name of names) {
    const [x, y] = [a, b].map((p) => p?.shown.answers?.abilities[name]);
    rows.push([`right: ${name}`, ...[x, y].map((pair) => (pair ? `${pair[0]} of ${pair[1]}` : "–")),
      x && y && x[1] === y[1] ? signed(y[0] - x[0]) : ""]);
  }
  return rows;
}

const small = (text) => h("small", {}, text);

/** The panel: A and B in rows; draw(facts) shows it. facts: a, b (each with `shown`), known, live, measuring, layers, inks. */
export function numbersPanel() {
  const numbers = h("table", { class: "cc-numbers cc-four" });
  const details = h("div", { class: "cc-details" });

  function draw({ a, b, known, live, measuring, layers, inks }) {
    const plans = [a, b];
    const none = measuring ? "…" : "not measured";
    const most = Math.max(1e-12, ...plans.map((p) => p?.shown.kl?.risk ?? 0));
    const [denseRight, denseAsked] = answersOf(measurementOf(known, []));
    const line = (name, cells, change) => h("tr", {}, h("td", {}, ...[name].flat()), ...cells, h("td", {}, change));
    const cells = (row, words, share_, note) => plans.map((p, k) => {
      const found = p?.shown[row];
      return h("td", { title: found?.text }, ...(found ? meter(words(found), share_(found), inks[k]) : [none]), small(found ? note(found) : ""));
    });
    numbers.replaceChildren(h("thead", {}, h("tr", {}, h("th", {}, "nats per token"),
      ...plans.map((p, k) => h("th", {}, patch(inks[k]), `${"AB"[k]}: ${p?.name ?? "no plan"}`)), h("th", {}, CHANGE))),
    h("tbody", {}, line(["measured ", term("KL"), small("± one standard error, B − A row by row")],
      cells("kl", withError, (m) => m.risk / most, (m) => rowsText(m, live)), measuredChange(a, b, live)),
    line("predicted KL", plans.map((p) => h("td", {}, p ? brief(p.node + p.edge) : "–")),
      a && b ? signed(less(b.node + b.edge, a.node + a.edge), brief) : ""),
    line(["right answers", small(denseAsked ? `whole model: ${denseRight} of ${denseAsked}` : "")],
      cells("answers", (m) => answersOf(m).join(" of "), (m) => answersOf(m)[0] / answersOf(m)[1],
        (m) => rowsText({ ...m, rows: 0 }, live)), answersChange(a, b))));
    const change = a && b && difference(a.order, b.order);
    const on = [...new Set(plans.map((p) => p?.shown.kl?.text).filter(Boolean))];
    details.replaceChildren(table(["", "A", "B", CHANGE], detailRows(a, b), { class: "cc-numbers" }),
      h("p", {}, !change ? "" : !change.joined.length && !change.left.length ? "A and B remove the same units."
        : `${unitCount(change.joined.length)} removed only by B, ${unitCount(change.left.length)} only ` +
          `by A; layers ${layersText(layers, change)}.`),
      h("p", { class: "cc-muted" }, on.length ? `Measured on ${on.join("; ")}.` : ""));
  }
  return { rows: numbers, details, draw };
}
