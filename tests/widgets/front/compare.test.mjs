import assert from "node:assert/strict";
import test from "node:test";

import { difference, layersText } from "../../../widgets/cocurve_widgets/front/compare.js";

test("units that join and leave are told apart", () => {
  const change = difference([1, 2, 3], [3, 4, 5, 2]);
  assert.deepEqual(change, { joined: [4, 5], left: [1] });
  assert.equal(layersText([0, 0, 1, 1, 2, 0], change), "0 (+1 −1), 2 (+1)");
});
