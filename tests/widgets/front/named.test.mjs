// What the front ends call a matrix that is not H, and what a CSV may hold.

import assert from "node:assert/strict";
import test from "node:test";

import { named, stemOf, toCsv } from "../../../widgets/cocurve_widgets/front/kit.js";

const model = (matrix) => ({ get: (name) => (name === "matrix_name" ? matrix : undefined) });

test("labels and files name a matrix that is not H", () => {
  assert.equal(named(model("measured KL"), "Map"), "Map. From the measured KL");
  assert.equal(stemOf(model("measured KL"), "plan"), "plan_measured_KL");
  for (const real of [model("H"), model(undefined)]) { // the build monitor has no such trait
    assert.equal(named(real, "Map"), "Map");
    assert.equal(stemOf(real, "plan"), "plan");
  }
});

test("no cell of a CSV begins a formula, and numbers stay numbers", () => {
  const rows = [["=1+1", -2.5], ['@a","b', 3], ["\rx", null], ["a-b", "-"]];
  assert.equal(toCsv({ columns: ["=name", "value"], rows }),
    "'=name,value\n'=1+1,-2.5\n\"'@a\"\",\"\"b\",3\n\"'\rx\",\na-b,'-\n");
});
