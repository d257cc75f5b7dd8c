// Units in a grid, layer across, attention above FFN; and the map of the lambda explorer, every unit a cell.

import { COLORS, fit, ticks } from "./kit.js";

const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** Where the units stand: place(width, its share, height and height of a row at most) first, then box(u), unitAt(x, y) and step(u, key). */
export function unitGrid({ kinds, layers, places, numLayers }) {
  const most = (kind) => Math.max(0, ...places.filter((_, u) => kinds[u] === kind).map((p) => p + 1));
  const [attention, ffn] = [most(0), most(1)];
  const grid = { attention, ffn, numLayers, size: kinds.length, geometry: null };

  grid.place = (width, share = 0.72, tallest = 430, row = 22) => {
    const [left, top, gap] = [64, 4, attention && ffn ? 8 : 0];
    const cell = Math.max(3, Math.min(110, (width - left - 6) / numLayers));
    const rows = Math.max(1, attention + ffn);
    const tall = Math.max(5, Math.min(row, Math.max(250, Math.min(tallest, share * width)) / rows));
    grid.geometry = { left, top, gap, cell, tall, height: top + (attention + ffn) * tall + gap + 22,
      width: left + cell * numLayers + 6 };
  };
  grid.box = (u) => {
    const { left, top, gap, cell, tall } = grid.geometry;
    const row = kinds[u] ? attention + places[u] : places[u];
    return [left + layers[u] * cell, top + row * tall + (kinds[u] ? gap : 0), cell, tall];
  };
  grid.unitAt = (x, y) => {
    const found = layers.findIndex((_, u) => {
      const [left, top, w, t] = grid.box(u);
      return x >= left && x < left + w && y >= top && y < top + t;
    });
    return found < 0 ? null : found;
  };
  /** The unit an arrow key leads to: left and right the nearest of the next layer, up and down within. */
  grid.step = (from, key) => {
    if (from == null) return 0;
    const [[left, top], [dx, dy]] = [grid.box(from), MOVES[key]];
    const far = layers.map((_, u) => {
      const [x, y] = grid.box(u);
      const ahead = dx ? (x - left) * dx > 0 : x === left && (y - top) * dy > 0;
      return ahead ? 1e4 * Math.abs(x - left) + Math.abs(y - top) : Infinity;
    });
    const least = Math.min(...far);
    return least < Infinity ? far.indexOf(least) : from;
  };
  return grid;
}

/** Paint SVG paths, given by their attributes, on a canvas. */
export function paintPaths(pen, paths) {
  for (const { d, fill, stroke, "stroke-width": width, "stroke-dasharray": dash } of paths) {
    pen.setLineDash(dash?.split(" ") ?? []);
    Object.assign(pen, stroke ? { strokeStyle: stroke, lineWidth: width } : { fillStyle: fill });
    pen[stroke ? "stroke" : "fill"](new Path2D(d));
  }
  pen.setLineDash([]);
}

/** The attributes of a line along a path. */
export const lineOf = (d, stroke, width, dash) => ({ d, stroke, "stroke-width": width,
  "stroke-dasharray": dash, fill: "none" });

/** The path of a circle, or of a rectangle from its left and upper end. */
export const circle = (x, y, r) => `M${x - r} ${y}a${r} ${r} 0 1 1 ${2 * r} 0a${r} ${r} 0 1 1 ${-2 * r} 0z`;
export const rectangle = (x, y, wide, tall) => `M${x} ${y}h${wide}v${tall}h${-wide}z`;

/** Draw the numbers of the layers under a grid, and the names of the kinds beside it. */
export function drawGridAxes(pen, colors, { attention, ffn, numLayers, geometry }) {
  const { left, top, cell, tall, gap, height } = geometry;
  Object.assign(pen, { fillStyle: colors.muted, textBaseline: "middle", textAlign: "center" });
  for (const layer of ticks(0, numLayers - 1, Math.min(12, numLayers))) {
    if (Number.isInteger(layer)) pen.fillText(layer, left + (layer + 0.5) * cell, height - 9);
  }
  pen.textAlign = "left";
  pen.fillText("layer", 0, height - 9);
  if (attention) pen.fillText("attention", 0, top + (attention * tall) / 2);
  if (ffn) pen.fillText("FFN", 0, top + gap + attention * tall + (ffn * tall) / 2);
}

const FADE = 250; // ms
export const TINT = "#C77C11"; // of a living cell: the stronger, the higher its price

/** What a cell shows of two plans: gone in both, in `mine` alone, in the other alone, or alive. */
export function stateOf(u, mine, other) {
  if (mine.has(u)) return other && !other.has(u) ? "mine" : "gone";
  return other?.has(u) ? "other" : "alive";
}

/**
 * How far each cell is from alive (0) to gone (1), and the gaps that wander from a cell that returns to
 * one that goes: a change takes a moment, unless the reader prefers no motion.
 */
export class Fading {
  constructor(redraw) {
    this.redraw = redraw;
    this.cells = new Map(); // unit -> [whether it is gone, when that changed]
    this.moves = []; // [from, to, when]
  }
  /** Take over the units that are gone now. */
  take(gone, size, now) {
    const still = !this.cells.size || matchMedia("(prefers-reduced-motion: reduce)").matches;
    const changed = [[], []]; // those that return, and those that go
    for (let u = 0; u < size; u++) {
      if (this.cells.get(u)?.[0] === gone.has(u)) continue;
      this.cells.set(u, [gone.has(u), still ? -FADE : now]);
      changed[Number(gone.has(u))].push(u);
    }
    this.moves = this.moves.filter(([, , begun]) => now - begun < FADE);
    if (!still) changed[0].slice(0, changed[1].length).forEach((u, k) => this.moves.push([u, changed[1][k], now]));
  }
  at(u, now) {
    const [gone, begun] = this.cells.get(u);
    const share = Math.min(1, (now - begun) / FADE);
    if (share < 1) {
      this.queued ||= setTimeout(() => { // a frame of the screen could be the one of the change itself
        this.queued = 0;
        this.redraw();
      }, 30);
    }
    return gone ? share : 1 - share;
  }
}

const hatches = new Map(); // patterns of diagonal lines, by color

function hatch(pen, color) {
  if (hatches.has(color)) return hatches.get(color);
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const line = tile.getContext("2d");
  Object.assign(line, { strokeStyle: color, lineWidth: 1.4 });
  line.stroke(new Path2D("M-1 7L7 -1M-1 1L1 -1M5 7L7 5"));
  const made = pen.createPattern(tile, "repeat");
  hatches.set(color, made);
  return made;
}

/**
 * Draw the map: a filled cell is alive, the stronger its tint the higher its price; a hatched one is
 * gone. A frame in the color of a plan marks what it alone removes. `next` goes next, `arcs` are the
 * edges of a unit: [[u, v, size in [0, 1], sign]]. A dashed frame marks the brushed units, one
 * around the cell the `marked`, a ring the `pair`. inks: the colors of both plans.
 */
export function paintMap(canvas, grid, { problem, colors, mine, other, inks, tints, next, arcs, marked, pair,
  brushed, fading }) {
  const pen = fit(canvas, grid.geometry.width, grid.geometry.height);
  const now = performance.now();
  const lines = { gone: hatch(pen, colors.muted), mine: hatch(pen, inks[0]) };
  fading.take(mine, problem.size, now);
  const frame = (u, color, inset, width, dash = []) => {
    const [x, y, w, t] = grid.box(u);
    pen.setLineDash(dash);
    Object.assign(pen, { strokeStyle: color, lineWidth: width });
    pen.strokeRect(x + inset, y + inset, w - 2 * inset, t - 2 * inset);
  };
  for (let u = 0; u < problem.size; u++) {
    const [x, y, w, t] = grid.box(u);
    const state = stateOf(u, mine, other);
    const gone = fading.at(u, now);
    const box = [x + 0.5, y + 0.5, w - 1, t - 1];
    if (gone < 1) {
      pen.globalAlpha = (1 - gone) * (tints ? 0.25 + 0.75 * tints[u] : 0.5);
      pen.fillStyle = TINT;
      pen.fillRect(...box);
    }
    if (gone > 0) {
      pen.globalAlpha = gone;
      pen.fillStyle = lines[state] ?? lines.gone;
      pen.fillRect(...box);
    }
    pen.globalAlpha = 1;
    if (state === "mine" || state === "other") frame(u, inks[state === "mine" ? 0 : 1], 1.5, 2);
    else if (gone > 0) frame(u, colors.grid, 0.5, 1);
  }
  for (const [from, to, begun] of fading.moves) { // a gap wanders from the old place to the new one
    const share = Math.min(1, (now - begun) / FADE);
    const [[x, y, w, t], [p, q]] = [grid.box(from), grid.box(to)];
    const box = [x + share * (p - x) + 0.5, y + share * (q - y) + 0.5, w - 1, t - 1];
    for (const fill of [colors.back, lines.mine]) {
      pen.fillStyle = fill;
      pen.fillRect(...box);
    }
    Object.assign(pen, { strokeStyle: inks[0], lineWidth: 2 });
    pen.strokeRect(...box);
  }
  const middle = (u) => grid.box(u).slice(0, 2).map((at, k) => at + grid.box(u)[k + 2] / 2);
  if (next !== null) {
    frame(next, colors.back, 1.5, 5);
    frame(next, colors.text, 1.5, 2.5);
    paintPaths(pen, [{ d: circle(...middle(next), 3), fill: colors.text }]);
  }
  for (const [u, v, size, sign] of arcs) {
    const [[x, y], [p, q]] = [u, v].map(middle);
    const bend = Math.min(40, 0.25 * Math.hypot(p - x, q - y));
    for (const [color, width] of [[colors.back, 4], [COLORS[sign < 0 ? "negative" : "positive"], 1 + 2.5 * size]]) {
      pen.setLineDash(sign < 0 ? [5, 3] : []);
      Object.assign(pen, { strokeStyle: color, lineWidth: width });
      pen.stroke(new Path2D(`M${x} ${y}Q${(x + p) / 2 + (q > y ? bend : -bend)} ${(y + q) / 2 - bend} ${p} ${q}`));
    }
  }
  for (const u of brushed) frame(u, colors.accent, 1, 2, [3, 2]);
  for (const u of marked.filter((v) => v !== null && v !== undefined)) { // outside its cell: inside are the frames of the plans
    frame(u, colors.back, 0, 2);
    frame(u, colors.text, -1.5, 2);
  }
  for (const u of pair) {
    const [, , w, t] = grid.box(u);
    paintPaths(pen, [lineOf(circle(...middle(u), Math.max(3, Math.min(w, t) / 2 - 1)), colors.text, 2.5)]);
  }
  pen.setLineDash([]);
  drawGridAxes(pen, colors, grid);
}
