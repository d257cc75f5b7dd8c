// The path of plans on a page without a kernel, a few milliseconds at a time, so that it responds.

import { flips } from "./solver.js";

/** Returns a search for controls; it gives {breaks, changes, stale} as soon as they are known. */
export function pathSearch(problem, cleaner, give) {
  let timer = null;
  let searched = "";
  cleaner.add(() => clearTimeout(timer));
  return (controls) => {
    const key = JSON.stringify(controls);
    if (key === searched) return;
    searched = key;
    clearTimeout(timer);
    give({ breaks: [], changes: [], stale: true });
    const sweep = flips(problem, controls);
    const found = { breaks: [], changes: [], stale: false };
    const work = () => {
      const until = performance.now() + 8;
      while (performance.now() < until) {
        const { value, done } = sweep.next();
        if (done) return give(found);
        if (value) {
          found.breaks.push(value.strength);
          found.changes.push(value.changed);
        }
      }
      timer = setTimeout(work, 4);
      return undefined;
    };
    timer = setTimeout(work, 150);
  };
}
