// The tour: five steps in sixty seconds. It moves the controls themselves, so what it shows is live.

import { assign, button, h } from "./kit.js";

export const SECONDS = 12; // of a step
const TICK = 100; // ms: a kernel that solves alone follows
const [REST, MOVING] = [0.2, 0.5]; // shares of a step before its control moves, and while it does

const OPENING = { interaction_strength: 0, ratio: 0.2, layer_cap: null, layer_cap_factor: null,
  kinds: ["attention", "ffn"], selected_unit: null };
const thousandth = (x) => Math.round(1000 * x) / 1000;

/**
 * on: the part that is framed; from: the controls at its beginning; at(share, order) what changes
 * as the share goes from 0 to 1, where `place` is lambda by its place on the slider.
 */
export const TOUR = [
  { on: "map", from: { ...OPENING, ratio: 0 }, at: (share) => ({ ratio: thousandth(0.2 * share) }),
    say: "Each cell is a unit: attention heads above, FFN blocks below, one column per layer. The " +
      "share to remove grows to 20 %, and the units that go fill in. Each is judged alone (lambda 0)." },
  { on: "lambda", from: OPENING, at: (share) => ({ place: share }),
    say: "Now the edges count: lambda goes from 0 to 1. The plan changes in jumps, one per cell of " +
      "the bar. Units on which plans A and B differ have the color of that plan." },
  { on: "curves", from: { ...OPENING, interaction_strength: 1 },
    at: (share) => ({ ratio: thousandth(0.2 + 0.2 * share) }),
    say: "The share grows to 40 %. The solid line is the predicted risk; dashed are the units alone, " +
      "dotted the edges. Which part grows faster?" },
  { on: "card", from: { ...OPENING, interaction_strength: 1 },
    at: (share, order) => ({ selected_unit: order[Math.round(share * (order.length - 1))] ?? null }),
    say: "One unit after the other, in the order of removal. The card says what the unit costs " +
      "alone, what its edges add, and at which lambda it changes sides." },
  { on: "shares", from: { ...OPENING, interaction_strength: 1, ratio: 0.3 },
    at: (share) => ({ layer_cap: thousandth(1 - 0.4 * share) }),
    say: "A guard: no layer may lose more than a given share of its cost, in the end 60 % (dashed; the " +
      "bars are its attention and its FFN). Then the controls go back. Your turn: guess, then drag." },
];

/** How far the control of a step has moved after so many seconds; at once if motion is unwanted. */
export function shareAt(seconds, still) {
  return still ? 1 : Math.min(1, Math.max(0, (seconds / SECONDS - REST) / MOVING));
}

/**
 * Add the tour to an instrument. parts: what is framed, by name; slide(place) sets lambda; ends: the
 * layers at either end that stay whole as it opens; order() is the plan's removal order. The trait `tour_step` is its state: 1 to 5, or null.
 */
export function addTour({ model, cleaner, ui, parts, slide, ends, order }) {
  const still = matchMedia("(prefers-reduced-motion: reduce)");
  const starter = h("button", { type: "button", class: "cc-tour-button", onclick: () => tell(step ? null : 1) });
  const [place, text] = [h("b", {}), h("span", { "aria-live": "polite" })];
  const left = h("progress", { max: SECONDS, value: 0, "aria-label": "seconds of this step" });
  const next = button("Next", "", () => tell(step < TOUR.length ? step + 1 : null));
  const bar = h("div", { class: "cc-tour", role: "group", "aria-label": "Tour", hidden: true },
    place, text, h("span", { class: "cc-row" }, left, next));
  ui.root.querySelector(".cc-head").append(starter);
  ui.controls.before(bar);

  let step = null;
  let timer = 0;
  let begun = 0;
  let before = null; // the controls that the tour puts back

  const opening = { protect_first: ends, protect_last: ends };
  const tell = (value) => assign(model, { tour_step: value });
  const outline = (on) => {
    for (const part of Object.values(parts)) part.classList.toggle("cc-here", part === parts[on]);
  };
  function set(values) {
    const { place: at, ...traits } = values;
    if (at !== undefined) slide(at);
    const changed = Object.entries(traits).filter(([name, value]) => model.get(name) !== value);
    if (changed.length) assign(model, Object.fromEntries(changed));
  }
  function show() {
    starter.textContent = step ? "Stop the tour" : "Tour (60 seconds)";
    bar.hidden = !step;
    outline(step ? TOUR[step - 1].on : null);
    if (!step) return;
    place.textContent = `${step} of ${TOUR.length}`;
    text.textContent = TOUR[step - 1].say;
  }
  function move() {
    const seconds = (performance.now() - begun) / 1000;
    left.value = Math.min(SECONDS, seconds);
    set(TOUR[step - 1].at(shareAt(seconds, still.matches), order()));
    if (seconds >= SECONDS) tell(step < TOUR.length ? step + 1 : null);
  }
  function go(to) {
    if (!before) {
      before = Object.fromEntries(Object.keys({ ...OPENING, ...opening })
        .map((name) => [name, model.get(name)]));
      for (const event of ["pointerdown", "keydown"]) document.addEventListener(event, heed, true);
    }
    step = to;
    show();
    set({ ...opening, ...TOUR[step - 1].from });
    begun = performance.now();
    clearInterval(timer);
    timer = setInterval(move, TICK);
    move(); // before it is scrolled to: a card has its size then
    parts[TOUR[step - 1].on].scrollIntoView({ block: "nearest", behavior: still.matches ? "auto" : "smooth" });
  }
  /** End; `back` puts the controls back to where they were before the tour. */
  function end(back) {
    clearInterval(timer);
    for (const event of ["pointerdown", "keydown"]) document.removeEventListener(event, heed, true);
    const kept = before;
    [step, before] = [null, null];
    if (back && kept) set(kept);
    show();
  }
  /** Any input but on the tour's own buttons ends it. A hand on a control keeps what it sees. */
  function heed(event) {
    const own = bar.contains(event.target) || event.target === starter;
    if (event.key === "Escape") tell(null);
    else if (["Tab", "Shift", "Control", "Alt", "Meta"].includes(event.key) || own) return;
    else {
      end(false);
      tell(null);
    }
  }
  function follow() {
    const wanted = model.get("tour_step") ?? null;
    if (wanted === step) return;
    if (wanted === null) end(true);
    else go(wanted);
  }
  cleaner.add(() => end(false));
  show();
  cleaner.follow(model, ["tour_step"], follow);
}
