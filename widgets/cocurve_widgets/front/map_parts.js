// The parts of the map of H that need no page: cells and their colors, orders, windows.

import { eachPair } from "./kit.js";

const FULL_ROOT = 32767; // int16 of the largest root, as in curvature_map.py
const SHADES = 255; // of either sign
const OWN = SHADES + 1; // a unit with itself
const LEAST_SPAN = 4; // units across the smallest window

/** The upper triangle of roots of rho, int16, from H [size x size]: where H is there, it need not be sent. */
export function pairsOf(matrix, size, roots, peak) {
  const triangle = new Int16Array((size * (size + 1)) / 2);
  eachPair(size, (u, v, k) => {
    const rho = matrix[u * size + v] / (roots[u] * roots[v]);
    triangle[k] = Math.sign(rho) * Math.round(FULL_ROOT * Math.sqrt(Math.abs(rho) / peak));
  });
  return triangle;
}

/** H_uv / (root_u root_v), which is rho_uv, from the square of pairs. */
export function correlationOf(square, size, peak, u, v) {
  const root = square[u * size + v] / FULL_ROOT;
  return Math.sign(root) * root * root * peak;
}

/** The units from first to last place; an order that is not known yet is that of the layers. */
export function placesOf(order, size, { saliency, clustered, removed }) {
  const all = Array.from({ length: size }, (_, u) => u);
  if (order === "saliency") return all.sort((u, v) => saliency[v] - saliency[u] || u - v);
  if (order === "clustering" && clustered.length === size) return [...clustered];
  if (order === "plan") {
    const gone = new Set(removed);
    return [...removed, ...all.filter((u) => !gone.has(u))];
  }
  return all;
}

/** Colors as RGBA from the strongest negative over none to the strongest positive; the last is own. */
export function shadesOf(positive, negative, none, own) {
  const shades = new Uint32Array(2 * SHADES + 2);
  const bytes = new Uint8Array(shades.buffer);
  for (let k = -SHADES; k <= SHADES; k++) {
    const share = Math.abs(k) / SHADES;
    const end = k < 0 ? negative : positive;
    const color = none.map((from, i) => Math.round(from + share * (end[i] - from)));
    bytes.set([...color, 255], 4 * (k + SHADES));
  }
  bytes.set([...own, 255], 4 * (OWN + SHADES));
  return shades;
}

/**
 * To which power a size becomes a shade, as a share of the scale's end.
 *
 * H spans more decades than rho: its fourth root lets the cheap units of a plan be seen at all.
 */
export const POWERS = { correlation: 0.5, curvature: 0.25 };

/** The shades of all cells, [M * M] from -255 to 255, in the order of places; OWN on the diagonal. */
export function shadeCells(square, places, scale, { peak, ends, roots }) {
  const size = places.length;
  const order = Int32Array.from(places);
  const shades = new Int16Array(size * size);
  const gain = Math.sqrt(peak / ends[scale]) / FULL_ROOT;
  const fourth = scale === "curvature"; // the roots of H are those of rho times both units' own
  const weights = Float64Array.from(roots, fourth ? Math.sqrt : () => 1);
  for (let i = 0, at = 0; i < size; i++) {
    const u = order[i];
    const row = square.subarray(u * size, (u + 1) * size);
    const own = gain * weights[u];
    for (let j = 0; j < size; j++, at++) {
      const v = order[j];
      const root = own * weights[v] * row[v];
      const strength = root < 0 ? -root : root; // Math.abs and Math.round are slow four million times
      const shade = strength >= 1 ? SHADES : SHADES * (fourth ? Math.sqrt(strength) : strength) + 0.5;
      shades[at] = root < 0 ? -shade : shade; // cut to a whole number
    }
    if (!fourth) shades[i * size + i] = OWN; // rho of a unit with itself says nothing
  }
  return shades;
}

/** Half as many cells each way: of every four the strongest, {shades, size}. A mean would mix signs. */
export function halved({ shades, size }) {
  const half = Math.ceil(size / 2);
  const found = new Int16Array(half * half);
  for (let i = 0; i < size; i++) {
    const to = (i >> 1) * half;
    for (let j = 0, at = i * size; j < size; j++, at++) {
      const shade = shades[at];
      if (shade !== OWN && Math.abs(shade) > Math.abs(found[to + (j >> 1)])) found[to + (j >> 1)] = shade;
    }
  }
  return { shades: found, size: half };
}

/** The pixels of shades: Uint32Array of RGBA. */
export function colored(shades, colors) {
  const pixels = new Uint32Array(shades.length); // `from` with a function is ten times slower
  for (let at = 0; at < pixels.length; at++) pixels[at] = colors[shades[at] + SHADES];
  return pixels;
}

/** A window moved back inside M units. */
export function inside([column, row, span], size) {
  const wide = Math.min(size, Math.max(Math.min(LEAST_SPAN, size), span));
  const fit = (at) => Math.min(size - wide, Math.max(0, at));
  return [fit(column), fit(row), wide];
}

/** The window magnified by a factor about a point [column, row], which stays where it is. */
export function zoomed([column, row, span], size, factor, [x, y]) {
  const wide = inside([0, 0, span / factor], size)[2];
  const share = wide / span;
  return inside([x - (x - column) * share, y - (y - row) * share, wide], size);
}

/** The window moved, if need be, so that it holds a column and a row. */
export function showing([column, row, span], size, x, y) {
  const near = (at, want) => Math.min(want, Math.max(want + 1 - span, at));
  return inside([near(column, x), near(row, y), span], size);
}

/** [column, row] of the cell at a point of the window, whose numbers have fractions; null outside. */
export function cellAt([column, row, span], [x, y]) {
  const seen = x >= column && y >= row && x < column + span && y < row + span;
  return seen ? [Math.floor(x), Math.floor(y)] : null;
}

/** The nearest point of the window; its far sides are not of it. */
export function clipped([column, row, span], [x, y]) {
  const near = (from, at) => Math.min(from + span - 1e-9, Math.max(from, at));
  return [near(column, x), near(row, y)];
}

/** The units in the rows and columns of a rectangle of two points, ascending. */
export function unitsOf(places, one, other) {
  const found = one.flatMap((at, axis) => places.slice(Math.floor(Math.min(at, other[axis])),
    Math.floor(Math.max(at, other[axis])) + 1));
  return [...new Set(found)].sort((u, v) => u - v);
}

/** Runs of equal values along the places: [{value, start, end}], end excluded. */
export function runsOf(values) {
  const runs = [];
  values.forEach((value, k) => {
    if (runs.length && runs.at(-1).value === value) runs.at(-1).end = k + 1;
    else runs.push({ value, start: k, end: k + 1 });
  });
  return runs;
}

/** Pairs of two units in the rows and columns of a window, strongest first: at most `most`, [u, v]. */
export function pairsInside(window, places, strength, most) {
  const [columns, rows] = [0, 1].map((axis) =>
    new Set(places.slice(Math.floor(window[axis]), Math.ceil(window[axis] + window[2]))));
  const [firsts, seconds, strengths] = [[], [], []];
  eachPair(places.length, (u, v) => {
    const seen = (rows.has(u) && columns.has(v)) || (rows.has(v) && columns.has(u));
    if (!seen || u === v) return;
    firsts.push(u);
    seconds.push(v);
    strengths.push(Math.abs(strength(u, v)));
  });
  // H of an 8B has 294,528 pairs: a sort of numbers finds the bound, and few are left to put in order
  const least = Float64Array.from(strengths).sort().at(-most) ?? 0;
  return [...strengths.keys()].filter((k) => strengths[k] >= least)
    .sort((a, b) => strengths[b] - strengths[a]).slice(0, most).map((k) => [firsts[k], seconds[k]]);
}
