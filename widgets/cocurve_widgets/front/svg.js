// SVG for all charts: elements, marks that keys reach, texts, axes. Colors are written out, so that a chart
// can be saved as a picture.

import { FONT, logAxis, show } from "./kit.js";

/** An SVG element with attributes (on* are listeners) and children. */
export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** One of a row of marks: a single stop for Tab, arrows between them, Enter or a click to choose. */
export function stop(attributes, choose, ...children) {
  return svg("g", { "data-stop": "", tabindex: "-1", style: "cursor:pointer", ...attributes,
    "data-lm-suppress-shortcuts": "true",
    onclick: (event) => {
      event.stopPropagation();
      choose();
    },
    onkeydown: (event) => {
      const all = [...event.currentTarget.parentNode.querySelectorAll("[data-stop]")];
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (step) all[all.indexOf(event.currentTarget) + step]?.focus();
      else if (event.key === "Enter" || event.key === " ") choose();
      else return;
      event.preventDefault();
    } }, ...children);
}

/** Put a chart in place of the one before, which keeps the focus on the same mark. */
export function place(home, chart) {
  const stops = (root) => [...root.querySelectorAll("[data-stop], [role=slider]")];
  const held = stops(home).indexOf(document.activeElement);
  home.replaceChildren(chart);
  const now = stops(chart);
  (now.find((mark) => mark.dataset.here) ?? now[0])?.setAttribute("tabindex", "0");
  if (held >= 0) now[held]?.focus({ preventScroll: true });
}

export const text = (x, y, content, attributes = {}) => svg("text", { x, y, ...attributes }, content);

export function sheet(width, height, colors, attributes, ...children) {
  return svg("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, fill: colors.muted,
    "font-family": FONT, "font-size": 12, class: "cc-chart", ...attributes }, ...children);
}

/** Where a pointer is in a sheet, in its pixels: it is larger than drawn where the page is presented. */
export function pointer(event) {
  const box = event.currentTarget.getBoundingClientRect();
  const scale = event.currentTarget.getAttribute("width") / box.width;
  return [scale * (event.clientX - box.left), scale * (event.clientY - box.top)];
}

/** The text of a value on an axis: "1e-5" rather than "1.00e-5". */
const tick = (value) => show(value).replace(".00e", "e");

/** Lines across a chart at some values, each with words(value) on its left. */
export const levels = (values, y, left, right, colors, words = tick) => values.flatMap((value) => [
  svg("path", { d: `M${left} ${y(value)}H${right}`, stroke: colors.grid }),
  text(left - 8, y(value) + 4, words(value), { "text-anchor": "end" })]);

/** The texts under an axis, [place, text], as far as they do not touch. */
export const labelsBelow = (labels, y) => clearLabels(labels, (words) => 7 * words.length)
  .map(([x, words]) => text(x, y, words, { "text-anchor": "middle" }));

/**
 * A plane of two logarithmic axes, for the values xs and ys: {x, y, box, axes}, where x.at and y.at give
 * the pixel of a value, and axes are lines and texts. names: of both axes.
 */
export function logPlane({ xs, ys, names, colors, width, height }) {
  const [left, right, top, base] = [72, width - 10, 10, height - 46];
  const [x, y] = [logAxis(xs, left, right), logAxis(ys, base, top)];
  const marksOf = ({ zeros, marks }) => (zeros ? [0, ...marks] : marks);
  const columns = marksOf(x).map((value) => [x.at(value), tick(value)]);
  const axes = [
    ...columns.map(([at]) => svg("path", { d: `M${at} ${top}V${base}`, stroke: colors.grid })),
    ...levels(marksOf(y), y.at, left, right, colors), ...labelsBelow(columns, base + 15),
    text((left + right) / 2, base + 38, names[0], { "text-anchor": "middle" }),
    text(0, 0, names[1], { "text-anchor": "middle",
      transform: `translate(12 ${(top + base) / 2}) rotate(-90)` })];
  return { x, y, box: { left, right, top, base }, axes };
}

/** The index of the mark nearest to a point, within reach pixels; null for none. */
export function nearest(places, x, y, reach = 10) {
  const far = places.x.map((px, k) => Math.hypot(px - x, places.y[k] - y));
  const least = Math.min(...far);
  return least <= reach ? far.indexOf(least) : null;
}

/** An entry of a key at a point: a sign around (0, 0) and what it means. */
export const keyEntry = (x, y, sign, words) => [svg("g", { transform: `translate(${x + 12} ${y - 4})` },
  ...[sign].flat()), text(x + 28, y, words)];

/** Those of [place, text] whose texts do not touch, the ends first; width(text) in pixels. */
export function clearLabels(labels, width, space = 6) {
  const taken = [];
  const found = new Set();
  const order = [labels[0], labels.at(-1), ...labels.slice(1, -1)];
  for (const label of order) {
    const half = width(label[1]) / 2 + space / 2;
    const [from, to] = [label[0] - half, label[0] + half];
    if (taken.some(([a, b]) => from < b && to > a)) continue;
    taken.push([from, to]);
    found.add(label);
  }
  return labels.filter((label) => found.has(label));
}
