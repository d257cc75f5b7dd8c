// Plans A and B in four rows: measured KL, predicted KL, right answers, text. A row is never empty: a
// plan that was not measured shows the nearest one that was, in gray, and says which.

import { tokenText } from "./by_hand.js";
import { CHANGE, brief, difference, layersText, signed, withError } from "./compare.js";
import { COLORS, count, h, menu, patch, percent, show, table, unitCount } from "./kit.js";
import { lessOf, mainText, markOf, measurementOf, pairedOf, rowsText, share, standIn } from "./measured.js";

/** x − y, or 0 where the two differ in the last bits only: the same sum in another order. */
const less = (x, y) => (Math.abs(x - y) > 1e-12 * Math.abs(x) ? x - y : 0);

/** A cell with a bar below its text, as long as a share of the cell. */
export const meter = (text, share_, color) => [text, h("div", {},
  h("i", { style: `width:${100 * Math.min(1, share_)}%;background:${color}` }))];

/** Right answers of a record over all abilities: [right, asked]. */
export const answersOf = (record) => Object.values(record?.abilities ?? {})
  .reduce(([right, asked], [x, n]) => [right + x, asked + n], [0, 0]);

const HAS = { kl: () => true, answers: (m) => answersOf(m)[1] > 0, text: (m) => m.replies?.length > 0 };

/**
 * What the rows show of a plan, by row: {record, apart, text, note}, or null. `note` says of how many
 * rows a KL is, or of which plan it stands in for. Answers and text have questions, not rows.
 */
export function shownOf(plan, known, live, now = Date.now() / 1000) {
  if (!plan) return { kl: null, answers: null, text: null };
  const text = live.text && measurementOf(known, plan.order, live.text)?.text === live.text
    ? live.text : mainText(known);
  return Object.fromEntries(Object.entries(HAS).map(([row, has]) => {
    const found = standIn(known, plan.order, text, has);
    if (!found) return [row, null];
    const { record, apart } = found;
    const note = apart ? `${share(record.ratio)}, λ ${show(record.strength)}, ${unitCount(apart)} off`
      : rowsText(row === "kl" ? record : { ...record, rows: 0 }, live, now);
    return [row, { ...found, note, on: record.text }];
  }));
}

/** How B differs from A in measured KL, as text; empty unless both were measured on one text. */
export function measuredChange(a, b, live) {
  const [one, two] = [a?.shown.kl, b?.shown.kl];
  if (!one || !two || one.apart || two.apart || one.on !== two.on) return "";
  const paired = pairedOf(live, a, b) ?? lessOf(two.record, one.record);
  return signed(paired.difference, (x) => withError({ risk: x, error: paired.error }));
}

/** How many more answers are right under B; empty unless both were asked the same. */
export function answersChange(a, b) {
  const [one, two] = [a?.shown.answers, b?.shown.answers];
  if (!one || !two || one.apart || two.apart) return "";
  const [[x, n], [y, m]] = [one, two].map(({ record }) => answersOf(record));
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
  const names = [...new Set([a, b].flatMap((p) => Object.keys(p?.shown.answers?.record.abilities ?? {})))];
  for (const name of names) {
    const [x, y] = [a, b].map((p) => (p?.shown.answers?.apart ? null : p?.shown.answers?.record.abilities[name]));
    rows.push([`right: ${name}`, ...[x, y].map((pair) => (pair ? `${pair[0]} of ${pair[1]}` : "–")),
      x && y && x[1] === y[1] ? signed(y[0] - x[0]) : ""]);
  }
  return rows;
}

/** A reply with what differs from the whole model's underlined. */
function marked(reply, whole) {
  let same = 0;
  while (same < reply.length && reply[same] === whole?.[same]) same += 1;
  return [reply.slice(0, same), same < reply.length ? h("u", {}, reply.slice(same)) : ""];
}

const small = (text) => h("small", {}, text);

/** A cell of what was measured of a plan, with a bar of a share of it. */
function measuredCell(found, text, share_, color) {
  const from = found && `${found.apart ? "the nearest measured plan: " : ""}${found.note}; ${found.on}`;
  return h("td", { class: Boolean(found?.apart) && "cc-stand-in", title: from },
    ...(found ? meter(text, share_, color) : [text]), small(found?.note ?? ""));
}

/** The panels: `rows` to be seen at once, `details` to be folded; draw(facts) shows them. */
export function numbersPanel() {
  const numbers = h("table", { class: "cc-numbers" });
  let chosen = 0;
  let draw = () => undefined;
  const prompts = menu([], (value) => {
    chosen = Number(value);
    draw();
  }, { "aria-label": "question" });
  const asked = h("span", {});
  const lines = ["whole", "A", "B"].map((name) => [h("span", {}, name), h("span", { class: "cc-says", tabindex: -1 })]);
  const texts = h("div", { class: "cc-texts" }, h("div", { class: "cc-row" }, h("span", {}, "text"), prompts, asked),
    ...lines.map((pair) => h("div", {}, ...pair)));
  const details = h("div", { class: "cc-details" });

  /** facts: a, b (plans, each with what `shownOf` gives as `shown`), known, live, measuring, layers. */
  function show_({ a, b, known, live, measuring, layers }) {
    const plans = [a, b];
    const none = measuring ? "…" : "–"; // being measured, or not at all
    const colors = [COLORS.a, COLORS.b];
    const most = Math.max(1e-12, ...plans.map((p) => p?.shown.kl?.record.risk ?? 0));
    const dense = measurementOf(known, []);
    const [denseRight, denseAsked] = answersOf(dense);
    const ratioOf = ([right, asked]) => (asked ? right / asked : 0);
    const line = (name, cells, change, tall = true) => h("tr", { class: tall && "cc-tall" },
      h("td", {}, ...[name].flat()), ...cells, h("td", {}, change));
    const cells = (row, words, share_) => plans.map((p, k) => {
      const found = p?.shown[row];
      return measuredCell(found, found ? words(found.record) : none, found && share_(found.record), colors[k]);
    });
    numbers.replaceChildren(h("thead", {}, h("tr", {}, h("th", {}, "nats per token"),
      ...plans.map((p, k) => h("th", {}, patch(colors[k]), `${"AB"[k]}: ${p?.name ?? "no plan"}`)), h("th", {}, CHANGE))),
    h("tbody", {}, line(["measured KL", small("± one standard error, B − A row by row")],
      cells("kl", withError, (m) => m.risk / most), measuredChange(a, b, live)),
    line("predicted KL", plans.map((p) => h("td", {}, p ? brief(p.node + p.edge) : "–")),
      a && b ? signed(less(b.node + b.edge, a.node + a.edge), brief) : "", false),
    line(["right answers", small(denseAsked ? `whole model: ${denseRight} of ${denseAsked}` : "")],
      cells("answers", (m) => answersOf(m).join(" of "), (m) => ratioOf(answersOf(m))), answersChange(a, b))));
    showText(plans, known, live, dense, none);
    const change = a && b && difference(a.order, b.order);
    const on = [...new Set(plans.map((p) => p?.shown.kl?.on).filter(Boolean))];
    details.replaceChildren(table(["", "A", "B", CHANGE], detailRows(a, b), { class: "cc-numbers" }),
      h("p", {}, !change ? "" : !change.joined.length && !change.left.length ? "A and B remove the same units."
        : `${unitCount(change.joined.length)} removed only by B, ${unitCount(change.left.length)} only ` +
          `by A; layers ${layersText(layers, change)}.`),
      h("p", { class: "cc-muted" }, on.length ? `Measured on ${on.join("; ")}.` : ""));
  }

  function showText(plans, known, live, dense, none) {
    const questions = known.prompts ?? [];
    const kept = plans.some((p) => p?.shown.text);
    texts.hidden = !kept && !live.next;
    if (texts.hidden) return;
    prompts.hidden = !kept;
    if (prompts.length !== questions.length) {
      prompts.replaceChildren(...questions.map((text, k) => h("option", { value: k }, text)));
    }
    const likeliest = (k) => { // of the whole model, A or B; a pass of earlier plans does not count
      const now = !k || (plans[k - 1] && live.next.plans[k - 1] === markOf(plans[k - 1].order));
      const rows = now ? live.next.rows.filter((row) => row.shares[k] !== null) : [];
      if (!rows.length) return "…";
      const best = rows.reduce((top, row) => (row.shares[k] > top.shares[k] ? row : top));
      return `${tokenText(best.token)} ${percent(best.shares[k])}`;
    };
    asked.textContent = kept ? "" : `next token after “${(live.next?.prompt ?? "").slice(-40)}”`;
    const wholeText = dense?.replies?.[chosen];
    lines.forEach(([, said], k) => {
      const found = k ? plans[k - 1]?.shown.text : null;
      const reply = k ? found?.record.replies[chosen] : wholeText;
      said.classList.toggle("cc-stand-in", Boolean(found?.apart));
      said.title = found?.apart ? `the nearest measured plan: ${found.note}` : "";
      const text = reply?.replaceAll("\n", " ⏎ ");
      said.replaceChildren(...(!kept ? [likeliest(k)] : text === undefined ? [none]
        : k ? marked(text, wholeText?.replaceAll("\n", " ⏎ ")) : [text]),
      ...(found?.apart ? [h("small", {}, ` ${found.note}`)] : []));
    });
  }
  let last = null;
  draw = () => last && show_(last);
  return { rows: h("div", { class: "cc-four" }, numbers, texts), details,
    draw: (facts) => {
      last = facts;
      show_(facts);
    } };
}
