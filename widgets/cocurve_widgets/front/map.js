// The map of H: one cell per pair of units, to order, zoom and brush; the greedy order step by step.

import { COLORS, Cleaner, GONE, assign, button, fillBrushed, frame, h, labeled, menu, named, palette,
  patch, percent, picture, receiveFiles, redrawing, show, stretch, typed, unitCount } from "./kit.js";
import { pairCardOf, planCardOf } from "./map_cards.js";
import { accountOf, cellAt, colored, correlationOf, halved, inside, pairsInside, pauseOf,
  placesOf, shadeCells, shadesOf, shading, showing, squarePairs, unitsOf, zoomed } from "./map_parts.js";
import { boxOf, paintHeat, placeAt } from "./map_picture.js";

const MAP_ROWS = 500; // of the table on the page; the file has all
const MOST_PAIRS = 10_000; // of the file, as in Python
const LINE = "position:absolute;pointer-events:none;background:var(--cc-accent);opacity:0.7";

export function renderMap({ model, el }) {
  const cleaner = new Cleaner();
  const { kind: kinds, layer: layers, name: names, saliency, cost: costs } = model.get("nodes");
  const size = names.length;
  const numLayers = Math.max(0, ...layers) + 1;
  const roots = model.get("roots");
  const peak = model.get("peak");
  const square = squarePairs(typed(model.get("pairs"), Int16Array), size);
  const live = model.get("kernel") !== false;
  const less = matchMedia("(prefers-reduced-motion: reduce)");
  const put = (values) => assign(model, values);
  let places = [];
  let [scene, spot, timer] = [null, null, 0];

  const rho = (u, v) => (saliency[u] > 0 && saliency[v] > 0
    ? correlationOf(square, size, peak, u, v) : 0);
  const edge = (u, v) => (u === v ? saliency[u]
    : correlationOf(square, size, peak, u, v) * roots[u] * roots[v]);
  const plan = () => model.get("plan");
  const length = () => (plan().order ?? []).length;
  const removed = () => (plan().order ?? []).slice(0, model.get("step"));
  const chosen = () => [model.get("partner"), model.get("selected_unit")];

  const map = picture("H as a picture");
  Object.assign(map.style, { cursor: "crosshair", touchAction: "none" });
  const options = { title: "Map of H", name: "map", table: tableOf, mostRows: MAP_ROWS,
    tables: { units: "units", ledger: "steps of the plan", pairs: "pairs in view" },
    canvases: () => [map], redraw: drawMap, legend: legendOf,
    caption: () => [`${titleText()} of ${model.get("model_name") || "a model"}`, planWords()] };
  const request = receiveFiles(model, cleaner, "map");
  if (live) options.json = () => request(".json", () => complain(GONE));
  const ui = frame(model, el, cleaner, options);
  const { root, controls, body, complain } = ui;

  // Controls ------------------------------------------------------------------------------------

  const choice = (name, texts) => menu(Object.entries(texts), (value) => put({ [name]: value }));
  const order = choice("order", { layer: "layer", saliency: "saliency, largest first",
    clustering: "clustering, tied units together", plan: "plan, removed first" });
  const scale = choice("scale", { correlation: "correlation ρ_uv", curvature: "curvature H_uv" });
  const drag = menu([["brush", "brush units"], ["zoom", "zoom in"], ["move", "move"]], () => {});
  const onlyPlan = h("input", { type: "checkbox",
    onchange: () => put({ only_plan: onlyPlan.checked }) });
  const play = button("Play", "remove the units of the plan one by one", () =>
    put({ ...(atEnd() ? { step: 0 } : {}), playing: !model.get("playing") }));
  const step = h("input", { type: "range", min: 0, step: 1, "aria-label": "step of the plan",
    oninput: () => put({ step: Number(step.value), playing: false }) });
  const steps = [button("◀ step", "one step back", () => walk(-1)),
    button("step ▶", "one step on", () => walk(1))];
  const stepText = h("span", { style: "min-width:9em" });
  controls.append(labeled("order of rows and columns", order), labeled("color", scale),
    labeled("drag to", drag),
    h("span", { class: "cc-row" }, button("−", "zoom out", () => zoom(1 / 1.6)),
      button("+", "zoom in", () => zoom(1.6)), button("All of H", "zoom out fully", () =>
        put({ window: [0, 0, size] }))),
    h("label", { class: "cc-row", title: "fade every cell but those of two removed units" },
      onlyPlan, "only pairs of the plan"),
    h("span", { class: "cc-row", style: "flex-wrap:wrap" }, play, steps[0], step, steps[1], stepText));

  // Pictures and cards ----------------------------------------------------------------------------

  const lines = [0, 1].map(() => h("div", { hidden: true, style: LINE }));
  const band = h("div", { hidden: true, class: "cc-band" });
  const pairCard = h("div", { "aria-live": "polite", style: "flex:1 1 310px;min-height:170px" });
  const planCard = h("div", { style: "flex:1 1 310px" });
  const brushCard = h("div", { class: "cc-row", style: "flex-wrap:wrap" });
  const side = h("div", { class: "cc-card cc-cards" }, pairCard, planCard);
  const [title, words] = [h("h4", {}), h("div", { class: "cc-muted" })];
  const legend = h("div", { class: "cc-legend", style: "margin-top:6px;max-width:60em" });
  const pictureSide = h("div", { style: "flex:none;max-width:100%" }, title, words,
    h("div", { style: "position:relative" }, map, ...lines, band), legend,
    h("p", { class: "cc-muted", style: "max-width:48em" },
      "Click a cell, or focus the picture and use the arrow keys. Plus and minus zoom, 0 shows ",
      "all, Shift and an arrow move, Space brushes the pair, P plays, Escape clears. The wheel ",
      "zooms once the picture has the focus. Dashed lines: the unit removed last."));
  body.append(pictureSide, side,
    h("div", { class: "cc-row", style: "flex:1 1 100%;flex-wrap:wrap" },
      button("Brush what is shown", "mark the units of all rows and columns in view",
        () => put({ brushed: unitsOf(model.get("window"), places, [0, 0], [1, 1]) })),
      button("Brush the plan", "mark the removed units",
        () => put({ brushed: [...removed()].sort((u, v) => u - v) })),
      button("Clear brush", "remove all marks", () => put({ brushed: [] })), brushCard));

  // Shades are made once per order and scale, pixels when a window first needs their level: with
  // several cells to a screen pixel that is a level of half, a quarter, ... of the cells.
  let [levels, shades, shaded, how] = [[], null, "", null];
  function shadeAll(colors) {
    const now = JSON.stringify([model.get("order"), model.get("scale"), colors.back, colors.kept,
      model.get("order") === "plan" ? plan().order : model.get("clustered").length]);
    if (now === shaded) return;
    shaded = now;
    places = placesOf(model.get("order"), size, { saliency, clustered: model.get("clustered"),
      removed: plan().order ?? [] });
    const g = h("canvas", { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
    const rgb = (color) => { // as it looks on the background: a theme's color may be translucent
      for (const fill of [colors.back, color]) {
        g.fillStyle = fill;
        g.fillRect(0, 0, 1, 1);
      }
      return [...g.getImageData(0, 0, 1, 1).data.slice(0, 3)];
    };
    shades = shadesOf(...[COLORS.positive, COLORS.negative, colors.back, colors.kept].map(rgb));
    how = shading(model.get("scale"), { peak, ends: model.get("ends"), roots });
    levels = [{ shades: shadeCells(square, places, how), size }];
  }
  /** A canvas with size / 2 ** level cells across. */
  function cellsAt(level) {
    while (levels.length <= level) levels.push(halved(levels.at(-1)));
    const found = levels[level];
    if (!found.canvas) {
      found.canvas = h("canvas", { width: found.size, height: found.size });
      const pixels = new Uint8ClampedArray(colored(found.shades, shades).buffer);
      found.canvas.getContext("2d").putImageData(new ImageData(pixels, found.size), 0, 0);
    }
    return found.canvas;
  }

  function drawMap() {
    const start = performance.now();
    const colors = palette(root);
    shadeAll(colors);
    const wide = body.clientWidth || 900;
    const beside = wide >= 820; // the card fits beside the picture
    // the whole picture is seen at once, under the controls and, in JupyterLab, its menu
    const tall = Math.max(360, window.innerHeight - 365);
    const most = tall + boxOf(900).left + 6;
    const width = Math.max(240, Math.min(beside ? wide - 368 : wide, 900, most));
    pictureSide.style.width = beside ? `${width}px` : "";
    side.style.width = beside ? `${Math.min(700, wide - width - 28)}px` : "100%";
    const [now, total] = [model.get("step"), length()];
    scene = { box: boxOf(width), window: model.get("window"), cellsAt, places, kinds, layers, names,
      numLayers, colors, power: how.power, order: model.get("order"),
      end: model.get("ends")[model.get("scale")], removed: new Set(removed()), chosen: chosen(),
      brushed: new Set(model.get("brushed")), onlyPlan: model.get("only_plan"),
      last: plan().ordered && now && (now < total || model.get("playing")) ? plan().order[now - 1] : null };
    paintHeat(map, scene);
    title.textContent = titleText();
    words.textContent = stepWords();
    legend.replaceChildren(...legendOf().map(([color, text]) => h("span", {}, patch(color), text)));
    const [v, u] = chosen();
    map.setAttribute("aria-label", named(model, `H of ${unitCount(size)}, ordered by ` +
      `${model.get("order")}; ${u === null || v === null ? "no pair chosen"
        : `chosen: row ${names[u]}, column ${names[v]}`}. Arrow keys choose a pair; the table holds ` +
      "the same data"));
    Object.assign(map.dataset, { ms: (performance.now() - start).toFixed(1),
      draws: Number(map.dataset.draws ?? 0) + 1, order: model.get("order") });
  }

  // Words -----------------------------------------------------------------------------------------

  const BY = { layer: "layer", saliency: "saliency", clustering: "clustering", plan: "the plan" };
  function titleText() {
    const [, , span] = model.get("window");
    const what = model.get("scale") === "correlation" ? "Correlation ρ" : "Curvature H";
    return `${what} of ${unitCount(size)} by ${BY[model.get("order")]}` +
      `${span < size ? `, ${Math.round(span)} units across` : ""}`;
  }
  function legendOf() {
    const colors = palette(root);
    return [[COLORS.attention, "attention"], [COLORS.ffn, "FFN"], [colors.text, "removed (middle strip)"],
      [colors.accent, "brushed (outer strip)"], [COLORS.positive, "positive: worse together"],
      [COLORS.negative, "negative: losses partly cancel"]];
  }
  function stepWords() {
    if (!length()) return "no plan yet";
    const account = accountOf(plan(), model.get("step"));
    return `plan: ${model.get("step")} of ${unitCount(length())} removed, ${percent(account.gone, 2)} of the ` +
      `cost, predicted risk ${show(account.risk)}`;
  }

  /** Of a saved picture, where no card tells which plan it is. */
  function planWords() {
    const strength = length() ? plan().strength : null;
    return `${stepWords()}${strength === null ? "" : `, lambda ${show(strength)}`}` +
      `${model.get("only_plan") ? "; cells of kept units are faded" : ""}`;
  }

  function drawPair() {
    const [v, u] = (spot ?? chosen()).map((unit) => unit ?? null);
    const pair = u !== null && v !== null;
    const both = pair && saliency[u] > 0 && saliency[v] > 0;
    pairCard.replaceChildren(...pairCardOf({ u, v, names, saliency, plan: plan(),
      edge: pair ? edge(u, v) : null, rho: both ? rho(u, v) : null }));
  }
  function drawPlan() {
    planCard.setAttribute("aria-live", model.get("playing") ? "off" : "polite");
    planCard.replaceChildren(...planCardOf({ plan: plan(), step: model.get("step"), names }));
  }

  function drawBrush() {
    const unitButton = (u) => button(names[u], "select this unit",
      () => put({ selected_unit: u, partner: u }));
    fillBrushed(brushCard, model.get("brushed"), unitButton, "No units brushed.");
  }

  function tableOf(most) {
    const what = model.get("table_of");
    if (what === "ledger") {
      const p = { order: [], ...plan() };
      let risk = 0;
      return { columns: ["step", "unit", "node", "edge", "risk", "ratio"],
        rows: p.order.slice(0, most).map((u, k) => [k + 1, names[u], p.node[k], p.edge[k],
          (risk += p.node[k] + p.edge[k]), p.gone[k]]) };
    }
    if (what === "pairs") {
      const strength = model.get("scale") === "correlation" ? rho : edge;
      const rows = pairsInside(model.get("window"), places, strength, Math.min(most, MOST_PAIRS))
        .map(({ u, v }) => [names[u], names[v], ...[edge(u, v), rho(u, v)]
          .map((x) => Number(x.toPrecision(3)))]);
      return { columns: ["first", "second", "curvature", "correlation"], rows };
    }
    const [steps_, brushed] = [plan().order ?? [], new Set(model.get("brushed"))];
    const rows = places.slice(0, most).map((u, place) => [place + 1, names[u], layers[u], kinds[u],
      saliency[u], costs[u], steps_.includes(u) ? steps_.indexOf(u) + 1 : "",
      brushed.has(u) ? "True" : "False"]);
    return { columns: ["place", "unit", "layer", "kind", "saliency", "cost", "removed_at_step",
      "brushed"], rows };
  }


  // Steps -----------------------------------------------------------------------------------------

  const atEnd = () => model.get("step") >= length();
  function walk(by) {
    put({ step: Math.min(length(), Math.max(0, model.get("step") + by)), playing: false });
  }
  function showControls() {
    const total = length();
    const steady = !plan().ordered;
    order.value = model.get("order");
    scale.value = model.get("scale");
    onlyPlan.checked = model.get("only_plan");
    step.max = total;
    step.value = model.get("step");
    step.disabled = steps[0].disabled = steps[1].disabled = steady;
    play.disabled = steady || less.matches;
    play.title = less.matches ? "your system asks for less motion: use the step buttons"
      : "remove the units of the plan one by one";
    play.textContent = model.get("playing") ? "Pause" : "Play";
    stepText.textContent = total ? `${model.get("step")} of ${unitCount(total)}` : "no plan yet";
  }
  /** Count on while playing. Each step sets the clock anew, so two views do not count twice. */
  function clock() {
    clearTimeout(timer);
    if (!model.get("playing")) return;
    if (less.matches || atEnd()) {
      put({ playing: false });
      return;
    }
    timer = setTimeout(() => {
      if (!root.isConnected) return;
      put({ step: model.get("step") + 1 });
    }, pauseOf(length()));
  }

  // Events ----------------------------------------------------------------------------------------

  const shareOf = (event) => [(event.offsetX - scene.box.left) / scene.box.side,
    (event.offsetY - scene.box.top) / scene.box.side];
  const middle = () => {
    const [column, row, span] = model.get("window");
    const [x, y] = chosen().map((u) => (u === null ? -1 : places.indexOf(u)));
    const seen = x >= column && x < column + span && y >= row && y < row + span;
    return seen ? [(x + 0.5 - column) / span, (y + 0.5 - row) / span] : [0.5, 0.5];
  };
  function zoom(factor, about = middle()) {
    put({ window: zoomed(model.get("window"), size, factor, about) });
  }
  function move(x, y) {
    const [column, row, span] = model.get("window");
    put({ window: inside([column + x * span, row + y * span, span], size) });
  }
  function hover(event) {
    const cell = event && scene ? cellAt(model.get("window"), size, shareOf(event)) : null;
    const now = cell && cell.map((place) => places[place]);
    if (String(now) === String(spot)) return;
    spot = now;
    const box = scene?.box;
    lines.forEach((mark, axis) => {
      mark.hidden = !cell;
      if (!cell) return;
      const from = cell.map((place, k) => placeAt(scene, place + 0.5, k));
      Object.assign(mark.style, axis ? { left: `${box.left}px`, top: `${from[1]}px`,
        width: `${box.side}px`, height: "1px" } : { left: `${from[0]}px`, top: `${box.top}px`,
        width: "1px", height: `${box.side}px` });
    });
    drawPair();
  }
  function choose(cell) {
    put({ partner: cell && places[cell[0]], selected_unit: cell && places[cell[1]] });
  }
  function walkCells([x, y]) {
    hover(null); // the mouse may rest on another cell: what was chosen last is shown
    const [column, row, span] = model.get("window");
    const now = chosen().map((u) => (u === null ? -1 : places.indexOf(u)));
    const clip = (place) => Math.min(size - 1, Math.max(0, place));
    const next = now.includes(-1) ? [column, row].map((from, axis) =>
      (now[axis] < 0 ? Math.min(size - 1, Math.ceil(from)) : now[axis]))
      : [clip(now[0] + x), clip(now[1] + y)];
    put({ partner: places[next[0]], selected_unit: places[next[1]],
      window: showing([column, row, span], size, ...next) });
  }
  function brushPair() {
    const units = chosen().filter((u) => u !== null);
    const brushed = new Set(model.get("brushed"));
    const all = units.every((u) => brushed.has(u));
    for (const u of units) all ? brushed.delete(u) : brushed.add(u);
    put({ brushed: [...brushed].sort((u, v) => u - v) });
  }
  const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  const KEYS = { "+": () => zoom(1.6), "=": () => zoom(1.6), "-": () => zoom(1 / 1.6),
    0: () => put({ window: [0, 0, size] }), " ": brushPair, p: () => play.click(),
    Escape: () => put({ selected_unit: null, partner: null, brushed: [], playing: false }) };
  map.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const arrow = ARROWS[event.key];
    if (arrow && event.shiftKey) move(arrow[0] / 4, arrow[1] / 4);
    else if (arrow) walkCells(arrow);
    else if (KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key]) {
      KEYS[event.key.length === 1 ? event.key.toLowerCase() : event.key]();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });
  map.addEventListener("wheel", (event) => {
    // an unfocused picture lets the page scroll
    if (!scene || !(event.ctrlKey || document.activeElement === map)) return;
    event.preventDefault();
    zoom(2 ** (-event.deltaY / 400), shareOf(event).map((x) => Math.min(1, Math.max(0, x))));
  }, { passive: false });

  let held = null;
  map.addEventListener("pointerdown", (event) => {
    if (!scene || !cellAt(model.get("window"), size, shareOf(event))) return;
    map.setPointerCapture(event.pointerId);
    held = { from: shareOf(event), window: model.get("window"), far: false,
      what: event.shiftKey ? "move" : drag.value };
  });
  map.addEventListener("pointermove", (event) => {
    if (!held) {
      hover(event);
      return;
    }
    const to = shareOf(event);
    const by = held.from.map((from, axis) => to[axis] - from);
    const { box } = scene;
    held.far ||= Math.hypot(...by) * box.side > 4;
    if (!held.far) return;
    if (held.what === "move") {
      const [column, row, span] = held.window;
      put({ window: inside([column - by[0] * span, row - by[1] * span, span], size) });
      return;
    }
    const clip = (share) => Math.min(1, Math.max(0, share));
    band.hidden = false;
    stretch(band, ...[held.from, to].map((point) =>
      [box.left + box.side * clip(point[0]), box.top + box.side * clip(point[1])]));
  });
  map.addEventListener("pointerup", (event) => {
    if (!held) return;
    const [{ from, far, what, window: before }, to] = [held, shareOf(event)];
    held = null;
    band.hidden = true;
    if (!far) choose(cellAt(before, size, to));
    else if (what === "brush") put({ brushed: unitsOf(before, places, from, to) });
    else if (what === "zoom") {
      const [column, row, span] = before;
      const wide = span * Math.max(...from.map((x, axis) => Math.abs(to[axis] - x)));
      const center = from.map((x, axis) => [column, row][axis] + (span * (x + to[axis])) / 2);
      put({ window: inside([center[0] - wide / 2, center[1] - wide / 2, wide], size) });
    }
  });
  map.addEventListener("pointercancel", () => {
    held = null;
    band.hidden = true;
  });
  map.addEventListener("pointerleave", () => hover(null));

  // Following the traits --------------------------------------------------------------------------

  less.addEventListener("change", showControls);
  cleaner.add(() => {
    less.removeEventListener("change", showControls);
    clearTimeout(timer);
  });
  showControls();
  clock();
  redrawing(model, cleaner, ui, { turned: ["map"],
    parts: { map: drawMap, pair: drawPair, plan: drawPlan, brush: drawBrush },
    follows: { order: ["map"], scale: ["map"], window: ["map"], only_plan: ["map"],
      clustered: ["map"], plan: ["map", "plan", "pair"], step: ["map", "plan"], playing: ["plan"],
      brushed: ["map", "brush"], selected_unit: ["map", "pair"], partner: ["map", "pair"],
      table_of: [] },
    first: (trait) => {
      showControls();
      // a model announces each trait as it is set: wait until all that belong together are there
      if (["step", "playing", "plan"].includes(trait)) queueMicrotask(clock);
    } });
  return cleaner.run;
}
