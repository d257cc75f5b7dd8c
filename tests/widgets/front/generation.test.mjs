// The functions of generation.js that need no page.
import assert from "node:assert/strict";
import { test } from "node:test";

import { compared } from "../../../widgets/cocurve_widgets/front/compare.js";
import { forkBar, grown } from "../../../widgets/cocurve_widgets/front/generation.js";

const tokens = (...ids) => ids.map((id) => [id, `t${id} `]);

test("words of all texts are shared, and the first that differs is marked in each", () => {
  const found = compared(["a b c d", "a b x c", "a b y"]);
  assert.deepEqual(found.map((some) => some.filter(({ first }) => first).map(({ word }) => word)),
    [[" c"], [" x"], [" y"]]);
  assert.deepEqual(found[0].map(({ shared }) => shared), [true, true, false, false]);
  const marks = (texts, growing) => compared(texts, growing).map((some) => some.findIndex(({ first }) => first));
  assert.deepEqual(marks(["a b", "a b"]), [-1, -1]);
  assert.deepEqual(marks(["a b", "a"]), [1, -1]); // the other one has ended
  assert.deepEqual(marks(["a bo", "a bot"], true), [-1, -1]); // a word that still grows
  assert.deepEqual(marks(["", "x"]), [-1, 0]);
});

test("texts grow only by what follows on them", () => {
  const state = { run: 2, prompt: "p", tokens: { dense: tokens(1), diagonal: tokens(1) } };
  const message = { run: 2, after: { dense: 1, diagonal: 1, pruned: 0 },
    append: { dense: tokens(2, 3), diagonal: tokens(7), pruned: tokens(8) } };
  const next = grown(state, message);
  assert.deepEqual(next.tokens, { dense: tokens(1, 2, 3), diagonal: tokens(1, 7), pruned: tokens(8) });
  assert.equal(next.prompt, "p");
  assert.deepEqual(state.tokens.dense, tokens(1)); // the old state stays
  assert.equal(grown(next, message), null); // twice the same
  assert.equal(grown(state, { ...message, run: 3 }), null);
  assert.equal(grown(null, message), null); // a view opened in the middle
});

test("the fork stands on the bar of the first differing token", () => {
  const bar = (generated) => ({ token: "x", kl: 0, generated });
  const bars = [bar(false), bar(false), bar(true), bar(true), bar(true)];
  assert.equal(forkBar(bars, 0), 2);
  assert.equal(forkBar(bars, 2), 4);
  assert.equal(forkBar(bars, 3), null); // the ribbon's text ends before
  assert.equal(forkBar(bars, null), null);
  assert.equal(forkBar([bar(false)], 0), null);
});
