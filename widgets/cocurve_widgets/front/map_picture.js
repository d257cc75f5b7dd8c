// The drawing of the map of H: cells, what lies over and beside them, and the scale of the colors.

import { COLORS, fit, show } from "./kit.js";
import { runsOf } from "./map_parts.js";

const NAMED = 12; // pixels of a row from which on its unit is named

/** Where the cells go in a picture of this width: left, top, and length of a side. */
export function boxOf(width) {
  const left = width >= 560 ? 118 : 62;
  return { left, top: 24, side: width - left - 6, names: left > 100 };
}

/** Pixels from the corner of the cells to the start of a place, across (axis 0) or down (1). */
export function placeAt({ box, window: shown }, place, axis) {
  return ((place - shown[axis]) * box.side) / shown[2];
}

/** The point [column, row], in places with fractions, at a pixel [x, y] of the picture. */
export function pointAt({ box, window: shown }, [x, y]) {
  return [x - box.left, y - box.top].map((at, axis) => shown[axis] + (at * shown[2]) / box.side);
}

/** Runs of equal values along an axis, as far as they are in view: [{value, from, to}] in pixels. */
function runsAlong(scene, axis, valueOf) {
  const clip = (place) => Math.min(scene.box.side, Math.max(0, placeAt(scene, place, axis)));
  return runsOf(scene.places.map(valueOf))
    .map(({ value, start, end }) => ({ value, from: clip(start), to: clip(end) }))
    .filter(({ from, to }) => to > from);
}

/** A rectangle [x, y, width, height] of axis 0, on the other axis for 1. */
const flipped = (axis, [x, y, wide, tall]) => (axis ? [y, x, tall, wide] : [x, y, wide, tall]);

/**
 * Draw the map.
 *
 * scene: box and window; cellsAt, from a level to the canvas of all pairs, each with half the cells
 * of the one before; places and order; end, the largest size that colors tell apart, and power, to
 * which a size is taken; nodes, with kind, layer and name of the units; removed and brushed, sets of
 * units; chosen, [column, row] as units or nulls; colors of the theme.
 */
export function paintHeat(canvas, scene) {
  const { box: { left, top, side, names }, colors, window: [column, row, wide] } = scene;
  const width = left + side + 6;
  const g = fit(canvas, width, side + 96);
  g.translate(left, top);
  const cell = side / wide;
  g.save();
  g.beginPath();
  g.rect(0, 0, side, side);
  g.clip();
  g.imageSmoothingEnabled = false;
  const sharp = cell * (globalThis.devicePixelRatio || 1);
  const level = Math.max(0, Math.ceil(-Math.log2(sharp) - 1e-9));
  const part = [column, row, wide, wide].map((places) => places / 2 ** level);
  g.drawImage(scene.cellsAt(level), ...part, 0, 0, side, side);
  paintOver(g, scene, cell);
  g.restore();
  g.strokeStyle = colors.grid;
  g.lineWidth = 1;
  g.strokeRect(-0.5, -0.5, side + 1, side + 1);
  for (const axis of [0, 1]) {
    paintStrips(g, scene, axis);
    if (axis && names && cell >= NAMED) paintNames(g, scene, cell);
    else paintLayers(g, scene, axis, cell);
  }
  paintScale(g, scene, width);
}

/** Over the cells: the borders of layers, and the chosen row and column. */
function paintOver(g, scene, cell) {
  const { box: { side }, colors, places, nodes } = scene;
  const band = (axis, start, end) => {
    const [from, to] = [start, end].map((place) => placeAt(scene, place, axis));
    return flipped(axis, [from, 0, to - from, side]);
  };
  if (scene.order === "layer") {
    g.strokeStyle = colors.muted;
    g.globalAlpha = 0.35;
    g.lineWidth = 1;
    for (const { start, end } of runsOf(places.map((u) => nodes.layer[u]))) {
      if ((end - start) * cell < 12) break; // lines alone would fill the picture
      for (const axis of [0, 1]) g.strokeRect(...band(axis, start, end));
    }
  }
  g.globalAlpha = 1;
  g.lineWidth = 1.5;
  g.strokeStyle = colors.text;
  const outline = (unit, axis) => {
    if (unit !== null) g.strokeRect(...band(axis, places.indexOf(unit), places.indexOf(unit) + 1));
  };
  scene.chosen.forEach(outline);
}

/** Beside and above the cells: kinds, the plan's units, and brushed units. */
function paintStrips(g, scene, axis) {
  const { nodes, removed, brushed, colors } = scene;
  const strips = [(u) => COLORS[nodes.kind[u]], (u) => removed.has(u) && colors.text,
    (u) => brushed.has(u) && colors.accent];
  strips.forEach((color, k) => {
    for (const { value, from, to } of runsAlong(scene, axis, color)) {
      if (!value) continue;
      g.fillStyle = value;
      const long = Math.max(0.7, to - from); // a thousand units may share a hundred pixels
      g.fillRect(...flipped(axis, [from, -6 - 6 * k, long, 5]));
    }
  });
}

/** Names of the units on the left of the cells. */
function paintNames(g, scene, cell) {
  g.textAlign = "right";
  g.textBaseline = "middle";
  g.fillStyle = scene.colors.text;
  for (const { value: u, from, to } of runsAlong(scene, 1, (unit) => unit)) {
    const whole = to - from > cell - 1e-6;
    if (whole) g.fillText(scene.nodes.name[u], -22, (from + to) / 2, scene.box.left - 24);
  }
}

/**
 * Layers below the cells or on their left: as numbers where units stand by layer.
 *
 * In other orders a dot per place tells its layer: the first at the cells, the last away.
 */
function paintLayers(g, scene, axis, cell) {
  const { box: { side }, nodes: { layer } } = scene;
  g.fillStyle = scene.colors.muted;
  g.textAlign = axis ? "right" : "center";
  g.textBaseline = axis ? "middle" : "top";
  if (scene.order === "layer") {
    let free = -Infinity;
    for (const { value, from, to } of runsAlong(scene, axis, (u) => layer[u])) {
      const middle = (from + to) / 2;
      if (middle < free) continue;
      free = middle + (axis ? 16 : 24);
      g.fillText(String(value), ...(axis ? [-22, middle] : [middle, side + 5]));
    }
    if (!axis) g.fillText("layer", side / 2, side + 20);
    return;
  }
  const [last, dot] = [Math.max(...layer), Math.max(1, Math.min(4, cell))];
  for (const { value: u, from, to } of runsAlong(scene, axis, (unit) => unit)) {
    const away = 20 * (layer[u] / Math.max(1, last));
    const start = (from + to - dot) / 2;
    g.fillRect(...(axis ? [-24 - away, start] : [start, side + 4 + away]), dot, dot);
  }
  g.textBaseline = "middle";
  g.textAlign = "right";
  if (!axis) [0, last].forEach((number, k) => g.fillText(`layer ${number}`, -6, side + 7 + 18 * k));
}

/** What the colors mean, below the picture. */
function paintScale(g, { box, colors, end, power }, width) {
  const [top, wide] = [box.side + 44, Math.min(320, width - 90)];
  const from = (width - wide) / 2 - box.left;
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
