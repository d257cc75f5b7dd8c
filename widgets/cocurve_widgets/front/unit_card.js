// The card of the lambda explorer: what one unit costs, and why the plan removes it or not.

import { term } from "./glossary.js";
import { counted, h, show, table } from "./kit.js";
import { ledger, nameOf } from "./solver.js";

/**
 * Four rows of a unit at a fixed place: what it costs alone, with its edges, its price now, and what its
 * strongest partner costs once it is gone (`after`: prices then, or null).
 */
export function fourRows(card, { problem, order, controls, price, after, u }) {
  const found = u === null ? null : ledger(problem, order, controls.interaction_strength, u);
  if (!found || !price) {
    card.replaceChildren(h("p", { class: "cc-muted" }, "Point at a cell for its price; a click removes it."));
    return;
  }
  const rank = price.living.indexOf(u);
  const million = (value) => show(Number((1e6 * value).toPrecision(3)));
  const partner = after && found.partners.find(({ unit }) => price.living.includes(unit))?.unit;
  card.replaceChildren(h("b", {}, `${nameOf(problem, u)}, ${rank < 0 ? "removed" : "alive"}`), table(null, [
    ["alone (½ H_uu)", show(found.half)],
    [`pairs with removed cells (λ Σ H_uv)`, show(found.edges)],
    ...(rank < 0 ? [] : [["price, per million parameters", `${million(price.prices[u])}, ${rank + 1} of ${price.living.length}`]]),
    ...(partner == null ? [] : [[`then ${nameOf(problem, partner)} costs`, `${million(price.prices[partner])} → ${million(after.prices[partner])}`]])]));
}

/**
 * Fill the card. Returns whether everything was there: on a large model a row of H comes from the
 * kernel first.
 *
 * facts: problem; order and strength of the plan; u, the unit; gone, unit -> its step;
 * turns, {below, above} with the lambdas at which it changes sides, or false while unknown.
 */
export function drawCard(card, { problem, order, strength, u, gone, turns }) {
  const found = ledger(problem, order, strength, u);
  if (!found) {
    card.replaceChildren(h("h4", {}, nameOf(problem, u)), h("p", {}, "waiting for the kernel"));
    return false;
  }
  const at = turns && [turns.below, turns.above].filter((b) => b !== null).map(show).join(" and ");
  const removed = gone.has(u);
  const units = (list) => (list.length
    ? table(null, list.map(([v, text]) => [nameOf(problem, v), text]))
    : h("p", { class: "cc-muted" }, "none"));
  card.replaceChildren(
    h("h4", {}, `${nameOf(problem, u)}: ${removed ? `removed at step ${gone.get(u) + 1}` : "kept"}`),
    table(null, [
      [term("saliency", "saliency (H_uu)"), show(problem.saliency[u])],
      ["connectivity (b_u)", show(problem.connectivity[u])],
      ["cost", counted(problem.costs[u], "parameter")],
      ["alone (½ H_uu)", show(found.half)],
      [`its edges (lambda · Σ H_uv) to ${removed ? "units removed before" : "the plan"}`,
        show(found.edges)],
      [removed ? "marginal at its step" : "marginal if removed next", show(found.marginal)],
      ["per parameter", show(found.score)],
      ["flips at lambda", turns ? at || "never in [0, 1]" : "being computed"]]),
    h("h4", {}, "Largest terms (lambda · H_uv)"),
    units(found.terms.map((t) => [t.unit, show(t.value)])),
    h("h4", {}, "Strongest partners (H_uv, correlation ρ)"),
    units(found.partners.map((p) => [p.unit, `${show(p.edge)}, ${show(p.correlation)}`])));
  return true;
}
