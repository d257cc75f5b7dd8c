// Present: the page before a class. Page Down and Page Up, which clickers send, go through five steps.
// Each frames what it names. The last one, and Escape, show the page as it was before the first.

import { assign, button, counted, h, percent } from "./kit.js";

const LENT = ["interaction_strength", "_pin", "guess"]; // the traits that the steps set
const planAtEnd = (strength) => ({ interaction_strength: strength, _pin: {}, guess: "" });
const marked_ = (root, name) => (root.dataset[name] ? root.dataset[name].split(" ").length : 0);

/** The steps: what each frames (the first that is there), sets and says. */
const SHOWN = [
  { frame: ["canvas"], set: planAtEnd(0), say: (root, plan) => "Each cell is a part of the model, solid ones are removed: " +
    `${counted(marked_(root, "pruned"), "unit")} for ${percent(plan.get("ratio"), 0)}. With λ = 0 each is judged alone.` },
  { frame: ["canvas"], set: planAtEnd(1), say: (root) => "λ = 1 counts in full what parts cost together: " +
    `${counted(marked_(root, "joined"), "unit")} (+) go instead of ${marked_(root, "left")} others (−).` },
  { frame: [".cc-chart"], set: planAtEnd(1), say: () => "What the plans cost: measured with their errors, predicted dashed." },
  { frame: [".cc-texts", ".cc-numbers"], set: planAtEnd(1), say: () => "What the whole model, A (λ = 0) and B (λ = 1) say." },
  { frame: [".cc-along"], set: {}, say: () => "Your turn: drag λ. What do you expect in between?" },
];

/** Follow the trait `present` of the page's plan, the step shown or 0; `root` is its instrument. */
export function presenting(plan, root) {
  let [before, scrolled] = [null, 0];
  const words = h("span", { role: "status" });
  const go = (step) => assign(plan, { present: (plan.get("present") + step) % (SHOWN.length + 1) || (step < 0 ? 1 : 0) });
  const end = () => assign(plan, { present: 0 });
  const bar = h("div", { class: "cc-caption" }, words, button("◀", "the step before: Page Up", () => go(-1)),
    button("▶", "the next step: Page Down", () => go(1)), button("✕", "end: Escape", end));
  root.prepend(bar);
  const start = button("Present", "18 px, five steps by Page Down and Page Up", () => go(1));
  root.querySelector(".cc-files").append(start);

  function show() {
    const at = plan.get("present");
    if (at && !before) [before, scrolled] = [Object.fromEntries(LENT.map((name) => [name, plan.get(name)])), scrollY];
    if (!before) return;
    document.body.classList.toggle("cc-present", at > 0);
    root.querySelector(".cc-framed")?.classList.remove("cc-framed");
    if (at || bar.dataset.at !== String(SHOWN.length)) assign(plan, { ...before, ...SHOWN[at - 1]?.set });
    bar.dataset.at = at;
    if (!at) {
      before = null;
      start.focus({ preventScroll: true });
      setTimeout(() => scrollTo(0, scrolled), 100); // once the page has its size
      return;
    }
    const { frame, say } = SHOWN[at - 1];
    const framed = frame.map((name) => root.querySelector(name)).find((one) => one?.checkVisibility()) ?? root;
    framed.closest("svg")?.parentNode.classList.add("cc-framed"); // charts are drawn anew, their place stays
    if (!framed.closest("svg")) framed.classList.add("cc-framed");
    words.textContent = `${at} of ${SHOWN.length}: ${say(root, plan)}`;
    setTimeout(() => root.querySelector(".cc-framed")?.scrollIntoView({ block: "nearest" }), 100); // the same
  }
  plan.on("change:present", show);
  addEventListener("keydown", (event) => {
    const step = { PageDown: 1, PageUp: -1 }[event.key];
    if (!plan.get("present") || (!step && event.key !== "Escape")) return;
    event.preventDefault();
    event.stopPropagation();
    if (step) go(step);
    else end();
  }, true);
}
