// The scatter: what a point says, its color and mark, and what a field of numbers accepts.

import assert from "node:assert/strict";
import test from "node:test";

import { ORDERED } from "../../../widgets/cocurve_widgets/front/kit.js";
import { colorOf, numbersOf, pointOf, rowsOf } from "../../../widgets/cocurve_widgets/front/scatter.js";

test("rows come back from columns", () => {
  assert.deepEqual(rowsOf({ name: ["a", "b"], risk: [1, null] }), [{ name: "a", risk: 1 }, { name: "b", risk: null }]);
  assert.deepEqual(rowsOf({}), []);
});

test("a color is the removed share, and its bounds belong to the lower one", () => {
  assert.deepEqual([0, 0.075, 0.0751, 0.15, 0.25, 0.35, 0.45, 0.9].map(colorOf),
    [0, 0, 1, 1, 2, 3, 4, 5].map((k) => ORDERED[k]));
});

test("a list of numbers is taken whole or not at all", () => {
  assert.deepEqual(numbersOf("0, 0.2 ,1", 0, Infinity), [0, 0.2, 1]);
  assert.deepEqual(numbersOf("0.1 0.2", 0, 1), [0.1, 0.2]);
  for (const typed of ["", "0, x", "-1", "0.2, 7"]) assert.equal(numbersOf(typed, 0, 1), null);
});

test("a point has its two risks, and what a log axis cannot show is none", () => {
  const row = { kind: "plan", name: "P", method: "random", realized_ratio: 0.2, units: 3, text: "T",
    predicted_risk: 0.5, measured_risk: 1, measured_risk_error: 0.25 };
  const point = pointOf(row);
  assert.deepEqual([point.x, point.y, point.error], [0.5, 1, 0.25]);
  assert.equal(pointOf({ ...row, predicted_risk: null }), null);
  assert.equal(pointOf({ ...row, measured_risk: 0 }), null);
});
