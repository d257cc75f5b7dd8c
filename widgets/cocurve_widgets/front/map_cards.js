// The cards beside the map of H: the pair under the pointer, and the plan's ledger up to a step.

import { fateText, h, percent, show, table, unitCount } from "./kit.js";
import { accountOf } from "./map_parts.js";

const RECENT = 8; // steps listed in the ledger

const hint = (title, text) => [h("h4", {}, title), h("p", { class: "cc-muted" }, text)];

/** A number read off what was sent: three digits, more are lost. */
const digits = (x) => (x === null ? "-" : show(Number(x.toPrecision(3))));

/** The pair of row u and column v: its edge and rho (null where undefined), and both units. */
export function pairCardOf({ u, v, names, saliency, plan, edge, rho }) {
  if (u === null || v === null) {
    return hint("No pair chosen", "Point at a cell to see its two units; click to keep them.");
  }
  const facts = (unit) => [names[unit], digits(saliency[unit]),
    fateText(unit, plan.order, plan.ordered)];
  const units = table(["unit", "saliency H_uu", "plan"], (u === v ? [u] : [u, v]).map(facts));
  if (u === v) return [h("h4", {}, names[u]), units];
  return [h("h4", {}, `${names[u]} and ${names[v]}`),
    table(null, [["H_uv, nats per token", digits(edge)], ["correlation ρ_uv", digits(rho)]]),
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
  const score = `score: (½ H_uu + ${show(plan.strength)} · Σ H_uv) per parameter`;
  const own = unit === null || !plan.ordered ? [] : [["½ H_uu", show(ownNode)],
    ["Σ H_uv with units removed before", show(ownEdge)],
    ...(plan.strength === null ? []
      : [[score, show((ownNode + plan.strength * ownEdge) / costs[unit])]])];
  const steps = Array.from({ length: Math.min(RECENT, step) }, (_, k) => step - k).map((k) => {
    const name = names[plan.order[k - 1]];
    return [plan.ordered ? `${k} ${name}` : name, show(plan.node[k - 1]), show(plan.edge[k - 1]),
      show(accountOf(plan, k).risk)];
  });
  return [h("h4", {}, title),
    table(null, [...own, ["predicted risk so far, nats per token", show(sums.risk)],
      ["its node part", show(sums.node)], ["its edge part", show(sums.edge)],
      ["removed share of the cost", percent(sums.gone, 2)]]),
    h("h4", {}, plan.ordered ? "Ledger, newest first" : "Removed units, in no order"),
    table(["unit", "node", "edge", "risk"], steps, { class: "cc-tight" })];
}
