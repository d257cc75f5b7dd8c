// The lambda axis: where a lambda stands on the slider. A plan changes only at a few lambdas, often
// all of them close together, so on a linear scale most of the slider would do nothing. Here every
// distinct plan has the same width; until the plans are known, the axis is linear.

/** The number of the plan at a lambda, from 0; a plan holds the lambda at which it begins. */
export function planAt(breaks, strength) {
  return breaks.filter((b) => b <= strength).length;
}

/** The lambda in the middle of the next (step 1) or previous (step -1) plan, or null at the end. */
export function neighbor(breaks, strength, step) {
  const there = planAt(breaks, strength) + step;
  if (there < 0 || there > breaks.length) return null;
  const edges = [0, ...breaks, 1];
  return (edges[there] + edges[there + 1]) / 2;
}

const clamp = (x) => Math.min(1, Math.max(0, x));

/** The linear axis, of plans that are not known yet. */
export const linearAxis = { linear: true, place: clamp, strength: clamp, cells: [[0, 1]] };

/**
 * The axis of plans: {place(strength), strength(place), cells}, where places lie in [0, 1]. `cells`
 * are the plans as [from, to] in places.
 */
export function axisOf(breaks) {
  const edges = [0, ...breaks, 1];
  const count = edges.length - 1;
  const place = (strength) => {
    const k = Math.min(count - 1, planAt(breaks, strength));
    return (k + clamp((strength - edges[k]) / (edges[k + 1] - edges[k] || 1))) / count;
  };
  const strength = (at) => {
    if (at <= 0 || at >= 1) return clamp(at);
    const k = Math.min(count - 1, Math.floor(at * count + 1e-12));
    // off the ends of the cell: at a break itself rounding decides which of the two plans it is
    const within = Math.min(0.98, Math.max(0.02, at * count - k));
    return edges[k] + within * (edges[k + 1] - edges[k]);
  };
  return { linear: false, place, strength, cells: edges.slice(1).map((_, k) => [k / count, (k + 1) / count]) };
}
