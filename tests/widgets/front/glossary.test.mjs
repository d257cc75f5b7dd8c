import assert from "node:assert/strict";
import test from "node:test";

import { TERMS } from "../../../widgets/cocurve_widgets/front/glossary.js";

test("the words that a reader needs are explained in a few whole sentences", () => {
  assert.deepEqual(Object.keys(TERMS), ["lambda", "ratio", "unit", "saliency", "edge", "bridge", "nats",
    "KL", "plan", "guard"]);
  for (const text of Object.values(TERMS)) assert.match(text, /^[A-Z].{40,200}\.$/);
});
