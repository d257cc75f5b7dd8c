// What the front ends say of an H that is a preview: the parts that need no page.

import assert from "node:assert/strict";
import test from "node:test";

import { named, stemOf, toCsv } from "../../../widgets/cocurve_widgets/front/kit.js";
import { untrusted } from "../../../widgets/cocurve_widgets/front/measured.js";

const model = (matrix) => ({ get: (name) => (name === "matrix_name" ? matrix : undefined) });

test("labels and files are called a preview only where H is one", () => {
  assert.equal(named(model("preview of H"), "Map"), "Map. From a preview of H");
  assert.equal(stemOf(model("preview of H"), "plan"), "plan_preview");
  assert.equal(named(model("pair KL"), "Map"), "Map. From a pair KL");
  assert.equal(stemOf(model("pair KL"), "plan"), "plan_pair_KL");
  for (const real of [model("H"), model(undefined)]) { // the build monitor has no such trait
    assert.equal(named(real, "Map"), "Map");
    assert.equal(stemOf(real, "plan"), "plan");
  }
});

test("lambda is doubted above the bound of a preview and nowhere without one", () => {
  assert.deepEqual([0, 0.5, 0.500001, 1].map((s) => untrusted({ trusted: 0.5 }, s)),
    [false, false, true, true]);
  for (const marks of [{ trusted: null }, {}, undefined, null]) {
    assert.equal(untrusted(marks, 1), false);
    assert.equal(untrusted(marks, Infinity), false);
  }
});

test("no cell of a CSV begins a formula, and numbers stay numbers", () => {
  const rows = [["=1+1", -2.5], ['@a","b', 3], ["\rx", null], ["a-b", "-"]];
  assert.equal(toCsv({ columns: ["=name", "value"], rows }),
    "'=name,value\n'=1+1,-2.5\n\"'@a\"\",\"\"b\",3\n\"'\rx\",\na-b,'-\n");
});
