// The lambda explorer: sliders, the layer x unit map, budgets, risk curves, and the unit card.

import { COLORS, Cleaner, GONE, SILENCE, assign, count, frame, h, labelled, named, offer, palette, percent,
  picture, receiveFiles, show, stemOf, typed, typedNumber, unitCount, watch } from "./kit.js";
import { axisOf, neighbour, planAt } from "./axis.js";
import { MOST, capAt, flips, nameOf, symmetricDifference, unpack, viewOf } from "./solver.js";
import { KINDS, measuredAt, paintBudget, paintCurves, paintReach, paintStrip,
  untrusted } from "./plan_pictures.js";
import { drawCard } from "./unit_card.js";
import { paintMap, unitGrid } from "./unit_map.js";

const STEPS = 1000; // of the lambda slider
const PATIENCE = 600; // ms for a new path; until then the axis of the old one stays, to be calm
const CONTROLS = ["interaction_strength", "ratio", "layer_cap", "layer_cap_factor",
  "protect_first", "protect_last", "kinds"];

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
    canvases: () => [map, budget, curves],
    // in a notebook the kernel sends the file, which Selection.from_json reads
    json: () => (alone() ? ownJson() : request(".json", ownJson)),
    caption: () => [captionOf()],
    legend: () => [[COLORS.attention, "attention, removed"], [COLORS.ffn, "FFN, removed"],
      [palette(ui.root).kept, "kept"]],
    redraw: () => paint(),
  });

  // Controls -----------------------------------------------------------------------------------

  const range = (attributes) => h("input", { type: "range", min: 0, ...attributes });
  const number = (attributes) => h("input", { type: "number", ...attributes });
  const lambda = range({ max: STEPS, step: 1, "aria-label": "lambda, weight of the edges",
    oninput: () => put({ interaction_strength: axis.strength(lambda.value / STEPS) }),
    onkeydown: turnPage, onpointerdown: () => { held = true; }, onpointerup: release,
    onpointercancel: release });
  const lambdaBox = number({ min: 0, max: 1, step: "any", "aria-label": "lambda, typed",
    onchange: () => take(lambdaBox, (value) => put({ interaction_strength: value })) });
  const axisChoice = h("select", { onchange: () => put({ axis: axisChoice.value }) },
    h("option", { value: "plans" }, "one width per plan"), h("option", { value: "linear" }, "linear"),
    h("option", { value: "logarithmic" }, "logarithmic"));
  const ratio = range({ max: MOST, step: 0.001, "aria-label": "ratio, share of cost to remove",
    oninput: () => put({ ratio: Number(ratio.value) }) });
  const ratioBox = number({ min: 0, max: 60, step: 0.1, "aria-label": "ratio in percent, typed",
    onchange: () => take(ratioBox, (value) => put({ ratio: value / 100 })) });
  const capMode = h("select", { "aria-label": "layer cap", onchange: setCap },
    h("option", { value: "none" }, "none"),
    h("option", { value: "share" }, "share of a layer"),
    h("option", { value: "factor" }, "x ratio"));
  const capBox = number({ min: 0.01, step: 0.05, "aria-label": "size of the cap", onchange: setCap });
  const first = number({ min: 0, max: problem.numLayers, step: 1,
    onchange: () => takeWhole(first, (value) => put({ protect_first: value })) });
  const last = number({ min: 0, max: problem.numLayers, step: 1,
    onchange: () => takeWhole(last, (value) => put({ protect_last: value })) });
  const kinds = h("select", { "aria-label": "kinds of units", onchange: () => put({ kinds: kinds.value.split("+") }) },
    h("option", { value: "attention+ffn" }, "joint"),
    h("option", { value: "attention" }, "attention only"),
    h("option", { value: "ffn" }, "FFN only"));
  const button = (text, hint, step) =>
    h("button", { type: "button", title: hint, onclick: () => go(step) }, text);
  const key = h("p", { class: "cc-legend cc-key" });
  const doubt = h("p", { class: "cc-legend", hidden: true },
    h("span", {}, h("i", { class: "cc-swatch cc-hatch" }), h("span", {})));
  const sliders = h("div", { class: "cc-sliders" },
    labelled("weight of the edges (lambda): 0 ignores them, 1 counts them in full; arrow keys: next plan",
      h("span", { class: "cc-row" }, lambda, lambdaBox,
        button("◀ plan", "previous plan: the next smaller lambda with another plan", -1),
        button("plan ▶", "next plan: the next larger lambda with another plan", 1))),
    strip, key, doubt,
    labelled("ratio: share of removable parameters to remove",
      h("span", { class: "cc-row" }, ratio, ratioBox, "%")),
    reach);
  ui.controls.append(sliders,
    labelled("layer cap", h("span", { class: "cc-row" }, capMode, capBox),
      "the largest share of a layer's cost that may be removed"),
    labelled("scale of lambda", axisChoice),
    labelled("protect first layers", first), labelled("protect last layers", last),
    labelled("units", kinds));

  const facts = h("div", { class: "cc-facts" });
  const card = h("div", { class: "cc-card", "aria-live": "polite" });
  const swatch = (color, text, mark = "") => h("span", {},
    h("i", { class: "cc-swatch", style: `background:${color}` }, mark), text);
  const legend = h("div", { class: "cc-legend" },
    swatch(COLORS.attention, "attention, pruned"), swatch(COLORS.ffn, "FFN, pruned"),
    swatch("var(--cc-kept)", "kept"),
    swatch(`linear-gradient(45deg, var(--cc-kept) 50%, ${COLORS.flip} 50%)`,
      "flips at the next or previous plan"));
  const title = (text) => h("h4", {}, text);
  const mapColumn = h("div", { class: "cc-column" }, title("Units by layer"), map, legend,
    title("Removed share of each layer"), budget);
  const curveColumn = h("div", { class: "cc-column" }, title("Predicted risk by ratio"), curves, facts);
  ui.body.append(mapColumn, curveColumn, card);

  function put(values) {
    assign(model, values);
    refresh();
  }
  /** Use the typed number, moved into the bounds; letters restore the old one. */
  function take(field, use, round) {
    const value = typedNumber(field, round);
    field.value = value ?? field.dataset.now;
    if (value !== null) use(value);
  }
  function takeWhole(field, use) {
    take(field, use, Math.round);
  }
  function setCap(event) {
    if (event.target === capMode && capMode.value !== "none") {
      capBox.value = capMode.value === "factor" ? 1.5 : 0.4;
    }
    const mode = capMode.value;
    if (mode === "none") put({ layer_cap: null, layer_cap_factor: null });
    else {
      capBox.max = mode === "share" ? 1 : 100;
      take(capBox, (size) => put({
        layer_cap: mode === "share" ? size : null, layer_cap_factor: mode === "factor" ? size : null }));
    }
  }
  function release() {
    held = false;
    paint();
  }
  function turnPage(event) {
    const arrows = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 };
    // where every plan has a width of its own, a key press goes to the next one
    const step = { PageUp: 1, PageDown: -1, ...(axis.kind === "plans" && arrows) }[event.key];
    if (!step) return;
    event.preventDefault();
    go(step);
  }
  function go(step) {
    if (flip.stale && !alone()) {
      model.send({ go: step });
      return;
    }
    const found = neighbour(flip.breaks, model.get("interaction_strength"), step);
    if (found !== null) put({ interaction_strength: found });
  }

  function controls() {
    const [strength, share, cap, factor, f, l, chosen] = CONTROLS.map((name) => model.get(name));
    return { strength, ratio: share, cap, factor, first: f, last: l,
      kinds: chosen.map((kind) => KINDS.indexOf(kind)) };
  }
  function showControls() {
    const now = controls();
    const put1 = (input, value) => {
      input.dataset.now = value;
      if (document.activeElement !== input || input.type === "range") input.value = value;
    };
    axisChoice.value = model.get("axis") ?? "plans";
    chooseAxis();
    lambda.value = Math.round(axis.place(now.strength) * STEPS);
    const marks = model.get("_marks") || {};
    const far = untrusted(marks, now.strength);
    lambda.setAttribute("aria-valuetext",
      `lambda ${show(now.strength)}${planText(now.strength)}${far ? ", not to be trusted on a preview" : ""}`);
    doubt.hidden = !untrusted(marks, Infinity);
    doubt.title = marks.gate?.reason ?? "";
    doubt.firstChild.lastChild.textContent =
      `preview: not to be trusted above ${marks.trusted}; no gate mark, since the gate needs the real H`;
    put1(lambdaBox, Number(now.strength.toPrecision(4)));
    ratio.value = now.ratio;
    ratio.setAttribute("aria-valuetext", percent(now.ratio));
    put1(ratioBox, Number((100 * now.ratio).toFixed(2)));
    capMode.value = now.factor != null ? "factor" : now.cap != null ? "share" : "none";
    capBox.disabled = capMode.value === "none";
    put1(capBox, now.factor ?? now.cap ?? "");
    put1(first, now.first);
    put1(last, now.last);
    kinds.value = model.get("kinds").join("+");
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
    if (wanted !== "plans") axis = axisOf(wanted, flip.breaks);
    else if (!flip.stale) axis = axisOf("plans", flip.breaks);
    else if (axis.kind !== "plans" || performance.now() >= late) axis = axisOf("linear", flip.breaks);
  }
  function planText(strength) {
    return flip.stale ? "" : `, plan ${planAt(flip.breaks, strength) + 1} of ${flip.breaks.length + 1}`;
  }

  // Solving ------------------------------------------------------------------------------------

  let lost = false; // the kernel was there and is no more
  let silence = 0; // timer
  const alone = () => model.get("kernel") === false || lost;
  /** Say so, and go on alone, if the kernel gives no answer to the present controls. */
  function listen() {
    clearTimeout(silence);
    silence = setTimeout(() => {
      if (alone() || answer()) return;
      lost = true;
      note = `${GONE}${problem.matrix ? " This page solves the plans itself meanwhile." : ""}`;
      refresh();
    }, SILENCE);
  }
  cleaner.add(() => clearTimeout(silence));
  function refresh() {
    const begun = performance.now();
    if (problem.matrix) view = viewOf(problem, controls(), memory);
    else view = fromKernel();
    if (alone() && problem.matrix) {
      speak(performance.now() - begun);
      findFlips();
    } else if (!alone()) listen();
    paint();
  }
  /** The kernel's answer, or null while it is still about earlier controls. */
  function answer() {
    const sent = model.get("_view");
    const now = JSON.stringify(CONTROLS.map((name) => model.get(name)));
    return sent && sent.order && JSON.stringify(sent.key) === now ? sent : null;
  }
  function fromKernel() {
    const sent = model.get("_view");
    const ends = model.get("_ends");
    if (!sent || !sent.order || !ends.curves) return null;
    const removed = sent.order.reduce((sum, u) => sum + problem.costs[u], 0);
    return { ...sent, removed, realized: removed / problem.total, reachable: ends.reachable,
      stalled: null, stale: !answer(),
      curves: [...ends.curves, { strength: sent.key[0], ...sent.curve }] };
  }
  /** Compare the plan drawn at once with the kernel's, which decides. */
  function confirm() {
    const sent = answer();
    if (!problem.matrix) return refresh();
    if (!sent || !view) return undefined;
    lost = false;
    const apart = view.feasible === sent.feasible
      ? symmetricDifference(view.order, sent.order) : sent.order;
    const agrees = !sent.feasible || apart.length === 0;
    note = agrees ? "" : `Browser and kernel differ in ${apart.length} units; the kernel's plan is shown.`;
    if (!agrees) view = fromKernel();
    if (model.get("agrees") !== agrees) assign(model, { agrees });
    return paint();
  }
  function speak(milliseconds) {
    const share = (x) => percent(x, 2);
    const both = view.stalled === null ? "" : ` and greedy stops at ${share(view.stalled)}`;
    model.set("error", view.feasible ? "" : `The ratio ${share(model.get("ratio"))} is out of reach: ` +
      `the guards leave at most ${share(view.reachable)}${both}. Lower the ratio or loosen the guards.`);
    const risk = view.feasible ? `Predicted risk ${show(view.node + view.edge)} nats per token (from H, not ` +
      "measured)" : "No plan";
    model.set("status", `${risk}; solved in ${milliseconds.toFixed(1)} ms by this page.` +
      (untrusted(model.get("_marks"), model.get("interaction_strength"))
        ? ` Not to be trusted: lambda is above ${model.get("_marks").trusted} on a preview.` : ""));
    model.set("plans", { ratio: model.get("ratio"), diagonal: view.diagonal, edge_aware: view.full,
      present: view.feasible ? view.order : null, ordered: true, problem: model.get("error") });
    model.save_changes();
  }

  // Flips come from the kernel. A page without one finds its own, a few milliseconds at a time, so
  // that it stays responsive.
  let search = null;
  let searched = "";
  function findFlips() {
    const now = { ...controls(), strength: 0 };
    const key = JSON.stringify(now);
    if (key === searched) return;
    searched = key;
    clearTimeout(search);
    flip = { breaks: [], changes: [], stale: true };
    const sweep = flips(problem, now);
    const found = { breaks: [], changes: [], stale: true };
    const work = () => {
      const until = performance.now() + 8;
      while (performance.now() < until) {
        const { value, done } = sweep.next();
        if (done) {
          flip = { ...found, stale: false };
          paint();
          return;
        }
        if (value) {
          found.breaks.push(value.strength);
          found.changes.push(value.changed);
        }
      }
      search = setTimeout(work, 4);
    };
    search = setTimeout(work, 150);
    cleaner.add(() => clearTimeout(search));
  }
  function takeFlips() {
    flip = { breaks: model.get("flips"), changes: model.get("_changes"), stale: model.get("flips_stale") };
    paint();
  }

  // Painting -----------------------------------------------------------------------------------

  const grid = unitGrid(problem);
  let paints = 0;
  function paint() {
    showControls();
    if (!view) return;
    const colors = palette(ui.root);
    const wide = ui.root.clientWidth || 900;
    const column = Math.min(620, wide - 30);
    const now = controls();
    grid.place(column);
    const mapWidth = Math.max(250, grid.geometry.width);
    mapColumn.style.width = `${mapWidth}px`;
    const room = wide - mapWidth - 24 - 26; // padding and a gap
    const three = room - 24 - 340 >= 340; // the card has its own column
    const home = three ? ui.body : curveColumn;
    if (card.parentNode !== home) home.append(card);
    const beside = three ? room - 366 : room;
    const gone = new Map(view.feasible ? view.order.map((u, k) => [u, k]) : []);
    const turning = flip.stale ? new Set() : aboutToFlip(flip.breaks, flip.changes, model.get("interaction_strength"));
    const scene = { problem, colors, geometry: grid.geometry, gone, flip, axis, view, ratio: model.get("ratio"),
      strength: now.strength, cap: capAt(now, now.ratio), marks: model.get("_marks") || {} };
    paintMap(map, grid, scene, { turning, marked: [model.get("selected_unit"), hovered] });
    paintBudget(budget, scene);
    paintCurves(curves, scene, beside >= 340 ? Math.min(600, beside) : column);
    paintStrip(strip, scene, Math.max(120, lambda.clientWidth || 400));
    paintKey(scene);
    paintReach(reach, scene, Math.max(120, ratio.clientWidth || 400));
    paintFacts();
    paintCard(gone);
    for (const canvas of [map, budget]) canvas.classList.toggle("cc-stale", !view.feasible || Boolean(view.stale));
    ui.root.refreshTable();
    ui.root.dataset.stale = String(Boolean(view.stale));
    ui.root.dataset.paints = String(++paints);
    ui.root.dataset.pruned = view.feasible ? view.order.join(" ") : "";
  }

  /** What the strip shows, in words; what it does not show at this ratio is not listed. */
  function paintKey({ marks, strength }) {
    const here = measuredAt(marks, model.get("ratio"));
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
  function paintFacts() {
    const fact = (name, value) => h("div", {}, h("span", { class: "cc-muted" }, `${name} `), value);
    const share = problem.parameters ? `, ${percent(view.removed / problem.parameters)} of all` : "";
    facts.replaceChildren(...[...(view.feasible ? [
      fact("realised ratio", percent(view.realized, 2)),
      fact("removed", `${count(view.removed)} parameters in ${unitCount(view.order.length)}${share}`),
      fact("predicted risk", `${show(view.node + view.edge)} nats per token`),
      fact("of which", `node ${show(view.node)}, edge ${show(view.edge)}`),
      fact("differs from the diagonal plan (lambda 0) in",
        view.differs === null ? "no such plan at this ratio" : unitCount(view.differs)),
      fact("plans over lambda", flip.stale ? "being computed" : String(flip.breaks.length + 1)),
    ] : [fact("no plan", `${percent(model.get("ratio"))} asked, at most ${percent(view.reachable, 2)} ` +
      `reachable${view.stalled === null ? "" : `, greedy stops at ${percent(view.stalled, 2)}`}`)]),
    note && h("div", { role: "alert" }, `⚠ ${note}`)].filter(Boolean));
  }

  function paintCard(gone) {
    const u = hovered ?? model.get("selected_unit") ?? null;
    const strength = model.get("interaction_strength");
    const turns = u !== null && !flip.stale && flipsOf(flip.breaks, flip.changes, strength, u);
    const complete = drawCard(card, { problem, order: view.order, strength, u, gone, turns });
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
    const guards = [now.cap != null && `layer cap ${now.cap}`, now.factor != null && `layer cap ${now.factor} x ratio`,
      now.first > 0 && `first ${now.first} layers whole`, now.last > 0 && `last ${now.last} layers whole`,
      now.kinds.length === 1 && `${KINDS[now.kinds[0]]} only`].filter(Boolean).join(", ");
    const what = model.get("model_name") || "a model";
    const risk = view?.feasible ? `predicted risk ${show(view.node + view.edge)} nats per token`
      : "no plan";
    return `${what}, ${count(problem.size)} units: ratio ${percent(now.ratio)}, lambda ` +
      `${show(now.strength)}, ${guards || "no guards"}; ${risk}.`;
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
  map.addEventListener("click", (event) => select(grid.unitAt(event.offsetX, event.offsetY)));
  map.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return select(null);
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
  for (const name of ["selected_unit", "_marks", "axis"]) cleaner.on(model, `change:${name}`, paint);
  cleaner.on(model, "change:_view", confirm);
  cleaner.on(model, "change:_ends", () => problem.matrix || refresh());
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
  return cleaner.run;
}
