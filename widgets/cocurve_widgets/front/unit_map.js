// Units in a grid, layer across, attention above FFN; and the map of the lambda explorer, every unit a cell.

import { fit, ticks } from "./kit.js";

const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** Where the units stand: place(width) first, then box(u), unitAt(x, y) and step(u, key). */
export function unitGrid({ kinds, layers, places, numLayers }) {
  const most = (kind) => Math.max(0, ...places.filter((_, u) => kinds[u] === kind).map((p) => p + 1));
  const [attention, ffn] = [most(0), most(1)];
  const grid = { attention, ffn, numLayers, size: kinds.length, geometry: null };

  grid.place = (width) => {
    const [left, top, gap] = [64, 4, attention && ffn ? 8 : 0];
    const cell = Math.max(3, Math.min(110, (width - left - 6) / numLayers));
    const rows = Math.max(1, attention + ffn);
    const tall = Math.max(5, Math.min(22, Math.max(250, Math.min(430, 0.72 * width)) / rows));
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

/** What a cell shows: removed by both plans, by B alone, by A alone, or kept. */
export function stateOf(u, inA, inB) {
  if (inB.has(u)) return inA && !inA.has(u) ? "joined" : "removed";
  return inA?.has(u) ? "left" : "kept";
}

/** The colors of cells over time: a change fades in, unless the reader prefers no motion. */
export class Fading {
  constructor(redraw) {
    this.redraw = redraw;
    this.cells = new Map(); // unit -> [color before, color now, when it changed]
  }
  /** The layers to paint at a time: [[color, alpha], ...]. */
  at(u, color, now) {
    const cell = this.cells.get(u);
    if (!cell || cell[1] !== color) {
      const still = !cell || matchMedia("(prefers-reduced-motion: reduce)").matches;
      this.cells.set(u, [cell?.[1] ?? color, color, still ? -FADE : now]);
    }
    const [before, after, since] = this.cells.get(u);
    const share = Math.min(1, (now - since) / FADE);
    if (share < 1 && !this.queued) {
      this.queued = requestAnimationFrame(() => {
        this.queued = 0;
        this.redraw();
      });
    }
    return share < 1 ? [[before, 1], [after, share]] : [[after, 1]];
  }
}

/**
 * Draw the map without need of color: removed units are solid, those of FFN with a stripe, kept ones
 * an outline; + is only in the plan `inB`, − only in the other. A corner marks those about to change,
 * a dashed frame the brushed ones, a solid one the marked ones, a ring the `pair`.
 */
export function paintMap(canvas, grid, { problem, colors, inA, inB, turning, marked, pair, brushed, fading }) {
  const pen = fit(canvas, grid.geometry.width, grid.geometry.height);
  const now = performance.now();
  const framed = new Set(brushed);
  for (let u = 0; u < problem.size; u++) {
    const [x, y, w, t] = grid.box(u);
    const state = stateOf(u, inA, inB);
    const solid = state === "removed" || state === "joined";
    const ink = solid ? colors.back : colors.text;
    for (const [color, alpha] of fading.at(u, solid ? colors.text : colors.back, now)) {
      pen.globalAlpha = alpha;
      pen.fillStyle = color;
      pen.fillRect(x + 0.5, y + 0.5, w - 1, t - 1);
    }
    pen.globalAlpha = 1;
    Object.assign(pen, { strokeStyle: colors.muted, lineWidth: 1 });
    if (!solid) pen.strokeRect(Math.round(x) + 0.5, Math.round(y) + 0.5, Math.round(w - 1), Math.round(t - 1));
    const [cx, cy, arm] = [x + w / 2, y + t / 2, Math.min(w, t) * 0.3];
    const corner = Math.min(w, t) * 0.45;
    const minus = `M${cx - arm} ${cy}h${2 * arm}`;
    const stripe = `M${x + 1} ${y + t - 1}L${x + w - 1} ${y + 1}`;
    const frame = (d, dots) => [lineOf(d, colors.back, 4, dots), lineOf(d, colors.accent, 2, dots)];
    const dash = marked.includes(u) ? null : "3 2";
    paintPaths(pen, [
      state === "joined" && lineOf(`${minus}M${cx} ${cy - arm}v${2 * arm}`, ink, 2),
      state === "left" && lineOf(minus, ink, 2),
      state === "removed" && problem.kinds[u] && lineOf(stripe, ink, 1.2),
      turning.has(u) && { d: `M${x + w - 1.5} ${y + 1.5}h${-corner}l${corner} ${corner}z`, fill: ink },
      ...(pair.includes(u) ? frame(circle(cx, cy, Math.max(3, Math.min(w, t) / 2 - 1))) : []),
      ...(framed.has(u) || !dash ? frame(rectangle(x + 1, y + 1, w - 2, t - 2), dash) : []),
    ].filter(Boolean));
  }
  drawGridAxes(pen, colors, grid);
}
