import assert from "node:assert/strict";
import test from "node:test";

import { pinOf, readAddress, writeAddress } from "../../../widgets/cocurve_widgets/front/address.js";

const plan = { interaction_strength: 1, ratio: 0.2, layer_cap: null, layer_cap_factor: null,
  protect_first: 0, protect_last: 0, kinds: ["attention", "ffn"], selected_unit: null };
const bridge = { threshold: 0.15, edges_of: "bridges", sign: "both",
  blocks: ["attention", "cross", "ffn"], brushed: [] };
const opening = { plan, bridge };
const nothing = { plan: {}, bridge: {}, pin: null };
const model = (values) => ({ get: (name) => values[name] });
const write = (one, two = bridge, start = opening) => writeAddress(
  { plan: model(one), bridge: model(two) }, start, 160, 8);

test("what the page opens with has no address", () => {
  assert.equal(write(plan), "");
  assert.deepEqual(readAddress("", 160, 8), nothing);
});

test("what differs is written, and read again as it was", () => {
  const mine = { interaction_strength: 0.123456789, ratio: 0.35, layer_cap_factor: 1.5,
    protect_last: 2, kinds: ["ffn"], selected_unit: 17 };
  const theirs = { threshold: 0.3, edges_of: "all", blocks: ["cross"], brushed: [3, 159] };
  const text = write({ ...plan, ...mine }, { ...bridge, ...theirs });
  assert.deepEqual(readAddress(`#${text}`, 160, 8), { plan: mine, bridge: theirs, pin: null });
});

test("a value that goes back to none, or to an empty list, is told from one that is not there", () => {
  const start = { ...opening, plan: { ...plan, layer_cap: 0.4, selected_unit: 3 } };
  const text = write(plan, { ...bridge, blocks: [] }, start);
  const found = readAddress(text, 160, 8);
  assert.deepEqual(found.plan, { layer_cap: null, selected_unit: null });
  assert.deepEqual(found.bridge, { blocks: [] });
});

test("plan A is kept by the controls that made it", () => {
  const controls = { ...plan, interaction_strength: 0.5 };
  const text = write({ ...plan, _pin: { controls } });
  assert.deepEqual(readAddress(text, 160, 8).pin, { interaction_strength: 0.5 });
  const same = write({ ...plan, _pin: { controls: plan } }); // as at the opening, and pinned all the same
  assert.deepEqual(readAddress(same, 160, 8).pin, { ratio: 0.2 });
});

test("a plan A without controls is kept by its units", () => {
  const text = write({ ...plan, _pin: { order: [3, 1], controls: null } });
  assert.equal(text, "pin.units=3,1");
  const { pin } = readAddress(text, 160, 8);
  assert.deepEqual(pin, { units: [3, 1] });
  const problem = { size: 2, matrix: Float64Array.of(2, 0.5, 0.5, 4), half: [1, 2], costs: [10, 30], total: 80 };
  const made = pinOf(problem, { ...plan, units: [1, 0] });
  assert.deepEqual([made.order, made.hand, made.ratio], [[1, 0], true, 0.5]);
});

test("what no control could set is not taken", () => {
  for (const bad of ["ratio=0.7", "ratio=-0.1", "ratio=", "ratio=NaN", "ratio=Infinity", "ratio=x",
    "selected_unit=160", "selected_unit=1.5", "kinds=", "kinds=heads", "brushed=1,x", "blocks=x", "layer_cap=0", "_problem=1", "kernel=true", "toString=1",
    "pin._pin=1", "pin.units=1,1", "pin.units=160", "pair=1,2,3", "pair=4,4", "mode=x", "axis=plans",
    "map.order=x", "order=saliency", "pin.", "%E0%A4%A"]) {
    assert.deepEqual(readAddress(`#${bad}`, 160, 8), nothing, bad);
  }
  const { plan: found } = readAddress("#layer_cap=0.4&layer_cap_factor=2", 160, 8);
  assert.deepEqual(found, { layer_cap: 0.4 }); // there is only one cap
});
