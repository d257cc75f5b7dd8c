// The bridge explorer: graph of the edges, saliency against connectivity, list of bridges.

import { logPlane, nearest, sheet, svg, text } from "./svg.js";
import { COLORS, Cleaner, GONE, assign, button, checks, counted, fateText, fillBrushed, fit, frame, h,
  labeled, menu, named, numberInput, palette, percent, picture, receiveFiles, redrawing,
  refill, show, stretch, table, tied, typed, unitCount } from "./kit.js";
import { comparedPlans, flowChart, graphKey, joined, lineEnds, markPaths, placeGraph, readEdges, shareBelow,
  shownText, strokeEdges, unitsInside, visibleEdges } from "./bridge_parts.js";
import { drawGridAxes, lineOf, paintPaths, unitGrid } from "./unit_map.js";

export function renderBridge({ model, el }) {
  const cleaner = new Cleaner();
  const nodes = model.get("nodes");
  const grid = unitGrid({ kinds: nodes.kind.map((kind) => Number(kind !== "attention")),
    layers: nodes.layer, places: nodes.index, numLayers: Math.max(0, ...nodes.layer) + 1 });
  const edges = readEdges(typed(model.get("edge_ends"), Uint32Array),
    typed(model.get("edge_correlation"), Float32Array), nodes.kind);
  const partners = typed(model.get("partners"), Uint32Array);
  const partnerRho = typed(model.get("partner_correlation"), Float32Array);
  const live = model.get("kernel") !== false;
  const put = (name, value) => assign(model, { [name]: value });
  let shown = [];
  let [graphPlace, planePlace] = [null, null];
  let hovered = null;

  const graph = picture("Graph of the units and their strongest edges");
  const chartHome = (label) => h("div", { role: "img", tabindex: "0", "aria-label": label });
  const plane = chartHome("Saliency against connectivity of every unit");
  const flow = chartHome("Edges of one bridge by layer");
  const key = h("div", {});
  const request = receiveFiles(model, cleaner, "bridges");
  const ui = frame(model, el, cleaner, { title: "Bridges", name: "bridges",
    table: tableOf,
    canvases: () => [graph, key.firstChild, plane.firstChild, flow.firstChild],
    caption: pictureWords, redraw: drawGraph,
    gexf: live ? () => request(".gexf", () => complain(GONE)) : null });
  const { root, controls, body, complain } = ui;

  // Controls ------------------------------------------------------------------------------------

  // the slider ends where the strongest edge is left: beyond it there is nothing to see
  const steps = Math.floor(200 * Math.abs(edges.rho[0] ?? 1) + 1e-9);
  const most = Math.max(1, steps) / 200;
  const tie = (trait, control, how) => tied(model, cleaner, trait, control, how);
  const number = (attributes) => h("input", { type: "number", min: 0, ...attributes });
  const slider = h("input", { type: "range", min: 0, max: most, step: 0.005, "aria-label": "threshold" });
  const box = number({ max: 1, step: 0.01, "aria-label": "threshold as number" });
  const quantile = (name) => numberInput(model, cleaner, name, { min: 0, max: 1, step: 0.05 });
  controls.append(
    labeled("weakest edge shown (|ρ|)", h("span", { class: "cc-row" },
      tie("threshold", slider, { event: "input" }),
      tie("threshold", box, { shown: (x) => Number(x.toPrecision(6)) }))),
    labeled("edges of", tie("edges_of", menu([["bridges", "listed bridges"], ["all", "all units"]]))),
    labeled("sign of the edges (ρ)", tie("sign", menu(["both", "positive", "negative"].map((one) => [one, one])))));
  controls.after(h("details", { class: "cc-more" }, h("summary", {}, "More"),
    h("div", { class: "cc-controls" },
      h("fieldset", { class: "cc-row", style: "border:0;padding:0;margin:0" },
        h("legend", { class: "cc-muted" }, "blocks"),
        ...checks(model, cleaner, "blocks", ["attention", "cross", "ffn"])),
      ...(live ? [
        labeled("low saliency quantile", quantile("saliency_quantile"),
          "low: at most this; 0.5 is the median"),
        labeled("high connectivity quantile", quantile("connectivity_quantile"),
          "high: at least this"),
      ] : []))));

  // Pictures, card, lists ------------------------------------------------------------------------

  const caption = h("h4", {});
  const rings = [0, 1].map(() => h("div", { hidden: true, class: "cc-ring" }));
  const band = h("div", { hidden: true, class: "cc-band" });
  const stage = (...content) => h("div", { style: "position:relative" }, ...content);
  const card = h("div", { class: "cc-card", "aria-live": "polite" });
  const flowTitle = h("h4", {});
  const brushList = h("div", { class: "cc-row", style: "flex-wrap:wrap" });
  const listTitle = h("h4", {});
  const listNote = h("p", { class: "cc-muted" });
  const list = h("div", { class: "cc-scroll" });
  graph.style.cursor = plane.style.cursor = "crosshair";
  Object.assign(plane.style, { touchAction: "none", userSelect: "none" }); // a drag brushes
  const [graphSide, planeSide] = [0, 1].map(() => h("div", { style: "flex:none" }));
  graphSide.append(caption, stage(graph, rings[0]), key,
    h("p", { class: "cc-muted" }, "Click a unit, or focus the graph and use the arrow keys: ",
      "left and right change the layer, up and down the unit; Escape clears."),
    listTitle, listNote, list);
  planeSide.append(h("h4", {}, "Saliency and connectivity"), stage(plane, rings[1], band),
    flowTitle, flow, card);
  body.append(graphSide, planeSide,
    h("div", { style: "flex:1 1 100%" },
      h("div", { class: "cc-row", style: "flex-wrap:wrap" },
        button("Brush the bridge region", "mark all units of low saliency and high connectivity",
          () => put("brushed", region())),
        button("Clear brush", "remove all marks", () => put("brushed", [])), brushList)));

  const select = (unit) => {
    hover(null); // the mouse may rest on another unit: what was chosen last is shown
    put("selected_unit", unit);
  };
  const unitButton = (unit) => button(nodes.name[unit], "select this unit", () => select(unit));
  const curvature = (u, v, rho) => rho * Math.sqrt(nodes.saliency[u] * nodes.saliency[v]);
  const isBridge = (unit) => model.get("bridges").indices.includes(unit);
  /** The present plan, and the two that it is compared with. */
  function plansNow() {
    const plans = model.get("plans");
    return { ...plans, ...comparedPlans(plans.runs, model.get("bridges").indices, plans.ratio) };
  }
  const fate = (unit, plan, plans = plansNow()) => fateText(unit, plans[plan],
    plan !== "present" || plans.ordered);
  function region() {
    const { saliency_threshold: low, connectivity_threshold: high } = model.get("bridges");
    return nodes.saliency.flatMap((d, u) => (d <= low && nodes.connectivity[u] >= high ? [u] : []));
  }

  /** What a saved picture shows, line by line: the edges, the plan of the crosses, the bars. */
  function pictureWords() {
    const { present } = model.get("plans");
    const crossed = !present ? "No plan yet."
      : `Crossed: the ${unitCount(present.length)} that the present plan removes.`;
    const bars = flow.hidden ? "" : `Bars: ${flowTitle.textContent.replace("Edges", "edges")}.`;
    return [`${model.get("model_name") || "a model"}: ${caption.textContent}.`, crossed, bars]
      .filter(Boolean);
  }

  function drawCard() {
    const unit = hovered ?? model.get("selected_unit");
    if (unit == null) {
      card.replaceChildren(h("h4", {}, "No unit chosen"),
        h("p", { class: "cc-muted" }, "Point at a unit to see its numbers; click to keep them."));
      return;
    }
    const place = (values) => `${show(values[unit])} (at least as large as in ${percent(
      shareBelow(values, values[unit]), 0)} of units)`;
    const own = [5 * unit, 5 * unit + 5];
    const rho = partnerRho.slice(...own);
    const rows = [...partners.slice(...own)].flatMap((v, k) => (v === unit ? [] // no more partners
      : [[nodes.name[v], show(curvature(unit, v, rho[k])), show(rho[k])]]));
    const fact = (name, text) => h("div", {}, h("span", { class: "cc-muted" }, `${name} `), text);
    card.replaceChildren(
      h("h4", {}, nodes.name[unit] + (isBridge(unit) ? ", listed as bridge" : "")),
      fact("saliency H_uu", place(nodes.saliency)),
      fact("connectivity b_u", place(nodes.connectivity)),
      fact("residual", show(nodes.residual[unit])),
      fact("lambda 0:", `${fate(unit, "diagonal")}; lambda 1: ${fate(unit, "edge_aware")}`),
      table(["strongest partners", "H_uv", "ρ"], rows));
  }

  /** The paths of the marks of all units; marked ones come last, so that nothing covers them. */
  function marks(place, r, colors) {
    const [removed, bridges, brushed] = [model.get("plans").present ?? [],
      model.get("bridges").indices, model.get("brushed")].map((units) => new Set(units));
    const selected = model.get("selected_unit");
    const weight = (u) => (u === selected ? 4 : 2 * bridges.has(u) + brushed.has(u));
    const order = nodes.name.map((_, u) => u).sort((u, v) => weight(u) - weight(v));
    return order.map((u) => markPaths({ kind: nodes.kind[u], bridge: bridges.has(u),
      removed: removed.has(u), brushed: brushed.has(u), selected: u === selected },
    place.x[u], place.y[u], r, colors));
  }

  /** Widths of graph and plane: side by side where there is room. */
  function widths() {
    const wide = Math.max(280, body.clientWidth || 900);
    const side = wide < 720 ? wide : Math.min(520, Math.round(0.38 * wide));
    const both = [wide < 720 ? wide : wide - side - 26, side];
    [graphSide, planeSide].forEach((column, i) => (column.style.width = `${both[i]}px`));
    return both;
  }

  function drawGraph() {
    const among = model.get("edges_of") !== "bridges" ? null
      : new Set(model.get("bridges").indices);
    const [filters, width] = [{ unit: model.get("selected_unit"), among }, widths()[0]];
    for (const name of ["threshold", "sign", "blocks"]) filters[name] = model.get(name);
    shown = visibleEdges(edges, filters);
    const colors = palette(root);
    const place = graphPlace = placeGraph(grid, width);
    const g = fit(graph, width, grid.geometry.height);
    const mine = (e) => edges.u[e] === filters.unit || edges.v[e] === filters.unit;
    const focus = shown.filter(mine);
    strokeEdges(g, colors, place, edges, shown, focus.length ? 0.3 : 1);
    strokeEdges(g, colors, place, edges, focus, 1);
    paintPaths(g, joined(marks(place, place.radius, colors)));
    drawGridAxes(g, colors, grid);
    key.replaceChildren(graphKey(colors, width));
    sayShown(filters);
    graph.dataset.edges = shown.length;
    graph.dataset.draws = Number(graph.dataset.draws ?? 0) + 1;
  }

  function sayShown(filters) {
    const text = shownText(filters, { shown: shown.length, rho: edges.rho, total: model.get("edge_total") });
    caption.textContent = text;
    graph.setAttribute("aria-label", named(model, `Graph of ${unitCount(nodes.name.length)}. ` +
      `${text}. Arrow keys choose a unit, whose partners are then listed`));
  }

  function drawPlane() {
    const [colors, width] = [palette(root), widths()[1]];
    const height = Math.round(Math.min(400, 0.8 * width));
    const { saliency, connectivity } = nodes;
    const { x, y, box, axes } = logPlane({ xs: saliency, ys: connectivity, width, height, colors,
      names: ["saliency (H_uu), nats per token, log",
        `connectivity (b_u)${height > 340 ? ", nats per token, log" : ""}`] });
    planePlace = { x: saliency.map(x.at), y: connectivity.map(y.at) };
    const { left, top, right, base } = box;
    const bridges = model.get("bridges");
    const corner = [x.at(bridges.saliency_threshold), y.at(bridges.connectivity_threshold)];
    const line = lineEnds(nodes)?.map(([d, b]) => `${x.at(d)} ${y.at(b)}`);
    const [wide, tall] = [right - left, base - top];
    plane.replaceChildren(sheet(width, height, colors, { "pointer-events": "none" }, ...axes,
      svg("svg", { x: left, y: top, width: wide, height: tall, // what lies outside is cut off
        viewBox: `${left} ${top} ${wide} ${tall}` },
      svg("path", { d: `M${left} ${top}H${corner[0]}V${corner[1]}H${left}z`, fill: COLORS.bridge,
        "fill-opacity": 0.16 }),
      line && svg("path", lineOf(`M${line.join("L")}`, colors.muted, 1.5, "4 3"))),
      ...joined(marks(planePlace, 4, colors)).map((one) => svg("path", one)),
      text(left + 6, top + 13, "bridge region", { fill: colors.text }),
      line && text(right - 6, base - 6, "dashed: typical connectivity", { fill: colors.text,
        "text-anchor": "end" })));
    plane.setAttribute("aria-label",
      `Saliency against connectivity of ${unitCount(nodes.name.length)}. ${bridges.note}`);
  }

  /** The edges of the selected bridge by layer, or of the first one listed. */
  function drawFlowOf() {
    const { indices, flow: sums } = model.get("bridges");
    const found = indices.indexOf(model.get("selected_unit"));
    const place = Math.max(0, found);
    flow.hidden = flowTitle.hidden = !sums || !indices.length;
    if (flow.hidden) return flow.replaceChildren();
    const unit = indices[place];
    flowTitle.textContent = `Edges of ${nodes.name[unit]}${found < 0 ? ", the first bridge listed," : ""} by layer (sum of H_uv, nats per token)`;
    flow.setAttribute("aria-label", named(model, flowTitle.textContent));
    return flow.replaceChildren(flowChart({ positive: sums.positive[place],
      negative: sums.negative[place], own: nodes.layer[unit] }, palette(root), widths()[1]));
  }

  function drawLists() {
    const plans = plansNow();
    const { indices, ranked, note, correlation } = model.get("bridges");
    listTitle.textContent = !ranked ? counted(indices.length, "bridge unit") : indices.length
      ? `Too few bridges by the thresholds: ${unitCount(indices.length)} most connected for the ` +
        "saliency"
      : "Too few bridges by the thresholds, and no unit is connected beyond its saliency";
    const together = correlation === null ? "" : "Saliency and connectivity correlate at " +
      `${show(correlation)} (the paper reports 0.63 for its 8B). `;
    listNote.textContent = `${note} ${together}Plans at ratio ${show(plans.ratio)}. ${plans.note}`;
    const wide = graphSide.clientWidth > 720; // else the card has the numbers, the list the plans
    const number = (name) => [name, (u) => show(nodes[name][u])];
    const plan = (head, name) => [head, (u) => fate(u, name, plans)];
    const columns = [["unit", unitButton],
      ...(wide ? [number("saliency"), number("connectivity")] : []), number("residual"),
      plan("diagonal plan (λ\u00a00)", "diagonal"), plan("edge-aware plan (λ\u00a01)", "edge_aware"),
      ...(plans.present ? [plan("present plan", "present")] : [])];
    const made = table(columns.map(([head]) => head),
      indices.map((u) => columns.map(([, cell]) => cell(u))),
      { "data-table": "bridges" });
    made.tBodies[0].rows[indices.indexOf(model.get("selected_unit"))]?.setAttribute("style",
      "font-weight:600;outline:1px solid var(--cc-accent)");
    refill(list, made);
    fillBrushed(brushList, model.get("brushed"), unitButton,
      "Drag a rectangle in the plane to brush units.");
  }

  function tableOf() {
    const present = new Set(model.get("plans").present ?? []);
    const said = (is) => (is ? "True" : "False");
    return { columns: ["unit", "saliency", "connectivity", "residual", "bridge", "removed"],
      rows: nodes.name.map((name, u) => [name, nodes.saliency[u], nodes.connectivity[u],
        nodes.residual[u] ?? "", said(isBridge(u)), said(present.has(u))]) };
  }

  // Events ----------------------------------------------------------------------------------------

  const point = (event) => [event.offsetX, event.offsetY];
  function hover(unit) {
    if (unit === hovered) return;
    hovered = unit;
    [graphPlace, planePlace].forEach((place, i) => {
      rings[i].hidden = unit === null;
      if (unit === null) return;
      rings[i].style.left = `${place.x[unit] - 11}px`;
      rings[i].style.top = `${place.y[unit] - 11}px`;
    });
    drawCard();
  }
  function keys(event) {
    if (event.key === "Escape") assign(model, { selected_unit: null, brushed: [] });
    else if (event.key.startsWith("Arrow")) {
      select(grid.step(model.get("selected_unit"), event.key));
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
  for (const [canvas, place] of [[graph, () => graphPlace], [plane, () => planePlace]]) {
    canvas.addEventListener("keydown", keys);
    canvas.addEventListener("pointermove", (e) => place() && hover(nearest(place(), ...point(e))));
    canvas.addEventListener("pointerleave", () => hover(null));
  }
  graph.addEventListener("click", (e) => select(nearest(graphPlace, ...point(e))));
  let from = null;
  plane.addEventListener("pointerdown", (event) => {
    from = point(event);
    plane.setPointerCapture(event.pointerId);
  });
  plane.addEventListener("pointermove", (event) => {
    if (!from) return;
    const to = point(event);
    band.hidden = Math.hypot(to[0] - from[0], to[1] - from[1]) < 4;
    stretch(band, from, to);
  });
  plane.addEventListener("pointerup", (event) => {
    if (!from) return;
    if (band.hidden) select(nearest(planePlace, ...point(event)));
    else put("brushed", unitsInside(planePlace, from, point(event)));
  });
  plane.addEventListener("lostpointercapture", () => { // after that, and where it is cancelled
    from = null;
    band.hidden = true;
  });

  // Following the traits --------------------------------------------------------------------------

  const parts = { graph: drawGraph, plane: drawPlane, flow: drawFlowOf, card: drawCard,
    lists: drawLists };
  const all = Object.keys(parts);
  redrawing(model, cleaner, ui, { parts,
    turned: ["graph", "plane", "flow", "lists"],
    follows: { threshold: ["graph"], edges_of: ["graph"], sign: ["graph"], blocks: ["graph"],
      selected_unit: all, brushed: ["graph", "plane", "lists"], bridges: all, plans: all } });
  return cleaner.run;
}
