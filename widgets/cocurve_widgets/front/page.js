// A page without a kernel: the instruments on plain values, linked with each other.

import { keepAddress } from "./address.js";
import { renderBridge } from "./bridge.js";
import { runModel } from "./in_page.js";
import { labeled, menu } from "./kit.js";
import { renderLambda } from "./lambda.js";
import { link, localModel, revive } from "./local.js";
import { planFiles } from "./plan_file.js";
import { unpack } from "./solver.js";

function open() {
  const all = JSON.parse(document.getElementById("cocurve-data").textContent, revive);
  const asked = new URLSearchParams(location.hash.slice(1)).get("scale");
  const scale = Object.hasOwn(all.scales ?? {}, asked ?? "") ? asked : "";
  const states = scale ? all.scales[scale] : all;
  const inside = !scale && document.getElementById("cocurve-model")?.textContent; // the model, where the page has it
  const plan = localModel({ prompt: "", _damage: { inside: Boolean(inside) }, ...states.lambda });
  const bridges = localModel(states.bridge);
  const problem = unpack(states.lambda._problem);
  link(plan, bridges, ["selected_unit", "brushed", "plans"]);
  renderBridge({ model: bridges, el: document.getElementById("bridge") });
  renderLambda({ model: plan, el: document.getElementById("lambda") });
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
  keepAddress({ plan, bridge: bridges }, problem, scale);
  for (const one of document.querySelectorAll(".cocurve")) one.classList.add("cc-page");
}

if (typeof document !== "undefined" && document.getElementById("cocurve-data")) open();
