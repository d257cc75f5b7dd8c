// A sentence and its likeliest next words, of the whole model and of the pruned one.

import { assign, h, menu, percent } from "./kit.js";
import { markOf } from "./measured.js";

const WORDS = 5;

/**
 * The likeliest next words after a text, [[word, share]] of the whole model and of a plan; null where
 * they are not known. first: what was kept; next: what the kernel predicted for some plans.
 */
export function wordsOf(first, next, text, order) {
  const mark = order && markOf(order);
  const kept = first.sentences?.find((one) => one.text === text);
  const named = (list) => list?.map(([k, share]) => [kept.tokens[k], share]);
  const live = (column) => {
    if (next?.prompt !== text || column < 0) return null;
    const rows = next.rows.filter((row) => row.shares[column] !== null).map((row) => [row.token, row.shares[column]]);
    return rows.length ? rows.sort((x, y) => y[1] - x[1]).slice(0, WORDS) : null;
  };
  const column = mark === "" ? 0 : 1 + (next?.plans.indexOf(mark) ?? -2);
  return { whole: named(kept?.plans[""]) ?? live(0),
    pruned: order ? named(kept?.plans[mark]) ?? live(column || (mark === "" ? 0 : -1)) : null };
}

/** The panel; draw(facts) shows it. choose(word, button) is called by a click on a word of the whole model. */
export function sentencePanel(model, first, { choose }) {
  const texts = (first.sentences ?? []).map((one) => one.text);
  const inside = model.get("_damage")?.inside; // a model in the page, which is quick
  const typed = model.get("kernel") !== false || inside;
  const put = (prompt) => assign(model, { prompt });
  const list = h("datalist", { id: `cc-${Math.random().toString(36).slice(2)}` }, ...texts.map((text) => h("option", { value: text })));
  const box = typed ? h("input", { type: "text", list: list.id, "aria-label": "sentence", placeholder: "type the beginning of a sentence",
    maxlength: inside && 200, [inside ? "oninput" : "onchange"]: () => put(box.value) }) : menu(texts.map((text) => [text, `${text} ▮`]), put, { "aria-label": "sentence" });
  const columns = [0, 1].map(() => h("div", {}));
  const panel = h("div", { class: "cc-sentence" }, h("div", { class: "cc-row" }, box, list), h("div", { class: "cc-next" }, ...columns));
  const text = () => model.get("prompt") || texts[0] || "";

  function draw({ plan, live, name, inks, cover, choosing, measuring }) {
    if (document.activeElement !== box || !typed) box.value = text();
    const found = wordsOf(first, live.next, text(), plan?.order);
    panel.hidden = !typed && !texts.length;
    const best = found.whole?.[0]?.[0];
    [["whole model", found.whole, inks.whole], [name, cover ? null : found.pruned, inks.plan]].forEach(([head, words, ink], k) => {
      const coming = inside && !words && !(cover && k); // those of before stay meanwhile
      columns[k].style.opacity = coming ? 0.5 : "";
      if (coming) return;
      columns[k].replaceChildren(h("small", {}, head), ...(words ?? []).map(([word, share], n) =>
        h(choosing && !k ? "button" : "div", { class: "cc-word", title: `${word} ${percent(share)}`,
          onclick: choosing && !k ? () => choose(word) : null },
        h("span", { class: k && !n && word !== best && "cc-wrong" }, word.trim() || "␣"),
        h("i", { style: `width:${Math.max(1, 42 * share)}%;background:${ink}` }), n ? "" : h("small", {}, percent(share, 0)))),
      ...(words ? [] : [h("p", { class: "cc-muted" }, cover && k ? "?" : measuring ? "…" : "not measured")]));
    });
    return found;
  }
  return { panel, draw, text };
}
