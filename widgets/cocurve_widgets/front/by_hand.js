// By hand: what a click on the map does, and the edge of two clicked units.

import { button, h, labeled, menu } from "./kit.js";
import { markOf, measurementOf } from "./measured.js";
import { nameOf, rowOf } from "./solver.js";

const MODES = [["remove", "removes or restores it"], ["pair", "adds it to a pair"], ["mark", "marks it"]];

/** Your plan as `_pin` holds plan A: its units, and the share that they are. */
export function ownPlan(problem, order) {
  const removed = order.reduce((total, u) => total + problem.costs[u], 0);
  return { order, strength: null, ratio: removed / problem.total, controls: null, hand: true };
}

/** A list with an entry removed if it is in, added if it is not. */
export const toggled = (list, u) => (list.includes(u) ? list.filter((v) => v !== u) : [...list, u]);

/** The pair after a click on a unit: at most two units, the newest stay. */
export const pairWith = (pair, u) => toggled(pair, u).slice(-2);

/**
 * The account of a pair: what each unit costs alone, both summed, both together, and the edge as
 * the difference. Predicted by H, and measured where it is; null without the row of H.
 */
export function pairRows(problem, [u, v], known, live) {
  const row = rowOf(problem, u);
  if (!row) return null;
  const found = [[u], [v], [u, v]].map((order) => measurementOf(known, order, live.text));
  const here = found.every((m) => m && m.text === found[2].text && m.rows === found[2].rows);
  const edge = live.edge?.plans[0] === markOf([u, v]) ? live.edge : (here && found[2].edge) || null;
  const [one, two, both] = found.map((m) => (here ? m.risk : null));
  const [pu, pv] = [problem.half[u], problem.half[v]];
  const line = (name, predicted, measured, error) => ({ name, predicted, measured, error });
  return { origin: here ? found[2] : null, rows: [
    line(nameOf(problem, u), pu, one, found[0]?.error),
    line(nameOf(problem, v), pv, two, found[1]?.error),
    line("sum of both", pu + pv, here ? one + two : null),
    line("both together", pu + pv + row[v], both, found[2]?.error),
    line("edge: together − sum", row[v], edge ? edge.difference : null, edge?.error),
  ] };
}

/** The edges that were measured before, as they are kept: [{units, difference, error}]. */
export const measuredPairs = (known) => (known.measured ?? []).filter((m) => m.edge).map((m) => m.edge);

/** What a measured edge says, in a sentence. */
export function edgeText({ predicted, measured, error }) {
  if (measured === null) return "";
  if (!error || Math.abs(measured) < 2 * error) {
    return "The measured edge cannot be told from 0 yet: it is less than two standard errors.";
  }
  const wrong = predicted * measured < 0 ? " H has the other sign." : "";
  return `${measured > 0 ? "Together they cost more than alone: each made up for the loss of the other."
    : "Together they cost less than alone: part of the harm is the same harm."}${wrong}`;
}

/** The controls of a click; draw(scene) shows them. does: put(values) sets traits, own(order) makes a plan yours. */
export function handPanels(problem, { put, own, back }) {
  const mode = menu(MODES, (value) => put({ mode: value }));
  let mine = null;
  const budget = button("Same share for B", "set the share to that of your plan",
    () => put({ ratio: Math.min(0.6, Number(mine.realized.toFixed(4))) }));
  const solver = button("Back to the solver", "drop your plan", back);
  const panel = h("div", { class: "cc-row cc-hand" }, labeled("a click on a cell", mode),
    button("Start empty", "your plan, without any removed unit", () => own([])), budget, solver);

  function draw({ mode: chosen, a }) {
    mode.value = chosen;
    mine = a;
    for (const one of [budget, solver]) one.disabled = !a?.hand;
  }
  return { panel, draw };
}
