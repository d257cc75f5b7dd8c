// The lambda explorer: the layer x unit map of plan B against plan A, budgets, risk curves, the card.

import { PATHS, axisOf, neighbor, planAt } from "./axis.js";
import { handPanels, ownPlan, pairWith, toggled } from "./by_hand.js";
import { placeColumns } from "./columns.js";
import { difference, drawComparison, measurementOf } from "./compare.js";
import { COLORS, Cleaner, GONE, SILENCE, assign, button, counted, frame, h, named, offer, palette, patch,
  percent, picture, receiveFiles, show, stemOf, typed, unitCount, watch } from "./kit.js";
import { damagePanel, knownOf, pairedOf } from "./damage.js";
import { CONTROLS, guardWords, labelOf, lambdaControls } from "./lambda_controls.js";
import { pathSearch } from "./path_search.js";
import { capAt, inTheWay, nameOf, symmetricDifference, unpack, viewOf } from "./solver.js";
import { KINDS, measuredAt, paintBudget, paintCurves, paintReach, paintStrip, pathMarks,
  untrusted } from "./plan_pictures.js";
import { addTour } from "./tour.js";
import { drawCard } from "./unit_card.js";
import { Fading, paintMap, unitGrid } from "./unit_map.js";

const STROKES = "solid: total, dashed: units alone (node), dotted: edges";
const PATIENCE = 600; // ms for a new path; until then the axis of the old one stays, to be calm

/** Units that join or leave the plan at the flips just below and just above a lambda. */
export function aboutToFlip(breaks, changes, strength) {
  const here = planAt(breaks, strength);
  return new Set([...(changes[here - 1] ?? []), ...(changes[here] ?? [])]);
}

/** The nearest lambda below and above at which a unit joins or leaves; null for none. */
export function flipsOf(breaks, changes, strength, u) {
  const mine = breaks.filter((_, i) => changes[i].includes(u));
  return { below: mine.filter((b) => b <= strength).at(-1) ?? null,
    above: mine.find((b) => b > strength) ?? null };
}

export function renderLambda({ model, el }) {
  const cleaner = new Cleaner();
  const problem = unpack(model.get("_problem"));
  const memory = {};
  let view = null;
  let hovered = null;
  let note = "";
  let flip = { breaks: [], changes: [], stale: true };
  let axis = axisOf("linear", []);
  let held = false; // while the hand is on the slider, the axis must not move under it
  let late = 0; // when the wait for a path ends

  const request = receiveFiles(model, cleaner, "plan");
  const drawn = (label) => picture(named(model, label));
  const map = drawn("Map of units by layer: which are pruned, kept, or about to flip");
  const budget = drawn("Share of each layer's attention and FFN cost that is removed");
  const curves = drawn("Predicted risk against ratio, with node and edge parts");
  const strip = h("canvas", { class: "cc-picture", "aria-hidden": "true" });
  const reach = h("canvas", { class: "cc-picture", "aria-hidden": "true" });
  const ui = frame(model, el, cleaner, {
    title: "Pruning plan by lambda",
    name: "plan",
    table: tableOf,
    canvases: () => [map, curves, budget],
    // in a notebook the kernel sends the file, which Selection.from_json reads
    json: () => (alone() ? ownJson() : request(".json", ownJson)),
    caption: () => [captionOf(), `Curves: ${curveTitle.textContent}, ${STROKES}. ` +
      `Bars: ${whose.textContent}.`],
    legend: () => [[COLORS.attention, "attention, removed by both"],
      [COLORS.ffn, "FFN, removed by both"], [COLORS.b, `B: ${planB()?.name ?? "no plan"}`],
      [COLORS.a, `A: ${planA()?.name ?? "no plan"}`], [palette(ui.root).kept, "kept"]],
    redraw: () => paint(),
  });

  // Controls and places ------------------------------------------------------------------------

  const key = h("p", { class: "cc-legend cc-key" });
  const doubt = h("p", { class: "cc-legend", hidden: true },
    h("span", {}, h("i", { class: "cc-swatch cc-hatch" }), h("span", {})));
  const bar = lambdaControls(problem, { lambda: strip, key, doubt, reach }, { put, go,
    slide,
    hold: (on) => {
      held = on;
      if (!on) paint();
    },
    arrows: () => PATHS.includes(axis.kind) });
  ui.controls.classList.remove("cc-controls");
  ui.controls.append(bar.bar, bar.more);

  const facts = h("div", { class: "cc-facts" });
  const card = h("div", { class: "cc-card", "aria-live": "polite" });
  const swatch = (color, text, style) => h("span", {}, patch(color, style), text);
  const both = [swatch(COLORS.attention, "attention, removed by both"),
    swatch(COLORS.ffn, "FFN, removed by both")];
  const onlyB = swatch(COLORS.b, "removed only by B");
  const onlyA = swatch("var(--cc-kept)", "only by A", `box-shadow:inset 0 0 0 3px ${COLORS.a}`);
  const brushMark = swatch("var(--cc-kept)", "brushed", "outline:2px dashed var(--cc-text);outline-offset:-2px");
  const legend = h("div", { class: "cc-legend" }, ...both, onlyB, onlyA,
    swatch("var(--cc-kept)", "kept"), brushMark,
    swatch("linear-gradient(225deg, var(--cc-text) 35%, var(--cc-kept) 35%)",
      "changes at the next or previous plan"));
  const lines = h("div", { class: "cc-legend" });
  const title = (text) => h("h4", {}, text);
  const act = (text, hint, pin) => button(text, hint, () => repin(pin));
  const buttons = {
    pin: act("Pin B as A", "compare with the present plan from now on", "pin"),
    swap: act("Swap", "show plan A, and compare with the present one", "swap"),
    unpin: act("Unpin", "compare with the diagonal plan (lambda 0) again", "unpin"),
  };
  const versus = h("div", {}, h("div", { class: "cc-row cc-versus" }, title("Plan A against plan B"),
    ...Object.values(buttons)), facts);
  const whose = title("");
  const shares = h("div", {}, whose, budget);
  const hand = handPanels(problem, { put, clear: () => editPlan(null) });
  const mapColumn = h("div", { class: "cc-column" }, title("Units by layer"), hand.modes, map, legend,
    shares);
  const curveTitle = title("");
  const hands = h("div", {}, hand.pair, hand.next);
  const curveColumn = h("div", { class: "cc-column" }, curveTitle, curves, lines, hands);
  const damage = damagePanel(put);
  const sideColumn = h("div", { class: "cc-column" }, versus, damage.panel, card);
  ui.body.append(mapColumn, curveColumn, sideColumn);

  function put(values) {
    assign(model, values);
    refresh();
  }
  function slide(place) {
    put({ interaction_strength: axis.strength(place) });
  }
  function go(step) {
    if (flip.stale && !alone()) {
      model.send({ go: step });
      return;
    }
    const found = neighbor(flip.breaks, model.get("interaction_strength"), step);
    if (found !== null) put({ interaction_strength: found });
  }

  function controls() {
    const [strength, share, cap, factor, f, l, chosen] = CONTROLS.map((name) => model.get(name));
    return { strength, ratio: share, cap, factor, first: f, last: l,
      kinds: chosen.map((kind) => KINDS.indexOf(kind)) };
  }
  function showControls() {
    const now = controls();
    const marks = model.get("_marks") || {};
    chooseAxis();
    const far = untrusted(marks, now.strength);
    doubt.hidden = !untrusted(marks, Infinity);
    doubt.title = marks.gate?.reason ?? "";
    doubt.firstChild.lastChild.textContent =
      `preview: not to be trusted above ${marks.trusted}; no gate mark, since the gate needs the real H`;
    bar.show(now, { place: axis.place(now.strength), axisName: model.get("axis") ?? "plans",
      words: `${planText(now.strength)}${far ? ", not to be trusted on a preview" : ""}`,
      guarded: guardWords(now), chosen: model.get("kinds"), solvedOn: surrogate() });
  }

  // A against B --------------------------------------------------------------------------------

  /** Plan A: the pinned one, or the diagonal plan of the present ratio and guards; null for none. */
  function planA() {
    const pin = model.get("_pin") ?? {};
    const plan = pin.order ? pin : view.a && { ...view.a, strength: 0, curve: view.curves[0],
      ratio: model.get("ratio"), controls: { ...present(), interaction_strength: 0 } };
    if (!plan) return null;
    const name = pin.hand ? "your plan" : pin.order ? `pinned${made(plan)}` : "diagonal, lambda 0";
    return { ...plan, ...sizes(plan.order), name };
  }
  function planB() {
    return view.feasible ? { order: view.order, node: view.node, edge: view.edge, ...sizes(view.order),
      name: `present, lambda ${show(rounded(model.get("interaction_strength")))}` } : null;
  }
  const rounded = (x) => Number(x.toPrecision(3));
  const made = ({ strength, ratio }) => (strength === null ? ""
    : `, lambda ${show(rounded(strength))}, ${percent(ratio)}`);
  const present = () => Object.fromEntries(CONTROLS.map((name) => [name, model.get(name)]));
  function sizes(order) {
    const removed = order.reduce((sum, u) => sum + problem.costs[u], 0);
    return { removed, realized: removed / problem.total };
  }
  function repin(what) {
    if (!alone()) {
      model.send({ pin: what });
      return;
    }
    const [a, b] = [planA(), planB()];
    const pinned = what === "unpin" ? {} : b && { order: b.order, node: b.node, edge: b.edge,
      strength: model.get("interaction_strength"), ratio: model.get("ratio"), controls: present(),
      curve: view.curves.at(-1) };
    if (!pinned) return;
    model.set("_pin", pinned);
    put(what === "swap" && a?.controls ? a.controls : {});
  }

  /** Remove or restore a unit in plan A, which is then the reader's; null begins it anew. */
  function editPlan(u) {
    if (!alone()) return void model.send({ toggle: u });
    const from = (model.get("_pin") ?? {}).order ?? planB()?.order ?? [];
    const plan = ownPlan(problem, u === null ? [] : toggled(from, u));
    if (plan) put({ _pin: plan });
  }
  /** What a click on a unit does beside marking it. */
  function clicked(u) {
    if (u === null || u === undefined) return;
    if (model.get("mode") === "remove") editPlan(u);
    if (model.get("mode") === "pair") put({ pair: pairWith(model.get("pair") ?? [], u) });
  }

  /** The axis asked for; that of the plans only once their path is known, else a linear one. */
  function chooseAxis() {
    const wanted = model.get("axis") ?? "plans";
    if (!flip.stale) late = 0;
    else if (!late) {
      late = performance.now() + PATIENCE;
      const timer = setTimeout(() => flip.stale && paint(), PATIENCE + 20);
      cleaner.add(() => clearTimeout(timer));
    }
    if (held) return;
    if (!PATHS.includes(wanted) || !flip.stale) axis = axisOf(wanted, flip.breaks);
    else if (axis.kind !== wanted || performance.now() >= late) axis = axisOf("linear", flip.breaks);
  }
  function planText(strength) {
    return flip.stale ? "" : `, plan ${planAt(flip.breaks, strength) + 1} of ${flip.breaks.length + 1}`;
  }

  // Solving ------------------------------------------------------------------------------------

  let lost = false; // the kernel was there and is no more
  let silence = 0; // timer
  const surrogate = () => model.get("surrogate") || problem.surrogates[0];
  const onMatrix = () => surrogate() === problem.surrogates[0];
  const solvable = () => problem.matrix && onMatrix();
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
    if (solvable()) view = viewOf(problem, controls(), memory);
    else view = fromKernel();
    if (solvable() && !answer()) speak(performance.now() - begun);
    if (alone() && solvable()) findFlips({ ...controls(), strength: 0 });
    else if (!alone()) listen();
    paint();
  }
  /** The kernel's answer, or null while it is still about earlier controls. */
  function answer() {
    const sent = model.get("_view");
    return sent && sent.order && JSON.stringify(sent.key) === settings() ? sent : null;
  }
  /** Whether the kernel knows the present controls: it solves when asked, which may take seconds. */
  const asked = () => JSON.stringify(model.get("_asked")) === settings();
  const settings = () => JSON.stringify(CONTROLS.map((name) => model.get(name)));
  function fromKernel() {
    const sent = model.get("_view");
    const ends = model.get("_ends");
    if (!sent || !sent.order || !ends.curves) return null;
    const removed = sent.order.reduce((sum, u) => sum + problem.costs[u], 0);
    return { ...sent, removed, realized: removed / problem.total, reachable: ends.reachable,
      a: ends.diagonal, stalled: null, stale: !answer(),
      curves: [...ends.curves, { strength: sent.key[0], ...sent.curve }] };
  }
  /** Compare the plan drawn at once with the kernel's, which decides. */
  function confirm() {
    const sent = answer();
    if (!solvable()) return refresh();
    if (!sent || !view) return undefined;
    lost = false;
    const apart = view.feasible === sent.feasible
      ? symmetricDifference(view.order, sent.order) : sent.order;
    const agrees = !sent.feasible || apart.length === 0;
    note = agrees ? "" : `Browser and kernel differ in ${unitCount(apart.length)}; the kernel's plan is shown.`;
    if (!agrees) view = fromKernel();
    if (model.get("agrees") !== agrees) assign(model, { agrees });
    return paint();
  }
  function speak(milliseconds) {
    const share = (x) => percent(x, 2);
    const both = view.stalled === null ? "" : ` and greedy stops at ${share(view.stalled)}`;
    model.set("error", view.feasible ? "" : `The ratio ${share(model.get("ratio"))} is out of reach: ` +
      `the guards leave at most ${share(view.reachable)}${both}. Lower the ratio, or loosen ` +
      `${inTheWay(problem, controls()).map(labelOf).join(" or ") || "the guards"}.`);
    const found = view.feasible && measurementOf(model.get("_marks") || {}, view.order);
    const risk = view.feasible ? `Predicted risk ${show(view.node + view.edge)} nats per token, ` +
      (found ? `measured KL ${show(found.risk)} on ${found.text}` : "KL not measured") : "No plan";
    model.set("status", `${risk}; solved in ${milliseconds < 1 ? "less than 1" : milliseconds.toFixed(1)} ms by this page.` +
      (untrusted(model.get("_marks"), model.get("interaction_strength"))
        ? ` Not to be trusted: lambda is above ${model.get("_marks").trusted} on a preview.` : ""));
    if (alone()) model.set("plans", { ratio: model.get("ratio"), diagonal: view.diagonal, edge_aware: view.full,
      present: view.feasible ? view.order : null, ordered: true, problem: model.get("error"),
      runs: { diagonal: runOf(memory.zero), edge_aware: runOf(memory.one) } });
    model.save_changes();
  }

  const runOf = (run) => ({ order: run.order, share: run.spent.map((cost) => cost / problem.total) });

  const findFlips = pathSearch(problem, cleaner, (found) => {
    flip = found;
    if (!found.stale) paint();
  });
  function takeFlips() {
    flip = { breaks: model.get("flips"), changes: model.get("_changes"), stale: model.get("flips_stale") };
    paint();
  }

  // Painting -----------------------------------------------------------------------------------

  const grid = unitGrid(problem);
  const fading = new Fading(() => paint());
  let paints = 0;

  function paint() {
    showControls();
    if (!view) return;
    const colors = palette(ui.root);
    const [mapWidth, curveWidth] = placeColumns(ui.body, [mapColumn, curveColumn, sideColumn], shares,
      hands);
    const now = controls();
    const [a, b] = [planA(), planB()];
    grid.place(mapWidth);
    const gone = new Map(b ? b.order.map((u, k) => [u, k]) : []);
    const turning = flip.stale ? new Set() : aboutToFlip(flip.breaks, flip.changes, now.strength);
    const scene = { problem, colors, geometry: grid.geometry, gone, flip, axis, view,
      ratio: now.ratio, strength: now.strength, cap: capAt(now, now.ratio),
      path: view.feasible ? pathMarks(flip, view.order, now.strength) : [],
      marks: model.get("_marks") || {} };
    paintMap(map, grid, { problem, colors, inA: a && new Set(a.order), inB: gone, turning, fading,
      brushed: model.get("brushed") ?? [],
      marked: [model.get("selected_unit"), hovered, ...(model.get("pair") ?? [])] });
    paintBudget(budget, a?.hand ? { ...scene, gone: new Set(a.order) } : scene);
    whose.textContent = `Removed share of each layer, ${a?.hand ? "your plan (A)" : "plan B"}`;
    const thin = (strength) => [a?.strength, now.strength].includes(strength);
    const drawn = [!thin(1) && { curve: view.curves[1], color: colors.muted, thin: true },
      a && (a.curve ? { curve: a.curve, color: COLORS.a } : { plan: a, color: COLORS.a }),
      { curve: view.curves[2], color: COLORS.b }].filter(Boolean);
    curveTitle.textContent = `${onMatrix() ? "Predicted risk" : "Additive KL"} by ratio`;
    paintCurves(curves, { curves: drawn, colors, ratio: now.ratio }, curveWidth);
    lines.replaceChildren(swatch(COLORS.b, `B${doubtful(now.strength)}`), swatch(COLORS.a, "A"),
      ...(thin(1) ? [] : [swatch("var(--cc-muted)", `lambda 1${doubtful(1)}`)]),
      h("span", {}, STROKES));
    paintStrip(strip, scene, Math.max(120, bar.lambda.clientWidth || 400));
    paintKey(scene);
    paintReach(reach, scene, Math.max(120, bar.ratio.clientWidth || 400));
    paintFacts(a, b, scene.marks);
    paintDamage(a, b);
    paintCard(gone);
    for (const canvas of [map, budget]) canvas.classList.toggle("cc-stale", !view.feasible || Boolean(view.stale));
    ui.root.refreshTable();
    ui.root.dataset.stale = String(Boolean(view.stale));
    ui.root.dataset.paints = String(++paints);
    ui.root.dataset.pruned = view.feasible ? view.order.join(" ") : "";
    const change = a && b ? difference(a.order, b.order) : { joined: [], left: [] };
    ui.root.dataset.joined = change.joined.join(" ");
    ui.root.dataset.left = change.left.join(" ");
  }
  const doubtful = (strength) =>
    (untrusted(model.get("_marks"), strength) ? " (not to be trusted)" : "");

  /** What the strip shows, in words; what it does not show at this ratio is not listed. */
  function paintKey({ marks, strength, path }) {
    const here = measuredAt(marks, model.get("ratio"), path);
    const gate = typeof marks.gate?.strength === "number";
    const count_ = flip.breaks.length + 1;
    const plans = flip.stale ? "the plans are being computed"
      : count_ === 1 ? "a single plan: at this ratio every lambda gives it"
        : `plan ${planAt(flip.breaks, strength) + 1} of ${count_}: one cell each, lambda at the breaks`;
    key.replaceChildren(...[h("span", {}, h("i", { class: "cc-swatch cc-cell" }), plans),
      here.length > 0 && h("span", {}, h("i", { class: "cc-dot" }), "measured KL"),
      gate && h("span", {}, h("i", { class: "cc-triangle" }), "recommended by the redundancy gate"),
    ].filter(Boolean));
    key.title = marks.gate?.reason ?? "";
  }
  function paintDamage(a = planA(), b = planB()) {
    const [marks, live] = [model.get("_marks") || {}, model.get("_damage") || {}];
    damage.draw({ a, b, marks, live, on: Boolean(model.get("live")), alone: alone() });
    const units = model.get("pair") ?? [];
    const complete = hand.draw({ chosen: model.get("mode") ?? "mark", units, a, b, live,
      known: knownOf(marks, live) });
    if (!complete) model.send({ row: units[0] });
  }
  function paintFacts(a, b, marks) {
    const live = model.get("_damage") || {};
    drawComparison(facts, { a, b, marks: knownOf(marks, live), paired: pairedOf(live, a, b),
      layers: problem.layers });
    if (!b) {
      facts.append(h("p", {}, `No plan: ${percent(model.get("ratio"))} asked, at most ` +
        `${percent(view.reachable, 2)} reachable${view.stalled === null ? ""
          : `, greedy stops at ${percent(view.stalled, 2)}`}.`));
    }
    if (note) facts.append(h("p", { role: "alert" }, `⚠ ${note}`));
    buttons.pin.disabled = !b;
    buttons.swap.disabled = !a?.controls || !b;
    buttons.unpin.disabled = !model.get("_pin")?.order;
    legend.hidden = false;
    [onlyA, onlyB].forEach((entry) => { entry.hidden = !a || !b; });
    brushMark.hidden = !model.get("brushed")?.length;
  }

  function paintCard(gone) {
    const u = hovered ?? model.get("selected_unit") ?? null;
    const strength = model.get("interaction_strength");
    const turns = u !== null && !flip.stale && flipsOf(flip.breaks, flip.changes, strength, u);
    const complete = drawCard(card, { problem, order: view.order, strength, u, gone, turns,
      solvedOn: onMatrix() ? null : surrogate() });
    if (!complete) model.send({ row: u });
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
    const risk = view?.feasible ? `${onMatrix() ? "predicted risk" : "additive KL"} ` +
      `${show(view.node + view.edge)} nats per token`
      : "no plan";
    return `${what}, ${unitCount(problem.size)}: ratio ${percent(now.ratio)}, lambda ` +
      `${show(now.strength)}, ${guardWords(now)}; ${risk}.`;
  }
  function ownJson() {
    const text = JSON.stringify({ controls: Object.fromEntries(CONTROLS.map((n) => [n, model.get(n)])),
      realized_ratio: view.realized, pruned: view.order.map((u) => nameOf(problem, u)) }, null, 1);
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
  for (const name of ["selected_unit", "brushed", "_marks", "axis", "_pin", "mode", "pair"]) cleaner.on(model, `change:${name}`, paint);
  const again = () => view && [paintFacts(planA(), planB(), model.get("_marks") || {}), paintDamage()];
  for (const name of ["_damage", "live"]) cleaner.on(model, `change:${name}`, again);
  const aging = setInterval(() => view && paintDamage(), 10_000); // "just now" becomes "20 s ago"
  cleaner.add(() => clearInterval(aging));
  cleaner.on(model, "change:_view", confirm);
  cleaner.on(model, "change:_ends", () => solvable() || refresh());
  for (const name of ["flips", "flips_stale"]) cleaner.on(model, `change:${name}`, takeFlips);
  cleaner.on(model, "msg:custom", (content, buffers) => {
    if (content && content.row !== undefined) {
      problem.rows.set(content.row, typed(buffers[0], Float64Array));
      paint();
    }
  });
  watch(ui.root, cleaner, paint);
  if (!alone()) {
    flip = { breaks: model.get("flips"), changes: model.get("_changes"), stale: model.get("flips_stale") };
  }
  refresh();
  confirm();
  addTour({ model, cleaner, ui, slide, ends: problem.protected, order: () => (view?.feasible ? view.order : []),
    parts: { map, curves, card, lambda: bar.bar.firstChild, shares: budget } });
  return cleaner.run;
}
