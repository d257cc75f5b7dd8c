import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

import { comparisonRows, difference, layersText, markOf, measurementOf, signed,
} from "../../../widgets/cocurve_widgets/front/compare.js";
import { stateOf } from "../../../widgets/cocurve_widgets/front/unit_map.js";

test("units that join and leave are told apart", () => {
  const change = difference([1, 2, 3], [3, 4, 5, 2]);
  assert.deepEqual(change, { joined: [4, 5], left: [1] });
  assert.equal(layersText([0, 0, 1, 1, 2, 0], change), "0 (+1 −1), 2 (+1)");
  const [a, b] = [new Set([1, 2]), new Set([2, 3])];
  assert.deepEqual([0, 1, 2, 3].map((u) => stateOf(u, a, b)), ["kept", "left", "removed", "joined"]);
  assert.equal(stateOf(3, null, b), "removed"); // without a plan A nothing has joined
});

test("a plan has the mark that Python gives it, in any order", () => {
  const [{ cases }] = JSON.parse(readFileSync(process.env.COCURVE_FIXTURES, "utf8"));
  const known = cases.filter((c) => !c.stalled && c.order.length > 1);
  assert.ok(known.length > 5);
  for (const { order, mark } of known) {
    assert.equal(markOf(order), mark);
    assert.equal(markOf([...order].reverse()), mark);
    assert.notEqual(markOf(order.slice(1)), mark);
  }
});

test("two plans are compared on one text only", () => {
  const of = (order, text, risk, abilities) => ({ plan: markOf(order), text, risk, error: 0.01,
    abilities });
  const marks = { measured: [of([1], "books", 0.5, { sums: [3, 4] }), of([1], "news", 0.9),
    of([2], "books", 0.2, { sums: [1, 4] })] };
  assert.equal(measurementOf(marks, [1]).text, "news"); // the newest
  assert.equal(measurementOf(marks, [1], "books").risk, 0.5);
  assert.equal(measurementOf(marks, [7]), null);
  const plan = (order) => ({ order, node: 0.1, edge: 0.02, removed: 10, realized: 0.2 });
  const cells = (a, b, name, paired) =>
    comparisonRows(a, b, marks, paired).find((row) => row[0] === name)?.slice(1);
  assert.deepEqual(cells(plan([1]), plan([2]), "measured KL"), ["0.500 ± 0.010", "0.200 ± 0.010", "−0.3"]);
  const paired = { difference: -0.31, error: 0.004 };
  assert.equal(cells(plan([1]), plan([2]), "measured KL", paired)[2], "−0.3100 ± 0.0040");
  const uneven = structuredClone(marks);
  uneven.measured[2].rows = 3;
  const named = comparisonRows(plan([1]), plan([2]), uneven, paired).map(([name]) => name);
  assert.ok(named[3].endsWith("on the rows of both"));
  assert.deepEqual(cells(plan([1]), plan([7]), "measured KL"), ["0.900 ± 0.010", "not measured", ""]);
  assert.equal(cells(plan([1]), plan([7]), "measured KL", paired)[2], ""); // nothing to compare
  assert.deepEqual(cells(null, plan([2]), "– units"), ["no plan", "1", ""]);
  const again = { ...plan([1]), node: 0.1 + 2e-17, edge: 0.02 - 1e-17 }; // summed in another order
  assert.equal(cells(plan([1]), again, "predicted KL")[2], "0");
  assert.equal(cells(plan([1]), { ...again, node: 0.1001 }, "– units alone")[2], "+0.0001");
});

test("differences have a sign", () => {
  assert.deepEqual([0.25, -0.25, 0, null].map((x) => signed(x)), ["+0.25", "−0.25", "0", ""]);
});
