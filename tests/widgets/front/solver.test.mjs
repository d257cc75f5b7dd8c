// The browser's solver against fixtures that tests/widgets/test_front.py made with the Python one.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

import { NO_GUARDS, flips, greedy, inTheWay, ledger, nameOf, orderOf, partsOf, prefix, reachable, rulesFor, runner,
  targetCost, unpack, viewOf } from "../../../widgets/cocurve_widgets/front/solver.js";

const problems = JSON.parse(readFileSync(process.env.COCURVE_FIXTURES, "utf8"));

function load({ packed }) {
  const bytes = (text) => {
    const raw = Buffer.from(text, "base64");
    return new DataView(raw.buffer.slice(raw.byteOffset, raw.byteOffset + raw.length));
  };
  return unpack({ ...packed, saliency: bytes(packed.saliency),
    connectivity: bytes(packed.connectivity), matrix: bytes(packed.matrix) });
}

const close = (a, b) => assert.ok(Math.abs(a - b) <= 1e-9 * Math.max(1e-12, Math.abs(b)), `${a} ${b}`);

test("every plan is the one Python makes", () => {
  let compared = 0;
  for (const fixture of problems) {
    const problem = load(fixture);
    for (const { controls, order, stalled, node, edge, most, loosen } of fixture.cases) {
      const rules = rulesFor(problem, controls);
      const run = greedy(problem, rules, controls.interaction_strength, targetCost(problem, controls.ratio));
      assert.equal(run.stalled, stalled);
      if (!stalled) assert.deepEqual(run.order, order);
      close(reachable(problem, rules), most);
      if (stalled) assert.deepEqual(inTheWay(problem, controls), loosen);
      if (stalled) continue;
      close(run.order.reduce((sum, u) => sum + problem.half[u], 0), node);
      assert.ok(Math.abs(run.edges.reduce((sum, g) => sum + g, 0) - edge) <= 1e-9 * (node + Math.abs(edge)));
      compared += 1;
    }
  }
  assert.ok(compared > 100);
});

test("the view at a ratio is the prefix of one longer run", () => {
  for (const fixture of problems) {
    const problem = load(fixture);
    const run = runner(problem);
    for (const { controls, order, stalled } of fixture.cases) {
      const view = viewOf(problem, controls);
      assert.equal(view.feasible, !stalled);
      if (!stalled) assert.deepEqual(view.order, order);
      assert.deepEqual(orderOf(problem, controls, run), stalled ? null : order); // the same, remembered
      if (!stalled) close(partsOf(problem, order).node, view.node);
      if (!stalled) close(partsOf(problem, order).edge, view.edge);
    }
  }
});

test("flips are those of Python's exact path", () => {
  let seen = 0;
  for (const fixture of problems) {
    const problem = load(fixture);
    for (const { controls, breaks, changes } of fixture.paths) {
      const found = [...flips(problem, controls)].filter(Boolean);
      assert.equal(found.length, breaks.length);
      found.forEach(({ strength, changed }, i) => {
        assert.ok(Math.abs(strength - breaks[i]) <= 1e-9, `${strength} ${breaks[i]}`);
        assert.deepEqual([...changed].sort((a, b) => a - b), changes[i]);
      });
      seen += breaks.length;
    }
  }
  assert.ok(seen > 10);
});

test("what misses its target is no plan", () => {
  const run = { order: [2, 0], edges: [0, 1], spent: [3, 5], stalled: true };
  assert.equal(prefix(run, 5).stalled, false);
  assert.equal(prefix(run, 5.5).stalled, true);
  assert.equal(prefix(run, NaN).stalled, true);
});

test("where greedy stalls at lambda 0 there is no diagonal plan to differ from", () => {
  let stalls = 0;
  for (const fixture of problems) {
    const problem = load(fixture);
    for (const { controls, stalled } of fixture.cases) {
      const rules = rulesFor(problem, controls);
      const none = greedy(problem, rules, 0, targetCost(problem, controls.ratio)).stalled;
      if (stalled) continue;
      assert.equal(viewOf(problem, controls).a === null, none);
      stalls += none;
    }
  }
  assert.ok(stalls > 0);
});

test("ties go to the lowest index", () => {
  const problem = unpack({ costs: [1, 1, 1, 1], layers: [0, 0, 1, 1], kinds: [0, 1, 0, 1],
    places: [0, 0, 0, 0], num_layers: 2, saliency: new Float64Array(4).fill(1),
    connectivity: new Float64Array(4), matrix: new Float64Array([1, 0, 0, 0, 1, 0, 0, 1, 0, 1]) });
  const controls = { ratio: 0.5, ...NO_GUARDS };
  const run = greedy(problem, rulesFor(problem, controls), 1, targetCost(problem, 0.5));
  assert.deepEqual(run.order, [0, 1]);
  assert.equal(nameOf(problem, 3), "L1.ffn[0]");
});

test("the ledger adds up to the marginal of the step", () => {
  const [fixture] = problems;
  const problem = load(fixture);
  const { controls, order } = fixture.cases.find((c) => !c.stalled && c.order.length > 5);
  const run = greedy(problem, rulesFor(problem, controls), controls.interaction_strength,
    targetCost(problem, controls.ratio));
  order.forEach((u, k) => {
    const found = ledger(problem, order, controls.interaction_strength, u);
    assert.equal(found.step, k);
    close(found.half, problem.half[u]);
    assert.ok(Math.abs(found.edges - controls.interaction_strength * run.edges[k]) < 1e-9);
    assert.ok(Math.abs(found.marginal - found.half - found.edges) < 1e-9);
  });
  const kept = [...problem.costs.keys()].find((u) => !order.includes(u));
  assert.equal(ledger(problem, order, controls.interaction_strength, kept).step, -1);
});
