import assert from "node:assert/strict";
import test from "node:test";

import { bounded, covering, guessedSteps, guessesOn, turned } from "../../../widgets/cocurve_widgets/front/guess.js";

const step = (strength, risk, predicted) => ({ strength, risk, predicted, order: [Math.round(100 * strength)] });
const STEPS = [step(0, 1.1, 1.5), step(0.25, 1.2, 1.3), step(0.6, 1.3, 0.7), step(0.75, 1.6, 0.75), step(1, 2.8, 0.8)];

test("the plans nearest to a half and to one are guessed, once, and only beside one at 0", () => {
  assert.deepEqual(guessedSteps(STEPS).map((one) => one.strength), [0.6, 1]);
  assert.deepEqual(guessedSteps(STEPS.slice(0, 2)).map((one) => one.strength), [0.25]);
  assert.deepEqual(guessedSteps(STEPS.slice(1)), []);
  assert.deepEqual(guessedSteps([]), []);
});

test("guesses start level with lambda 0 and are of one ratio", () => {
  const values = (guesses) => guessesOn(STEPS, 0.2, guesses).map((one) => one.value);
  assert.deepEqual(values([]), [1.1, 1.1]);
  assert.deepEqual(values([0.2, 0.9]), [0.9, 1.1]);
  assert.deepEqual(values([0.3, 0.9, 2]), [1.1, 1.1]);
});

test("a guess moves by a tenth and stays in reach of the chart", () => {
  assert.equal(bounded(turned(1, "ArrowUp"), 1), 1.1);
  assert.ok(turned(1, "ArrowDown") < 1);
  assert.equal(turned(1, "Tab"), null);
  assert.deepEqual([bounded(99, 1.1), bounded(0, 1.1)], [4.4, 0.275]);
});

test("a plan is covered until it is visited, and a new guess covers all again", () => {
  const cover = covering();
  const hidden = () => STEPS.filter(cover.hides).map((one) => one.strength);
  cover.visit("", STEPS[4].order);
  assert.deepEqual(hidden(), []);
  cover.visit("1", STEPS[0].order);
  assert.deepEqual(hidden(), [0.25, 0.6, 0.75, 1]);
  cover.visit("1", STEPS[2].order);
  assert.deepEqual(hidden(), [0.25, 0.75, 1]);
  cover.visit("shown", STEPS[0].order);
  assert.deepEqual(hidden(), []);
  cover.visit("1", STEPS[0].order);
  assert.deepEqual(hidden(), [0.25, 0.6, 0.75, 1]);
});
