// By hand: what a click on the map does, the edge of two clicked units, the next token of a prompt.

import { markOf, measurementOf, signed, withError } from "./compare.js";
import { meter, originText } from "./damage.js";
import { COLORS, button, h, labeled, menu, patch, percent, table } from "./kit.js";
import { nameOf, rowOf } from "./solver.js";

const MODES = [["mark", "shows its card"], ["remove", "removes or restores it (plan A)"],
  ["pair", "adds it to a pair"]];

/** Your plan as the page holds plan A: its units, and what H predicts; null without rows of H. */
export function ownPlan(problem, order) {
  const rows = order.map((u) => rowOf(problem, u));
  if (rows.some((row) => row === null)) return null;
  let [node, edge] = [0, 0];
  order.forEach((u, k) => {
    node += problem.half[u];
    for (const v of order.slice(0, k)) edge += rows[k][v];
  });
  const removed = order.reduce((total, u) => total + problem.costs[u], 0);
  return { order, node, edge, strength: null, ratio: removed / problem.total, controls: null,
    curve: null, hand: true };
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
    line(`${nameOf(problem, u)} alone`, pu, one, found[0]?.error),
    line(`${nameOf(problem, v)} alone`, pv, two, found[1]?.error),
    line("sum of both alone", pu + pv, here ? one + two : null),
    line("removed together", pu + pv + row[v], both, found[2]?.error),
    line("edge: together − sum", row[v], edge ? edge.difference : null, edge?.error),
  ] };
}

/** The pairs whose edge was measured before, strongest first as they are kept. */
export const measuredPairs = (known) =>
  (known.measured ?? []).filter((m) => m.edge).map((m) => m.edge.units);

/** What a measured edge says, in a sentence. */
export function edgeText({ measured, error }) {
  if (measured === null) return "";
  if (!error || Math.abs(measured) < 2 * error) {
    return "The measured edge cannot be told from 0 yet: it is less than two standard errors.";
  }
  return measured > 0 ? "Together they cost more than alone: each made up for the loss of the other."
    : "Together they cost less than alone: part of the harm is the same harm.";
}

/** A token as text that can be seen: blanks and line ends have signs. */
export const tokenText = (token) => `“${token.replaceAll("\n", "⏎").replace(/^ +$/, "␣")}”`;

/**
 * The panels: `modes` for above the map, `pair` and `next`. does: put(values) sets traits, clear()
 * empties your plan. draw(facts) shows them.
 */
export function handPanels(problem, { put, clear }) {
  const mode = menu(MODES, (value) => put({ mode: value }));
  const empty = button("Start empty", "begin your plan without any removed unit", clear);
  let own = null;
  const budget = button("Same budget for B", "set the ratio to that of your plan",
    () => put({ ratio: Math.min(0.6, Number(own.realized.toFixed(4))) }));
  const tools = h("span", { class: "cc-row" }, empty, budget);
  const modes = h("div", { class: "cc-row cc-hand" },
    labeled("a click on a unit", mode), tools);
  const pair = h("div", { class: "cc-damage cc-pair" });
  const ready = h("select", { onchange: () =>
    put({ pair: ready.value.split(",").filter(Boolean).map(Number) }) });
  const choice = labeled("pairs measured before", ready);
  const box = h("input", { type: "text", "aria-label": "prompt",
    onchange: () => put({ prompt: box.value }) });
  const tokens = h("div", {});
  const next = h("div", { class: "cc-damage" }, h("h4", {}, "Next token"),
    labeled("after this text", box), tokens);

  function drawPair(units, known, live) {
    pair.hidden = mode.value !== "pair" && units.length < 2;
    const title = h("h4", {}, "Two units and their edge");
    const before = measuredPairs(known);
    const names = (of) => of.map((u) => nameOf(problem, u)).join(" and ");
    if (ready.length !== before.length + 1) {
      ready.replaceChildren(h("option", { value: "" }, "choose one"),
        ...before.map((of) => h("option", { value: String(of) }, names(of))));
    }
    ready.value = String(before.find((of) => of.every((u) => units.includes(u))) ?? "");
    choice.hidden = !before.length;
    if (units.length < 2) {
      pair.replaceChildren(title, choice, h("p", { class: "cc-muted" }, units.length
        ? `${nameOf(problem, units[0])}: click a second unit.` : "Click two units on the map."));
      return true;
    }
    const account = pairRows(problem, units, known, live);
    if (!account) return false;
    const { rows, origin } = account;
    const most = (name) => Math.max(1e-12, ...rows.map((r) => Math.abs(r[name] ?? 0)));
    const color = (r, k) => (k < 4 ? "var(--cc-muted)" : COLORS[r < 0 ? "negative" : "positive"]);
    const cell = (value, error, k, scale) => (value === null ? live.text ? "…" : "–" : meter(
      k < 4 ? withError({ risk: value, error })
        : signed(value, (x) => withError({ risk: x, error })), Math.abs(value) / scale, color(value, k)));
    const [p, m] = [most("predicted"), most("measured")];
    pair.replaceChildren(title, choice, table(["nats per token", "predicted by H", "measured"],
      rows.map((r, k) => [r.name, cell(r.predicted, null, k, p), cell(r.measured, r.error, k, m)])),
    h("p", {}, edgeText(rows[4])),
    h("p", { class: "cc-muted" }, origin ? `Measured on ${originText(origin, live, Date.now() / 1000)}.`
      : live.text ? "Being measured." : "Measuring needs a kernel with the model and text."));
    return true;
  }
  function drawNext(a, b, live) {
    const found = live.next;
    next.hidden = !found;
    if (!found) return;
    if (document.activeElement !== box) box.value = found.prompt;
    const shown = [a, b].map((plan, k) => plan && found.plans[k] === markOf(plan.order));
    const most = Math.max(1e-12, ...found.rows.flatMap((r) => r.shares));
    const colors = ["var(--cc-muted)", COLORS.a, COLORS.b];
    const heads = ["dense", "A", "B"].map((name, k) => [patch(colors[k]), name]);
    tokens.replaceChildren(found.rows.length ? table(["token", ...heads], found.rows.map((r) =>
      [tokenText(r.token), ...r.shares.map((share, k) => (share === null || (k && !shown[k - 1])
        ? "…" : meter(percent(share), share / most, colors[k])))])) : "");
  }
  /** facts: mode, units of the pair, a, b, known, live. Returns whether no row of H is missing. */
  function draw({ chosen, units, a, b, known, live }) {
    mode.value = chosen;
    own = a;
    tools.hidden = chosen !== "remove";
    budget.disabled = !a?.hand;
    drawNext(a, b, live);
    return drawPair(units, known, live);
  }
  return { modes, pair, next, draw };
}
