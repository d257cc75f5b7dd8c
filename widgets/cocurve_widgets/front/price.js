// What each living unit costs now, per parameter: what Algorithm 2 compares in its next step.

import { rowOf, rulesFor } from "./solver.js";

/**
 * Prices (½ H_uu + λ Σ H_uv over the removed v) / c_u after some units are gone: {prices, tints, next},
 * where a tint is the rank among the living in [0, 1], and `next` the unit that goes next under the
 * guards, null for none. Null without rows of H.
 */
export function pricesOf(problem, controls, order) {
  const { size, half, costs, layers } = problem;
  const sums = new Float64Array(size);
  const { room, admissible } = rulesFor(problem, controls);
  for (const v of order) {
    const row = rowOf(problem, v);
    if (!row) return null;
    for (let u = 0; u < size; u++) sums[u] += row[u];
    room[layers[v]] -= costs[v];
  }
  const gone = new Set(order);
  const prices = Float64Array.from(costs, (cost, u) => (half[u] + controls.interaction_strength * sums[u]) / cost);
  const living = [...prices.keys()].filter((u) => !gone.has(u)).sort((u, v) => prices[u] - prices[v]);
  const tints = new Float64Array(size);
  living.forEach((u, rank) => { tints[u] = rank / Math.max(1, living.length - 1); });
  const next = living.find((u) => admissible[u] && costs[u] <= room[layers[u]]) ?? null;
  return { prices, tints, next, living };
}

const ARCS = 20; // edges that are drawn of one unit

/** The largest edges of a unit as `paintMap` draws them; none without its row of H. */
export function arcsOf(problem, u) {
  const row = u === null ? null : rowOf(problem, u);
  if (!row) return [];
  const others = [...row.keys()].filter((v) => v !== u).sort((v, w) => Math.abs(row[w]) - Math.abs(row[v])).slice(0, ARCS);
  const most = Math.abs(row[others[0]]) || 1;
  return others.map((v) => [u, v, Math.abs(row[v]) / most, Math.sign(row[v])]);
}
