// An edge in one picture: what two units cost alone, in sum, and together.

import { edgeText, measuredPairs, pairRows } from "./by_hand.js";
import { edgeChart } from "./chart.js";
import { brief, signed, withError } from "./compare.js";
import { button, eachPair, h } from "./kit.js";
import { nameOf, rowOf } from "./solver.js";
import { place } from "./svg.js";

/**
 * The measured pairs in the order in which they are shown: surest first, and after each on which H
 * has the sign one on which it has not; at the end those within three standard errors.
 */
export function pairsInTurn(problem, known) {
  const found = measuredPairs(known).map(({ units: [u, v], difference, error }) => ({ units: [u, v],
    sure: error ? Math.abs(difference) / error : 0, right: (rowOf(problem, u)?.[v] ?? 0) * difference > 0 }));
  found.sort((a, b) => b.sure - a.sure);
  const sure = found.filter((pair) => pair.sure > 3);
  const [right, wrong] = [true, false].map((is) => sure.filter((pair) => pair.right === is));
  const turns = Array.from({ length: Math.max(right.length, wrong.length) }, (_, k) => [right[k], wrong[k]]);
  return [...turns.flat().filter(Boolean), ...found.filter((pair) => pair.sure <= 3)].map((pair) => pair.units);
}

/** The pair with the largest entry of H; null without H. */
export function strongestPair({ matrix, size }) {
  let [best, most] = [null, -1];
  eachPair(matrix ? size : 0, (u, v) => {
    const entry = u === v ? -1 : Math.abs(matrix[u * size + v]);
    if (entry > most) [best, most] = [[u, v], entry];
  });
  return best;
}

/** The panel; draw(scene, width) returns the pair whose row of H is missing. */
export function edgePanel(problem, put) {
  const strongest = strongestPair(problem);
  let shown = null;
  let turns = [];
  const next = button("next pair", "another pair: H is right about one, then wrong about one", () => {
    const at = turns.findIndex((pair) => String(pair) === String(shown));
    put({ pair: turns[(at + 1) % turns.length] });
  });
  const title = h("h4", {}, "Two units, alone and together (nats per token)");
  const [home, words] = [h("div", {}), h("p", { class: "cc-said" })];
  const panel = h("div", { class: "cc-edge" }, h("div", { class: "cc-row" }, title, next), home, words);

  function draw({ pair, known, live, now, colors, by }, width) {
    const strength = now.interaction_strength;
    turns = pairsInTurn(problem, known);
    next.hidden = turns.length < 2;
    shown = pair.length === 2 ? pair : turns[0] ?? strongest;
    panel.hidden = !shown;
    if (!shown) return null;
    const account = pairRows(problem, shown, known, live);
    if (!account) return shown;
    const rows = account.rows.slice(0, 4);
    const edge = account.rows[4];
    const counted = rows[2].predicted + strength * edge.predicted;
    const label = [...account.rows.map(({ name, predicted, measured }) =>
      `${name}: predicted ${brief(predicted)}${measured === null ? "" : `, measured ${brief(measured)}`}`)].join("; ");
    place(home, edgeChart({ rows, edge, counted, counts: `H, at λ ${brief(strength)}`,
      colors, width, label }));
    const said = edge.measured === null ? (live.text && pair.length === 2 ? ", being measured" : by === "H" ? ", not measured" : "")
      : `, measured ${signed(edge.measured, (x) => withError({ risk: x, error: edge.error }))}`;
    words.textContent = `${shown.map((u) => nameOf(problem, u)).join(" and ")}: the hatched gap is their edge, ` +
      `${signed(edge.predicted, brief)} by ${by} (ticks)${said}. ${edgeText(edge)}`;
    return null;
  }
  return { panel, draw };
}
