// A page without a kernel: the instruments on plain values, linked with each other.

import { keepAddress } from "./address.js";
import { renderBridge } from "./bridge.js";
import { renderLambda } from "./lambda.js";
import { unpack } from "./solver.js";

/** The widget model that render() needs, over plain values; save_changes announces changes. */
export function localModel(values) {
  const handlers = new Map();
  const changed = new Set();
  const list = (event) => handlers.get(event) ?? handlers.set(event, []).get(event);
  return {
    get: (name) => values[name],
    set(name, value) {
      if (values[name] === value) return; // linked models would otherwise echo without end
      values[name] = value;
      changed.add(name);
    },
    save_changes() {
      const names = [...changed];
      changed.clear();
      for (const name of names) for (const job of [...list(`change:${name}`)]) job();
    },
    on: (event, job) => list(event).push(job),
    off: (event, job) => handlers.set(event, list(event).filter((other) => other !== job)),
    send: () => undefined,
  };
}

/** Keep traits of two models equal. */
export function link(one, other, names) {
  const copy = (from, to, name) => () => {
    to.set(name, from.get(name));
    to.save_changes();
  };
  for (const name of names) {
    one.on(`change:${name}`, copy(one, other, name));
    other.on(`change:${name}`, copy(other, one, name));
  }
}

/** {"$bytes": base64} anywhere inside becomes a DataView. */
export function revive(value) {
  if (Array.isArray(value)) return value.map(revive);
  if (value === null || typeof value !== "object") return value;
  if (value.$bytes !== undefined) {
    const raw = Uint8Array.from(atob(value.$bytes), (c) => c.charCodeAt(0));
    return new DataView(raw.buffer);
  }
  return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, revive(inner)]));
}

function open() {
  const states = revive(JSON.parse(document.getElementById("cocurve-data").textContent));
  const [plan, bridges] = [localModel(states.lambda), localModel(states.bridge)];
  link(plan, bridges, ["selected_unit", "plans"]);
  keepAddress(plan, bridges, unpack(states.lambda._problem));
  renderBridge({ model: bridges, el: document.getElementById("bridge") });
  renderLambda({ model: plan, el: document.getElementById("lambda") });
  for (const root of document.querySelectorAll(".cocurve")) root.classList.add("cc-page");
}

if (typeof document !== "undefined" && document.getElementById("cocurve-data")) open();
