import assert from "node:assert/strict";
import test from "node:test";

import { axisOf, linearAxis, neighbor, planAt } from "../../../widgets/cocurve_widgets/front/axis.js";

const breaks = [0.1, 0.4, 0.8];

test("next and previous plan land in the middle of their segment", () => {
  assert.equal(neighbor(breaks, 0.2, 1), (0.4 + 0.8) / 2);
  assert.equal(neighbor(breaks, 0.2, -1), 0.05);
  assert.equal(neighbor(breaks, 0.1, -1), 0.05); // a segment holds its start
  assert.equal(neighbor(breaks, 0.05, -1), null);
  assert.equal(neighbor(breaks, 0.9, 1), null);
  assert.equal(neighbor([], 0.5, 1), null);
});

test("on the axis of plans every plan has the same width", () => {
  // all changes near 0, as in a large model: a linear slider would be dead almost everywhere
  const near = [1e-5, 3e-5, 4e-4];
  const axis = axisOf(near);
  axis.cells.forEach(([from, to]) => assert.ok(Math.abs(to - from - 0.25) < 1e-12));
  const found = [0, 0.1, 0.3, 0.45, 0.6, 0.8, 1].map((place) => planAt(near, axis.strength(place)));
  assert.deepEqual(found, [0, 0, 1, 1, 2, 3, 3]);
});

test("the ends of a cell belong to one plan, and the ends of the axis are 0 and 1", () => {
  const axis = axisOf(breaks);
  assert.equal(axis.strength(0), 0);
  assert.equal(axis.strength(1), 1);
  for (let step = 1; step < 1000; step++) {
    const strength = axis.strength(step / 1000);
    assert.ok(breaks.every((b) => Math.abs(b - strength) > 1e-3), `${strength}`);
    assert.equal(planAt(breaks, strength), Math.floor((4 * step) / 1000));
  }
});

test("every axis goes there and back", () => {
  for (const axis of [linearAxis, axisOf([1e-6, 0.3])]) {
    for (const strength of [0, 3e-6, 1e-5, 4.5e-5, 0.001, 0.2, 1]) {
      const off = axis.linear ? 1e-12 : 0.02 * 0.7; // kept off the breaks
      assert.ok(Math.abs(axis.strength(axis.place(strength)) - strength) <= off, `${strength}`);
    }
    assert.deepEqual([axis.place(0), axis.place(1)], [0, 1]);
  }
});

test("one plan, and two flips at one lambda, leave a usable axis", () => {
  assert.equal(axisOf([]).strength(0.5), 0.5);
  const twice = axisOf([0.5, 0.5]);
  for (const strength of [0, 0.25, 0.5, 0.75, 1]) assert.ok(Number.isFinite(twice.place(strength)));
});
