import assert from "node:assert/strict";
import test from "node:test";

import { markOf, rowsText } from "../../../widgets/cocurve_widgets/front/measured.js";
import { answersChange, answersOf, detailRows, measuredChange, shownOf,
} from "../../../widgets/cocurve_widgets/front/numbers.js";

const of = (order, risk, more = {}) => ({ plan: markOf(order), text: "t", risk, error: 0.01, rows: 6,
  strength: 0.25, ratio: 0.2, at: null, abilities: { sums: [1, 4], words: [2, 4] }, replies: ["a"], ...more });
const plan = (order, known, live = {}) => ({ order, node: 0.1, edge: 0.02, removed: 10, realized: 0.2,
  shown: shownOf({ order }, known, live) });

test("a row has what was measured of the plan itself, and of no neighbor", () => {
  const known = { measured: [of([1, 2], 0.5, { abilities: {} }), of([1, 3], 0.7)] };
  const { kl, answers } = shownOf({ order: [1, 2] }, known, {});
  assert.equal(kl.risk, 0.5);
  assert.equal(answers, null);
  assert.deepEqual(shownOf({ order: [2, 3] }, known, {}), { kl: null, answers: null });
  assert.deepEqual(shownOf(null, known, {}), { kl: null, answers: null });
});

test("what is measured now wins over what was kept", () => {
  const live = { text: "now", rows: 16 };
  const known = { measured: [of([1], 0.5), of([1], 0.4, { text: "now", rows: 2, at: 100 })] };
  const { kl } = shownOf({ order: [1] }, known, live);
  assert.deepEqual([kl.risk, rowsText(kl, live, 103)], [0.4, "2 of 16 rows, just now"]);
});

test("A and B are compared only where both were measured, on one text", () => {
  const rows = (by_row) => ({ by_row });
  const known = { measured: [of([1], 1, rows([1, 1, 1])), of([2], 1.2, rows([1.1, 1.2, 1.3])),
    of([3], 9, { text: "u" })] };
  const [a, b, c, d] = [[1], [2], [3], [4]].map((order) => plan(order, known));
  assert.equal(measuredChange(a, b, {}), "+0.200 ± 0.058");
  assert.equal(measuredChange(b, a, {}), "−0.200 ± 0.058");
  assert.equal(measuredChange(a, c, {}), "");
  assert.equal(measuredChange(a, d, {}), ""); // not measured
  const live = { paired: { plans: [markOf([1]), markOf([2])], difference: -0.31, error: 0.004 } };
  assert.equal(measuredChange(a, b, live), "−0.3100 ± 0.0040");
  assert.equal(answersChange(a, b), "0");
  assert.equal(answersChange(a, d), "");
  const fewer = plan([5], { measured: [of([5], 1, { abilities: { sums: [1, 4] } })] });
  assert.equal(answersChange(a, fewer), ""); // fewer were asked
  assert.deepEqual(answersOf({ abilities: { x: [1, 2], y: [3, 5] } }), [4, 7]);
});

test("the folded rows have every part of a plan; a sum in another order is no difference", () => {
  const known = { measured: [of([1], 1), of([2], 1, { abilities: { sums: [3, 4] } })] };
  const a = plan([1], known);
  const again = { ...plan([2], known), node: 0.1 + 2e-17 };
  const rows = Object.fromEntries(detailRows(a, again).map(([name, ...cells]) => [name, cells]));
  assert.deepEqual(rows["predicted: units alone"], ["0.1", "0.1", "0"]);
  assert.deepEqual(rows["right: sums"], ["1 of 4", "3 of 4", "+2"]);
  assert.deepEqual(rows["right: words"], ["2 of 4", "–", ""]);
  assert.deepEqual(detailRows(null, again)[0].slice(1), ["no plan", "0.1", ""]);
});
