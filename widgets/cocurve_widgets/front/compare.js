// Plan A against plan B: which units join or leave; and how measured numbers are written.

import { h, show } from "./kit.js";

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

/**
 * The words of some texts, each {word, shared, first}: `shared` are those that all texts hold, `first` is
 * the first word that differs. The last word of a text that still grows may not be whole.
 */
export function compared(texts, growing = false) {
  const words = texts.map((whole) => whole.match(/\s*\S+/g) ?? []);
  const bare = words.map((some) => some.map((word) => word.trim()));
  const all = bare.map((some) => new Set(some));
  const whole = Math.min(...words.map((some) => some.length - (growing ? 1 : 0)));
  let fork = 0;
  while (fork < whole && bare.every((some) => some[fork] === bare[0][fork])) fork += 1;
  if (growing && fork >= whole) fork = Infinity;
  return words.map((some, side) => some.map((word, k) => ({ word, first: k === fork,
    shared: all.every((set) => set.has(bare[side][k])) })));
}

/** One of the lists of `compared` as elements: shared words gray, the first that differs marked. */
export const markedWords = (words) => words.map(({ word, shared, first }) =>
  h(first ? "mark" : "span", { class: shared && !first && "cc-muted" }, word));
