// The map of the lambda explorer: every unit a cell, layer across, attention above FFN.

import { fit, ticks } from "./kit.js";

const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** Where the units stand: place(width) first, then box(u), unitAt(x, y) and step(u, key). */
export function unitGrid(problem) {
  const most = (kind) => Math.max(0,
    ...problem.places.filter((_, u) => problem.kinds[u] === kind).map((p) => p + 1));
  const [attention, ffn] = [most(0), most(1)];
  const grid = { attention, ffn, geometry: null };

  grid.place = (width) => {
    const [left, top, gap] = [64, 4, attention && ffn ? 8 : 0];
    const cell = Math.max(3, Math.min(110, (width - left - 6) / problem.numLayers));
    const rows = Math.max(1, attention + ffn);
    const tall = Math.max(5, Math.min(22, Math.max(250, Math.min(430, 0.72 * width)) / rows));
    grid.geometry = { left, top, gap, cell, tall, height: top + (attention + ffn) * tall + gap + 22,
      width: left + cell * problem.numLayers + 6 };
  };
  grid.box = (u) => {
    const { left, top, gap, cell, tall } = grid.geometry;
    const row = problem.kinds[u] ? attention + problem.places[u] : problem.places[u];
    return [left + problem.layers[u] * cell, top + row * tall + (problem.kinds[u] ? gap : 0), cell, tall];
  };
  grid.unitAt = (x, y) => {
    for (let u = 0; u < problem.size; u++) {
      const [left, top, w, t] = grid.box(u);
      if (x >= left && x < left + w && y >= top && y < top + t) return u;
    }
    return null;
  };
  grid.step = (u, key) => {
    const [x, y, w, t] = grid.box(u);
    const [dx, dy] = MOVES[key];
    const jump = grid.geometry.gap + t; // over the gap between attention and FFN
    return grid.unitAt(x + w / 2 + dx * w, y + t / 2 + dy * t)
      ?? grid.unitAt(x + w / 2 + dx * w, y + t / 2 + dy * jump);
  };
  return grid;
}

/** Draw layer numbers under a picture whose columns are layers. */
function layerLabels(pen, { problem, geometry }, y) {
  pen.textAlign = "center";
  for (const layer of ticks(0, problem.numLayers - 1, Math.min(12, problem.numLayers))) {
    if (Number.isInteger(layer)) {
      pen.fillText(layer, geometry.left + (layer + 0.5) * geometry.cell, y);
    }
  }
  pen.textAlign = "left";
  pen.fillText("layer", 0, y);
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
  const { geometry, attention, ffn } = grid;
  const pen = fit(canvas, geometry.width, geometry.height);
  const now = performance.now();
  const framed = new Set(brushed);
  const stroke = (color, width, ...points) => {
    Object.assign(pen, { strokeStyle: color, lineWidth: width });
    pen.beginPath();
    points.forEach(([x, y], k) => (k % 2 ? pen.lineTo(x, y) : pen.moveTo(x, y)));
    pen.stroke();
  };
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
    if (state === "joined") stroke(ink, 2, [cx - arm, cy], [cx + arm, cy], [cx, cy - arm], [cx, cy + arm]);
    else if (state === "left") stroke(ink, 2, [cx - arm, cy], [cx + arm, cy]);
    else if (solid && problem.kinds[u]) stroke(ink, 1.2, [x + 1, y + t - 1], [x + w - 1, y + 1]);
    if (turning.has(u)) {
      const size = Math.min(w, t) * 0.45;
      pen.fillStyle = ink;
      pen.beginPath();
      pen.moveTo(x + w - 1.5, y + 1.5);
      pen.lineTo(x + w - 1.5 - size, y + 1.5);
      pen.lineTo(x + w - 1.5, y + 1.5 + size);
      pen.fill();
    }
    const frame = (shape) => {
      for (const [color, width] of [[colors.back, 4], [colors.accent, 2]]) {
        Object.assign(pen, { strokeStyle: color, lineWidth: width });
        pen.beginPath();
        shape();
        pen.stroke();
      }
    };
    if (pair.includes(u)) frame(() => pen.arc(cx, cy, Math.max(3, Math.min(w, t) / 2 - 1), 0, 7));
    pen.setLineDash(marked.includes(u) ? [] : [3, 2]);
    if (marked.includes(u) || framed.has(u)) frame(() => pen.rect(x + 1, y + 1, w - 2, t - 2));
    pen.setLineDash([]);
  }
  pen.fillStyle = colors.muted;
  pen.textBaseline = "middle";
  const { top, tall, gap } = geometry;
  if (attention) pen.fillText("attention", 0, top + (attention * tall) / 2);
  if (ffn) pen.fillText("FFN", 0, top + gap + attention * tall + (ffn * tall) / 2);
  layerLabels(pen, { problem, geometry }, geometry.height - 9);
}
