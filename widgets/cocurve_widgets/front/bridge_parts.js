// The parts of the bridge explorer that need no model: places, filters, marks, edges, bars, legend.

import { keyEntry, levels, sheet, svg, text } from "./svg.js";
import { brief } from "./compare.js";
import { COLORS, count, counted, show, ticks } from "./kit.js";
import { circle, lineOf, rectangle } from "./unit_map.js";

const BLOCK_NAMES = ["ffn", "cross", "attention"]; // by the number of attention ends
const PATH = 40; // edges stroked at once
const WIDE = 400; // edges drawn with more than a thin line

/** Place a grid in a width: x and y of each unit, size of a cell, right edge, radius of a mark. */
export function placeGraph(grid, width) {
  grid.place(width);
  const { cell, tall, width: right } = grid.geometry;
  const boxes = Array.from({ length: grid.size }, (_, u) => grid.box(u));
  const radius = Math.max(1.5, Math.min(7, 0.3 * Math.min(cell, tall)));
  return { cell: [cell, tall], right, radius, x: boxes.map(([left]) => left + cell / 2),
    y: boxes.map(([, top]) => top + tall / 2) };
}

/** The edges from the model's bytes, strongest first, each with its block. */
export function readEdges(ends, correlation, kinds) {
  const [u, v] = [0, 1].map((side) => ends.filter((_, i) => i % 2 === side));
  const attention = (unit) => Number(kinds[unit] === "attention");
  const block = Array.from(u, (a, e) => BLOCK_NAMES[attention(a) + attention(v[e])]);
  return { u, v, rho: correlation, block };
}

/**
 * The indices of edges that pass {threshold, sign, blocks, among}, strongest first; `among` is the
 * set of units of which an edge needs one, null for all.
 */
export function visibleEdges({ u, v, rho, block }, { threshold, sign, blocks, among }) {
  return [...rho.keys()].filter((e) => Math.abs(rho[e]) >= threshold && blocks.includes(block[e]) &&
    (sign === "both" || rho[e] > 0 === (sign === "positive")) &&
    (!among || among.has(u[e]) || among.has(v[e])));
}

/** Units inside a rectangle of two corners. */
export function unitsInside(place, [x1, y1], [x2, y2]) {
  const inside = (a, b, value) => value >= Math.min(a, b) && value <= Math.max(a, b);
  return place.x.flatMap((x, u) => (inside(x1, x2, x) && inside(y1, y2, place.y[u]) ? [u] : []));
}

/** The ends of the line of residual 0, each [saliency, connectivity]; null if there is none. */
export function lineEnds({ saliency, connectivity, residual }) {
  const known = residual.flatMap((r, u) => (r == null ? [] : [u]))
    .sort((u, v) => saliency[u] - saliency[v]);
  const ends = [known[0], known.at(-1)];
  if (!(saliency[ends[0]] < saliency[ends[1]])) return null;
  return ends.map((u) => [saliency[u], connectivity[u] * Math.exp(-residual[u])]);
}

const TRIED = Array.from({ length: 12 }, (_, n) => (n + 1) / 20);

/**
 * The two compared plans, read off the runs of lambda 0 and 1 ({diagonal, edge_aware}, each {order,
 * share}, the removed share after each step), at a ratio where they treat some units differently:
 * `asked`, or the nearest tried.
 */
export function comparedPlans(runs, units, asked) {
  const upto = ({ order, share }, ratio) => {
    const steps = ratio > 0 ? share.findIndex((s) => s >= ratio * (1 - 1e-12)) + 1 : 0;
    return steps || ratio === 0 ? order.slice(0, steps) : null; // null: out of reach
  };
  const at = (ratio) => ({ ratio, note: "", diagonal: upto(runs.diagonal, ratio),
    edge_aware: upto(runs.edge_aware, ratio) });
  if (!units.length) return at(asked);
  const gap = (ratio) => Math.round(1e9 * Math.abs(ratio - asked));
  const nearby = [...TRIED].sort((x, y) => gap(x) - gap(y) || x - y);
  const found = [asked, ...nearby].map(at).find(({ diagonal, edge_aware: other }) =>
    diagonal && other && units.some((u) => diagonal.includes(u) !== other.includes(u)));
  if (!found) {
    return { ...at(asked), note: "At every ratio tried, up to 60 %, the diagonal and the " +
      "edge-aware plan treat these units alike." };
  }
  const note = `At ratio ${brief(asked)} the two plans treat these units alike. They are ` +
    `compared at ${brief(found.ratio)}, the nearest ratio tried where they do not.`;
  return found.ratio === asked ? found : { ...found, note };
}

/** Which edges pass the filters, in words. */
export function shownText(filters, { shown, rho, total }) {
  if (!total) return "H has no edges: no two units interact";
  const { threshold, sign, blocks, among } = filters;
  const sent = rho.length;
  const weakest = sent ? Math.abs(rho[sent - 1]) : 0;
  const capped = total > sent && threshold <= weakest;
  const pool = `${capped ? `the ${count(sent)} strongest of ` : ""}${counted(total, "edge")}`;
  const part = capped && shown === sent ? "" : `${count(shown)} of `;
  const named = blocks.map((block) => (block === "ffn" ? "FFN" : block)).join(" and ") || "no";
  const kinds = blocks.length === BLOCK_NAMES.length ? ""
    : `, ${named} block${blocks.length > 1 ? "s" : ""}`;
  return `${part}${pool}: |ρ| ≥ ${show(capped ? weakest : threshold)}` +
    `${among ? " with an end among the listed units" : ""}` +
    `${sign === "both" ? "" : `, ${sign} only`}${kinds}`;
}

/** The share of values that are at most this one. */
export function shareBelow(values, value) {
  return values.filter((v) => v <= value).length / values.length;
}

/** The sums of a unit's positive (up) and negative (down) edges by layer; `own` is its layer. */
export function flowChart({ positive, negative, own }, colors, width) {
  const [left, right, top, base] = [72, width - 10, 10, 112];
  const [high, low] = [Math.max(0, ...positive), Math.min(0, ...negative)];
  const y = (v) => top + ((high - v) / (high - low || 1)) * (base - top);
  const cell = (right - left) / positive.length;
  const bars = ([name, sums]) => svg("path", { fill: COLORS[name], d: sums.map((sum, layer) =>
    `M${left + (layer + 0.15) * cell} ${y(0)}v${y(sum) - y(0)}h${0.7 * cell}V${y(0)}z`).join("") });
  const below = (layer, down, words) => text(left + (layer + 0.5) * cell, base + down, words,
    { "text-anchor": "middle", fill: layer === own ? colors.text : colors.muted });
  const every = Math.ceil(26 / cell);
  return sheet(width, 148, colors, {}, ...levels(ticks(low, high, 4), y, left, right, colors),
    ...Object.entries({ positive, negative }).map(bars),
    ...positive.flatMap((_, layer) => (layer % every ? [] : [below(layer, 15, layer)])),
    below(own, 30, "▲"));
}

// Marks and edges -------------------------------------------------------------------------------

/**
 * The mark of a unit as SVG paths, the lowest first: circle for attention, square for FFN; a halo
 * if brushed, hollow and crossed if removed, ringed if a bridge or selected.
 */
export function markPaths({ kind, bridge, removed, brushed, selected }, x, y, r, colors) {
  const square = (half) => rectangle(x - half, y - half, 2 * half, 2 * half);
  const shape = (more) =>
    (kind === "attention" ? circle(x, y, r + more) : square(0.9 * (r + more)));
  const cross = `M${x - r} ${y - r}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}`;
  return [
    brushed && { d: shape(Math.max(3.5, Math.min(6, r))), fill: colors.accent },
    { d: shape(0), fill: colors.back }, // muted may be translucent, and edges end under the mark
    removed ? lineOf(shape(0) + cross, colors.text, 1) : { d: shape(0), fill: colors.muted },
    bridge && lineOf(shape(2), COLORS.bridge, 2.5),
    selected && lineOf(circle(x, y, r + 5), colors.text, 2),
  ].filter(Boolean);
}

/** The paths of many marks, with those of plain ones, which look alike, as one: a thousand are slow. */
export function joined(marks) {
  const isPlain = (paths) => paths.length === 2 && !paths[1].stroke;
  const plain = marks.filter(isPlain);
  const one = (plain[0] ?? []).map((path, k) => ({ ...path, d: plain.map((paths) => paths[k].d).join("") }));
  return [...one, ...marks.filter((paths) => !isPlain(paths)).flat()];
}

/** Trace an edge; along a row or column it bows, to stay off the marks between its ends. */
function traceEdge(path, place, u, v) {
  const [x1, y1, x2, y2] = [place.x[u], place.y[u], place.x[v], place.y[v]];
  path.moveTo(x1, y1);
  if (x1 === x2) {
    let bow = Math.min(1.6 * place.cell[0], 0.35 * Math.abs(y2 - y1));
    if (x1 + bow / 2 > place.right) bow = -bow; // else the arc of the last layer is cut off
    path.quadraticCurveTo(x1 + bow, (y1 + y2) / 2, x2, y2);
  } else if (y1 === y2) {
    const bow = Math.min(1.2 * place.cell[1], 0.1 * Math.abs(x2 - x1));
    path.quadraticCurveTo((x1 + x2) / 2, y1 - bow, x2, y2);
  } else path.lineTo(x2, y2);
}

/**
 * Stroke edges from weak to strong, in short paths of one sign; opacity and width grow with |rho|.
 *
 * Only the strongest are wider than one screen pixel, and those go one by one: a browser without
 * GPU draws 10,000 thin lines in 50 ms and needs a second for long paths of wide dashed ones.
 */
export function strokeEdges(g, colors, place, edges, shown, alpha) {
  if (!shown.length) return;
  const size = (e) => Math.abs(edges.rho[e]);
  const [high, low] = [size(shown[0]), size(shown.at(-1))];
  const thin = 1 / (globalThis.devicePixelRatio || 1);
  for (let [start, end] = [0, shown.length]; end > 0; end = start) {
    start = end > WIDE ? Math.max(WIDE, end - PATH) : end - 1;
    const t = high > low ? (size(shown[start]) - low) / (high - low) : 1;
    g.globalAlpha = alpha * (0.3 + 0.7 * t);
    g.lineWidth = start < WIDE ? 0.8 + 2.4 * t : thin;
    for (const positive of [false, true]) {
      const mine = shown.slice(start, end).filter((e) => edges.rho[e] > 0 === positive);
      if (!mine.length) continue;
      g.strokeStyle = positive ? COLORS.positive : COLORS.negative;
      g.setLineDash(positive ? [] : [5, 4]);
      g.beginPath();
      for (const e of mine) traceEdge(g, place, edges.u[e], edges.v[e]);
      g.stroke();
    }
  }
  g.setLineDash([]);
  g.globalAlpha = 1;
}

/** What the marks and lines of the graph mean. */
export function graphKey(colors, width) {
  const mark = (state) => markPaths({ kind: "ffn", ...state }, 0, 0, 4.5, colors)
    .map((path) => svg("path", path));
  const entries = [
    [mark({ kind: "attention" }), "attention"], [mark({}), "FFN"],
    [mark({ bridge: true }), "bridge"], [mark({ removed: true }), "removed in the present plan"],
    [mark({ brushed: true }), "brushed"], [mark({ selected: true }), "selected"],
    [svg("path", lineOf("M-9 0H9", COLORS.positive, 2)), "positive: worse together"],
    [svg("path", lineOf("M-9 0H9", COLORS.negative, 2, "5 4")), "negative: losses partly cancel"],
  ];
  const columns = Math.max(1, Math.floor(width / 215)); // the longest has 210 px
  const rows = Math.ceil(entries.length / columns);
  return sheet(width, 20 * rows + 4, colors, { role: "img", "aria-label": "legend", fill: colors.text },
    ...entries.flatMap((entry, k) =>
      keyEntry(8 + 215 * Math.floor(k / rows), 20 * (k % rows) + 16, ...entry)));
}
