// The lambda explorer: a sentence, one number, and the layer x unit map of the plan; below them plan A
// against plan B, the chart of lambda, pairs, guards and files.

import { axisOf, linearAxis, neighbor, planAt } from "./axis.js";
import { handPanels, ownPlan, pairWith, toggled } from "./by_hand.js";
import { brief, difference } from "./compare.js";
import { Cleaner, GONE, SILENCE, assign, button, frame, h, named, offer, palette,
  percent, picture, receiveFiles, show, stemOf, tied, typed, unitCount, watch } from "./kit.js";
import { edgePanel } from "./edge.js";
import { gapPanel } from "./gap.js";
import { keepHistory } from "./history.js";
import { chartPanel } from "./lambda_chart.js";
import { CONTROLS, guardWords, labelOf, lambdaControls } from "./lambda_controls.js";
import { keptRatios, knownOf, mainText, measurementOf, share, strengthsAt } from "./measured.js";
import { numbersPanel, shownOf } from "./numbers.js";
import { pathSearch } from "./path_search.js";
import { arcsOf, pricesOf } from "./price.js";
import { sentencePanel, wordsOf } from "./sentence.js";
import { KINDS, MOST, inTheWay, nameOf, orderOf, partsOf, runner, unpack, viewOf } from "./solver.js";
import { stepsPanel } from "./steps.js";
import { breaksAt, marksOf, thermometer } from "./thermometer.js";
import { guidedTour } from "./tour.js";
import { drawCard, fourRows } from "./unit_card.js";
import { Fading, paintMap, unitGrid } from "./unit_map.js";

/** The nearest lambda below and above at which a unit joins or leaves; null for none. */
export function flipsOf(breaks, changes, strength, u) {
  const mine = breaks.filter((_, i) => changes[i].includes(u));
  return { below: mine.filter((b) => b <= strength).at(-1) ?? null,
    above: mine.find((b) => b > strength) ?? null };
}

export function renderLambda({ model, el }) {
  const cleaner = new Cleaner();
  const put = (values) => assign(model, values); // what follows a trait is shown anew by its change
  const problem = unpack(model.get("_problem"));
  const run = runner(problem);
  let view = null;
  let hovered = null;
  let note = "";
  let flip = { breaks: [], changes: [], stale: true };
  let axis = linearAxis;
  let held = false; // while the hand is on the slider, the axis must not move under it

  const request = receiveFiles(model, cleaner, "plan");
  const map = picture(named(model, "Map of units by layer: which are alive, and which are gone"));
  const charts = chartPanel(problem, run, { put, slide });
  const first = model.get("_first") ?? {};
  const number = thermometer({ guess: (value) => tour.answer("KL", value) });
  const ui = frame(model, el, cleaner, {
    title: "Pruning plan by lambda",
    name: "plan",
    table: tableOf,
    canvases: () => [map, ...number.pictures(), ...charts.pictures()],
    // in a notebook the kernel sends the file, which Selection.from_json reads
    json: () => (alone() ? ownJson() : request(".json", ownJson)),
    caption: () => [captionOf(), charts.finding.textContent],
    legend: () => [["#C77C11", "alive: the stronger, the higher its price; hatched: gone. Layers from left to right"],
      [inksOf().b, `B: ${planB()?.name ?? "no plan"}; a frame: B alone removes it`],
      [inksOf().a, `A: ${planA()?.name ?? "no plan"}; a frame: A alone removes it`]],
    redraw: () => paint(),
  });

  // Controls and places ------------------------------------------------------------------------

  const bar = lambdaControls(model, cleaner, problem, { go, slide, ratios: () => keptRatios(model.get("_marks")),
    hold: (on) => {
      held = on;
      if (!on) paint();
    },
    arrows: () => !axis.linear });
  ui.controls.remove();

  const tour = guidedTour({ put, read: () => ({ ...controls(), selected_unit: model.get("selected_unit"), _pin: pinned() }), write: put,
    scene: () => scene, redraw: paint, surprise: () => first.sentences?.find(({ text }) => {
      const { whole, pruned } = wordsOf(first, null, text, scene.mine?.order);
      return pruned && pruned[0][0] !== whole[0][0];
    })?.text });
  const history = keepHistory(cleaner, model.get("kernel") === false ? document : ui.root,
    () => (tour.bar.hidden ? { ...controls(), _pin: pinned() } : null), put, drawSteps);
  const steps = stepsPanel(problem, cleaner, ui.root, { step, settle: history.settle, undo: history.undo, redo: history.redo,
    again: () => put(model.get("_pin").hand ? { _pin: ownPlan(problem, []) } : { ratio: 0 }) });
  const sentence = sentencePanel(model, first, { choose: (word) => tour.answer("word", word) });
  const card = h("div", { class: "cc-card", "aria-live": "polite" });
  const ledger = h("div", { class: "cc-card" });
  const swatch = (text, style) => h("span", {}, h("i", { class: "cc-swatch cc-unit", style }), text);
  const [only, others] = [swatch("", ""), swatch("", "")];
  const legend = h("div", { class: "cc-legend" }, swatch("alive, by price", "background:linear-gradient(90deg, #C77C1138, #C77C11)"),
    swatch("gone", "background:repeating-linear-gradient(135deg, var(--cc-muted) 0 1px, transparent 1px 4px)"),
    h("span", {}, h("i", { class: "cc-swatch cc-unit cc-dot", style: "border:2px solid var(--cc-text)" }), "goes next"), only, others);
  const title = (text) => h("h4", {}, text);
  const act = (text, hint, pin) => button(text, hint, () => repin(pin));
  const buttons = {
    pin: act("Pin B as A", "compare with the current plan from now on", "pin"),
    swap: act("Swap", "show plan A, and compare with the current one", "swap"),
    unpin: act("Unpin", "compare with the diagonal plan (lambda 0) again", "unpin"),
  };
  const hand = handPanels(problem, { put, own, back: () => repin("unpin") });
  const edge = edgePanel(problem, put);
  const numbers = numbersPanel();
  const gap = gapPanel(first);
  const live = tied(model, cleaner, "live", h("input", { type: "checkbox" }));
  const choice = h("label", { title: "KL and right answers of A and B are measured as soon as the hand rests" },
    live, " measure automatically");
  const facts = h("div", { class: "cc-facts" });
  const guardsNow = h("p", { class: "cc-muted" });
  const section = (name, ...children) => h("details", { ontoggle: () => paint() }, h("summary", {}, name), ...children);
  const sections = { gap: section("Predicted against measured", gap.panel), chart: section("Every λ", charts.panel),
    numbers: section("A and B in numbers", h("div", { class: "cc-row cc-versus" }, ...Object.values(buttons), choice), numbers.rows, numbers.details, ui.status),
    edge: section("Two cells together", edge.panel), unit: section("One cell, term by term", ledger),
    hand: section("Steps, guards, exact values", steps.panel, hand.panel, bar.exact, title("Guards"), guardsNow, bar.guards),
    files: section("Files", ui.root.querySelector(".cc-files")) };
  const numberHome = h("div", { class: "cc-thermometer" }, ...number.parts);
  const mapHome = h("div", {}, map, legend);
  const side = h("div", { class: "cc-side" }, sentence.panel, numberHome, facts, card);
  const mapColumn = h("div", { class: "cc-map" }, mapHome, h("div", { class: "cc-sliders" }, bar.share, bar.strength));
  ui.root.classList.add("cc-lambda");
  ui.root.querySelector("h3").after(h("div", { class: "cc-top" }, tour.start, tour.bar));
  ui.body.classList.add("cc-screen");
  ui.body.append(side, mapColumn, h("div", { class: "cc-sections" }, ...Object.values(sections)));

  /** The lambdas that the slider goes to: those that were measured, where nothing measures now. The first plan is that of 0, the last that of 1. */
  function stops() {
    if (model.get("_damage").text && !alone()) return [];
    const kept = (model.get("_marks").measured ?? []).filter((m) => m.at === null);
    const ends = new Map(flip.stale ? [] : [[0, 0], [flip.breaks.length, 1]]);
    return strengthsAt({ measured: kept }, model.get("ratio")).map((x) => ends.get(planAt(flip.breaks, x)) ?? x);
  }
  function slide(at, free = false) {
    const apart = (strength) => Math.abs(axis.place(strength) - at);
    const near = free ? [] : stops();
    put({ interaction_strength: near.length ? near.reduce((best, one) => (apart(one) < apart(best) ? one : best)) : axis.strength(at) });
  }
  function go(step) {
    const [near, here] = [stops(), model.get("interaction_strength")];
    if (near.length) {
      const there = step > 0 ? near.find((one) => one > here + 1e-9) : near.findLast((one) => one < here - 1e-9);
      if (there !== undefined) put({ interaction_strength: there });
      return;
    }
    const found = neighbor(flip.breaks, here, step);
    if (found !== null) put({ interaction_strength: found });
  }

  function controls() {
    return Object.fromEntries(CONTROLS.map((name) => [name, model.get(name)]));
  }
  function showControls() {
    const now = controls();
    chooseAxis();
    choice.hidden = alone() || !model.get("_damage").text;
    guardsNow.textContent = guardWords(now);
    bar.show(now, { place: axis.place(now.interaction_strength),
      words: flip.stale ? "" : `, plan ${planAt(flip.breaks, now.interaction_strength) + 1} of ${flip.breaks.length + 1}`,
      most: view?.reachable ?? 1 });
  }
  // A against B --------------------------------------------------------------------------------

  /** Plan A: the pinned one, or the diagonal plan of the present ratio and guards; null for none. */
  function planA() {
    const pin = model.get("_pin");
    const plan = pin.order ? { node: 0, edge: 0, ...pin, ...partsOf(problem, pin.order) } : view.a && { ...view.a, strength: 0,
      ratio: model.get("ratio"), controls: { ...controls(), interaction_strength: 0 } };
    if (!plan) return null;
    const name = pin.hand ? "your plan" : pin.order ? `pinned${made(plan)}` : "λ 0";
    return told({ ...plan, ...sizes(plan.order), name });
  }
  function planB() {
    return view.feasible ? told({ order: view.order, node: view.node, edge: view.edge, ...sizes(view.order),
      strength: model.get("interaction_strength"), name: `λ ${brief(model.get("interaction_strength"))}` }) : null;
  }
  const told = (plan) => ({ ...plan, shown: shownOf(plan, known(), model.get("_damage")) });
  const known = () => knownOf(model.get("_marks"), model.get("_damage"));
  const made = ({ strength, ratio }) => (strength === null ? ""
    : `, λ ${brief(strength)}, ${share(ratio)}`);
  function sizes(order) {
    const removed = order.reduce((sum, u) => sum + problem.costs[u], 0);
    return { removed, realized: removed / problem.total };
  }
  /** Plan A as it is pinned, without what H says of it. */
  function pinned() {
    const { order, strength, ratio, controls: made, hand: yours } = model.get("_pin");
    return order ? { order, strength, ratio, controls: made, hand: yours } : {};
  }
  function repin(what) {
    const [a, b] = [planA(), planB()];
    if (what === "unpin") return put({ _pin: {} });
    return put({ _pin: { order: b.order, strength: b.strength, ratio: model.get("ratio"), controls: controls(), hand: false },
      ...(what === "swap" && a.controls) });
  }

  /** Make plan A the reader's. */
  function own(order) {
    history.settle();
    put({ _pin: ownPlan(problem, order) });
  }
  /** Remove the unit that goes next (by 1), or return the last one (by -1); whether there was one. */
  function step(by) {
    const { mine, price } = scene;
    const u = by > 0 ? price?.next : mine?.order.at(-1);
    if (u === undefined || u === null) return false;
    if (mine.hand) own(by > 0 ? [...mine.order, u] : mine.order.slice(0, -1));
    else {
      const ratio = (mine.removed + by * problem.costs[u]) / problem.total;
      if (ratio > MOST) return false;
      put({ ratio });
    }
    return true;
  }
  /** The strip of the last plans; the steps stand beside the map once there are two. */
  function drawSteps() {
    const last = history.list().slice(-24);
    steps.draw(last.map(({ state, here, go: back }) => {
      const { order, hand: yours } = state._pin;
      return { here, go: back, order: yours ? order : solvable() ? orderOf(problem, state, run) : null,
        words: yours ? `your plan, ${unitCount(order.length)} removed` : `${share(state.ratio)} removed, λ ${brief(state.interaction_strength)}` };
    }), palette(ui.root));
    if (last.length > 1) card.after(steps.panel);
  }
  /** What a click on a unit does beside marking it. */
  function clicked(u) {
    if (u === null || u === undefined || tour.answer("cell", u)) return;
    const mode = model.get("mode");
    if (mode === "remove") own(toggled((model.get("_pin").hand ? model.get("_pin") : planB())?.order ?? [], u));
    if (mode === "pair") put({ pair: pairWith(model.get("pair"), u) });
  }

  /** The axis of the plans; while their path is computed or the hand is on it, it stays as it was. */
  function chooseAxis() {
    if (!held && !flip.stale) axis = axisOf(flip.breaks);
  }

  // Solving ------------------------------------------------------------------------------------

  let lost = false; // the kernel was there and is no more
  let silence = 0; // timer
  const solvable = () => Boolean(problem.matrix);
  const alone = () => model.get("kernel") === false || lost;
  /** Say so, and go on alone, if the kernel gives no answer to the present controls. */
  function listen() {
    clearTimeout(silence);
    silence = setTimeout(() => {
      if (alone() || answer() || asked()) return;
      lost = true;
      note = `${GONE}${solvable() ? " This page solves the plans itself meanwhile." : ""}`;
      refresh();
    }, SILENCE);
  }
  cleaner.add(() => clearTimeout(silence));
  function refresh() {
    const begun = performance.now();
    if (solvable()) view = viewOf(problem, controls(), run);
    else view = fromKernel();
    if (solvable() && !answer()) speak(performance.now() - begun);
    if (alone() && solvable()) findFlips({ ...controls(), interaction_strength: 0 });
    else if (!alone()) listen();
    paint();
  }
  /** The kernel's answer, or null while it is still about earlier controls. */
  function answer() {
    const sent = model.get("_view");
    return sent?.order && JSON.stringify(sent.key) === settings() ? sent : null;
  }
  /** Whether the kernel knows the present controls: it solves when somebody asks for the plan. */
  const asked = () => JSON.stringify(model.get("_asked")) === settings();
  const settings = () => JSON.stringify(Object.values(controls()));
  function fromKernel() {
    const sent = model.get("_view");
    return sent?.order ? { ...sent, stalled: null, stale: !answer() } : null;
  }
  /** Compare the plan drawn at once with the kernel's, which decides. */
  function confirm() {
    const sent = answer();
    if (!solvable()) return refresh();
    if (!sent || !view) return undefined;
    lost = false;
    const { joined, left } = difference(view.feasible ? view.order : [], sent.order);
    const agrees = !sent.feasible || joined.length + left.length === 0;
    note = agrees ? "" : `Browser and kernel differ in ${unitCount(joined.length + left.length)}; the kernel's plan is shown.`;
    if (!agrees) view = fromKernel();
    if (model.get("agrees") !== agrees) assign(model, { agrees });
    return paint();
  }
  function speak(milliseconds) {
    const said = (x) => percent(x, 2);
    const both = view.stalled === null ? "" : ` and greedy stops at ${said(view.stalled)}`;
    model.set("error", view.feasible ? "" : `The ratio ${said(model.get("ratio"))} is out of reach: ` +
      `the guards leave at most ${said(view.reachable)}${both}. Lower the ratio, or loosen ` +
      `${inTheWay(problem, controls()).map(labelOf).join(" or ") || "the guards"}.`);
    const found = view.feasible && measurementOf(model.get("_marks"), view.order);
    const risk = view.feasible ? `Predicted risk ${show(view.node + view.edge)} nats per token, ` +
      (found ? `measured KL ${show(found.risk)} on ${found.text}` : "KL not measured") : "No plan";
    model.set("status", `${risk}; solved in ${milliseconds < 1 ? "less than 1" : milliseconds.toFixed(1)} ms by this page.`);
    const runOf = ({ order, spent }) => ({ order, share: spent.map((cost) => cost / problem.total) });
    if (alone()) model.set("plans", { ratio: model.get("ratio"), present: view.feasible ? view.order : null, ordered: true,
      runs: { diagonal: runOf(view.runs.diagonal), edge_aware: runOf(view.runs.edge_aware) } });
    model.save_changes();
  }

  const findFlips = pathSearch(problem, cleaner, (found) => {
    flip = found;
    if (!found.stale) paint();
  });
  const kernelPath = () => ({ breaks: model.get("flips"), changes: model.get("_changes"),
    stale: model.get("flips_stale") });
  function takeFlips() {
    flip = kernelPath();
    paint();
  }

  // Painting -----------------------------------------------------------------------------------

  const grid = unitGrid(problem);
  let fade = () => undefined; // draws the map again, as it is
  const fading = new Fading(() => fade());
  let [paints, late] = [0, 0]; // late: a timer
  let scene = null; // what the panels show

  const inksOf = () => {
    const colors = palette(ui.root);
    return { a: colors.text, b: colors.accent };
  };
  function sceneOf() {
    const live = model.get("_damage");
    const [mode, pair] = ["mode", "pair"].map((name) => model.get(name));
    const [a, b, now, all, colors] = [planA(), planB(), controls(), known(), palette(ui.root)];
    const mine = a?.hand ? a : b; // the plan on the map
    const text = live.text || mainText(all);
    const marks = marksOf(first, all, text);
    return { a, b, mine, now, marks: model.get("_marks"), known: all, live, flip, axis, problem,
      first: view.a, solvable: solvable(), by: model.get("matrix_name") ?? "H", mode,
      pair, colors, layers: problem.layers, inks: [colors.text, colors.accent],
      price: pricesOf(problem, now, mine?.order ?? []), shown: mine?.shown.kl ?? null,
      scale: marks, broken: breaksAt(all, text), most: mostOf(all, marks, text),
      change: a && b ? difference(a.order, b.order).joined.length + difference(a.order, b.order).left.length : 0,
      measuring: Boolean(model.get("live")) && live.text && !alone() };
  }
  /** The end of the scale of KL: that of the marks and of what was measured along lambda. */
  const mostOf = (all, marks, text) => 1.05 * Math.max(1e-3, ...marks.map((mark) => mark.risk),
    ...(all.measured ?? []).filter((m) => m.text === text && m.strength !== null && m.strength <= 1).map((m) => m.risk));

  function paint() {
    showControls();
    if (!view) return;
    scene = sceneOf();
    const { a, b, mine, colors, pair, price, inks } = scene;
    const brushed = model.get("brushed");
    const asks = tour.asks;
    grid.place(mapHome.clientWidth || 500, 0.85, 540, 28);
    const other = mine === a ? b : a;
    const ink = mine === a ? inks : [...inks].reverse();
    [[only, mine, 0], [others, other, 1]].forEach(([entry, plan, k]) => {
      entry.hidden = !a || !b || !scene.change;
      entry.firstChild.style.border = `2px solid ${ink[k]}`;
      entry.lastChild.textContent = `${plan?.name} only`;
    });
    const marked = [model.get("selected_unit"), hovered];
    const focus = hovered ?? (document.activeElement === map ? model.get("selected_unit") : null) ?? null;
    const after = focus === null || asks || mine?.order.includes(focus) ? null : pricesOf(problem, scene.now, [...mine?.order ?? [], focus]);
    if (after) after.tints[focus] = price.tints[focus];
    fade = () => paintMap(map, grid, { problem, colors, mine: new Set(mine?.order), other: other && new Set(other.order),
      inks: ink, tints: asks === "cell" ? null : (after ?? price)?.tints, next: asks === "cell" ? null : price?.next ?? null,
      arcs: asks ? [] : arcsOf(problem, focus), fading, brushed, marked, pair });
    fade();
    const wide = numberHome.clientWidth || 500;
    scene.words = sentence.draw({ plan: mine, live: scene.live, name: mine?.hand ? "your plan" : `${share(scene.now.ratio)} removed`,
      inks: { whole: colors.muted, plan: ink[0] }, cover: ["word", "ratio"].includes(asks), choosing: asks === "word", measuring: scene.measuring });
    number.draw({ record: scene.shown, predicted: mine ? mine.node + mine.edge : null, marks: scene.scale, most: scene.most, ink: ink[0],
      colors, width: Math.max(240, wide), guessed: tour.guessed, cover: ["KL", "ratio"].includes(asks), measuring: scene.measuring });
    facts.replaceChildren(note ? h("p", { role: "alert" }, `⚠ ${note}`) : "");
    buttons.pin.disabled = !b;
    buttons.swap.disabled = !a?.controls || !b;
    buttons.unpin.disabled = !model.get("_pin").order;
    paintSections();
    paintCard(focus, after);
    map.classList.toggle("cc-stale", !view.feasible || Boolean(view.stale));
    ui.root.refreshTable();
    ui.root.dataset.stale = String(Boolean(view.stale));
    ui.root.dataset.paints = String(++paints);
    ui.root.dataset.pruned = view.feasible ? view.order.join(" ") : "";
    ui.root.dataset.shown = mine ? mine.order.join(" ") : "";
    history.note();
  }
  /** The sections below: those that are open at once, the others when the hand rests. */
  function paintSections(all = false) {
    const wide = Math.max(240, ui.body.clientWidth - 24);
    const draw = (section, paint_) => (all || section.open) && paint_();
    draw(sections.hand, () => hand.draw(scene));
    draw(sections.numbers, () => numbers.draw(scene));
    draw(sections.chart, () => charts.draw(scene, Math.min(900, wide)));
    draw(sections.gap, () => gap.draw({ plan: scene.mine, record: scene.shown, colors: scene.colors, width: Math.min(720, wide),
      ink: scene.inks[1] }));
    draw(sections.edge, () => {
      const missing = edge.draw(scene, Math.min(720, wide));
      if (missing) model.send({ row: missing[0] });
    });
    clearTimeout(late);
    if (!all) late = setTimeout(() => paintSections(true), 150);
  }
  /** The four rows of the unit under the pointer or the marked one, and all terms of the marked one. */
  function paintCard(focus, after) {
    const [u, marked, order] = [focus, model.get("selected_unit") ?? null, scene.mine?.order ?? []];
    card.style.visibility = focus === null && !tour.bar.hidden ? "hidden" : ""; // its hint is not for now
    fourRows(card, { problem, order, controls: scene.now, price: tour.asks ? null : scene.price, after, u });
    if (!sections.unit.open) return;
    ledger.replaceChildren(h("p", { class: "cc-muted" }, "Click a cell, or go to it with the arrow keys."));
    if (marked === null) return;
    const strength = scene.now.interaction_strength;
    const turns = !flip.stale && flipsOf(flip.breaks, flip.changes, strength, marked);
    if (!drawCard(ledger, { problem, order, strength, u: marked, gone: new Map(order.map((v, k) => [v, k])), turns })) model.send({ row: marked });
  }
  function tableOf() {
    const steps = new Map(view && view.feasible ? view.order.map((u, k) => [u, k]) : []);
    return { columns: ["unit", "layer", "kind", "cost", "saliency", "connectivity", "pruned", "step"],
      rows: Array.from(problem.costs, (cost, u) => [nameOf(problem, u), problem.layers[u],
        KINDS[problem.kinds[u]], cost, problem.saliency[u], problem.connectivity[u],
        steps.has(u) ? "pruned" : "kept", steps.has(u) ? steps.get(u) : ""]) };
  }
  function captionOf() {
    const now = controls();
    const what = model.get("model_name") || "a model";
    const risk = view?.feasible ? `predicted risk ${show(view.node + view.edge)} nats per token` : "no plan";
    return `${what}, ${unitCount(problem.size)}: ratio ${percent(now.ratio)}, lambda ` +
      `${show(now.interaction_strength)}, ${guardWords(now)}; ${risk}.`;
  }
  function ownJson() {
    const text = JSON.stringify({ controls: controls(),
      realized_ratio: sizes(view.order).realized, pruned: view.order.map((u) => nameOf(problem, u)) }, null, 1);
    offer(`${stemOf(model, "plan")}.json`, text, "application/json");
  }

  // Pointing and keys on the map ---------------------------------------------------------------

  map.addEventListener("mousemove", (event) => {
    const u = grid.unitAt(event.offsetX, event.offsetY);
    if (u !== hovered) {
      hovered = u;
      paint();
    }
  });
  map.addEventListener("mouseleave", () => {
    hovered = null;
    paint();
  });
  map.addEventListener("blur", paint);
  map.addEventListener("click", (event) => {
    const u = grid.unitAt(event.offsetX, event.offsetY);
    select(u);
    clicked(u);
  });
  map.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return select(null);
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      return clicked(model.get("selected_unit"));
    }
    if (!event.key.startsWith("Arrow")) return undefined;
    event.preventDefault();
    const u = model.get("selected_unit");
    if (u === null || u === undefined) return select(0);
    const there = grid.step(u, event.key);
    return there === null ? undefined : select(there);
  });
  function select(u) {
    hovered = null; // the mouse may rest on another unit: what was chosen last is shown
    assign(model, { selected_unit: u });
    paint();
  }

  // Following the model ------------------------------------------------------------------------

  for (const name of CONTROLS) cleaner.on(model, `change:${name}`, refresh);
  for (const name of ["selected_unit", "brushed", "_marks", "_pin", "mode", "pair", "_damage", "live", "prompt"]) {
    cleaner.on(model, `change:${name}`, paint);
  }
  const aging = setInterval(() => view && scene && numbers.draw(scene), 10_000); // "just now" becomes "20 s ago"
  cleaner.add(() => clearInterval(aging));
  cleaner.add(() => clearTimeout(late));
  cleaner.on(model, "change:_view", confirm);
  for (const name of ["flips", "flips_stale"]) cleaner.on(model, `change:${name}`, takeFlips);
  cleaner.on(model, "msg:custom", (content, buffers) => {
    if (content && content.row !== undefined) {
      problem.rows.set(content.row, typed(buffers[0], Float64Array));
      paint();
    }
  });
  watch(ui.root, cleaner, paint);
  if (!alone()) flip = kernelPath();
  refresh();
  confirm();
  if (model.get("kernel") === false) setTimeout(tour.first); // once the page has taken over its address
  return cleaner.run;
}
