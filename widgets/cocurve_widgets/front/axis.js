// The lambda axis: where a lambda stands on the slider. A plan changes only at a few lambdas, often
// all of them close together, so on most scales most of the slider does nothing. On the axis of
// plans every distinct plan has the same width; on that of lengths it is as wide as its stretch of
// lambda, but never too narrow to be hit.

// The logarithmic axis: 0 at the left end, linear to 1e-5, then logarithmic to 1.
const SMALLEST = 1e-5;
const LINEAR = 0.06; // share of the axis below SMALLEST
const NARROWEST = 0.03; // share of the axis of a plan, however short its stretch; of many plans less

function logPlace(strength) {
  if (strength <= SMALLEST) return (LINEAR * Math.max(0, strength)) / SMALLEST;
  const share = Math.log(strength / SMALLEST) / Math.log(1 / SMALLEST);
  return Math.min(1, LINEAR + (1 - LINEAR) * share);
}

function logStrength(place) {
  if (place <= LINEAR) return (SMALLEST * Math.max(0, place)) / LINEAR;
  if (place >= 1) return 1;
  return SMALLEST * (1 / SMALLEST) ** ((place - LINEAR) / (1 - LINEAR));
}

/** The number of the plan at a lambda, from 0; a plan holds the lambda at which it begins. */
export function planAt(breaks, strength) {
  return breaks.filter((b) => b <= strength).length;
}

/** The ends of the plans over [0, most]: plan k holds from edges[k] to edges[k + 1]. */
function edgesOf(breaks, most = 1) {
  return [0, ...breaks, most];
}

/** The lambda in the middle of the next (step 1) or previous (step -1) plan, or null at the end. */
export function neighbor(breaks, strength, step) {
  const there = planAt(breaks, strength) + step;
  if (there < 0 || there > breaks.length) return null;
  const edges = edgesOf(breaks);
  return (edges[there] + edges[there + 1]) / 2;
}

const clamp = (x) => Math.min(1, Math.max(0, x));

/** The axes that need all plans of [0, 1] to be known. */
export const PATHS = ["plans", "lengths"];

/**
 * An axis: {kind, place(strength), strength(place), cells}, where places lie in [0, 1]. `cells` are
 * the plans as [from, to] in places; "linear" and "logarithmic" have them where their breaks are.
 */
export function axisOf(kind, breaks) {
  if (PATHS.includes(kind)) return plansAxis(kind, breaks);
  const [place, strength] = kind === "linear" ? [clamp, clamp] : [logPlace, logStrength];
  return { kind, place, strength, cells: cellsOf(breaks, place) };
}

function cellsOf(breaks, place) {
  const ends = edgesOf(breaks).map(place);
  return ends.slice(1).map((end, k) => [ends[k], end]);
}

function plansAxis(kind, breaks) {
  const edges = edgesOf(breaks);
  const count = edges.length - 1;
  const least = Math.min(NARROWEST, 0.5 / count);
  const wide = Array.from({ length: count }, (_, k) =>
    (kind === "plans" ? 1 : Math.max(least, edges[k + 1] - edges[k])));
  const starts = [0];
  for (const width of wide) starts.push(starts.at(-1) + width);
  const all = starts[count];
  const place = (strength) => {
    const k = Math.min(count - 1, planAt(breaks, strength));
    const within = clamp((strength - edges[k]) / (edges[k + 1] - edges[k] || 1));
    return clamp((starts[k] + within * wide[k]) / all);
  };
  const strength = (at) => {
    if (at <= 0 || at >= 1) return clamp(at);
    const k = starts.findLastIndex((start, i) => i < count && start <= at * all + 1e-12);
    // off the ends of the cell: at a break itself rounding decides which of the two plans it is
    const within = Math.min(0.98, Math.max(0.02, (at * all - starts[k]) / wide[k]));
    return edges[k] + within * (edges[k + 1] - edges[k]);
  };
  return { kind, place, strength, cells: cellsOf(breaks, place) };
}

/** Those of [place, text] whose texts do not touch, the ends first; width(text) in pixels. */
export function clearLabels(labels, width, space = 6) {
  const taken = [];
  const found = new Set();
  const order = [labels[0], labels.at(-1), ...labels.slice(1, -1)];
  for (const label of order) {
    const half = width(label[1]) / 2 + space / 2;
    const [from, to] = [label[0] - half, label[0] + half];
    if (taken.some(([a, b]) => from < b && to > a)) continue;
    taken.push([from, to]);
    found.add(label);
  }
  return labels.filter((label) => found.has(label));
}
