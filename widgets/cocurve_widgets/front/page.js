// A page without a kernel: the instruments on plain values, linked with each other.

import { keepAddress } from "./address.js";
import { renderBridge } from "./bridge.js";
import { runModel } from "./in_page.js";
import { labeled, menu } from "./kit.js";
import { renderLambda } from "./lambda.js";
import { link, localModel, revive } from "./local.js";
import { renderMap } from "./map.js";
import { pairsOf } from "./map_parts.js";
import { planFiles } from "./plan_file.js";
import { unpack } from "./solver.js";

/** The map's model: its pairs are those of H, and it marks the plan of the other instruments. */
function mapModel(state, problem, plan) {
  const map = localModel({ ...state,
    pairs: pairsOf(problem.matrix, problem.size, state.roots, state.peak) });
  plan.on("change:plans", () => {
    const order = plan.get("plans").present ?? [];
    if (String(order) === String(map.get("plan").order)) return;
    map.set("plan", { order, strength: plan.get("interaction_strength"), ordered: true });
    map.save_changes();
  });
  return map;
}

function open() {
  const all = JSON.parse(document.getElementById("cocurve-data").textContent, revive);
  const asked = new URLSearchParams(location.hash.slice(1)).get("scale");
  const scale = Object.hasOwn(all.scales ?? {}, asked ?? "") ? asked : "";
  const states = scale ? all.scales[scale] : all;
  const inside = !scale && document.getElementById("cocurve-model")?.textContent; // the model, where the page has it
  const plan = localModel({ prompt: "", _damage: { inside: Boolean(inside) }, ...states.lambda });
  const bridges = localModel(states.bridge);
  const problem = unpack(states.lambda._problem);
  const map = mapModel(states.map, problem, plan);
  link(plan, bridges, ["selected_unit", "brushed", "plans"]);
  link(bridges, map, ["selected_unit", "brushed"]);
  renderBridge({ model: bridges, el: document.getElementById("bridge") });
  renderLambda({ model: plan, el: document.getElementById("lambda") });
  renderMap({ model: map, el: document.getElementById("map") });
  const root = document.querySelector(".cocurve");
  if (all.scales) {
    const names = [["", "units"], ...Object.keys(all.scales).map((name) => [name, name])];
    const choice = menu(names, (name) => {
      location.hash = name && `scale=${name}`;
    });
    choice.value = scale;
    root.querySelector(".cc-hand").before(labeled("what is removed", choice));
  }
  if (!scale) planFiles(plan, problem, root); // a layer is no unit of a plan
  if (inside) runModel(plan, root, inside);
  keepAddress({ plan, bridge: bridges, map }, problem, scale);
  for (const one of document.querySelectorAll(".cocurve")) one.classList.add("cc-page");
}

if (typeof document !== "undefined" && document.getElementById("cocurve-data")) open();
