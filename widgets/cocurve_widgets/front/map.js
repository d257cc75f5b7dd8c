// The map of H: one cell per pair of units, to order, zoom and brush, with the units of the plan marked.

import { COLORS, Cleaner, GONE, assign, button, fateText, fillBrushed, frame, h, labeled, menu, named,
  palette, patch, picture, receiveFiles, redrawing, show, squareOf, stretch, table, tied,
  typed, unitCount } from "./kit.js";
import { POWERS, cellAt, clipped, colored, correlationOf, halved, inside, pairsInside, placesOf,
  shadeCells, shadesOf, showing, unitsOf, zoomed } from "./map_parts.js";
import { boxOf, paintHeat, placeAt, pointAt } from "./map_picture.js";

const MAP_ROWS = 500; // of the table on the page; the file has all
const MOST_PAIRS = 10_000; // of the file, as in Python
const LINE = "position:absolute;background:var(--cc-accent);opacity:0.7;";

const digits = (x) => Number(x.toPrecision(3)); // of a number read off what was sent: more are lost
/** Fill a card: a heading, and elements or a hint below. */
const fill = (card, heading, ...content) => card.replaceChildren(h("h4", {}, heading),
  ...content.map((part) => (typeof part === "string" ? h("p", { class: "cc-muted" }, part) : part)));

export function renderMap({ model, el }) {
  const cleaner = new Cleaner();
  const nodes = model.get("nodes");
  const { name: names, saliency } = nodes;
  const size = names.length;
  const [roots, peak, ends] = ["roots", "peak", "ends"].map((trait) => model.get(trait));
  const square = squareOf(typed(model.get("pairs"), Int16Array), size, Int16Array);
  const put = (values) => assign(model, values);
  let places = [];
  let [scene, spot] = [null, null];

  const rho = (u, v) => (saliency[u] > 0 && saliency[v] > 0
    ? correlationOf(square, size, peak, u, v) : 0);
  const edge = (u, v) => (u === v ? saliency[u]
    : correlationOf(square, size, peak, u, v) * roots[u] * roots[v]);
  const plan = () => model.get("plan");
  const planned = () => plan().order ?? []; // there may be no plan
  const length = () => planned().length;
  const chosen = () => [model.get("partner"), model.get("selected_unit")]; // column and row
  const chosenPlaces = () => chosen().map((u) => places.indexOf(u)); // -1 for none
  const showAll = () => put({ window: [0, 0, size] });
  const brush = (units) => put({ brushed: [...units].sort((u, v) => u - v) });

  const map = picture(""); // drawMap words its label
  Object.assign(map.style, { cursor: "crosshair", touchAction: "none" });
  const options = { title: "Map of H", name: "map", table: tableOf, mostRows: MAP_ROWS,
    tables: { units: "units", pairs: "pairs in view" },
    canvases: () => [map], redraw: drawMap, legend: legendOf,
    caption: () => [`${titleText()} of ${model.get("model_name") || "a model"}`, planWords()] };
  const request = receiveFiles(model, cleaner, "map");
  if (model.get("kernel") !== false) options.json = () => request(".json", () => complain(GONE));
  const ui = frame(model, el, cleaner, options);
  const { root, controls, body, complain } = ui;

  // Controls ------------------------------------------------------------------------------------

  const choice = (name, texts) => tied(model, cleaner, name, menu(Object.entries(texts)));
  const order = choice("order", { layer: "layer", saliency: "saliency, largest first",
    clustering: "clustering, tied units together", plan: "plan, removed first" });
  const scale = choice("scale", { correlation: "correlation ρ_uv", curvature: "curvature H_uv" });
  controls.append(labeled("order of rows and columns", order), labeled("color", scale),
    h("span", { class: "cc-row" }, button("−", "zoom out", () => zoom(1 / 1.6)),
      button("+", "zoom in", () => zoom(1.6)), button("All of H", "zoom out fully", showAll)));

  // Pictures and cards ----------------------------------------------------------------------------

  const lines = ["width:1px;height:100%", "height:1px;width:100%"].map((sides) =>
    h("div", { hidden: true, style: LINE + sides }));
  const band = h("div", { hidden: true, class: "cc-band" });
  const over = h("div", { style: "position:absolute;pointer-events:none" }, ...lines, band); // the cells
  const pairCard = h("div", { "aria-live": "polite", style: "flex:1 1 310px;min-height:170px" });
  const brushCard = h("div", { class: "cc-row", style: "flex-wrap:wrap" });
  const side = h("div", { class: "cc-card cc-cards", style: "flex:1 1 340px;max-width:700px" },
    pairCard);
  const [title, words] = [h("h4", {}), h("div", { class: "cc-muted" })];
  const legend = h("div", { class: "cc-legend", style: "margin-top:6px;max-width:60em" });
  const pictureSide = h("div", { style: "flex:none;max-width:100%" }, title, words,
    h("div", { style: "position:relative" }, map, over), legend,
    h("p", { class: "cc-muted", style: "max-width:48em" },
      "Click a cell, or focus the picture and use the arrow keys. Plus and minus zoom, 0 shows ",
      "all, Shift and an arrow or a drag move, Space brushes the pair, Escape clears. The wheel ",
      "zooms once the picture has the focus."));
  body.append(pictureSide, side,
    h("div", { class: "cc-row", style: "flex:1 1 100%;flex-wrap:wrap" },
      button("Brush what is shown", "mark the units of all rows and columns in view",
        () => brushBetween([0, 0], [size, size])),
      button("Brush the plan", "mark the removed units", () => brush(planned())),
      button("Clear brush", "remove all marks", () => brush([])), brushCard));

  // Shades are made once per order and scale, pixels when a window first needs their level: with
  // several cells to a screen pixel that is a level of half, a quarter, ... of the cells.
  let [levels, shades, shaded] = [[], null, ""];
  function shadeAll(colors) {
    const now = JSON.stringify([model.get("order"), model.get("scale"), colors.back, colors.kept,
      model.get("order") === "plan" ? planned() : model.get("clustered").length]);
    if (now === shaded) return;
    shaded = now;
    places = placesOf(model.get("order"), size, { saliency, clustered: model.get("clustered"),
      removed: planned() });
    const g = h("canvas", { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
    const rgb = (color) => { // as it looks on the background: a theme's color may be translucent
      for (const fill of [colors.back, color]) {
        g.fillStyle = fill;
        g.fillRect(0, 0, 1, 1);
      }
      return [...g.getImageData(0, 0, 1, 1).data.slice(0, 3)];
    };
    shades = shadesOf(...[COLORS.positive, COLORS.negative, colors.back, colors.kept].map(rgb));
    levels = [{ shades: shadeCells(square, places, model.get("scale"), { peak, ends, roots }), size }];
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
    const colors = palette(root);
    shadeAll(colors);
    const wide = body.clientWidth || 900;
    // the whole picture is seen at once, under the controls and, in JupyterLab, its menu
    const tall = Math.max(360, window.innerHeight - 365);
    const most = tall + boxOf(900).left + 6;
    // from 820 on the cards fit beside the picture
    const width = Math.max(240, Math.min(wide >= 820 ? wide - 368 : wide, 900, most));
    const box = boxOf(width);
    pictureSide.style.width = `${width}px`;
    stretch(over, [box.left, box.top], [box.left + box.side, box.top + box.side]);
    const scaled = model.get("scale");
    scene = { box, window: model.get("window"), cellsAt, places, nodes, colors,
      order: model.get("order"), power: POWERS[scaled], end: ends[scaled], removed: new Set(planned()),
      brushed: new Set(model.get("brushed")), chosen: chosen() };
    paintHeat(map, scene);
    title.textContent = titleText();
    words.textContent = planWords();
    legend.replaceChildren(...legendOf().map(([color, text]) => h("span", {}, patch(color), text)));
    const [v, u] = chosen();
    map.setAttribute("aria-label", named(model, `H of ${unitCount(size)}, ordered by ` +
      `${model.get("order")}; ${u === null || v === null ? "no pair chosen"
        : `chosen: row ${names[u]}, column ${names[v]}`}. Arrow keys choose a pair; the table holds ` +
      "the same data"));
    map.dataset.draws = Number(map.dataset.draws ?? 0) + 1;
  }

  // Words -----------------------------------------------------------------------------------------

  function titleText() {
    const [, , span] = model.get("window");
    const what = model.get("scale") === "correlation" ? "Correlation ρ" : "Curvature H";
    const by = model.get("order") === "plan" ? "the plan" : model.get("order");
    return `${what} of ${unitCount(size)} by ${by}` +
      `${span < size ? `, ${Math.round(span)} units across` : ""}`;
  }
  function legendOf() {
    const colors = palette(root);
    return [[COLORS.attention, "attention"], [COLORS.ffn, "FFN"], [colors.text, "removed (middle strip)"],
      [colors.accent, "brushed (outer strip)"], [COLORS.positive, "positive: worse together"],
      [COLORS.negative, "negative: losses partly cancel"]];
  }
  function planWords() {
    const { strength } = plan();
    return length() ? `plan: ${unitCount(length())} removed${strength === null ? "" : `, lambda ${show(strength)}`}` : "no plan yet";
  }

  function drawPair() {
    const [v, u] = spot ?? chosen();
    if (u === null || v === null) {
      fill(pairCard, "No pair chosen", "Point at a cell to see its two units; click to keep them.");
      return;
    }
    const facts = (unit) => [names[unit], show(digits(saliency[unit])),
      fateText(unit, plan().order, plan().ordered)];
    const units = table(["unit", "saliency H_uu", "plan"], [...new Set([u, v])].map(facts));
    const both = table(null, [["H_uv, nats per token", show(digits(edge(u, v)))],
      ["correlation ρ_uv", saliency[u] > 0 && saliency[v] > 0 ? show(digits(rho(u, v))) : "-"]]);
    if (u === v) fill(pairCard, names[u], units);
    else fill(pairCard, `${names[u]} and ${names[v]}`, both, units);
  }

  function drawBrush() {
    const unitButton = (u) => button(names[u], "select this unit",
      () => put({ selected_unit: u, partner: u }));
    fillBrushed(brushCard, model.get("brushed"), unitButton, "No units brushed.");
  }

  function tableOf(most) {
    const what = model.get("table_of");
    if (what === "pairs") {
      const strength = model.get("scale") === "correlation" ? rho : edge;
      return { columns: ["first", "second", "curvature", "correlation"],
        rows: pairsInside(model.get("window"), places, strength, Math.min(most, MOST_PAIRS))
          .map(([u, v]) => [names[u], names[v], digits(edge(u, v)), digits(rho(u, v))]) };
    }
    const brushed = new Set(model.get("brushed"));
    return { columns: ["place", "unit", "layer", "kind", "saliency", "cost", "removed_at_step", "brushed"],
      rows: places.slice(0, most).map((u, place) => [place + 1,
        ...["name", "layer", "kind", "saliency", "cost"].map((column) => nodes[column][u]),
        planned().indexOf(u) + 1 || "", brushed.has(u) ? "True" : "False"]) };
  }

  // Events ----------------------------------------------------------------------------------------

  /** The point [column, row] under the pointer; in a drag, of the window in which it began. */
  const pointOf = (event, shown = model.get("window")) =>
    pointAt({ box: scene.box, window: shown }, [event.offsetX, event.offsetY]);
  function zoom(factor, about) {
    const shown = model.get("window");
    const seen = cellAt(shown, chosenPlaces())?.map((place) => place + 0.5);
    const middle = [shown[0] + shown[2] / 2, shown[1] + shown[2] / 2];
    put({ window: zoomed(shown, size, factor, about ?? seen ?? middle) });
  }
  function move([x, y], [column, row, span] = model.get("window")) {
    put({ window: inside([column + x, row + y, span], size) });
  }
  function brushBetween(one, other, shown = model.get("window")) {
    put({ brushed: unitsOf(places, clipped(shown, one), clipped(shown, other)) });
  }
  function hover(event) {
    const cell = event && scene ? cellAt(model.get("window"), pointOf(event)) : null;
    const now = cell && cell.map((place) => places[place]);
    if (String(now) === String(spot)) return;
    spot = now;
    lines.forEach((line, axis) => {
      line.hidden = !cell;
      if (cell) line.style[axis ? "top" : "left"] = `${placeAt(scene, cell[axis] + 0.5, axis)}px`;
    });
    drawPair();
  }
  function choose(cell, more = {}) {
    put({ partner: cell && places[cell[0]], selected_unit: cell && places[cell[1]], ...more });
  }
  function walkCells(by) {
    hover(null); // the mouse may rest on another cell: what was chosen last is shown
    const [shown, now] = [model.get("window"), chosenPlaces()];
    const begun = !now.includes(-1);
    const next = now.map((place, axis) => {
      const to = begun ? place + by[axis] : place < 0 ? Math.ceil(shown[axis]) : place;
      return Math.min(size - 1, Math.max(0, to));
    });
    choose(next, { window: showing(shown, size, ...next) });
  }
  function brushPair() {
    const units = chosen().filter((u) => u !== null);
    const others = model.get("brushed").filter((u) => !units.includes(u));
    const all = units.every((u) => model.get("brushed").includes(u));
    brush(all ? others : new Set([...others, ...units])); // a unit with itself is one
  }
  const arrow = (...by) => (event) =>
    (event.shiftKey ? move(by.map((one) => (one * model.get("window")[2]) / 4)) : walkCells(by));
  const KEYS = { ArrowLeft: arrow(-1, 0), ArrowRight: arrow(1, 0), ArrowUp: arrow(0, -1),
    ArrowDown: arrow(0, 1), "+": () => zoom(1.6), "=": () => zoom(1.6), "-": () => zoom(1 / 1.6),
    0: showAll, " ": brushPair,
    Escape: () => put({ selected_unit: null, partner: null, brushed: [] }) };
  map.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
    KEYS[event.key](event);
    event.preventDefault();
    event.stopPropagation();
  });
  map.addEventListener("wheel", (event) => {
    // an unfocused picture lets the page scroll
    if (!scene || !(event.ctrlKey || document.activeElement === map)) return;
    event.preventDefault();
    zoom(2 ** (-event.deltaY / 400), clipped(model.get("window"), pointOf(event)));
  }, { passive: false });

  // A press: with Shift it moves while it is held, else it brushes where it ends; without a way it is a click.
  let held = null;
  const letGo = () => {
    held = null;
    band.hidden = true;
  };
  map.addEventListener("pointerdown", (event) => {
    const shown = model.get("window");
    if (!scene || !cellAt(shown, pointOf(event))) return;
    map.setPointerCapture(event.pointerId);
    held = { from: pointOf(event), shown, far: false, moves: event.shiftKey };
  });
  map.addEventListener("pointermove", (event) => {
    if (!held) {
      hover(event);
      return;
    }
    const { from, shown, moves } = held;
    const to = pointOf(event, shown);
    held.far ||= Math.hypot(to[0] - from[0], to[1] - from[1]) * (scene.box.side / shown[2]) > 4;
    if (!held.far) return;
    if (moves) {
      move([from[0] - to[0], from[1] - to[1]], shown);
      return;
    }
    band.hidden = false;
    stretch(band, ...[from, to].map((point) =>
      clipped(shown, point).map((place, axis) => placeAt(scene, place, axis))));
  });
  map.addEventListener("pointerup", (event) => {
    if (!held) return;
    const { from, shown, far, moves } = held;
    const to = pointOf(event, shown);
    letGo();
    if (!far) choose(cellAt(shown, to));
    else if (!moves) brushBetween(from, to, shown);
  });
  map.addEventListener("pointercancel", letGo);
  map.addEventListener("pointerleave", () => hover(null));

  // Following the traits --------------------------------------------------------------------------

  redrawing(model, cleaner, ui, { turned: ["map"],
    parts: { map: drawMap, pair: drawPair, brush: drawBrush },
    follows: { order: ["map"], scale: ["map"], window: ["map"], clustered: ["map"], plan: ["map", "pair"],
      brushed: ["map", "brush"], selected_unit: ["map", "pair"], partner: ["map", "pair"], table_of: [] } });
  return cleaner.run;
}
