// The state of the page in its address, after the "#": a link reopens what was shown. Only what
// differs from how the page opens is written, under the names of the traits.

import { ownPlan } from "./by_hand.js";
import { assign } from "./kit.js";
import { viewOf } from "./solver.js";

const SOON = 300; // ms: browsers limit how often an address may change

// Readers: the value of a text from the address, or undefined where it is none. Anybody can write
// an address, so nothing is taken that the controls could not set.
const between = (low, high) => (text) => {
  const value = text.trim() === "" ? NaN : Number(text);
  return value >= low && value <= high ? value : undefined;
};
const whole = (low, high) => (text) => {
  const value = between(low, high)(text);
  return Number.isInteger(value) ? value : undefined;
};
const orNone = (reader) => (text) => (text === "none" ? null : reader(text));
const oneOf = (...values) => (text) => (values.includes(text) ? text : undefined);
/** A list that `fits`. */
const several = (reader, fits = () => true) => (text) => {
  const values = text === "" ? [] : text.split(",").map(reader);
  return values.includes(undefined) || !fits(values) ? undefined : values;
};
const different = (values) => new Set(values).size === values.length;
/** Some of the values, in their order. */
const some = (values, least = 0) => (text) => {
  const found = several(oneOf(...values), (list) => list.length >= least)(text);
  return found && values.filter((value) => found.includes(value));
};

const GUARDS = ["layer_cap", "layer_cap_factor", "protect_first", "protect_last", "kinds"];
// of plan A, as "pin.ratio" and so on; one made by hand has its units instead, as "pin.units"
const PINNED = ["interaction_strength", "ratio", ...GUARDS];

/**
 * What an address may hold, on a page of so many units in so many layers: [{name, place, trait, read}],
 * where `place` is an instrument or plan A ("pin").
 */
function entries(units, layers) {
  const unit = whole(0, units - 1);
  const plan = { interaction_strength: between(0, 1), ratio: between(0, 0.6),
    layer_cap: orNone(between(1e-6, 1)), layer_cap_factor: orNone(between(1e-6, 100)),
    protect_first: whole(0, layers), protect_last: whole(0, layers),
    kinds: some(["attention", "ffn"], 1),
    selected_unit: orNone(unit), mode: oneOf("mark", "remove", "pair"),
    pair: several(unit, (pair) => pair.length <= 2 && different(pair)) };
  const bridge = { threshold: between(0, 1), edges_of: oneOf("bridges", "all"),
    sign: oneOf("both", "positive", "negative"), blocks: some(["attention", "cross", "ffn"]),
    brushed: several(unit) };
  const pin = Object.fromEntries(PINNED.map((trait) => [trait, plan[trait]]));
  pin.units = several(unit, different);
  return Object.entries({ plan, bridge, pin }).flatMap(([place, traits]) =>
    Object.entries(traits).map(([trait, read]) =>
      ({ name: place === "pin" ? `pin.${trait}` : trait, place, trait, read })));
}

const rounded = (value) => (typeof value !== "number" ? value
  : Number(Math.abs(value) < 1 ? value.toPrecision(3) : value.toFixed(3)));
const written = (value) => (value === null ? "none"
  : Array.isArray(value) ? value.map(rounded).join(",") : String(value));

/** The traits that an address sets, by instrument: {plan, bridge, pin}; pin is null without one. */
export function readAddress(hash, units, layers) {
  const known = new Map(entries(units, layers).map((entry) => [entry.name, entry]));
  const found = { plan: {}, bridge: {}, pin: {} };
  for (const [name, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    const { place, trait, read } = known.get(name) ?? {};
    const value = read?.(text);
    if (value !== undefined) found[place][trait] = value;
  }
  for (const guards of [found.plan, found.pin]) { // there is only one cap
    if ((guards.layer_cap ?? null) !== null) delete guards.layer_cap_factor;
  }
  return { ...found, pin: Object.keys(found.pin).length ? found.pin : null };
}

/** The address of the models {plan, bridge}; `opening` holds their traits as the page opens. */
export function writeAddress(models, opening, units, layers) {
  const { controls, order } = models.plan.get("_pin") ?? {};
  const pin = controls ?? { units: order };
  const first = { ...opening, pin: opening.plan };
  const pairs = [];
  for (const { name, place, trait } of entries(units, layers)) {
    const value = place === "pin" ? pin[trait] : models[place].get(trait) ?? null;
    if (value === undefined || written(value) === written(first[place][trait] ?? null)) continue;
    pairs.push([name, written(value)]);
  }
  const told = pairs.some(([name]) => name.startsWith("pin."));
  if (controls && !told) pairs.push(["pin.ratio", written(controls.ratio)]);
  // a comma needs no escape in a fragment, and without one the address can be read
  return new URLSearchParams(pairs).toString().replaceAll("%2C", ",");
}

/** Plan A from its controls or its units, as the page pins one; {} where they make no plan. */
export function pinOf(problem, { units, ...controls }) {
  if (!problem.matrix) return {};
  if (units) return ownPlan(problem, units);
  const view = viewOf(problem, controls);
  return !view.feasible ? {} : { order: view.order, controls, hand: false,
    strength: controls.interaction_strength, ratio: controls.ratio };
}

/**
 * Keep the address and the models {plan, bridge} equal from now on; first take over what the
 * address says. An address of another scale opens the page again.
 */
export function keepAddress(models, problem, scale = "") {
  const size = [problem.size, problem.numLayers];
  const known = entries(...size).filter(({ place }) => place !== "pin");
  const opening = { plan: {}, bridge: {} };
  for (const { place, trait } of known) opening[place][trait] = models[place].get(trait) ?? null;
  let timer = 0;

  function take() {
    clearTimeout(timer); // what was to be written is of before
    if ((new URLSearchParams(location.hash.slice(1)).get("scale") ?? "") !== scale) return void location.reload();
    const asked = readAddress(location.hash, ...size);
    const pin = asked.pin && pinOf(problem, { ...opening.plan, ...asked.pin });
    assign(models.plan, { ...opening.plan, ...asked.plan, _pin: pin ?? {} });
    assign(models.bridge, { ...opening.bridge, ...asked.bridge });
  }
  function write() {
    const text = [scale && `scale=${scale}`, writeAddress(models, opening, ...size)].filter(Boolean).join("&");
    if (text === location.hash.slice(1)) return;
    try {
      history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
    } catch { // a page inside another one may have no address of its own
    }
  }
  const soon = () => {
    clearTimeout(timer);
    timer = setTimeout(write, SOON);
  };
  if (location.hash.length > 1) take();
  for (const { place, trait } of known) models[place].on(`change:${trait}`, soon);
  models.plan.on("change:_pin", soon);
  window.addEventListener("hashchange", take);
}
