// The parts of the bridge explorer that need no page: `node --test tests/widgets/front/bridge.test.mjs`.

import assert from "node:assert/strict";
import test from "node:test";

import { comparedPlans, lineEnds, readEdges, unitsInside, visibleEdges } from "../../../widgets/cocurve_widgets/front/bridge_parts.js";
import { nearest } from "../../../widgets/cocurve_widgets/front/svg.js";
import { logAxis } from "../../../widgets/cocurve_widgets/front/kit.js";
import { unitGrid } from "../../../widgets/cocurve_widgets/front/unit_map.js";

// two layers of 2 attention units and 3 FFN groups; layer 1 lost its second attention unit
const nodes = {
  kind: ["attention", "attention", "ffn", "ffn", "ffn", "attention", "ffn", "ffn", "ffn"],
  layer: [0, 0, 0, 0, 0, 1, 1, 1, 1],
  index: [0, 1, 0, 1, 2, 0, 0, 1, 2],
};
/** The grid of units {kind, layer, index}, placed in a width. */
function gridOf({ kind, layer, index }, width = 276) {
  const grid = unitGrid({ kinds: kind.map((k) => Number(k !== "attention")), layers: layer,
    places: index, numLayers: Math.max(...layer) + 1 });
  grid.place(width);
  return grid;
}
const edges = readEdges(new Uint32Array([0, 1, 0, 2, 2, 6, 5, 7]),
  new Float32Array([0.9, -0.5, 0.25, -0.125]), nodes.kind);
const everything = { threshold: 0, sign: "both", blocks: ["attention", "cross", "ffn"] };

test("a grid puts layers across and attention above FFN", () => {
  const grid = gridOf(nodes);
  const boxes = nodes.kind.map((_, u) => grid.box(u));
  assert.deepEqual(boxes.map(([left]) => left), nodes.layer.map((layer) => 64 + 103 * layer));
  const gap = 8;
  const rows = [0, 1, 2, 3, 4, 0, 2, 3, 4].map((row, u) => 4 + 22 * row + (u % 5 > 1 || u > 5 ? gap : 0));
  assert.deepEqual(boxes.map(([, top]) => top), rows);
  assert.equal(new Set(boxes.map(String)).size, 9);
  assert.equal(grid.geometry.height, 4 + 5 * 22 + gap + 22);
});

test("edges know their block", () => {
  assert.deepEqual(edges.block, ["attention", "cross", "ffn", "cross"]);
  assert.deepEqual([...edges.u], [0, 0, 2, 5]);
  assert.deepEqual([...edges.v], [1, 2, 6, 7]);
});

test("threshold, sign and blocks choose edges", () => {
  const shown = (changes) => visibleEdges(edges, { ...everything, ...changes });
  assert.deepEqual(shown({}), [0, 1, 2, 3]);
  assert.deepEqual(shown({ threshold: 0.25 }), [0, 1, 2]); // at least, not above
  assert.deepEqual(shown({ threshold: 1 }), []);
  assert.deepEqual(shown({ sign: "positive" }), [0, 2]);
  assert.deepEqual(shown({ sign: "negative", threshold: 0.2 }), [1]);
  assert.deepEqual(shown({ blocks: ["cross"] }), [1, 3]);
  assert.deepEqual(shown({ blocks: [] }), []);
});

test("the nearest mark within reach is hit", () => {
  const place = { x: [0, 10, 10], y: [0, 0, 8] };
  assert.equal(nearest(place, 9, 1), 1);
  assert.equal(nearest(place, 10, 5), 2);
  assert.equal(nearest(place, 30, 30), null);
  assert.equal(nearest(place, 5, 0), 0); // a tie goes to the lower index
  assert.equal(nearest({ x: [], y: [] }, 0, 0), null);
});

test("a rectangle may be drawn from any corner", () => {
  const place = { x: [0, 5, 10], y: [0, 5, 10] };
  assert.deepEqual(unitsInside(place, [1, 1], [6, 6]), [1]);
  assert.deepEqual(unitsInside(place, [6, 6], [-1, -1]), [0, 1]);
  assert.deepEqual(unitsInside(place, [11, 0], [20, 20]), []);
});

test("arrow keys walk over units and stop at the border", () => {
  const grid = gridOf(nodes);
  const go = (unit, key) => grid.step(unit, key);
  assert.equal(go(null, "ArrowDown"), 0);
  assert.equal(go(0, "ArrowDown"), 1);
  assert.equal(go(1, "ArrowDown"), 2); // over the gap to the FFN block
  assert.equal(go(2, "ArrowUp"), 1);
  assert.equal(go(0, "ArrowUp"), 0);
  assert.equal(go(1, "ArrowRight"), 5); // the row is missing there: the nearest
  assert.equal(go(3, "ArrowRight"), 7);
  assert.equal(go(7, "ArrowLeft"), 3);
  assert.equal(go(7, "ArrowRight"), 7);
  assert.equal(go(4, "ArrowDown"), 4);
});

test("the log axis spans its values and keeps zeros apart", () => {
  const axis = logAxis([0, 1e-6, 1e-2], 50, 450);
  assert.ok(axis.zeros);
  assert.ok(axis.at(0) > 50 && axis.at(0) < axis.first && axis.first < axis.at(1e-6));
  assert.ok(axis.at(1e-2) < 450);
  const step = axis.at(1e-4) - axis.at(1e-5);
  assert.ok(Math.abs(axis.at(1e-3) - axis.at(1e-4) - step) < 1e-9);
  const up = logAxis([1, 2], 300, 0);
  assert.ok(!up.zeros && up.at(2) < up.at(1));
  for (const values of [[0, 0], [3], [3, 3], [0.004, 0.06], [1e-12, 1e3], [0]]) {
    const one = logAxis(values, 0, 100);
    assert.ok(values.every((v) => Number.isFinite(one.at(v))), String(values));
    assert.ok(one.marks.length > 0 && one.marks.length < 12, String(values));
    assert.ok(one.marks.every((m) => one.at(m) >= 0 && one.at(m) <= 100), String(values));
  }
});

test("the line runs where the residual is 0, over units that have one", () => {
  const line = (d) => 3 * d ** 0.5;
  const saliency = [0, 16, 1, 4, 100];
  const residual = [null, 0.3, -0.2, 0, null];
  const connectivity = saliency.map((d, u) => line(d) * Math.exp(residual[u] ?? 0));
  const ends = lineEnds({ saliency, connectivity, residual });
  assert.deepEqual(ends.map(([d]) => d), [1, 16]);
  assert.ok(ends.every(([d, b]) => Math.abs(b - line(d)) < 1e-9));
  assert.equal(lineEnds({ saliency: [2, 2], connectivity: [1, 3], residual: [-0.5, 0.5] }), null);
  assert.equal(lineEnds({ saliency: [0, 0], connectivity: [0, 0], residual: [null, null] }), null);
});

test("edges can be those of some units", () => {
  const ends = Uint32Array.from([0, 1, 1, 2, 2, 3]);
  const edges = readEdges(ends, Float32Array.from([0.9, 0.8, 0.7]), nodes.kind);
  const filters = { threshold: 0, sign: "both", blocks: ["attention", "cross", "ffn"], among: new Set([3]) };
  assert.deepEqual(visibleEdges(edges, filters), [2]);
  assert.deepEqual(visibleEdges(edges, { ...filters, among: null }), [0, 1, 2]);
});

test("plans are compared at the nearest ratio where they differ on the units", () => {
  const share = [0.1, 0.2, 0.3, 0.4];
  const runs = { diagonal: { order: [4, 5, 6, 7], share }, edge_aware: { order: [4, 5, 7, 6], share } };
  const found = comparedPlans(runs, [7], 0.2);
  assert.equal(found.ratio, 0.25); // three steps
  assert.deepEqual([found.diagonal, found.edge_aware], [[4, 5, 6], [4, 5, 7]]);
  assert.ok(found.note.includes("0.25"));
  assert.equal(comparedPlans(runs, [7], 0.3).note, "");
  assert.ok(comparedPlans(runs, [4], 0.2).note.startsWith("At every ratio tried"));
  assert.equal(comparedPlans(runs, [], 0.5).diagonal, null); // out of reach
});
