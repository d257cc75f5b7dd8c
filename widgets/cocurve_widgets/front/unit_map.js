// The map of the lambda explorer: every unit a cell, layer across, attention above FFN.

import { COLORS, fit } from "./kit.js";
import { KINDS, layerLabels } from "./plan_pictures.js";

const MOVES = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

/** Where the units stand: place(width) first, then box(u), unitAt(x, y) and step(u, key). */
export function unitGrid(problem) {
  const most = (kind) => Math.max(0,
    ...problem.places.filter((_, u) => problem.kinds[u] === kind).map((p) => p + 1));
  const [attention, ffn] = [most(0), most(1)];
  const grid = { attention, ffn, geometry: null };

  grid.place = (width) => {
    const [left, top, gap] = [64, 4, attention && ffn ? 8 : 0];
    const cell = Math.max(3, Math.min(30, (width - left - 6) / problem.numLayers));
    const tall = Math.max(5, Math.min(15, 420 / Math.max(1, attention + ffn)));
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

/** Draw the map: removed units filled, those about to flip with a corner, the marked ones framed. */
export function paintMap(canvas, grid, { problem, colors, gone }, { turning, marked }) {
  const { geometry, attention, ffn } = grid;
  const pen = fit(canvas, geometry.width, geometry.height);
  for (let u = 0; u < problem.size; u++) {
    const [x, y, w, t] = grid.box(u);
    pen.fillStyle = gone.has(u) ? COLORS[KINDS[problem.kinds[u]]] : colors.kept;
    pen.fillRect(x + 0.5, y + 0.5, w - 1, t - 1);
    if (turning.has(u)) {
      pen.fillStyle = COLORS.flip;
      pen.beginPath();
      pen.moveTo(x + w - 0.5, y + 0.5);
      pen.lineTo(x + w - 0.5 - Math.min(w, t) * 0.8, y + 0.5);
      pen.lineTo(x + w - 0.5, y + 0.5 + Math.min(w, t) * 0.8);
      pen.fill();
    }
    if (marked.includes(u)) {
      pen.strokeStyle = colors.text;
      pen.lineWidth = 2;
      pen.strokeRect(x + 1, y + 1, w - 2, t - 2);
    }
  }
  pen.fillStyle = colors.muted;
  pen.textBaseline = "middle";
  const { top, tall, gap } = geometry;
  if (attention) pen.fillText("attention", 0, top + (attention * tall) / 2);
  if (ffn) pen.fillText("FFN", 0, top + gap + attention * tall + (ffn * tall) / 2);
  layerLabels(pen, { problem, geometry }, geometry.height - 10);
}
