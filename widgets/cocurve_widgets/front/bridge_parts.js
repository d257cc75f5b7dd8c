// The parts of the bridge explorer that need no model: layout, filters, axes, marks, edges.

import { COLORS, count, counted, drawRules, drawUpwards, show, unitCount } from "./kit.js";

const BLOCK_NAMES = ["ffn", "cross", "attention"]; // by the number of attention ends
const PATH = 40; // edges stroked at once
const WIDE = 400; // edges drawn with more than a thin line

/** Places in a grid: column = layer, row = rank within layer and kind, attention above FFN. */
export function graphLayout(nodes) {
  const seen = new Map();
  const rank = nodes.kind.map((kind, u) => {
    const key = `${nodes.layer[u]} ${kind}`;
    seen.set(key, (seen.get(key) ?? -1) + 1);
    return seen.get(key);
  });
  const most = (kind) => Math.max(0, ...rank.map((r, u) => (nodes.kind[u] === kind ? r + 1 : 0)));
  const [attention, ffn] = [most("attention"), most("ffn")];
  const gap = attention && ffn ? 1.5 : 0;
  const row = rank.map((r, u) => (nodes.kind[u] === "attention" ? r : attention + gap + r));
  return { column: nodes.layer, row, columns: Math.max(0, ...nodes.layer) + 1,
    rows: attention + gap + ffn, attention, ffn };
}

/** The pixels of a layout in a box: x, y of each unit, size of a cell, radius of a mark. */
export function placeGraph(layout, box) {
  const cell = [(box.right - box.left) / layout.columns, (box.bottom - box.top) / layout.rows];
  return { cell, right: box.right, radius: Math.max(1.5, Math.min(7, 0.3 * Math.min(...cell))),
    x: layout.column.map((c) => box.left + (c + 0.5) * cell[0]),
    y: layout.row.map((r) => box.top + (r + 0.5) * cell[1]) };
}

/** The edges from the model's bytes, strongest first, each with its block. */
export function readEdges(ends, correlation, kinds) {
  const [u, v] = [0, 1].map((side) => ends.filter((_, i) => i % 2 === side));
  const attention = (unit) => Number(kinds[unit] === "attention");
  const block = Array.from(u, (a, e) => BLOCK_NAMES[attention(a) + attention(v[e])]);
  return { u, v, rho: correlation, block };
}

/**
 * The indices of edges that pass {threshold, sign, blocks, ego, unit, among}, strongest first;
 * `among` is the set of units of which an edge needs one, null for all.
 */
export function visibleEdges(edges, filters) {
  const { threshold, sign, blocks, ego, unit, among } = filters;
  const alone = ego && unit !== null && unit !== undefined;
  const found = [];
  for (let e = 0; e < edges.rho.length; e++) {
    const rho = edges.rho[e];
    if (Math.abs(rho) < threshold) break; // sorted by |rho|
    if (sign !== "both" && rho > 0 !== (sign === "positive")) continue;
    if (!blocks.includes(edges.block[e])) continue;
    if (alone && edges.u[e] !== unit && edges.v[e] !== unit) continue;
    if (!alone && among && !among.has(edges.u[e]) && !among.has(edges.v[e])) continue;
    found.push(e);
  }
  return found;
}

/** The unit whose mark is nearest to a point, within reach pixels; null for none. */
export function hitUnit(place, x, y, reach = 10) {
  let best = null;
  let nearest = reach * reach;
  place.x.forEach((px, u) => {
    const distance = (px - x) ** 2 + (place.y[u] - y) ** 2;
    if (distance < nearest || (best === null && distance <= nearest)) {
      [best, nearest] = [u, distance];
    }
  });
  return best;
}

/** Units inside a rectangle of two corners. */
export function unitsInside(place, [x1, y1], [x2, y2]) {
  const inside = (a, b, value) => value >= Math.min(a, b) && value <= Math.max(a, b);
  return place.x.flatMap((x, u) => (inside(x1, x2, x) && inside(y1, y2, place.y[u]) ? [u] : []));
}

/** The unit an arrow key leads to: left/right the nearest row of the next layer, up/down within. */
export function stepUnit(layout, unit, key) {
  if (unit === null || unit === undefined) return layout.row.length ? 0 : null;
  const [column, row] = [layout.column[unit], layout.row[unit]];
  const across = { ArrowLeft: -1, ArrowRight: 1 }[key] ?? 0;
  const down = { ArrowUp: -1, ArrowDown: 1 }[key] ?? 0;
  let best = unit;
  let nearest = Infinity;
  layout.column.forEach((c, u) => {
    const [dc, dr] = [c - column, layout.row[u] - row];
    const ahead = across ? dc * across > 0 : dc === 0 && dr * down > 0;
    const distance = 1e4 * Math.abs(dc) + Math.abs(dr);
    if (ahead && distance < nearest) [best, nearest] = [u, distance];
  });
  return best;
}

/** Least-squares line of log connectivity on log saliency: value at a saliency; null if none. */
export function fitLine(saliency, connectivity) {
  const live = saliency.flatMap((d, u) => (d > 0 && connectivity[u] > 0 ? [u] : []));
  const mean = (f) => live.reduce((sum, u) => sum + f(u), 0) / live.length;
  const [x, y] = [(u) => Math.log(saliency[u]), (u) => Math.log(connectivity[u])];
  const [mx, my] = [mean(x), mean(y)];
  const spread = mean((u) => (x(u) - mx) ** 2);
  if (!(spread > 0)) return null;
  const slope = mean((u) => (x(u) - mx) * (y(u) - my)) / spread;
  return (d) => Math.exp(my + slope * (Math.log(d) - mx));
}

const TRIED = Array.from({ length: 12 }, (_, n) => (n + 1) / 20);

/**
 * The two compared plans, read off the runs of lambda 0 and 1 ({diagonal, edge_aware}, each {order,
 * share}, the removed share after each step), at a ratio where they treat some units differently:
 * `asked`, or the nearest tried. With `exactly`, at the ratio asked for. As in Python.
 */
export function comparedPlans(runs, units, asked, exactly) {
  const upto = ({ order, share }, ratio) => {
    const steps = ratio > 0 ? share.findIndex((s) => s >= ratio * (1 - 1e-12)) + 1 : 0;
    return steps || ratio === 0 ? order.slice(0, steps) : null; // null: out of reach
  };
  const at = (ratio) => ({ ratio, note: "", diagonal: upto(runs.diagonal, ratio),
    edge_aware: upto(runs.edge_aware, ratio) });
  const first = at(asked);
  if (exactly || !units.length) return first;
  const gap = (ratio) => Math.round(1e9 * Math.abs(ratio - asked));
  const rest = TRIED.filter((r) => r !== asked).sort((x, y) => gap(x) - gap(y) || x - y);
  for (const ratio of [asked, ...rest]) {
    const found = at(ratio);
    const [one, other] = [found.diagonal, found.edge_aware];
    if (!one || !other || units.every((u) => one.includes(u) === other.includes(u))) continue;
    if (ratio !== asked) {
      found.note = `At ratio ${tickText(asked)} the two plans treat these units alike. They are ` +
        `compared at ${tickText(ratio)}, the nearest ratio tried where they do not.`;
    }
    return found;
  }
  return { ...first, note: "At every ratio tried, up to 60 %, the diagonal and the edge-aware " +
    "plan treat these units alike." };
}

/** Which edges pass the filters, in words; `alone`: the unit of an ego view by name, or false. */
export function shownText(filters, { shown, rho, total, alone }) {
  if (!total) return "H has no edges: no two units interact";
  const { threshold, sign, blocks, ego, among } = filters;
  const sent = rho.length;
  const weakest = sent ? Math.abs(rho[sent - 1]) : 0;
  const capped = total > sent && threshold <= weakest;
  const pool = `${capped ? `the ${count(sent)} strongest of ` : ""}${counted(total, "edge")}`;
  const part = capped && shown === sent ? "" : `${count(shown)} of `;
  const named = blocks.map((block) => (block === "ffn" ? "FFN" : block)).join(" and ") || "no";
  const kinds = blocks.length === BLOCK_NAMES.length ? ""
    : `, ${named} block${blocks.length > 1 ? "s" : ""}`;
  return `${part}${pool}: |ρ| ≥ ${show(capped ? weakest : threshold)}` +
    `${among && !alone ? " with an end among the listed units" : ""}` +
    `${sign === "both" ? "" : `, ${sign} only`}${kinds}` +
    `${alone ? `; ego view of ${alone}` : ego ? "; choose a unit for the ego view" : ""}`;
}

/** What a saved picture shows, line by line: the edges, the plan of the crosses, the bars. */
export function pictureWords({ what, shown, flow, plans }) {
  const { present } = plans;
  const removed = !present ? "No plan yet."
    : `Crossed: the ${unitCount(present.length)} that the present plan removes.`;
  return [`${what}: ${shown}.`, removed,
    flow && `Bars: ${flow[0].toLowerCase()}${flow.slice(1)}.`].filter(Boolean);
}

/** The label of a value on a log axis. */
export function tickText(value) {
  return value > 0 && value < 1e-3 ? value.toExponential(0) : String(Number(value.toPrecision(2)));
}

/** The share of values that are at most this one. */
export function shareBelow(values, value) {
  return values.filter((v) => v <= value).length / values.length;
}

/** Draw sums of a unit's positive (up) and negative (down) edges by layer; `own` is its layer. */
export function drawFlow(g, colors, { positive, negative, own, left, right, top, bottom }) {
  const [high, low] = [Math.max(0, ...positive), Math.min(0, ...negative)];
  const y = (v) => top + ((high - v) / (high - low || 1)) * (bottom - top);
  const cell = (right - left) / positive.length;
  drawRules(g, colors, ticks(low, high, 4), { y, text: tickText, left, right });
  g.textAlign = "center";
  g.textBaseline = "top";
  const every = Math.ceil(26 / cell);
  positive.forEach((more, layer) => {
    const x = left + layer * cell + 0.15 * cell;
    g.fillStyle = COLORS.positive;
    g.fillRect(x, y(more), 0.7 * cell, y(0) - y(more));
    g.fillStyle = COLORS.negative;
    g.fillRect(x, y(0), 0.7 * cell, y(negative[layer]) - y(0));
    g.fillStyle = layer === own ? colors.text : colors.muted;
    if (layer === own) g.fillText("▲", x + 0.35 * cell, bottom + 16);
    if (layer % every === 0) g.fillText(String(layer), x + 0.35 * cell, bottom + 3);
  });
}

// Drawing ---------------------------------------------------------------------------------------

/** Outline of a unit's mark: circle for attention, square for FFN. */
function traceMark(g, kind, x, y, r) {
  g.beginPath();
  if (kind === "attention") g.arc(x, y, r, 0, 2 * Math.PI);
  else g.rect(x - 0.9 * r, y - 0.9 * r, 1.8 * r, 1.8 * r);
}

/** Draw a unit: halo if brushed, hollow and crossed if removed, ringed if a bridge or selected. */
export function drawMark(g, colors, { kind, x, y, r, bridge, removed, brushed, selected }) {
  if (brushed) {
    g.fillStyle = colors.accent;
    traceMark(g, kind, x, y, r + Math.max(3.5, Math.min(6, r)));
    g.fill();
  }
  traceMark(g, kind, x, y, r);
  g.fillStyle = colors.back; // muted may be translucent, and edges end under the mark
  g.fill();
  if (!removed) {
    g.fillStyle = colors.muted;
    g.fill();
  }
  g.lineWidth = 1;
  g.strokeStyle = colors.text;
  if (removed) {
    g.stroke();
    g.beginPath();
    g.moveTo(x - r, y - r);
    g.lineTo(x + r, y + r);
    g.moveTo(x + r, y - r);
    g.lineTo(x - r, y + r);
    g.stroke();
  }
  if (bridge) {
    g.lineWidth = 2.5;
    g.strokeStyle = COLORS.bridge;
    traceMark(g, kind, x, y, r + 2);
    g.stroke();
  }
  if (selected) {
    g.lineWidth = 2;
    g.strokeStyle = colors.text;
    traceMark(g, "attention", x, y, r + 5);
    g.stroke();
  }
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
    const bow = Math.min(1.6 * place.cell[1], 0.1 * Math.abs(x2 - x1));
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

/** Draw the numbers of the layers and the names of the kinds beside a graph. */
export function drawGraphAxes(g, colors, place, box_, layout) {
  g.fillStyle = colors.muted;
  g.textAlign = "center";
  g.textBaseline = "top";
  const every = Math.ceil(26 / place.cell[0]);
  for (let c = 0; c < layout.columns; c += every) {
    g.fillText(String(c), box_.left + (c + 0.5) * place.cell[0], box_.bottom + 4);
  }
  g.fillText("layer", (box_.left + box_.right) / 2, box_.bottom + 21);
  const side = (text, from, rows) =>
    rows && drawUpwards(g, text, 10, box_.top + (from + rows / 2) * place.cell[1]);
  side(layout.attention * place.cell[1] < 52 ? "attn." : "attention", 0, layout.attention);
  side("FFN", layout.rows - layout.ffn, layout.ffn);
}

/** Draw the marks and their meanings in rows from (left, top); return the height used. */
export function drawLegend(g, colors, left, top, width, draw) {
  const mark = (state) => (x, y) => drawMark(g, colors, { kind: "ffn", x, y, r: 4.5, ...state });
  const line = (color, dash) => (x, y) => {
    g.strokeStyle = color;
    g.lineWidth = 2;
    g.setLineDash(dash);
    g.beginPath();
    g.moveTo(x - 9, y);
    g.lineTo(x + 9, y);
    g.stroke();
    g.setLineDash([]);
  };
  const entries = [
    [mark({ kind: "attention" }), "attention"], [mark({}), "FFN"],
    [mark({ bridge: true }), "bridge"], [mark({ removed: true }), "removed in the present plan"],
    [mark({ brushed: true }), "brushed"], [mark({ selected: true }), "selected"],
    [line(COLORS.positive, []), "positive: worse together"],
    [line(COLORS.negative, [5, 4]), "negative: losses partly cancel"],
  ];
  let [x, y] = [left, top];
  g.textAlign = "left";
  g.textBaseline = "middle";
  for (const [symbol, text] of entries) {
    const wide = 30 + g.measureText(text).width + 14;
    if (x > left && x + wide > left + width) [x, y] = [left, y + 20];
    if (draw) {
      symbol(x + 11, y + 10);
      g.fillStyle = colors.text;
      g.fillText(text, x + 26, y + 10.5);
    }
    x += wide;
  }
  return y + 20 - top;
}
