import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

import { stepsOfGap } from "../../../widgets/cocurve_widgets/front/gap.js";
import { keepHistory } from "../../../widgets/cocurve_widgets/front/history.js";
import { Cleaner } from "../../../widgets/cocurve_widgets/front/kit.js";
import { markOf } from "../../../widgets/cocurve_widgets/front/measured.js";
import { arcsOf, pricesOf } from "../../../widgets/cocurve_widgets/front/price.js";
import { wordsOf } from "../../../widgets/cocurve_widgets/front/sentence.js";
import { unpack } from "../../../widgets/cocurve_widgets/front/solver.js";
import { breaksAt, marksOf, timesText } from "../../../widgets/cocurve_widgets/front/thermometer.js";
import { Fading, stateOf } from "../../../widgets/cocurve_widgets/front/unit_map.js";

const PROBLEMS = JSON.parse(readFileSync(process.env.COCURVE_FIXTURES, "utf8"));
const bytes = (text) => new DataView(Uint8Array.from(Buffer.from(text, "base64")).buffer);
const unpacked = ({ packed }) => unpack({ ...packed, saliency: bytes(packed.saliency),
  connectivity: bytes(packed.connectivity), matrix: bytes(packed.matrix) });

test("the cheapest living unit that the guards allow is the one that Python removes next", () => {
  let compared = 0;
  for (const one of PROBLEMS) {
    const problem = unpacked(one);
    for (const { controls, order, stalled } of one.cases) {
      if (stalled || problem.size > 300) continue;
      for (const k of [0, 1, Math.floor(order.length / 2), order.length - 1]) {
        if (order[k] === undefined) continue;
        assert.equal(pricesOf(problem, controls, order.slice(0, k)).next, order[k]);
        compared += 1;
      }
    }
  }
  assert.ok(compared > 100);
});

test("the arcs of a unit are its largest edges with their sign", () => {
  const problem = unpacked(PROBLEMS[0]);
  const arcs = arcsOf(problem, 3);
  const edge = (v) => problem.matrix[3 * problem.size + v];
  assert.ok(arcs.length <= 20 && arcs.every(([u, v, size, sign]) => u === 3 && v !== 3 && size <= 1 && sign === Math.sign(edge(v))));
  assert.deepEqual(arcs.map(([, v]) => Math.abs(edge(v))), arcs.map(([, v]) => Math.abs(edge(v))).sort((x, y) => y - x));
  assert.deepEqual(arcsOf(problem, null), []);
});

test("a gap wanders from each cell that returns to one that goes", () => {
  globalThis.matchMedia = () => ({ matches: false });
  globalThis.requestAnimationFrame = () => 1;
  const fading = new Fading(() => undefined);
  fading.take(new Set([1, 2]), 6, 0);
  assert.deepEqual([fading.moves, fading.at(1, 0), fading.at(0, 0)], [[], 1, 0]); // as it opens nothing moves
  fading.take(new Set([2, 4, 5]), 6, 1000);
  assert.deepEqual(fading.moves, [[1, 4, 1000]]); // 5 goes without one that returns
  assert.ok(fading.at(4, 1100) > 0 && fading.at(4, 1100) < 1);
  fading.take(new Set([2, 4, 5]), 6, 2000);
  assert.deepEqual([fading.moves, fading.at(4, 2000), fading.at(1, 2000)], [[], 1, 0]);
});

test("a cell is gone in both plans, in one of them alone, or alive", () => {
  const [mine, other] = [new Set([1, 2]), new Set([2, 3])];
  assert.deepEqual([1, 2, 3, 4].map((u) => stateOf(u, mine, other)), ["mine", "gone", "other", "alive"]);
  assert.equal(stateOf(1, mine, null), "gone");
});

test("answers break at the KL with the fewest plans on its wrong side", () => {
  const of = (k, risk, right) => ({ plan: markOf(k ? [k] : []), text: "t", risk, abilities: { x: [right, 10] } });
  const measured = [of(0, 0, 10), of(1, 0.1, 9), of(2, 0.2, 4), of(3, 0.25, 8), of(6, 0.3, 7), of(4, 0.5, 3), of(5, 0.6, 1)];
  assert.equal(breaksAt({ measured }, "t"), 0.4);
  assert.equal(breaksAt({ measured: measured.slice(0, 2) }, "t"), null);
  assert.equal(breaksAt({ measured }, "another"), null);
  const first = { marks: [{ name: "noise", risk: 3 }, { name: "text unchanged", risk: 0.01 }] };
  assert.deepEqual(marksOf(first, { measured }, "t").map((mark) => mark.name), ["text unchanged", "answers break", "noise"]);
  assert.deepEqual(marksOf({}, {}, "t"), []);
});

test("next words are those of this plan, kept or predicted now, or none", () => {
  const first = { sentences: [{ text: "A", tokens: ["x", "y"], plans: { "": [[0, 0.9]], [markOf([1])]: [[1, 0.6]] } }] };
  assert.deepEqual(wordsOf(first, null, "A", [1]), { whole: [["x", 0.9]], pruned: [["y", 0.6]] });
  assert.deepEqual(wordsOf(first, null, "A", [2]).pruned, null);
  assert.deepEqual(wordsOf(first, null, "A", []).pruned, [["x", 0.9]]);
  const next = { prompt: "B", plans: [markOf([1]), markOf([2])],
    rows: [{ token: "x", shares: [0.5, 0.1, null] }, { token: "y", shares: [0.2, 0.7, null] }] };
  assert.deepEqual(wordsOf(first, next, "B", [1]), { whole: [["x", 0.5], ["y", 0.2]], pruned: [["y", 0.7], ["x", 0.1]] });
  assert.deepEqual(wordsOf(first, next, "B", [2]).pruned, null); // not predicted yet
  assert.deepEqual(wordsOf(first, next, "B", [3]).pruned, null); // of another plan
  assert.deepEqual(wordsOf(first, next, "B", []).pruned, [["x", 0.5], ["y", 0.2]]);
});

test("the gap's factors lead from the predicted to the measured KL", () => {
  const steps = stepsOfGap({ text: 2, parabola: 1.5, adding: 4 }, 0.01);
  assert.ok(Math.abs(steps.at(-1).to - 0.12) < 1e-12);
  assert.equal(stepsOfGap(undefined, 1), null);
});

test("undo goes back through all changes, redo forward, and a new change ends redo", () => {
  let state = { ratio: 0 };
  const home = new EventTarget();
  const cleaner = new Cleaner();
  let told = 0;
  const history = keepHistory(cleaner, home, () => (state.tour ? null : { ...state }),
    (before) => { state = before; }, () => { told += 1; });
  const change = (ratio) => {
    state = { ratio };
    history.redo(); // settles what was noted
  };
  [1, 2, 3].forEach(change);
  history.undo();
  assert.equal(state.ratio, 2);
  history.undo();
  history.undo();
  history.undo(); // nothing before
  assert.equal(state.ratio, 0);
  history.redo();
  assert.equal(state.ratio, 1);
  change(7);
  history.redo();
  assert.equal(state.ratio, 7);
  const press = (init) => home.dispatchEvent(Object.assign(new Event("keydown", { cancelable: true }), { ctrlKey: true, ...init }));
  press({ key: "z" });
  assert.equal(state.ratio, 1);
  press({ key: "Z", shiftKey: true });
  assert.equal(state.ratio, 7);
  state = { tour: true };
  history.settle(); // what is left out is no state
  assert.deepEqual(history.list().map(({ state: one, here }) => [one.ratio, here]), [[0, false], [1, false], [7, true]]);
  const before = told;
  history.list()[0].go();
  assert.deepEqual([state.ratio, told], [0, before + 1]);
  history.redo();
  assert.equal(state.ratio, 1);
  cleaner.run();
});

test("a prediction far from the measured value says how far", () => {
  assert.equal(timesText({ risk: 0.04 }, 0.003), ", 13 times too low");
  assert.equal(timesText({ risk: 1 }, 2), ", 2 times too high");
  assert.equal(timesText({ risk: 1 }, 0.9), "");
  assert.equal(timesText(null, 0.9), "");
});
