// Predict, then reveal: the measured steps of the chart are covered until their plan is visited, and
// handles at λ = ½ and 1 hold what the reader expects. The guesses live in the address alone.

import { brief } from "./compare.js";
import { show } from "./kit.js";
import { markOf } from "./measured.js";

const [AT, REACH, STRIDE] = [[0.5, 1], 4, 1.1]; // a guess is at most REACH times the KL at λ = 0, or its REACH-th

/** The measured steps that are guessed, nearest to λ = ½ and 1; none without one at λ = 0 to start from. */
export function guessedSteps(steps) {
  if (steps[0]?.strength !== 0) return [];
  const near = AT.map((wanted) => steps.slice(1).reduce((best, step) =>
    (!best || Math.abs(step.strength - wanted) < Math.abs(best.strength - wanted) ? step : best), null));
  return [...new Set(near)].filter(Boolean);
}

/** A guess in bounds, with three digits. */
export const bounded = (value, level) =>
  Number(Math.min(level * REACH, Math.max(level / REACH, value)).toPrecision(3));

/** The value after a key on a handle; null for other keys. */
export function turned(value, key) {
  const step = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1, PageUp: 5, PageDown: -5 }[key];
  return step ? value * STRIDE ** step : null;
}

/** The guesses (the trait: a ratio, then its values) on the steps; they start level with λ = 0. */
export function guessesOn(steps, ratio, guesses) {
  const mine = Math.abs((guesses[0] ?? -1) - ratio) < 5e-4 ? guesses.slice(1) : [];
  return guessedSteps(steps).map((step, k) => ({ step, value: mine[k] ?? bounded(steps[0].risk, steps[0].risk) }));
}

/** What the guesses were worth, in words. */
export const revealed = (guesses, by) => guesses.map(({ step, value }) =>
  `λ ${show(Number(step.strength.toPrecision(2)))}: you ${brief(value)}, ` +
  `${step.predicted === null ? "" : `${by} ${brief(step.predicted)}, `}measured ${brief(step.risk)}`).join("; ");

/** Which plans were visited: cover(asked, order) tells whether a plan's values are covered. */
export function covering() {
  const seen = new Set();
  let last = "";
  return { visit(mode, order) {
    if (mode !== last && mode === "1") seen.clear();
    last = mode;
    if (order) seen.add(markOf(order));
  },
  hides: ({ strength, order }) => last === "1" && strength > 0 && !seen.has(markOf(order)),
  range: (level) => (last === "1" ? [level / REACH, level * REACH] : []) };
}
