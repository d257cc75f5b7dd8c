// A plan in and out of the page: a file dropped on it becomes plan A, or is refused by its field;
// "Take this plan" copies the Python and the command that prune a model by the plan shown.

import { ownPlan } from "./by_hand.js";
import { assign, button, h, labeled } from "./kit.js";
import { KINDS, nameOf } from "./solver.js";

/** Plan A from the text of a file, of Python's `Selection.to_json` or this page's: {pin}, or {fault} with the field. */
export function planOf(problem, text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    return { fault: `it is not JSON (${error.message})` };
  }
  if (typeof file !== "object" || !Array.isArray(file?.pruned)) return { fault: "“pruned” is not a list of units" };
  if ("format" in file && (file.format !== "cocurve-selection" || file.version !== 1)) {
    return { fault: `“format” is ${JSON.stringify(file.format)} version ${JSON.stringify(file.version)}, not "cocurve-selection" version 1` };
  }
  const units = file.units?.units;
  if ("units" in file && !Array.isArray(units)) return { fault: "“units” has no list of units" };
  if (units && units.length !== problem.size) return { fault: `“units” has ${units.length} units, and this page ${problem.size}` };
  const mine = (u) => [KINDS[problem.kinds[u]], problem.layers[u], problem.places[u], problem.costs[u]];
  const other = (units ?? []).findIndex((unit, u) => String([unit[0], unit[1], unit[2], unit[5]]) !== String(mine(u)));
  if (other >= 0) return { fault: `“units[${other}]” is ${units[other]}, and here it is ${nameOf(problem, other)} of ${problem.costs[other]} parameters` };
  const names = new Map(problem.places.map((_, u) => [nameOf(problem, u), u]));
  const order = file.pruned.map((unit) => (typeof unit === "string" ? names.get(unit)
    : Number.isInteger(unit) && unit >= 0 && unit < problem.size ? unit : undefined));
  const wrong = order.findIndex((u, k) => u === undefined || order.indexOf(u) < k);
  if (wrong >= 0) {
    const why = order[wrong] === undefined ? "no unit of this page" : "there twice";
    return { fault: `“pruned[${wrong}]”, ${JSON.stringify(file.pruned[wrong])}, is ${why}` };
  }
  if (Object.keys(file.gains ?? {}).length) return { fault: "“gains” is not empty, and this page scales no units" };
  const strength = file.interaction_strength ?? file.controls?.interaction_strength ?? null;
  const ratio = file.requested_ratio ?? file.controls?.ratio ?? null;
  for (const [name, value] of Object.entries({ interaction_strength: strength, requested_ratio: ratio })) {
    if (value !== null && !Number.isFinite(value)) {
      return { fault: `“${name}” is ${JSON.stringify(value)}, not a number` };
    }
  }
  const plan = ownPlan(problem, order);
  return { pin: { ...plan, strength, ratio: ratio ?? plan.ratio, hand: false } };
}

/** The Python that writes a plan of these units, and the command that prunes by it. */
export function takeText(problem, order, { model, ratio, strength }) {
  const groups = Math.max(0, ...problem.places.map((place, u) => (problem.kinds[u] ? place + 1 : 0)));
  const names = order.map((u) => JSON.stringify(nameOf(problem, u)));
  const lines = Array.from({ length: Math.ceil(names.length / 5) }, (_, k) => `    ${names.slice(5 * k, 5 * k + 5).join(", ")},`);
  return [`import cocurve_lab as cl`, ``, `model, tokenizer = cl.load_model(${JSON.stringify(model)})`,
    `units = cl.enumerate_units(model${groups && groups !== 16 ? `, ffn_groups=${groups}` : ""})`,
    `plan = cl.Selection.from_pruned(units, [`, ...lines, `], interaction_strength=${strength}, requested_ratio=${ratio})`,
    `with open("plan.json", "w") as file:`, `    file.write(plan.to_json())`, `# then, in a terminal:`,
    `# cocurve prune ${model} plan.json --out smaller`, ``].join("\n");
}

/** The controls of both, in the folded part of the page's instrument. */
export function planFiles(plan, problem, root) {
  const taken = h("textarea", { readonly: true, rows: 6, "aria-label": "Python and command of this plan", hidden: true });
  const take = button("Take this plan", "copy Python and a command that prune a model by it", () => {
    const pin = plan.get("_pin"); // the plan on the map: yours, or the solver's
    const order = pin.hand ? pin.order : plan.get("plans")?.present;
    if (!order) return;
    taken.hidden = false;
    taken.value = takeText(problem, order, { model: plan.get("model_name")?.split(" (")[0] || "MODEL",
      ratio: pin.hand ? Number(pin.ratio.toFixed(6)) : plan.get("ratio"), strength: pin.hand ? "None" : plan.get("interaction_strength") });
    taken.select();
    const old = () => document.execCommand("copy"); // where the page may not write to the clipboard by itself
    if (navigator.clipboard) navigator.clipboard.writeText(taken.value).catch(old);
    else old();
  });
  async function read(file) {
    if (!file) return;
    const { pin, fault } = planOf(problem, await file.text());
    assign(plan, pin ? { error: "", _pin: pin } : { error: `${file.name} is refused: ${fault}. Plan A stays as it was.` });
    root.querySelector(pin ? ".cc-map" : ".cc-error").scrollIntoView({ block: "nearest" });
  }
  const pick = h("input", { type: "file", accept: ".json", onchange: () => read(pick.files[0]).then(() => { pick.value = ""; }) });
  root.querySelector(".cc-files").after(h("div", { class: "cc-plan" }, h("div", { class: "cc-row cc-versus" },
    labeled("plan A from a file, or drop one on the page", pick), take), taken));
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    read(event.dataTransfer.files[0]);
  });
}
