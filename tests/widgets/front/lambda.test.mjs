import assert from "node:assert/strict";
import test from "node:test";

import { flipsOf } from "../../../widgets/cocurve_widgets/front/lambda.js";

const breaks = [0.1, 0.4, 0.8];
const changes = [[3], [5, 6], [3, 9]];

test("a unit's own flips below and above", () => {
  assert.deepEqual(flipsOf(breaks, changes, 0.5, 3), { below: 0.1, above: 0.8 });
  assert.deepEqual(flipsOf(breaks, changes, 0.5, 9), { below: null, above: 0.8 });
  assert.deepEqual(flipsOf(breaks, changes, 0.5, 1), { below: null, above: null });
});
