// The cards beside the map of H: the pair under the pointer, and the plan up to a step.

import { fateText, h, percent, show, table, unitCount } from "./kit.js";
import { accountOf } from "./map_parts.js";

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

/** The plan after `step` steps: the terms of the last unit, and the sums. */
export function planCardOf({ plan, step, names }) {
  if (!plan.order?.length) {
    return hint("No plan yet",
      "Choose one in another instrument, or set session.selection, to see it here.");
  }
  const { unit, ownNode, ownEdge, ...sums } = accountOf(plan, step);
  const title = unit === null ? `Nothing removed, ${unitCount(plan.order.length)} to go`
    : plan.ordered ? `Step ${step} of ${plan.order.length}: ${names[unit]}`
      : `${unitCount(step)} removed`;
  const own = unit === null || !plan.ordered ? [] : [["½ H_uu", show(ownNode)],
    ["Σ H_uv with units removed before", show(ownEdge)]];
  return [h("h4", {}, title),
    table(null, [...own, ["predicted risk so far, nats per token", show(sums.risk)],
      ["its node part", show(sums.node)], ["its edge part", show(sums.edge)],
      ["removed share of the cost", percent(sums.gone, 2)]])];
}
