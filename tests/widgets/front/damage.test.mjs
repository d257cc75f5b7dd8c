import assert from "node:assert/strict";
import test from "node:test";

import { markOf } from "../../../widgets/cocurve_widgets/front/compare.js";
import { ageText, damageRows, knownOf, measuredRatios, originText, pairedOf,
} from "../../../widgets/cocurve_widgets/front/damage.js";

const of = (order, text, risk, rows, abilities) => ({ plan: markOf(order), text, risk, error: 0.01,
  rows, abilities, strength: 1, ratio: 0.2, at: 100 });
const [a, b] = [{ order: [1] }, { order: [2] }];

test("bars of the dense model, A and B come from one text", () => {
  const marks = { measured: [of([1], "kept", 0.9, 64, { sums: [1, 4] }),
    of([], "kept", 0, 64, { sums: [4, 4] }), of([2], "kept", 0.3, 64, { sums: [3, 4] })] };
  const alone = damageRows(a, b, marks, {});
  assert.equal(alone.text, "kept");
  assert.deepEqual(alone.rows.map((row) => row.cells.map((cell) => cell?.text ?? null)), [
    ["0", "0.900 ± 0.010", "0.300 ± 0.010"], ["4 of 4", "1 of 4", "3 of 4"]]);
  assert.ok(Math.abs(alone.rows[0].cells[2].share - 0.3 / 0.91) < 1e-12);
  assert.equal(alone.rows[1].cells[1].share, 0.25);
  assert.deepEqual(alone.rows.map((row) => row.change), ["", "+2"]);
  assert.equal(damageRows(b, a, marks, {}).rows[1].change, "−2");
  const unknown = damageRows({ order: [7] }, { order: [8] }, marks, {}).rows[1];
  assert.deepEqual(unknown.cells.map((cell) => cell?.text ?? null), ["4 of 4", null, null]);
  assert.equal(unknown.change, "");

  // what is measured now wins, and tells what is still to come
  const live = { text: "now", rows: 16, asked: { sums: 20 }, measured: [of([2], "now", 0.2, 2, {}),
    of([], "now", 0, 0, { sums: [2, 2] })] };
  const now = damageRows(a, b, knownOf(marks, live), live);
  assert.equal(now.text, "now");
  assert.deepEqual(now.rows[1].cells.map((cell) => cell?.text ?? null), ["2 of 2", "1 of 4", null]);
  assert.equal(now.rows[1].change, ""); // of two texts
  assert.equal(originText(now.records[2], live, 105), "2 of 16 rows, just now");
  const first = { ...now.records[2], rows: 1 };
  assert.equal(originText(first, live, 105), "1 of 16 rows, just now");
  assert.equal(originText(first, { text: "now", rows: 1 }, 105), "1 row, just now");
  assert.equal(originText(now.records[1], live, 160, now.text), "64 rows, 60 s ago, on kept");
});

test("a plan without a measurement has no bar, not an empty one", () => {
  const { rows } = damageRows(a, { order: [7] }, { measured: [of([1], "kept", 0.9, 64, {})] }, {});
  assert.equal(rows[0].cells[2], null);
  assert.equal(damageRows(null, null, {}, {}).rows[0].cells[1], null);
});

test("a difference of earlier plans is not shown for the present ones", () => {
  const paired = { plans: [markOf([1]), markOf([2])], difference: 0.1 };
  assert.equal(pairedOf({ paired }, a, b).difference, 0.1);
  assert.equal(pairedOf({ paired }, b, a), null);
  assert.equal(pairedOf({ paired }, a, { order: [2, 3] }), null);
  assert.equal(pairedOf({}, a, b), null);
});

test("ages are told in words", () => {
  const ages = [[100, 100], [100, 99], [100, 138], [100, 400], [100, 10_000], [null, 5]];
  assert.deepEqual(ages.map(([at, now]) => ageText(at, now)),
    ["just now", "just now", "40 s ago", "5 min ago", "3 h ago", "earlier"]);
});

test("the ratios that were measured are offered once", () => {
  const measured = [0.3, 0.1, 0.3].map((ratio) => ({ ratio, strength: 0 }));
  assert.deepEqual(measuredRatios({ measured: [...measured, { ratio: 0, strength: null }] }), [0.1, 0.3]);
});
