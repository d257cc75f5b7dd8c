// The drawing of the map of H: cells, what lies over and beside them, and the scale of the colors.

import { COLORS, fit, show } from "./kit.js";
import { runsOf } from "./map_parts.js";

const NAMED = 12; // pixels of a row from which on its unit is named

/** Where the cells go in a picture of this width: left, top, and length of a side. */
export function boxOf(width) {
  const left = width >= 560 ? 118 : 62;
  return { left, top: 24, side: width - left - 6, names: left > 100 };
}

/** x (axis 0) or y (axis 1) of the start of a place. */
export function placeAt({ box, window: shown }, place, axis) {
  return (axis ? box.top : box.left) + ((place - shown[axis]) * box.side) / shown[2];
}

/** The part of places from start to end that is in view: [first pixel, last pixel]. */
function span(scene, start, end, axis) {
  const low = axis ? scene.box.top : scene.box.left;
  return [start, end].map((place) =>
    Math.min(low + scene.box.side, Math.max(low, placeAt(scene, place, axis))));
}

/**
 * Draw the map.
 *
 * scene: box and window; cellsAt, from a level to the canvas of all pairs, each with half the cells
 * of the one before; places and order; end, the largest size that colors tell apart, and power, to
 * which a size is taken; kinds, layers and names; removed and brushed, sets of units; last, the unit
 * of this step, or null; chosen, [column, row] as units or nulls; onlyPlan; colors of the theme.
 */
export function paintHeat(canvas, scene) {
  const { box, colors, window: [column, row, wide] } = scene;
  const width = box.left + box.side + 6;
  const g = fit(canvas, width, box.side + 96);
  const cell = box.side / wide;
  g.save();
  g.beginPath();
  g.rect(box.left, box.top, box.side, box.side);
  g.clip();
  g.imageSmoothingEnabled = false;
  const sharp = cell * (globalThis.devicePixelRatio || 1);
  const level = Math.max(0, Math.ceil(-Math.log2(sharp) - 1e-9));
  const part = [column, row, wide, wide].map((places) => places / 2 ** level);
  g.drawImage(scene.cellsAt(level), ...part, box.left, box.top, box.side, box.side);
  paintOver(g, scene, cell);
  g.restore();
  g.strokeStyle = colors.grid;
  g.lineWidth = 1;
  g.strokeRect(box.left - 0.5, box.top - 0.5, box.side + 1, box.side + 1);
  paintStrips(g, scene);
  g.fillStyle = colors.muted;
  const named = box.names && cell >= NAMED;
  if (scene.order === "layer") paintLayers(g, scene, named);
  else paintTracks(g, scene, cell, named);
  if (named) paintNames(g, scene);
  paintScale(g, scene, width);
}

/** Over the cells: what the plan leaves, the borders of layers, and the chosen row and column. */
function paintOver(g, scene, cell) {
  const { box, colors, places, layers, removed } = scene;
  const band = (axis, start, end) => {
    const [from, to] = [start, end].map((place) => placeAt(scene, place, axis));
    return axis ? [box.left, from, box.side, to - from] : [from, box.top, to - from, box.side];
  };
  if (scene.onlyPlan) {
    g.fillStyle = colors.back;
    g.globalAlpha = 0.78;
    for (const run of runsOf(places.map((u) => removed.has(u)))) {
      if (!run.value) for (const axis of [0, 1]) g.fillRect(...band(axis, run.start, run.end));
    }
  }
  if (scene.order === "layer") {
    g.strokeStyle = colors.muted;
    g.globalAlpha = 0.35;
    g.lineWidth = 1;
    for (const { start, end } of runsOf(places.map((u) => layers[u]))) {
      if ((end - start) * cell < 12) break; // lines alone would fill the picture
      for (const axis of [0, 1]) g.strokeRect(...band(axis, start, end));
    }
  }
  g.globalAlpha = 1;
  g.lineWidth = 1.5;
  const outline = (unit, color, axes) => {
    if (unit === null || unit === undefined) return;
    const place = places.indexOf(unit);
    g.strokeStyle = color;
    for (const axis of axes) g.strokeRect(...band(axis, place, place + 1));
  };
  g.setLineDash([5, 3]);
  outline(scene.last, colors.text, [0, 1]);
  g.setLineDash([]);
  scene.chosen.forEach((unit, axis) => outline(unit, colors.text, [axis]));
}

/** Beside and above the cells: kinds, the plan's units, and brushed units. */
function paintStrips(g, scene) {
  const { box, places, kinds, removed, brushed, colors } = scene;
  const strips = [(u) => COLORS[kinds[u]], (u) => removed.has(u) && colors.text,
    (u) => brushed.has(u) && colors.accent];
  strips.forEach((color, k) => {
    for (const { value, start, end } of runsOf(places.map(color))) {
      if (!value) continue;
      g.fillStyle = value;
      for (const axis of [0, 1]) {
        const [from, to] = span(scene, start, end, axis);
        if (to <= from) continue;
        const beside = (axis ? box.left : box.top) - 6 - 6 * k;
        const long = Math.max(0.7, to - from); // a thousand units may share a hundred pixels
        g.fillRect(...(axis ? [beside, from, 5, long] : [from, beside, long, 5]));
      }
    }
  });
}

/** Numbers of the layers, below the cells and, unless names stand there, on their left. */
function paintLayers(g, scene, named) {
  const { box, places, layers } = scene;
  const free = [-Infinity, -Infinity];
  for (const { value, start, end } of runsOf(places.map((u) => layers[u]))) {
    for (const axis of named ? [0] : [0, 1]) {
      const [from, to] = span(scene, start, end, axis);
      const middle = (from + to) / 2;
      if (to <= from || middle < free[axis]) continue;
      free[axis] = middle + (axis ? 16 : 24);
      g.textAlign = axis ? "right" : "center";
      g.textBaseline = axis ? "middle" : "top";
      g.fillText(String(value), ...(axis ? [box.left - 22, middle] : [middle, box.top + box.side + 5]));
    }
  }
  g.textAlign = "center";
  g.textBaseline = "top";
  g.fillText("layer", box.left + box.side / 2, box.top + box.side + 20);
}

/** In other orders a dot per place tells its layer: the first at the cells, the last away. */
function paintTracks(g, scene, cell, named) {
  const { box, places, layers, numLayers } = scene;
  const dot = Math.max(1, Math.min(4, cell));
  places.forEach((u, place) => {
    const away = 20 * (layers[u] / Math.max(1, numLayers - 1));
    for (const axis of named ? [0] : [0, 1]) {
      const along = placeAt(scene, place + 0.5, axis);
      const low = axis ? box.top : box.left;
      if (along < low || along > low + box.side) continue;
      if (axis) g.fillRect(box.left - 24 - away, along - dot / 2, dot, dot);
      else g.fillRect(along - dot / 2, box.top + box.side + 4 + away, dot, dot);
    }
  });
  g.textBaseline = "middle";
  g.textAlign = "right";
  g.fillText("layer 0", box.left - 6, box.top + box.side + 7);
  g.fillText(`layer ${numLayers - 1}`, box.left - 6, box.top + box.side + 25);
}

function paintNames(g, scene) {
  const { box, places, names, window: [, row, wide] } = scene;
  g.textAlign = "right";
  g.textBaseline = "middle";
  g.fillStyle = scene.colors.text;
  for (let place = Math.ceil(row); place + 1 <= row + wide + 1e-9; place++) {
    g.fillText(names[places[place]], box.left - 22, placeAt(scene, place + 0.5, 1), box.left - 24);
  }
}

function paintScale(g, { box, colors, end, power }, width) {
  const [top, wide] = [box.top + box.side + 44, Math.min(320, width - 90)];
  const from = (width - wide) / 2;
  const ramp = g.createLinearGradient(from, 0, from + wide, 0);
  [COLORS.negative, colors.back, COLORS.positive].forEach((color, k) => ramp.addColorStop(k / 2, color));
  g.fillStyle = ramp;
  g.fillRect(from, top, wide, 10);
  g.strokeStyle = colors.grid;
  g.strokeRect(from - 0.5, top - 0.5, wide + 1, 11);
  g.fillStyle = colors.text;
  g.textBaseline = "top";
  g.textAlign = "center";
  const round = (x) => show(Number(x.toPrecision(2)));
  const half = end * 0.5 ** (1 / power);
  const marks = [[0, `≤ ${round(-end)}`], [0.25, round(-half)], [0.5, "0"], [0.75, round(half)],
    [1, `≥ ${round(end)}`]];
  for (const [share, text] of wide > 280 ? marks : marks.filter((_, k) => k % 2 === 0)) {
    g.fillText(text, from + share * wide, top + 13);
  }
}
