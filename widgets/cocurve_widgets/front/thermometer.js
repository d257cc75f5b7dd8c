// One number: the measured KL of the plan on a linear scale, with marks that say what a KL means here.

import { brief } from "./compare.js";
import { term } from "./glossary.js";
import { h, show } from "./kit.js";
import { answersOf } from "./numbers.js";
import { measurementOf } from "./measured.js";
import { place, sheet, svg, text } from "./svg.js";

/**
 * The KL above which half of the right answers are gone: the boundary with the fewest measured plans
 * on its wrong side. Null where no plan on a text was asked, or none is beyond.
 */
export function breaksAt(known, on) {
  const right = answersOf(measurementOf(known, [], on))[0];
  const asked = (known.measured ?? []).filter((m) => m.text === on && answersOf(m)[1] > 0).sort((a, b) => a.risk - b.risk);
  const broken = asked.map((m) => answersOf(m)[0] <= right / 2);
  if (!right || !broken.includes(true)) return null;
  let [wrong, least, best] = [0, 0, 0];
  broken.forEach((is, k) => {
    wrong += is ? 1 : -1;
    if (wrong < least) [least, best] = [wrong, k + 1];
  });
  return best && best < asked.length ? (asked[best - 1].risk + asked[best].risk) / 2 : null;
}

/** The marks of a model, ascending: what was kept, and where answers break. */
export function marksOf(first, known, on) {
  const broken = breaksAt(known, on);
  const found = [...(first.marks ?? [])];
  if (broken !== null) found.push({ name: "answers break", risk: broken, how: "above it half of the right answers are gone" });
  return found.sort((a, b) => a.risk - b.risk);
}

/** How far a prediction is below or above what was measured, where that is much. */
export function timesText(record, predicted) {
  const times = record && predicted > 0 ? record.risk / predicted : 1;
  if (times > 1.5) return `, ${show(Number(times.toPrecision(2)))} times too low`;
  return times < 0.67 ? `, ${show(Number((1 / times).toPrecision(2)))} times too high` : "";
}

/** The panel; draw(facts) shows it. guess(value) is called while the reader drags the mark. */
export function thermometer({ guess }) {
  const [number, scale] = [h("div", { class: "cc-kl", role: "status" }), h("div", {})];

  /** facts: record (of the plan, or null), predicted, marks, most (the end of the scale), ink, colors, width, guessed, cover. */
  function draw({ record, predicted, marks, most, ink, colors, width, guessed, cover, measuring }) {
    const said = cover ? "?" : record ? brief(record.risk) : measuring ? "…" : "not measured";
    number.replaceChildren(h("b", { style: `color:${ink}` }, said), h("span", { title: record ? `${record.text}, ± ${show(record.error)}` : "" },
      " nats of ", term("KL"), record ? ", measured" : ""),
    h("span", { class: "cc-muted" }, predicted === null || cover ? "" : `H predicted ${brief(predicted)}${timesText(record, predicted)}`));
    const [left, right, base] = [6, width - 8, 26];
    const x = (value) => left + Math.min(1, value / most) * (right - left);
    const rows = [-1e3, -1e3];
    const labels = marks.flatMap(({ name, risk, how }) => {
      const half = 3.4 * name.length;
      const at = Math.min(width - half, Math.max(half, x(risk)));
      const row = rows[0] < at - half ? 0 : 1;
      rows[row] = at + half + 6;
      return [svg("path", { d: `M${x(risk)} ${base - 12}V${base + 9}`, stroke: colors.muted, "stroke-width": 1.5 }),
        svg("g", {}, svg("title", {}, how), text(at, base + 20 + 14 * row, name, { "text-anchor": "middle", fill: colors.text }))];
    });
    const handle = guessed === null ? null : svg("g", { role: "slider", tabindex: 0, "aria-label": "your guess", "aria-valuenow": guessed,
      "aria-valuemin": 0, "aria-valuemax": most, "data-lm-suppress-shortcuts": "true", style: cover ? "cursor:ew-resize;touch-action:none" : "",
      onkeydown: (event) => {
        const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
        if (!step || !cover) return;
        event.preventDefault();
        guess(Math.min(most, Math.max(0, guessed + step * most / 50)));
      } }, svg("path", { d: `M${x(guessed)} ${base - 8}l7 -9v-8h-14v8z`, fill: colors.back, stroke: colors.text, "stroke-width": 2 }));
    const drag = (event) => {
      if (!cover || guessed === null) return;
      const box = scale.firstChild.getBoundingClientRect();
      guess(Math.min(most, Math.max(0, most * (event.clientX - box.left - left) / (right - left))));
    };
    place(scale, sheet(width, 62, colors, { role: "img", "aria-label": `KL ${said}; ${marks.map((m) => `${m.name} ${brief(m.risk)}`).join(", ")}`,
      onpointerdown: (event) => {
        if (!cover || guessed === null) return;
        event.preventDefault();
        drag(event);
        addEventListener("pointermove", drag);
        for (const end of ["pointerup", "pointercancel"]) {
          addEventListener(end, () => removeEventListener("pointermove", drag), { once: true });
        }
      } },
    svg("rect", { x: left, y: base - 8, width: right - left, height: 10, rx: 5, fill: colors.kept }),
    record && !cover && svg("rect", { class: "cc-mercury", x: left, y: base - 8, width: Math.max(3, x(record.risk) - left), height: 10, rx: 5, fill: ink }),
    predicted !== null && !cover && svg("path", { d: `M${x(predicted)} ${base - 13}v20`, stroke: colors.text, "stroke-width": 2, "stroke-dasharray": "3 2" }),
    ...labels, handle));
  }
  return { parts: [number, scale], draw, pictures: () => [scale.firstChild] };
}
