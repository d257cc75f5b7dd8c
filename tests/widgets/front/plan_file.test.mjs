// A plan file of Python's becomes plan A of the page, or is refused by its field.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

import { planOf } from "../../../widgets/cocurve_widgets/front/plan_file.js";
import { unpack } from "../../../widgets/cocurve_widgets/front/solver.js";

const [{ packed, file }] = JSON.parse(readFileSync(process.env.COCURVE_FIXTURES, "utf8"));
const bytes = (text) => new DataView(Uint8Array.from(Buffer.from(text, "base64")).buffer);
const problem = unpack({ ...packed, saliency: bytes(packed.saliency),
  connectivity: bytes(packed.connectivity), matrix: bytes(packed.matrix) });

test("a file of Python's is taken with its lambda and ratio, one of names as well", () => {
  const { pin, fault } = planOf(problem, file);
  assert.equal(fault, undefined);
  assert.deepEqual([pin.order, pin.strength, pin.ratio], [JSON.parse(file).pruned, 0.3, 0.2]);
  assert.deepEqual(planOf(problem, JSON.stringify({ pruned: ["L0.attention[0]"] })).pin.order, [0]);
});

test("a file that is no plan of these units is refused by its field", () => {
  const refused = (field, change) => {
    const plan = JSON.parse(file);
    change(plan);
    const { pin, fault } = planOf(problem, JSON.stringify(plan));
    assert.equal(pin, undefined);
    assert.ok(fault.includes(`“${field}”`), `${field}: ${fault}`);
  };
  refused("format", (plan) => { plan.format = "cocurve-H"; });
  refused("format", (plan) => { plan.version = 2; });
  refused("units", (plan) => { plan.units.units.pop(); });
  refused("units[3]", (plan) => { plan.units.units[3][5] = 7; });
  refused("pruned", (plan) => { delete plan.pruned; });
  refused("pruned[1]", (plan) => { plan.pruned[1] = 1000; });
  refused("pruned[1]", (plan) => { plan.pruned[1] = plan.pruned[0]; });
  refused("pruned[0]", (plan) => { plan.pruned[0] = "L9.ffn[0]"; });
  refused("gains", (plan) => { plan.gains = { 5: 1.1 }; });
  refused("interaction_strength", (plan) => { plan.interaction_strength = "0.3"; });
  assert.ok(planOf(problem, "{pruned").fault.includes("not JSON"));
});
