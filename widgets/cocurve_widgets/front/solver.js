// The greedy solver of cocurve_lab/solver/greedy.py in the browser: the same sums in the same order,
// the same tie-break (lowest index), doubles throughout. tests/widgets/front/solver.test.mjs compares
// it with Python.

import { difference } from "./compare.js";
import { squareOf, typed } from "./kit.js";

export const MOST = 0.6; // curves and sliders end here
export const KINDS = ["attention", "ffn"];
export const NO_GUARDS = { layer_cap: null, layer_cap_factor: null, protect_first: 0, protect_last: 0, kinds: KINDS };
const HAIR = 1e-12; // as in Python's needed_cost and Rules: 0.29 x 100 must count as 29

/**
 * The problem that Python packed: counts and names, and the upper triangle of H as float64 or
 * float32 (by its length); `matrix` is null where the kernel solves.
 */
export function unpack(packed) {
  const size = packed.costs.length;
  const problem = {
    size,
    costs: Float64Array.from(packed.costs),
    layers: packed.layers,
    kinds: packed.kinds, // 0 attention, 1 FFN
    places: packed.places, // index of the unit among those of its layer and kind
    numLayers: packed.num_layers,
    protected: packed.protected, // layers at either end that stay whole as an instrument opens
    total: packed.costs.reduce((sum, cost) => sum + cost, 0),
    parameters: packed.parameters,
    matrix: null,
    saliency: typed(packed.saliency, Float64Array),
    connectivity: typed(packed.connectivity, Float64Array),
    rows: new Map(), // rows of H that arrived one by one, where there is no matrix
  };
  if (packed.matrix && packed.matrix.byteLength) {
    const wide = packed.matrix.byteLength === size * (size + 1) * 4;
    problem.matrix = squareOf(typed(packed.matrix, wide ? Float64Array : Float32Array), size, Float64Array);
    problem.saliency = problem.saliency.map((_, u) => problem.matrix[u * size + u]);
  }
  problem.half = problem.saliency.map((value) => value / 2);
  return problem;
}

/** The name of a unit: L12.ffn[3]. */
export function nameOf(problem, u) {
  return `L${problem.layers[u]}.${KINDS[problem.kinds[u]]}[${problem.places[u]}]`;
}

/** Row u of H, or null if it has not arrived yet. */
export function rowOf(problem, u) {
  const { matrix, size } = problem;
  return matrix ? matrix.subarray(u * size, (u + 1) * size) : problem.rows.get(u) ?? null;
}

/**
 * The guards at one ratio: the admissible units, and the cost that may leave each layer. `controls` are
 * the traits of the explorer by name: interaction_strength, ratio, and those of NO_GUARDS.
 */
export function rulesFor(problem, controls) {
  const { size, layers, costs, kinds, numLayers } = problem;
  const layerCosts = new Float64Array(numLayers);
  for (let u = 0; u < size; u++) layerCosts[layers[u]] += costs[u];
  const cap = capAt(controls, controls.ratio);
  const room = layerCosts.map((cost) => Math.floor(cap * cost * (1 + HAIR)));
  const open = (layer) => layer >= controls.protect_first && layer < numLayers - controls.protect_last;
  const admissible = Array.from(costs, (cost, u) =>
    open(layers[u]) && controls.kinds.includes(KINDS[kinds[u]]) && cost <= room[layers[u]]);
  return { cap, room, admissible };
}

/** The layer cap in force at a ratio, a share of a layer's cost. */
export function capAt({ layer_cap: cap, layer_cap_factor: factor }, ratio) {
  return factor == null ? cap ?? 1 : Math.min(1, factor * ratio);
}

/** The cost that a plan of this ratio must reach. */
export function targetCost(problem, ratio) {
  return ratio * problem.total * (1 - HAIR);
}

/**
 * Remove units until `target` cost is gone (Alg. 2): {order, edges, spent, stalled}, where spent[k]
 * is the cost after step k and edges[k] is g of the unit at its removal, nats per token.
 */
export function greedy(problem, rules, strength, target) {
  const { size, matrix, costs, layers } = problem;
  const half = problem.half.slice();
  for (let u = 0; u < size; u++) if (!rules.admissible[u]) half[u] = Infinity;
  const room = rules.room.slice();
  const g = new Float64Array(size);
  const found = { order: [], edges: [], spent: [], stalled: false };
  let spent = 0;
  while (spent < target) {
    let [best, u] = [Infinity, -1];
    for (let v = 0; v < size; v++) {
      const score = (g[v] * strength + half[v]) / costs[v];
      if (score < best) [best, u] = [score, v];
    }
    if (u < 0) {
      found.stalled = true;
      break;
    }
    found.order.push(u);
    found.edges.push(g[u]);
    spent += costs[u];
    found.spent.push(spent);
    for (let v = 0, at = u * size; v < size; v++, at++) g[v] += matrix[at];
    half[u] = Infinity;
    const layer = layers[u];
    room[layer] -= costs[u];
    for (let v = 0; v < size; v++) {
      if (layers[v] === layer && costs[v] > room[layer]) half[v] = Infinity;
    }
  }
  return found;
}

/** The plan of a smaller target, read off a run: greedy under fixed guards is nested. */
export function prefix(run, target) {
  let length = 0;
  let spent = 0;
  while (length < run.order.length && spent < target) spent = run.spent[length++];
  // a plan is one that reaches its target: with a NaN neither < nor >= holds, and there is none
  return { order: run.order.slice(0, length), edges: run.edges.slice(0, length), spent,
    stalled: !(spent >= target) };
}

/** The largest share of the cost that any plan can remove under the rules (subset sums). */
export function reachable(problem, rules) {
  let most = 0;
  for (let layer = 0; layer < problem.numLayers; layer++) {
    let sums = new Set([0]);
    for (let u = 0; u < problem.size; u++) {
      if (problem.layers[u] !== layer || !rules.admissible[u]) continue;
      const more = new Set(sums);
      for (const sum of sums) {
        if (sum + problem.costs[u] <= rules.room[layer]) more.add(sum + problem.costs[u]);
      }
      sums = more;
    }
    most += Math.max(...sums);
  }
  return most / problem.total;
}

/**
 * The guards without which alone some plan has the ratio, by name, as `in_the_way` of protection.py;
 * the two ends together where neither is enough.
 */
export function inTheWay(problem, controls) {
  const enough = (...names) => {
    const free = Object.fromEntries(names.map((name) => [name, NO_GUARDS[name]]));
    const most = reachable(problem, rulesFor(problem, { ...controls, ...free }));
    return most * problem.total >= targetCost(problem, controls.ratio);
  };
  const given = Object.keys(NO_GUARDS).filter((name) => String(controls[name]) !== String(NO_GUARDS[name]));
  const found = given.filter((name) => enough(name));
  const ends = ["protect_first", "protect_last"];
  const both = ends.every((name) => given.includes(name)) && enough(...ends);
  return found.length || !both ? found : [ends.join(" and ")];
}

/**
 * The runs of greedy up to MOST, remembered: run(controls, strength). Each has the largest share that
 * any plan can remove under its rules, as `reachable`.
 */
export function runner(problem) {
  const [runs, most] = [new Map(), new Map()];
  return (controls, strength = controls.interaction_strength) => {
    const rules = rulesFor(problem, controls);
    const guards = JSON.stringify([rules.cap, controls.protect_first, controls.protect_last, controls.kinds]);
    const key = `${guards} ${strength}`;
    if (runs.size > 99) runs.clear();
    if (!most.has(guards)) most.set(guards, reachable(problem, rules));
    if (!runs.has(key)) runs.set(key, greedy(problem, rules, strength, targetCost(problem, MOST)));
    return { ...runs.get(key), reachable: most.get(guards) };
  };
}

/** The units of a plan in their order; null where greedy stalls before its ratio. */
export function orderOf(problem, controls, run) {
  const plan = prefix(run(controls), targetCost(problem, controls.ratio));
  return plan.stalled ? null : plan.order;
}

/** Everything the explorer shows at one setting; the kernel sends the same fields. */
export function viewOf(problem, controls, run = runner(problem)) {
  const runs = [controls.interaction_strength, 0, 1].map((strength) => run(controls, strength));
  const target = targetCost(problem, controls.ratio);
  const [plan, diagonal] = runs.map((one) => prefix(one, target));
  const [{ stalled, spent, reachable: most }] = runs;
  return {
    a: diagonal.stalled ? null : planOfRun(problem, diagonal), // the default plan A
    ...planOfRun(problem, plan),
    feasible: !plan.stalled,
    reachable: most,
    stalled: stalled ? (spent.at(-1) ?? 0) / problem.total : null,
    runs: { diagonal: runs[1], edge_aware: runs[2] },
  };
}

/** The parts of what H predicts for a set of units, {node, edge} in nats per token; null without its rows. */
export function partsOf(problem, order) {
  const rows = order.map((u) => rowOf(problem, u));
  if (rows.includes(null)) return null;
  const parts = { node: 0, edge: 0 };
  order.forEach((u, k) => {
    parts.node += problem.half[u];
    for (let j = 0; j < k; j++) parts.edge += rows[k][order[j]];
  });
  return parts;
}

function planOfRun(problem, run) {
  return { order: run.order, node: sum(run.order.map((u) => problem.half[u])), edge: sum(run.edges) };
}

/**
 * The account of a unit: half H_uu, g over the units removed before it (over the whole plan if it
 * is kept), their signed terms, and the score that the greedy step compared. Null without its row.
 */
export function ledger(problem, order, strength, u) {
  const row = rowOf(problem, u);
  if (!row) return null;
  const step = order.indexOf(u);
  const before = step < 0 ? order : order.slice(0, step);
  const terms = before.map((v) => ({ unit: v, value: strength * row[v] }));
  const g = sum(before.map((v) => row[v]));
  const strongest = (list, size) => list.sort((a, b) => size(b) - size(a)).slice(0, 5);
  const partners = Array.from(row, (edge, v) => ({ unit: v, edge,
    correlation: edge / (Math.sqrt(problem.saliency[u] * problem.saliency[v]) || Infinity) }));
  return {
    step,
    half: problem.half[u],
    edges: strength * g,
    marginal: g * strength + problem.half[u],
    score: (g * strength + problem.half[u]) / problem.costs[u],
    terms: strongest(terms.filter((t) => t.value !== 0), (t) => Math.abs(t.value)),
    partners: strongest(partners.filter((p) => p.unit !== u), (p) => Math.abs(p.edge)),
  };
}

/**
 * The flips of the plan between `from` and `to`, upwards: yields {strength, changed}, or null after
 * a solve without a flip so that the caller can pause. Exact up to rounding, like lambda_path.
 */
export function* flips(problem, controls, from = 0, to = 1) {
  const rules = rulesFor(problem, controls);
  const target = targetCost(problem, controls.ratio);
  let strength = from;
  let plan = greedy(problem, rules, strength, target);
  while (true) {
    const event = nextEvent(problem, rules, plan, strength);
    if (!(event < to)) return;
    strength = Math.max(event * (1 + 1e-13), strength + 1e-15);
    const next = greedy(problem, rules, strength, target);
    const { left, joined } = difference(plan.order, next.order);
    const changed = [...left, ...joined];
    yield changed.length ? { strength: event, changed } : null;
    plan = next;
  }
}

/** The smallest lambda above `strength` at which another unit would win one of the steps. */
function nextEvent(problem, rules, plan, strength) {
  const { size, matrix, costs, half, layers } = problem;
  const gone = rules.admissible.map((ok) => !ok);
  const room = rules.room.slice();
  const g = new Float64Array(size);
  let first = Infinity;
  for (const w of plan.order) {
    const [base, slope] = [half[w] / costs[w], g[w] / costs[w]];
    for (let v = 0; v < size; v++) {
      if (gone[v]) continue;
      const faster = slope - g[v] / costs[v];
      if (!(faster > 0)) continue;
      const event = (half[v] / costs[v] - base) / faster;
      if (event > strength && event < first) first = event;
    }
    gone[w] = true;
    for (let v = 0, at = w * size; v < size; v++, at++) g[v] += matrix[at];
    room[layers[w]] -= costs[w];
    for (let v = 0; v < size; v++) {
      if (layers[v] === layers[w] && costs[v] > room[layers[w]]) gone[v] = true;
    }
  }
  return first;
}

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}
