import assert from "node:assert/strict";
import test from "node:test";

import { markOf } from "../../../widgets/cocurve_widgets/front/compare.js";
import { aboutToFlip, flipsOf } from "../../../widgets/cocurve_widgets/front/lambda.js";
import { measuredAt, pathMarks } from "../../../widgets/cocurve_widgets/front/plan_pictures.js";

const breaks = [0.1, 0.4, 0.8];
const changes = [[3], [5, 6], [3, 9]];

test("units of the flips on either side are about to flip", () => {
  assert.deepEqual([...aboutToFlip(breaks, changes, 0.2)], [3, 5, 6]);
  assert.deepEqual([...aboutToFlip(breaks, changes, 0.0)], [3]);
  assert.deepEqual([...aboutToFlip(breaks, changes, 1)], [3, 9]);
});

test("a unit's own flips below and above", () => {
  assert.deepEqual(flipsOf(breaks, changes, 0.5, 3), { below: 0.1, above: 0.8 });
  assert.deepEqual(flipsOf(breaks, changes, 0.5, 9), { below: null, above: 0.8 });
  assert.deepEqual(flipsOf(breaks, changes, 0.5, 1), { below: null, above: null });
});

test("dots are the measured plans that lambda makes here, not those of other guards", () => {
  const plans = [[1, 3, 5], [1, 5], [1, 6], [1, 3, 6, 9]]; // as `changes` makes them
  const marks = plans.map(markOf).sort();
  for (const [k, strength] of [[0, 0], [1, 0.2], [3, 1]]) {
    const path = pathMarks({ breaks, changes, stale: false }, plans[k], strength);
    assert.deepEqual(path.sort(), marks);
    const measured = [plans[2], [1, 2, 4]].map((plan) => ({ plan: markOf(plan), ratio: 0.2, strength: 0.5 }));
    assert.deepEqual(measuredAt({ measured }, 0.2, path), measured.slice(0, 1));
    assert.deepEqual(measuredAt({ measured }, 0.3, path), []);
  }
  assert.deepEqual(pathMarks({ breaks, changes, stale: true }, plans[0], 0), []);
});
