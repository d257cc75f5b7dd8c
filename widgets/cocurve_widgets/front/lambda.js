// The lambda explorer: the layer x unit map of plan B against plan A, the chart of lambda, four rows.

import { axisOf, linearAxis, neighbor, planAt } from "./axis.js";
import { handPanels, ownPlan, pairWith, toggled } from "./by_hand.js";
import { brief, difference } from "./compare.js";
import { COLORS, Cleaner, GONE, SILENCE, assign, button, frame, h, named, offer, palette,
  percent, picture, receiveFiles, show, showBeside, stemOf, tied, typed, unitCount, watch } from "./kit.js";
import { edgePanel } from "./edge.js";
import { chartPanel } from "./lambda_chart.js";
import { CONTROLS, guardWords, labelOf, lambdaControls } from "./lambda_controls.js";
import { keptRatios, knownOf, measurementOf, share } from "./measured.js";
import { numbersPanel, shownOf } from "./numbers.js";
import { pathSearch } from "./path_search.js";
import { KINDS, inTheWay, nameOf, runner, unpack, viewOf } from "./solver.js";
import { drawCard } from "./unit_card.js";
import { Fading, paintMap, unitGrid } from "./unit_map.js";

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
  const drawn = (label) => picture(named(model, label));
  const map = drawn("Map of units by layer: which are pruned, kept, or about to flip");
  const charts = chartPanel(problem, run, { put, slide });
  const ui = frame(model, el, cleaner, {
    title: "Pruning plan by lambda",
    name: "plan",
    table: tableOf,
    canvases: () => [map, ...charts.pictures()],
    // in a notebook the kernel sends the file, which Selection.from_json reads
    json: () => (alone() ? ownJson() : request(".json", ownJson)),
    caption: () => [captionOf(), charts.finding.textContent],
    legend: () => [[palette(ui.root).text, "removed; outlined: kept; +: only in B, −: only in A"],
      [COLORS.b, `B: ${planB()?.name ?? "no plan"}`], [COLORS.a, `A: ${planA()?.name ?? "no plan"}`]],
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

  const card = h("div", { class: "cc-card", popover: "manual", "aria-live": "polite" });
  const swatch = (text, style, sign = "") => h("span", {}, h("i", { class: "cc-swatch cc-unit", style }, sign), text);
  const dark = "var(--cc-text)";
  const solid = `background:${dark};color:var(--cc-back)`;
  const [only, others] = [swatch("", solid, "+"), swatch("", "", "−")];
  const pairMark = swatch("pair", "border:2px solid var(--cc-accent);border-radius:50%");
  const brushMark = swatch("brushed", "border:2px dashed var(--cc-accent)");
  const legend = h("div", { class: "cc-legend" },
    problem.kinds.includes(0) ? swatch("attention, removed", solid) : "",
    swatch("FFN, removed", `background:linear-gradient(135deg, ${dark} 44%, var(--cc-back) 44% 56%, ${dark} 56%)`),
    only, others, swatch("kept", ""), pairMark, brushMark,
    swatch("changes next", "background:linear-gradient(225deg, var(--cc-text) 35%, transparent 35%)"));
  const title = (text) => h("h4", {}, text);
  const act = (text, hint, pin) => button(text, hint, () => repin(pin));
  const buttons = {
    pin: act("Pin B as A", "compare with the current plan from now on", "pin"),
    swap: act("Swap", "show plan A, and compare with the current one", "swap"),
    unpin: act("Unpin", "compare with the diagonal plan (lambda 0) again", "unpin"),
  };
  const hand = handPanels(problem, { put, clear: () => editPlan(null) });
  const edge = edgePanel(problem, put);
  const numbers = numbersPanel();
  const live = tied(model, cleaner, "live", h("input", { type: "checkbox" }));
  const choice = h("label", { title: "KL and right answers of A and B are measured as soon as the hand rests" },
    live, " measure automatically");
  const facts = h("div", { class: "cc-facts" });
  const guardsNow = h("span", {});
  const more = h("details", { class: "cc-more" }, h("summary", {}, "More", guardsNow),
    h("div", { class: "cc-folded" },
      h("div", {}, title("Guards"), bar.guards, title("Plan A against plan B"),
        h("div", { class: "cc-row cc-versus" }, ...Object.values(buttons), choice), numbers.details),
      h("div", {}, title("By hand"), hand.modes, hand.prompt),
      ui.root.querySelector(".cc-files")));
  const mapColumn = h("div", {}, bar.share, title("Units by layer"), map, legend, edge.panel, card);
  const chartColumn = h("div", {}, bar.strength, charts.title, charts.chart, charts.finding, charts.others,
    numbers.rows, facts);
  ui.body.classList.add("cc-screen");
  ui.body.append(chartColumn, mapColumn, more);

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

  const controls = () => Object.fromEntries(CONTROLS.map((name) => [name, model.get(name)]));
  function showControls() {
    const now = controls();
    chooseAxis();
    choice.hidden = alone() || !model.get("_damage").text;
    guardsNow.textContent = `: ${guardWords(now)}`;
    bar.show(now, { place: axis.place(now.interaction_strength),
      words: flip.stale || model.get("guess") === "1" ? ""
        : `, plan ${planAt(flip.breaks, now.interaction_strength) + 1} of ${flip.breaks.length + 1}`,
      most: view?.reachable ?? 1 });
  }

  // A against B --------------------------------------------------------------------------------

  /** Plan A: the pinned one, or the diagonal plan of the present ratio and guards; null for none. */
  function planA() {
    const pin = model.get("_pin");
    const plan = pin.order ? pin : view.a && { ...view.a, strength: 0,
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
  function repin(what) {
    if (!alone()) {
      model.send({ pin: what });
      return;
    }
    const [a, b] = [planA(), planB()];
    const pinned = what === "unpin" ? {} : b && { order: b.order, node: b.node, edge: b.edge,
      strength: model.get("interaction_strength"), ratio: model.get("ratio"), controls: controls() };
    if (!pinned) return;
    model.set("_pin", pinned);
    put(what === "swap" && a?.controls ? a.controls : {});
  }

  /** Remove or restore a unit in plan A, which is then the reader's; null begins it anew. */
  function editPlan(u) {
    if (!alone()) return void model.send({ toggle: u });
    const from = model.get("_pin").order ?? planB()?.order ?? [];
    const plan = ownPlan(problem, u === null ? [] : toggled(from, u));
    if (plan) put({ _pin: plan });
  }
  /** What a click on a unit does beside marking it. */
  function clicked(u) {
    if (u === null || u === undefined) return;
    if (model.get("mode") === "remove") editPlan(u);
    if (model.get("mode") === "pair") put({ pair: pairWith(model.get("pair"), u) });
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
    if (alone()) model.set("plans", { ratio: model.get("ratio"), diagonal: view.a?.order ?? null, edge_aware: view.full,
      present: view.feasible ? view.order : null, ordered: true, problem: model.get("error"),
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
  let paints = 0;

  /** What the panels show. */
  function sceneOf() {
    const live = model.get("_damage");
    const [guess, guesses, mode, pair] = ["guess", "guesses", "mode", "pair"].map((name) => model.get(name));
    return { a: planA(), b: planB(), now: controls(), marks: model.get("_marks"), known: known(), live, flip, axis,
      first: view.a, solvable: solvable(), by: model.get("matrix_name") ?? "H", guess, guesses, mode,
      pair, colors: palette(ui.root), layers: problem.layers,
      measuring: Boolean(model.get("live")) && live.text && !alone() };
  }

  function paint() {
    showControls();
    if (!view) return;
    const scene = sceneOf();
    const { a, b, now, colors, pair } = scene;
    const brushed = model.get("brushed");
    grid.place(mapColumn.clientWidth || 500);
    const gone = new Map(b ? b.order.map((u, k) => [u, k]) : []);
    const turning = flip.stale ? new Set() : aboutToFlip(flip.breaks, flip.changes, now.interaction_strength);
    const inA = a && new Set(a.order);
    const [own, other] = a?.hand ? ["A", "B"] : ["B", "A"]; // what the reader made is solid
    [[only, own], [others, other]].forEach(([entry, name]) => {
      entry.lastChild.textContent = `only in ${name}${a?.hand && name === "A" ? ", yours" : ""}`;
    });
    fade = () => paintMap(map, grid, { problem, colors, inA: a?.hand ? new Set(gone.keys()) : inA,
      inB: a?.hand ? inA : gone, turning, fading, brushed, marked: [model.get("selected_unit"), hovered], pair });
    fade();
    charts.draw(scene, chartColumn.clientWidth || 600);
    facts.replaceChildren(note ? h("p", { role: "alert" }, `⚠ ${note}`) : "");
    buttons.pin.disabled = !b;
    buttons.swap.disabled = !a?.controls || !b;
    buttons.unpin.disabled = !model.get("_pin").order;
    [only, others].forEach((entry) => { entry.hidden = !a || !b; });
    brushMark.hidden = !brushed.length;
    pairMark.hidden = !pair.length;
    paintNumbers(scene);
    paintCard(gone);
    map.classList.toggle("cc-stale", !view.feasible || Boolean(view.stale));
    ui.root.refreshTable();
    ui.root.dataset.stale = String(Boolean(view.stale));
    ui.root.dataset.paints = String(++paints);
    ui.root.dataset.pruned = view.feasible ? view.order.join(" ") : "";
    const change = a && b ? difference(a.order, b.order) : { joined: [], left: [] };
    ui.root.dataset.joined = change.joined.join(" ");
    ui.root.dataset.left = change.left.join(" ");
  }
  function paintNumbers(scene = sceneOf()) {
    numbers.draw(scene);
    hand.draw(scene);
    const missing = edge.draw(scene, Math.max(240, mapColumn.clientWidth));
    if (missing) model.send({ row: missing[0] });
  }
  /** The card of the unit under the pointer, or of the marked one while the map has the focus. */
  function paintCard(gone) {
    const u = hovered ?? (document.activeElement === map ? model.get("selected_unit") ?? null : null);
    if (u === null) {
      if (card.matches(":popover-open")) card.hidePopover();
      return;
    }
    const strength = model.get("interaction_strength");
    const turns = !flip.stale && flipsOf(flip.breaks, flip.changes, strength, u);
    const complete = drawCard(card, { problem, order: view.order, strength, u, gone, turns });
    if (!complete) model.send({ row: u });
    const [x, y, w, t] = grid.box(u);
    const home = map.getBoundingClientRect();
    showBeside(card, home.left + x - 10, home.left + x + w + 10, home.top + y + t / 2 - 40);
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
  for (const name of ["selected_unit", "brushed", "_marks", "_pin", "mode", "pair", "_damage", "live", "guess", "guesses"]) {
    cleaner.on(model, `change:${name}`, paint);
  }
  const aging = setInterval(() => view && paintNumbers(), 10_000); // "just now" becomes "20 s ago"
  cleaner.add(() => clearInterval(aging));
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
  return cleaner.run;
}
