// The parts of the map of H that need no page: `node --test tests/widgets/front/map.test.mjs`.

import assert from "node:assert/strict";
import test from "node:test";

const parts = await import("../../../widgets/cocurve_widgets/front/map_parts.js");
const { cellAt, clipped, correlationOf, inside, pairsInside, pairsOf, placesOf, shadeCells, showing,
  unitsOf, zoomed } = parts;
const { squareOf } = await import("../../../widgets/cocurve_widgets/front/kit.js");

const FULL = 32767;
const root = (rho) => Math.round(Math.sign(rho) * Math.sqrt(Math.abs(rho)) * FULL);
const RHO = [[1, 0.25, -0.04], [0.25, 1, 0.5], [-0.04, 0.5, 1]];
const triangle = Int16Array.from([1, 0.25, -0.04, 1, 0.5, 1].map(root));
const square = squareOf(triangle, 3, Int16Array);

test("the triangle becomes a symmetric square, and its roots rho again", () => {
  for (let u = 0; u < 3; u++) {
    for (let v = 0; v < 3; v++) {
      assert.ok(Math.abs(correlationOf(square, 3, 1, u, v) - RHO[u][v]) < 1e-4);
    }
  }
  assert.equal(correlationOf(square, 3, 2, 0, 0), 2); // measured interactions go beyond 1
});

test("a page with H makes the triangle that a kernel would send", () => {
  const roots = [1, 2, 3];
  const h = RHO.flatMap((row, u) => row.map((rho, v) => rho * roots[u] * roots[v]));
  assert.deepEqual(pairsOf(h, 3, roots, 1), triangle);
  const doubled = h.map((value) => 2 * value); // measured interactions go beyond 1: peak 2
  assert.deepEqual(pairsOf(doubled, 3, roots, 2), triangle);
});

test("each order holds every unit once", () => {
  const facts = { saliency: [0.1, 0.3, 0.3, 0.2], clustered: [2, 0, 3, 1], removed: [3, 1] };
  const order = (name, changes) => placesOf(name, 4, { ...facts, ...changes });
  assert.deepEqual(order("layer"), [0, 1, 2, 3]);
  assert.deepEqual(order("saliency"), [1, 2, 3, 0]); // a tie: lowest index first
  assert.deepEqual(order("clustering"), [2, 0, 3, 1]);
  assert.deepEqual(order("clustering", { clustered: [] }), [0, 1, 2, 3]); // not computed yet
  assert.deepEqual(order("plan"), [3, 1, 0, 2]);
});

test("shades follow sign and square root of rho, in the order of places", () => {
  const facts = { peak: 1, ends: { correlation: 1 }, roots: [1, 1, 1] };
  const shades = shadeCells(square, [2, 0, 1], "correlation", facts);
  const want = [[256, -51, 180], [-51, 256, 128], [180, 128, 256]]; // 256: a unit with itself
  assert.deepEqual([...shades], want.flat());
  const half = shadeCells(square, [0, 1, 2], "correlation", { ...facts, ends: { correlation: 0.25 } });
  assert.deepEqual([...half].slice(0, 3), [256, 255, -102]);
});

test("shades of H follow the fourth root, with its diagonal", () => {
  const roots = [1, 2, 10]; // H_00 = 1, H_11 = 4, H_01 = 0.5, H_02 = -0.4
  const shades = shadeCells(square, [0, 1, 2], "curvature", { peak: 1, ends: { curvature: 4 }, roots });
  const shade = (size) => Math.round(255 * Math.min(1, size / 4) ** 0.25);
  assert.deepEqual([...shades].slice(0, 6), [shade(1), shade(0.5), -shade(0.4), shade(0.5),
    shade(4), shade(10)]);
});

test("a window stays inside and keeps the point under the pointer", () => {
  assert.deepEqual(inside([-3, 95, 20], 100), [0, 80, 20]);
  assert.deepEqual(inside([0, 0, 1], 100), [0, 0, 4]);
  assert.deepEqual(inside([0, 0, 9], 2), [0, 0, 2]);
  const near = zoomed([0, 0, 100], 100, 2, [50, 25]);
  assert.deepEqual(near, [25, 12.5, 50]);
  assert.equal(near[0] + 0.5 * near[2], 50);
  assert.deepEqual(zoomed(near, 100, 0.1, [50, 37.5]), [0, 0, 100]);
  assert.deepEqual(showing([10, 10, 20], 100, 12, 40), [10, 21, 20]);
  assert.deepEqual(showing([10, 10, 20], 100, 3, 12), [3, 10, 20]);
});

test("points become cells and rectangles units", () => {
  const places = [4, 2, 0, 1, 3];
  assert.deepEqual(cellAt([1, 0, 4], [3, 3.96]), [3, 3]);
  assert.equal(cellAt([0, 0, 5], [5, 2.5]), null);
  assert.equal(cellAt([0, 0, 5], [2.5, -0.5]), null);
  assert.deepEqual(unitsOf(places, [1.5, 4.5], [0.5, 3.5]), [1, 2, 3, 4]);
  const between = (window, one, other) => unitsOf(places, clipped(window, one), clipped(window, other));
  assert.deepEqual(between([0, 0, 5], [-9, -9], [9, 9]), [0, 1, 2, 3, 4]);
  assert.deepEqual(between([1, 1, 2], [0, 0], [5, 5]), [0, 2]);
});

test("pairs in view: each once, strongest first", () => {
  const rho = (u, v) => RHO[u][v];
  const all = pairsInside([0, 0, 3], [2, 1, 0], rho, 9);
  assert.deepEqual(all, [[1, 2], [0, 1], [0, 2]]);
  assert.deepEqual(pairsInside([0, 0, 3], [2, 1, 0], rho, 2), all.slice(0, 2));
  assert.deepEqual(pairsInside([0, 1, 1], [0, 1, 2], rho, 9), [[0, 1]]);
});
