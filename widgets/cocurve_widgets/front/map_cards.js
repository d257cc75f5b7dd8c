// The cards beside the map of H: the pair under the pointer, and the plan's ledger up to a step.

import { h, percent, show, unitCount } from "./kit.js";
import { accountOf } from "./map_parts.js";

const RECENT = 8; // steps listed in the ledger
const NUMBER = "white-space:nowrap"; // stays on one line
const TIGHT = `${NUMBER};padding:2px 5px`;

const fact = (first, ...texts) => h("tr", {}, h("td", {}, first),
  ...texts.map((text) => h("td", { style: NUMBER }, text)));
const tight = (tag, ...texts) =>
  h("tr", {}, ...texts.map((text) => h(tag, { style: TIGHT }, text)));
const table = (heads, rows) => h("table", {}, heads && h("thead", {}, heads),
  h("tbody", {}, ...rows));
const hint = (title, text) => [h("h4", {}, title), h("p", { class: "cc-muted" }, text)];

/** A number read off what was sent: three digits, more are lost. */
const digits = (x) => (x === null ? "-" : show(Number(x.toPrecision(3))));

/** The fate of a unit in a plan, in words. */
function fateIn(plan, unit) {
  if (!plan.order) return "no plan";
  const found = plan.order.indexOf(unit);
  if (found < 0) return "kept";
  return plan.ordered ? `removed at step ${found + 1}` : "removed";
}

/** The pair of row u and column v: its edge and rho (null where undefined), and both units. */
export function pairCardOf({ u, v, names, saliency, plan, edge, rho }) {
  if (u === null || v === null) {
    return hint("No pair chosen", "Point at a cell to see its two units; click to keep them.");
  }
  const facts = (unit) => fact(names[unit], digits(saliency[unit]), fateIn(plan, unit));
  const units = table(h("tr", {}, ...["unit", "saliency H_uu", "plan"].map((text) =>
    h("th", {}, text))), (u === v ? [u] : [u, v]).map(facts));
  if (u === v) return [h("h4", {}, names[u]), units];
  return [h("h4", {}, `${names[u]} and ${names[v]}`),
    table(null, [fact("H_uv, nats per token", digits(edge)), fact("correlation ρ_uv", digits(rho))]),
    units];
}

/** The plan after `step` steps: the terms of the last unit, the sums, and the steps before. */
export function planCardOf({ plan, step, names, costs }) {
  if (!plan.order?.length) {
    return hint("No plan yet",
      "Choose one in another instrument, or set session.selection, to see it here.");
  }
  const { unit, ownNode, ownEdge, ...sums } = accountOf(plan, step);
  const title = unit === null ? `Nothing removed, ${unitCount(plan.order.length)} to go`
    : plan.ordered ? `Step ${step} of ${plan.order.length}: ${names[unit]}`
      : `${unitCount(step)} removed`;
  const own = unit === null || !plan.ordered ? [] : [fact("½ H_uu", show(ownNode)),
    fact("Σ H_uv with units removed before", show(ownEdge)),
    ...(plan.strength === null ? [] : [
      fact(`score: (½ H_uu + ${show(plan.strength)} · Σ H_uv) per parameter`,
        show((ownNode + plan.strength * ownEdge) / costs[unit]))])];
  const steps = Array.from({ length: Math.min(RECENT, step) }, (_, k) => step - k).map((k) => {
    const name = names[plan.order[k - 1]];
    return tight("td", plan.ordered ? `${k} ${name}` : name, show(plan.node[k - 1]),
      show(plan.edge[k - 1]), show(accountOf(plan, k).risk));
  });
  return [h("h4", {}, title),
    table(null, [...own, fact("predicted risk so far, nats per token", show(sums.risk)),
      fact("its node part", show(sums.node)), fact("its edge part", show(sums.edge)),
      fact("removed share of the cost", percent(sums.gone, 2))]),
    h("h4", {}, plan.ordered ? "Ledger, newest first" : "Removed units, in no order"),
    table(tight("th", "unit", "node", "edge", "risk"), steps)];
}
