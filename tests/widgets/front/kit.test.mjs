import assert from "node:assert/strict";
import test from "node:test";

import { Cleaner, SILENCE, ask, show, typedNumber } from "../../../widgets/cocurve_widgets/front/kit.js";

const field = (text, min = "", max = "", step = "any") => ({ min, max, step,
  valueAsNumber: text === "" ? NaN : Number(text) });

test("a typed number is brought into its bounds, and letters are none", () => {
  assert.equal(typedNumber(field("-1", "0", "5")), 0);
  assert.equal(typedNumber(field("100000", "1", "4096")), 4096);
  assert.equal(typedNumber(field("0.7", "0", "5")), 0.7);
  assert.equal(typedNumber(field("2.6", "0", "", "1")), 3);
  assert.equal(typedNumber(field("", "0", "5")), null);
});

test("a negative number has the minus that a difference has", () => {
  assert.deepEqual([-0.029234, -1.64e-5, 0.25, 2e6, 0, null].map(show),
    ["−0.02923", "−1.64e-5", "0.25", "2.00e+6", "0", "-"]);
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
