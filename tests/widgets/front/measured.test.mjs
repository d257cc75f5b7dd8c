import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

import { cellsOfPath, keptRatios, knownOf, lessOf, mainText, markOf, measuredSteps, measurementOf,
  pairedOf, strengthsAt, verdict,
} from "../../../widgets/cocurve_widgets/front/measured.js";

const of = (order, text, risk, more = {}) => ({ plan: markOf(order), text, risk, error: 0.01, rows: 6,
  strength: 0, ratio: 0.2, at: null, ...more });

test("a set of units has the mark that Python gives it, in any order, and no other set has it", () => {
  const [{ cases }] = JSON.parse(readFileSync(process.env.COCURVE_FIXTURES, "utf8"));
  const known = cases.filter((c) => !c.stalled && c.order.length > 1);
  assert.ok(known.length > 5);
  for (const { order, mark } of known) {
    assert.equal(markOf(order), mark);
    assert.equal(markOf([...order].reverse()), mark);
    assert.notEqual(markOf(order.slice(1)), mark);
  }
  assert.equal(markOf([]), "");
});

test("the newest measurement counts, on the text that is asked for", () => {
  const known = knownOf({ measured: [of([1], "books", 0.5), of([1], "news", 0.9)] },
    { measured: [of([2], "now", 0.2)] });
  assert.equal(measurementOf(known, [1]).text, "news");
  assert.equal(measurementOf(known, [1], "books").risk, 0.5);
  assert.equal(measurementOf(known, [2]).text, "now");
  assert.equal(measurementOf(known, [7]), null);
  assert.equal(mainText({ measured: [of([1], "a", 1), of([2], "b", 1), of([3], "a", 1)] }), "a");
  assert.equal(mainText({}), null);
});

test("ratios and lambdas are those of plans kept before", () => {
  const marks = { measured: [0.3, 0.1, 0.3].map((ratio, k) => of([k], "t", 1, { ratio, strength: k / 2 })) };
  assert.deepEqual(keptRatios(marks), [0, 0.1, 0.3]);
  assert.deepEqual(strengthsAt(marks, 0.3), [0, 1]);
  assert.deepEqual(keptRatios({ measured: [of([1], "t", 1, { at: 5 }), of([2], "t", 1, { strength: null })] }), []);
});

test("the cells of a path are its plans, and only the measured ones are steps", () => {
  const path = { breaks: [0.1, 0.4, 0.8], changes: [[3], [1, 5], [1, 5]] };
  const places = [0, 1, 2, 3].map((k) => [k / 4, (k + 1) / 4]);
  const cells = cellsOfPath(path, [1, 2], [0.5, 0.9], places, (order) => order.length);
  assert.deepEqual(cells.map((cell) => [...cell.order].sort()), [[1, 2], [1, 2, 3], [2, 3, 5], [1, 2, 3]]);
  assert.deepEqual(cells.map((cell) => cell.strength), [0, 0.25, 0.5, 1]);
  const known = { measured: [of([1, 2], "t", 0.5), of([3, 2, 1], "t", 0.7), of([2, 3, 5], "u", 0.1)] };
  const steps = measuredSteps(cells, known, "t");
  // of the two cells of {1, 2, 3} the one of a measured lambda
  assert.deepEqual(steps.map((step) => [step.from, step.risk]), [[0, 0.5], [0.75, 0.7]]);
  assert.match(steps[0].words, /0\.500 ± 0\.010 \(kept, 6 rows\), predicted 2/);
});

test("two plans are compared row by row, else by both errors", () => {
  const [a, b] = [[1, 2, 3], [1.5, 2.4, 3.6]].map((by_row) => of([1], "t", 2, { by_row }));
  const { difference, error } = lessOf(b, a);
  assert.ok(Math.abs(difference - 0.5) < 1e-12);
  assert.ok(Math.abs(error - 0.1 / Math.sqrt(3)) < 1e-12);
  assert.ok(Math.abs(lessOf(of([1], "t", 3), of([2], "t", 1)).error - 0.01 * Math.SQRT2) < 1e-12);
});

test("the finding names the lowest KL, what the ends cost, and whether H knew", () => {
  const step = (strength, risk, predicted, error = 0.001) =>
    ({ strength, risk, predicted, record: { risk, error } });
  assert.equal(verdict([step(0, 1, 1.5), step(0.5, 2, 1.2), step(1, 2.7, 0.9)], 0.2),
    "At 20 % the lowest measured KL is at λ = 0; λ = 1 costs 1.7000 ± 0.0014 nats more; H ranks them the other way.");
  assert.match(verdict([step(0, 3, 1.5), step(1, 2.7, 0.9)], 0.125), /^At 12\.5 % .* λ = 1; λ = 0 .* the same way\.$/);
  assert.match(verdict([step(0, 1, 1.5, 0.5), step(1, 1.2, 0.9)], 0.2), /λ = 1 costs .* more, which is inconclusive\.$/);
  const both = verdict([step(0, 2, 1), step(0.4, 1, 2), step(1, 3, null)], 0.2);
  assert.match(both, /at λ = 0\.4; λ = 0 .*the other way; λ = 1 costs 2\.0000 ± 0\.0014 nats more\.$/);
  assert.match(verdict([step(0.3, 1, 1)], 0.2), /one plan is measured, at λ = 0\.3/);
  assert.match(verdict([], 0.2), /no plan of these guards is measured/);
});

test("a difference of earlier plans is not shown for the present ones", () => {
  const [a, b] = [{ order: [1] }, { order: [2] }];
  const paired = { plans: [markOf([1]), markOf([2])], difference: 0.1 };
  assert.equal(pairedOf({ paired }, a, b).difference, 0.1);
  assert.equal(pairedOf({ paired }, b, a), null);
  assert.equal(pairedOf({}, a, b), null);
});
