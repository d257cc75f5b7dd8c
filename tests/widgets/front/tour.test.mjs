import assert from "node:assert/strict";
import test from "node:test";

import { SECONDS, TOUR, shareAt } from "../../../widgets/cocurve_widgets/front/tour.js";

test("five steps take a minute, and each moves a control that others leave where it was", () => {
  assert.equal(TOUR.length * SECONDS, 60);
  const moved = TOUR.map((step) => [step, Object.keys(step.at(0.5, [4, 5, 6]))]);
  assert.deepEqual(moved.map(([, names]) => names.join()),
    ["ratio", "place", "ratio", "selected_unit", "layer_cap"]);
  for (const [step, names] of moved) {
    for (const name of names) assert.notDeepEqual(step.at(0, [4, 5, 6])[name], step.at(1, [4, 5, 6])[name]);
  }
});

test("a step begins at its own controls, whichever step was before", () => {
  const names = Object.keys(TOUR[0].from).sort();
  for (const { from } of TOUR) assert.deepEqual(Object.keys(from).sort(), names);
});

test("a control rests, moves and rests again; without motion it is there at once", () => {
  assert.equal(shareAt(0, false), 0);
  assert.equal(shareAt(0.1 * SECONDS, false), 0);
  assert.ok(shareAt(0.4 * SECONDS, false) > 0 && shareAt(0.4 * SECONDS, false) < 1);
  assert.equal(shareAt(0.8 * SECONDS, false), 1);
  assert.equal(shareAt(0, true), 1);
});

test("the walk over units goes from the first to the last that is removed", () => {
  const { at } = TOUR[3];
  assert.equal(at(0, [7, 3, 9]).selected_unit, 7);
  assert.equal(at(1, [7, 3, 9]).selected_unit, 9);
  assert.equal(at(1, []).selected_unit, null); // no plan
});
