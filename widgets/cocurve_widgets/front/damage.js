// What the plans break, measured: KL and right answers of the dense model, plan A and plan B as bars.

import { CHANGE, brief, markOf, measurementOf, signed, withError } from "./compare.js";
import { COLORS, button, h, patch, percent, table } from "./kit.js";

/** Everything measured: what the session keeps, then what is being measured now, which wins. */
export function knownOf(marks, live) {
  return { ...marks, measured: [...(marks.measured ?? []), ...(live.measured ?? [])] };
}

/** The difference of A and B row by row, unless it is that of earlier plans; null for none. */
export function pairedOf(live, a, b) {
  const plans = live.paired?.plans;
  return plans && a && b && plans[0] === markOf(a.order) && plans[1] === markOf(b.order)
    ? live.paired : null;
}

/** How long ago a moment was, in words; both in seconds since 1970. */
export function ageText(at, now) {
  if (at === null || at === undefined) return "earlier";
  const seconds = Math.max(0, now - at); // two clocks may differ
  if (seconds < 10) return "just now";
  if (seconds < 90) return `${Math.round(seconds / 10) * 10} s ago`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  return `${Math.round(seconds / 3600)} h ago`;
}

/** What a KL is the mean of: "4 of 16 rows, just now"; text: the one that the panel names. */
export function originText(record, live, now, text = record?.text) {
  if (!record) return "";
  const all = record.text === live.text && record.rows !== live.rows ? ` of ${live.rows}` : "";
  const rows = record.rows ? `${record.rows}${all} ${record.rows === 1 && !all ? "row" : "rows"}, ` : "";
  return rows + ageText(record.at, now) + (record.text === text ? "" : `, on ${record.text}`);
}

/**
 * The damage of plans A and B beside the dense model: {text, rows}. A row is {name, cells, change},
 * a cell {text, share} with the length of its bar from 0 to 1, or null where nothing is known;
 * `change` is how many more answers are right under B.
 */
export function damageRows(a, b, known, live) {
  const record = (plan, text) => plan && measurementOf(known, plan.order, text);
  const mb = record(b, live.text ?? null);
  const ma = record(a, mb?.text ?? live.text ?? null);
  const text = (mb ?? ma)?.text ?? live.text ?? null;
  const dense = measurementOf(known, [], text);
  const all = [text === null || dense?.text === text ? dense : null, ma, mb];
  const most = Math.max(1e-12, ...[ma, mb].map((m) => (m ? m.risk + (m.error ?? 0) : 0)));
  const bar = (m) => (m ? { text: withError(m), share: m.risk / most } : null);
  const abilities = Object.keys(live.asked ?? {}).length ? Object.keys(live.asked)
    : Object.keys((mb ?? ma ?? dense)?.abilities ?? {});
  const answers = (m, name) => {
    const [right, asked] = m?.abilities?.[name] ?? [0, 0];
    return asked ? { text: `${right} of ${asked}`, share: right / asked } : null;
  };
  const change = (name) => {
    const [x, y] = [ma, mb].map((m) => m?.abilities?.[name]);
    return x && y && ma.text === mb.text && x[1] === y[1] ? signed(y[0] - x[0]) : "";
  };
  return { text, records: all, rows: [
    { name: "KL", cells: [{ text: brief(0), share: 0 }, bar(ma), bar(mb)], change: "" },
    ...abilities.map((name) => ({ name, cells: all.map((m) => answers(m, name)),
      change: change(name) })),
  ] };
}

/** The ratios at which plans were measured, ascending: a page without a kernel has no others. */
export function measuredRatios(marks) {
  const found = (marks.measured ?? []).filter((m) => m.strength !== null)
    .map((m) => Number(m.ratio.toFixed(4)));
  return [...new Set(found)].sort((x, y) => x - y);
}

/** A cell with a bar below its text, as long as a share of the cell. */
export const meter = (text, share, color) => [text, h("div", {},
  h("i", { style: `width:${100 * Math.min(1, share)}%;background:${color}` }))];

/** The panel, with draw(facts) to show it; put(values) sets traits. */
export function damagePanel(put) {
  const box = h("input", { type: "checkbox", onchange: () => put({ live: box.checked }) });
  const choice = h("label", {
    title: "KL and right answers of A and B are measured as soon as the hand rests" },
  box, " measure automatically");
  const place = h("div", {});
  const words = h("p", { class: "cc-muted" });
  const offer = h("p", {});
  const panel = h("div", { class: "cc-damage" },
    h("div", { class: "cc-row" }, h("h4", {}, "Measured damage"), choice), place, words, offer);
  const colors = ["var(--cc-muted)", COLORS.a, COLORS.b];

  /** facts: a, b, marks, live (what the kernel measures now), on (whether it does), alone. */
  function draw({ a, b, marks, live, on, alone }) {
    const now = Date.now() / 1000;
    const known = knownOf(marks, live);
    const { rows, records, text } = damageRows(a, b, known, live);
    const ratios = measuredRatios(marks);
    panel.hidden = !live.text && !known.measured.length;
    choice.hidden = !live.text || alone;
    box.checked = on;
    const head = ["dense", "A", "B"].map((name, k) => [patch(colors[k]), name]);
    const none = on && live.text && !alone ? "…" : "–"; // being measured, or not at all
    const origins = records.map((m, k) => (k ? originText(m, live, now, text) : ""));
    const shown = table(["KL, right answers", ...head, CHANGE],
      [...rows.map(({ name, cells, change }) => [name, ...cells.map((found, k) =>
        meter(found?.text ?? none, found?.share ?? 0, colors[k])), change]),
      ["measured on", ...origins, ""]], { class: "cc-abilities" });
    shown.rows[shown.rows.length - 1].className = "cc-muted";
    place.replaceChildren(shown);
    const doing = !alone && on && live.busy ? " Measuring goes on while you look." : "";
    words.textContent = (text ? `Text: ${text}.` : "") + doing;
    offer.hidden = !alone || !ratios.length;
    offer.replaceChildren("Plans were measured at ", ...ratios.flatMap((ratio) => [
      button(percent(ratio, 0), "", () => put({ ratio })), " "]),
    "but not under every guard.");
  }
  return { panel, draw };
}
