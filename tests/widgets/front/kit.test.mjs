import assert from "node:assert/strict";
import test from "node:test";

import { Cleaner, SILENCE, ask, stemOf, toCsv, typedNumber } from "../../../widgets/cocurve_widgets/front/kit.js";

const field = (text, min = "", max = "", step = "any") => ({ min, max, step,
  valueAsNumber: text === "" ? NaN : Number(text) });

test("a typed number is brought into its bounds, and letters are none", () => {
  assert.equal(typedNumber(field("-1", "0", "5")), 0);
  assert.equal(typedNumber(field("100000", "1", "4096")), 4096);
  assert.equal(typedNumber(field("0.7", "0", "5")), 0.7);
  assert.equal(typedNumber(field("2.6", "0", "", "1")), 3);
  assert.equal(typedNumber(field("", "0", "5")), null);
});

function fakeModel(send) {
  const handlers = new Set();
  return { send, on: (_, job) => handlers.add(job), off: (_, job) => handlers.delete(job),
    answer: (message) => [...handlers].forEach((job) => job(message)), handlers };
}

test("a kernel that drops what it is sent is noticed, and one that answers is not", (context) => {
  context.mock.timers.enable({ apis: ["setTimeout"] });
  let silent = 0;
  const [deaf, good, broken] = [fakeModel(() => {}), fakeModel(() => {}), fakeModel(() => {
    throw new Error("Cannot send");
  })];
  const cleaner = new Cleaner();
  for (const model of [deaf, good, broken]) {
    ask(model, cleaner, { want: ".json" }, ["msg:custom"], () => { silent += 1; });
  }
  assert.equal(silent, 1); // an error is known at once
  good.answer({ row: 3 }); // another message is no answer
  good.answer({ file: ".json" });
  context.mock.timers.tick(SILENCE + 1);
  assert.equal(silent, 2);
  assert.equal(deaf.handlers.size + good.handlers.size + broken.handlers.size, 0);
});

test("files name a matrix that is not H", () => {
  const model = (matrix) => ({ get: (name) => (name === "matrix_name" ? matrix : undefined) });
  assert.equal(stemOf(model("measured KL"), "plan"), "plan_measured_KL");
  for (const real of ["H", undefined]) assert.equal(stemOf(model(real), "plan"), "plan");
});

test("no cell of a CSV begins a formula, and numbers stay numbers", () => {
  const rows = [["=1+1", -2.5], ['@a","b', 3], ["\rx", null], ["a-b", "-"]];
  assert.equal(toCsv({ columns: ["=name", "value"], rows }),
    "'=name,value\n'=1+1,-2.5\n\"'@a\"\",\"\"b\",3\n\"'\rx\",\na-b,'-\n");
});
