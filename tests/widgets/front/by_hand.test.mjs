import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

import { edgeText, measuredPairs, pairRows, pairWith, toggled,
} from "../../../widgets/cocurve_widgets/front/by_hand.js";
import { markOf } from "../../../widgets/cocurve_widgets/front/measured.js";
import { pairsInTurn, strongestPair } from "../../../widgets/cocurve_widgets/front/edge.js";
import { partsOf, unpack } from "../../../widgets/cocurve_widgets/front/solver.js";

const [{ packed, cases }] = JSON.parse(readFileSync(process.env.COCURVE_FIXTURES, "utf8"));
const bytes = (text) => new DataView(Uint8Array.from(Buffer.from(text, "base64")).buffer);
const problem = unpack({ ...packed, saliency: bytes(packed.saliency),
  connectivity: bytes(packed.connectivity), matrix: bytes(packed.matrix) });
const close = (x, y) => assert.ok(Math.abs(x - y) < 1e-12, `${x} is not ${y}`);

test("your plan has the risk that Python predicts for its units, in any order", () => {
  const full = cases.filter((c) => !c.stalled && c.controls.interaction_strength === 1 && c.order.length > 2);
  assert.ok(full.length > 3);
  for (const { order, node, edge } of full) {
    for (const mine of [order, [...order].reverse()]) {
      const parts = partsOf(problem, mine);
      close(parts.node, node);
      close(parts.edge, edge);
    }
  }
  assert.equal(partsOf({ ...problem, matrix: null, rows: new Map() }, [0]), null);
});

test("clicks add and remove; a pair keeps the newest two", () => {
  assert.deepEqual(toggled([1, 2], 3), [1, 2, 3]);
  assert.deepEqual(toggled([1, 2, 3], 2), [1, 3]);
  assert.deepEqual(pairWith([1, 2], 3), [2, 3]);
  assert.deepEqual(pairWith([1, 2], 1), [2]);
});

test("the account of a pair: predicted from H, measured where all three are", () => {
  const of = (order, risk, rows) => ({ plan: markOf(order), text: "t", risk, rows, error: 0.01 });
  const known = { measured: [of([1], 0.1, 4), of([2], 0.2, 4), of([1, 2], 0.5, 4)] };
  const live = { text: "t", edge: { plans: [markOf([2, 1])], difference: 0.2, error: 0.05 } };
  const { rows } = pairRows(problem, [1, 2], known, live);
  const h = (u, v) => problem.matrix[u * problem.size + v];
  rows.map((r) => r.predicted).forEach((x, k) => close(x, [h(1, 1) / 2, h(2, 2) / 2,
    (h(1, 1) + h(2, 2)) / 2, (h(1, 1) + h(2, 2)) / 2 + h(1, 2), h(1, 2)][k]));
  rows.map((r) => r.measured).forEach((x, k) => close(x, [0.1, 0.2, 0.3, 0.5, 0.2][k]));
  // no sums of values from different rows, and no edge of an earlier pair
  known.measured[0].rows = 2;
  assert.deepEqual(pairRows(problem, [1, 2], known, {}).rows.map((r) => r.measured),
    [null, null, null, null, null]);
  assert.equal(pairRows({ ...problem, matrix: null, rows: new Map() }, [1, 2], known, live), null);
});

test("an edge measured before needs no kernel, and tells its pair", () => {
  const of = (order, risk, edge) => ({ plan: markOf(order), text: "t", risk, rows: 4, edge });
  const known = { measured: [of([1], 0.1, null), of([2], 0.2, null),
    of([1, 2], 0.5, { units: [1, 2], difference: 0.2, error: 0.05 })] };
  const last = pairRows(problem, [2, 1], known, {}).rows[4];
  assert.deepEqual([last.measured, last.error], [0.2, 0.05]);
  assert.deepEqual(measuredPairs(known).map((edge) => edge.units), [[1, 2]]);
  assert.deepEqual(measuredPairs({}), []);
});

test("pairs come in turn: surest first, one that H has right, one that it has wrong", () => {
  const row = (u, v) => problem.matrix[u * problem.size + v];
  const edge = (u, v, size, right) => of_([u, v], { units: [u, v], error: 0.01,
    difference: size * Math.sign(row(u, v)) * (right ? 1 : -1) });
  const of_ = (order, found) => ({ plan: markOf(order), edge: found });
  const known = { measured: [edge(0, 1, 0.02, true), edge(0, 2, 0.2, false), edge(0, 3, 0.1, true),
    edge(1, 2, 0.3, true)] };
  assert.deepEqual(pairsInTurn(problem, known), [[1, 2], [0, 2], [0, 3], [0, 1]]);
  assert.deepEqual(pairsInTurn(problem, {}), []);
  const [u, v] = strongestPair(problem);
  const all = Array.from({ length: problem.size }, (_, k) => k);
  assert.ok(all.every((x) => all.every((y) => x === y || Math.abs(row(x, y)) <= Math.abs(row(u, v)))));
  assert.equal(strongestPair({ matrix: null }), null);
});

test("an edge within its error says so", () => {
  assert.match(edgeText({ measured: 0.1, error: 0.06 }), /cannot be told from 0/);
  assert.match(edgeText({ measured: 0.1, error: 0.01 }), /more than alone/);
  assert.match(edgeText({ predicted: -0.2, measured: -0.1, error: 0.01 }), /less than alone.*same harm\.$/);
  assert.match(edgeText({ predicted: 0.2, measured: -0.1, error: 0.01 }), /H has the other sign\.$/);
  assert.equal(edgeText({ measured: null }), "");
});
