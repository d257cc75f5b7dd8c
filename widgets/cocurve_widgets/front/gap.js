// Why the measured KL is not the predicted one: predicted x other text x parabola x adding up.

import { brief } from "./compare.js";
import { h, logAxis } from "./kit.js";
import { markOf } from "./measured.js";
import { place, sheet, stop, svg, text } from "./svg.js";

const WHY = {
  text: ["other text", "H was built on other rows of text than those that the plan is measured on, and counts the likeliest tokens only. "
    + "On the measured rows H itself is larger or smaller by this factor."],
  parabola: ["parabola", "H is the curvature of the KL, so it predicts a parabola. Where the whole model is sure of the next word, "
    + "the KL rises faster than its parabola."],
  adding: ["adding up", "H adds up what each part changes when it is removed alone. Removed together, later parts "
    + "work on inputs that are already wrong, and their changes do not add up."],
};

/** The steps from a predicted to a measured KL: [{name, from, to, factor, why}]; null where they are not known. */
export function stepsOfGap(gap, predicted) {
  if (!gap) return null;
  let from = predicted;
  return Object.entries(WHY).map(([key, [name, why]]) => {
    const step = { name, why, from, to: from * gap[key], factor: gap[key] };
    from = step.to;
    return step;
  });
}

/** The panel; draw(facts) shows it. */
export function gapPanel(first) {
  const [home, words] = [h("div", {}), h("p", { class: "cc-said" })];
  let chosen = 2;

  function draw(facts) {
    const { plan, record, colors, width, ink } = facts;
    const predicted = plan ? plan.node + plan.edge : 0;
    const steps = plan && stepsOfGap(first.gaps?.[markOf(plan.order)], predicted);
    home.hidden = !steps;
    if (!steps) {
      words.textContent = !plan || !record ? "This plan is not measured." : `Measured is ${brief(record.risk / predicted)} times what H predicted. `
        + `${first.gaps && Object.keys(first.gaps).length ? "Where this comes from was measured for other plans: try λ = ½." : "Where this comes from was not measured here: cl.split_risk tells."}`;
      return;
    }
    const [left, right, tall] = [110, width - 70, 24];
    const { at } = logAxis([predicted, ...steps.map((step) => step.to)], left, right);
    const row = (k, name, value, ...parts) => [text(left - 10, k * tall + 16, name, { "text-anchor": "end", fill: colors.text }),
      text(right + 8, k * tall + 16, value), ...parts];
    const total = (k, name, value) => row(k, name, brief(value), svg("rect", { x: left, y: k * tall + 4, width: Math.max(2, at(value) - left),
      height: tall - 8, fill: k ? ink : "none", stroke: ink, "stroke-dasharray": k ? null : "4 3" }));
    place(home, sheet(width, 5 * tall + 4, colors, { role: "group", "aria-label": "from predicted to measured KL, on a logarithmic scale" },
      ...total(0, "predicted", predicted),
      ...steps.flatMap((step, k) => stop({ role: "button", "data-here": k === chosen ? "1" : null, "aria-label": `${step.name}: times ${brief(step.factor)}` }, () => {
        chosen = k;
        draw(facts);
      }, svg("rect", { x: 0, y: (k + 1) * tall, width, height: tall, fill: "transparent" }),
      svg("rect", { x: Math.min(at(step.from), at(step.to)), y: (k + 1) * tall + 4, width: Math.max(2, Math.abs(at(step.to) - at(step.from))),
        height: tall - 8, fill: k === chosen ? colors.text : colors.muted }),
      ...row(k + 1, step.name, `× ${brief(step.factor)}`))),
      ...total(4, "measured", steps[2].to)));
    words.textContent = `${steps[chosen].name}: × ${brief(steps[chosen].factor)}. ${steps[chosen].why}`;
  }
  return { panel: h("div", {}, home, words), draw };
}
