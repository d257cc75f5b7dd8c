// The bridge explorer: graph of the edges, saliency against connectivity, list of bridges.

import { COLORS, Cleaner, GONE, assign, button, counted, drawUpwards, fateText, fillBrushed, fit, frame,
  h, labeled, menu, named, oddMatrix, palette, percent, picture, receiveFiles, redrawing, refill, show,
  stretch, table, typed, typedNumber, unbroken, unitCount } from "./kit.js";
import { comparedPlans, drawFlow, drawGraphAxes, drawLegend, drawMark, fitLine,
  graphLayout, hitUnit, pictureWords, placeGraph, readEdges, shareBelow, shownText,
  stepUnit, strokeEdges, tickText, unitsInside, visibleEdges } from "./bridge_parts.js";

const MOST_RATIO = 60; // percent
const TABLE_ROWS = 500; // on the page

export function renderBridge({ model, el }) {
  const cleaner = new Cleaner();
  const nodes = model.get("nodes");
  const layout = graphLayout(nodes);
  const edges = readEdges(typed(model.get("edge_ends"), Uint32Array),
    typed(model.get("edge_correlation"), Float32Array), nodes.kind);
  const partners = typed(model.get("partners"), Uint32Array);
  const partnerRho = typed(model.get("partner_correlation"), Float32Array);
  const line = fitLine(nodes.saliency, nodes.connectivity);
  const live = model.get("kernel") !== false;
  const put = (name, value) => assign(model, { [name]: value });
  let shown = [];
  let [graphPlace, planePlace] = [null, null];
  let hovered = null;

  const graph = picture("Graph of the units and their strongest edges");
  const plane = picture("Saliency against connectivity of every unit");
  const options = { title: "Bridges", name: "bridges", table: tableOf, mostRows: TABLE_ROWS,
    tables: { edges: "shown edges", units: "units", bridges: "bridges" },
    canvases: () => [graph, plane, flow].filter((canvas) => !canvas.hidden),
    caption: () => pictureWords({ what: model.get("model_name") || "a model",
      shown: caption.textContent, plans: plansNow(),
      flow: flow.hidden ? "" : flowTitle.textContent }),
    redraw: () => Object.values(parts).forEach((draw) => draw()) };
  const request = receiveFiles(model, cleaner, "bridges");
  if (live) options.gexf = () => request(".gexf", () => complain(GONE));
  const ui = frame(model, el, cleaner, options);
  const { root, controls, body, complain } = ui;

  // Controls ------------------------------------------------------------------------------------

  const bounded = (text) => Math.min(1, Math.max(0, Number(text) || 0));
  // the slider ends where the strongest edge is: beyond it there is nothing to see
  // the threshold ends where an edge is left
  const steps = Math.floor(200 * Math.abs(edges.rho[0] ?? 1) + 1e-9);
  const most = Math.max(1, steps) / 200;
  const slider = h("input", { type: "range", min: 0, max: most, step: 0.005,
    "aria-label": "threshold", oninput: () => put("threshold", bounded(slider.value)) });
  const box = h("input", { type: "number", min: 0, max: 1, step: 0.01,
    "aria-label": "threshold as number", onchange: () => put("threshold", bounded(box.value)) });
  const choice = (name, pairs) => menu(pairs, (value) => put(name, value));
  const edgesOf = choice("edges_of", [["bridges", "listed bridges"], ["all", "all units"]]);
  const sign = choice("sign", ["both", "positive", "negative"].map((value) => [value, value]));
  const blocks = ["attention", "cross", "ffn"].map((value) => h("input", { type: "checkbox", value,
    onchange: () => put("blocks", blocks.filter((b) => b.checked).map((b) => b.value)) }));
  const ego = h("input", { type: "checkbox", onchange: () => put("ego", ego.checked) });
  const quantile = (name) => h("input", { type: "number", min: 0, max: 1, step: 0.05,
    onchange: (event) => put(name, bounded(event.target.value)) });
  const quantiles = ["saliency_quantile", "connectivity_quantile"]
    .map((name) => [name, quantile(name)]);
  const compared = h("input", { type: "number", min: 0, max: MOST_RATIO, step: 1,
    placeholder: "auto", onchange: () => {
      const value = typedNumber(compared);
      put("compared_ratio", value === null ? null : value / 100);
    } });
  const blockText = { attention: "attention", cross: "cross", ffn: "FFN" };
  controls.append(
    labeled("weakest edge shown (|ρ|)", h("span", { class: "cc-row" }, slider, box)),
    labeled("edges of", edgesOf), labeled("sign of the edges (ρ)", sign),
    h("label", { class: "cc-row", title: "the selected unit, its edges and its neighbors" },
      ego, "ego view"));
  controls.after(h("details", { class: "cc-more" }, h("summary", {}, "More"),
    h("div", { class: "cc-controls" },
      h("fieldset", { class: "cc-row", style: "border:0;padding:0;margin:0" },
        h("legend", { class: "cc-muted" }, "blocks"),
        ...blocks.map((b) => h("label", { class: "cc-row" }, b, blockText[b.value]))),
      labeled("plans compared at, % (empty: where they differ)", compared),
      ...(live ? [
        labeled("low saliency quantile", quantiles[0][1], "low: at most this; 0.5 is the median"),
        labeled("high connectivity quantile", quantiles[1][1], "high: at least this"),
      ] : []))));

  // Pictures, card, lists ------------------------------------------------------------------------

  const caption = h("h4", {});
  const rings = [0, 1].map(() => h("div", { hidden: true, class: "cc-ring" }));
  const band = h("div", { hidden: true, class: "cc-band" });
  const stage = (...content) => h("div", { style: "position:relative" }, ...content);
  const card = h("div", { class: "cc-card", "aria-live": "polite" });
  const flowTitle = h("h4", {});
  const flow = picture("Edges of one bridge by layer");
  const brushList = h("div", { class: "cc-row", style: "flex-wrap:wrap" });
  const listTitle = h("h4", {});
  const listNote = h("p", { class: "cc-muted" });
  const list = h("div", { class: "cc-scroll" });
  graph.style.cursor = plane.style.cursor = "crosshair";
  plane.style.touchAction = "none";
  const [graphSide, planeSide] = [0, 1].map(() => h("div", { style: "flex:none" }));
  graphSide.append(caption, stage(graph, rings[0]),
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
  /** The compared plans; without a kernel they are read off the runs of the other instrument. */
  function plansNow() {
    const plans = model.get("plans");
    const asked = model.get("compared_ratio");
    if (!plans.runs) return plans;
    return { ...plans, ...comparedPlans(plans.runs, model.get("bridges").indices,
      asked ?? plans.ratio, asked !== null && asked !== undefined) };
  }
  const fate = (unit, plan, plans = plansNow()) => fateText(unit, plans[plan],
    plan !== "present" || plans.ordered);
  function region() {
    const { saliency_threshold: low, connectivity_threshold: high } = model.get("bridges");
    return nodes.saliency.flatMap((d, u) => (d <= low && nodes.connectivity[u] >= high ? [u] : []));
  }

  function drawCard() {
    const unit = hovered ?? model.get("selected_unit");
    if (unit === null || unit === undefined) {
      card.replaceChildren(h("h4", {}, "No unit chosen"),
        h("p", { class: "cc-muted" }, "Point at a unit to see its numbers; click to keep them."));
      return;
    }
    const place = (values) => `${show(values[unit])} (at least as large as in ${percent(
      shareBelow(values, values[unit]), 0)} of units)`;
    const rows = [];
    for (let k = 5 * unit; k < 5 * unit + 5; k++) {
      const v = partners[k];
      if (v !== unit) {
        rows.push([nodes.name[v], show(curvature(unit, v, partnerRho[k])), show(partnerRho[k])]);
      }
    }
    const fact = (name, text) => h("div", {}, h("span", { class: "cc-muted" }, `${name} `), text);
    card.replaceChildren(
      h("h4", {}, nodes.name[unit] + (isBridge(unit) ? ", listed as bridge" : "")),
      fact("saliency H_uu", place(nodes.saliency)),
      fact("connectivity b_u", place(nodes.connectivity)),
      fact("residual", show(nodes.residual[unit])),
      fact("lambda 0:", `${fate(unit, "diagonal")}; lambda 1: ${fate(unit, "edge_aware")}`),
      table(["strongest partners", "H_uv", "ρ"], rows));
  }

  function marks(g, colors, place, r, faint) {
    const removed = new Set(model.get("plans").present ?? []);
    const bridges = new Set(model.get("bridges").indices);
    const brushed = new Set(model.get("brushed"));
    const selected = model.get("selected_unit");
    const weight = (u) => (u === selected ? 4 : 2 * bridges.has(u) + brushed.has(u));
    const order = nodes.name.map((_, u) => u).sort((u, v) => weight(u) - weight(v));
    for (const u of order) { // marked units come last, so that nothing covers them
      g.globalAlpha = faint && !faint.has(u) ? 0.15 : 1;
      drawMark(g, colors, { kind: nodes.kind[u], x: place.x[u], y: place.y[u], r,
        bridge: bridges.has(u), removed: removed.has(u), brushed: brushed.has(u),
        selected: u === selected });
    }
    g.globalAlpha = 1;
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
    const start = performance.now();
    const among = model.get("edges_of") !== "bridges" ? null
      : new Set(model.get("bridges").indices);
    const [filters, width] = [{ unit: model.get("selected_unit"), among }, widths()[0]];
    for (const name of ["threshold", "sign", "blocks", "ego"]) filters[name] = model.get(name);
    shown = visibleEdges(edges, filters);
    const colors = palette(root);
    const box_ = { left: 34, right: width - 12, top: 10 };
    box_.bottom = box_.top + Math.max(200, Math.min(430, 20 * layout.rows));
    const measure = graph.getContext("2d");
    measure.font = "12px system-ui, sans-serif";
    const legend = drawLegend(measure, colors, 8, 0, width - 16, false);
    const g = fit(graph, width, box_.bottom + 46 + legend);
    const place = graphPlace = placeGraph(layout, box_);
    const alone = filters.ego && filters.unit !== null && filters.unit !== undefined;
    const mine = (e) => edges.u[e] === filters.unit || edges.v[e] === filters.unit;
    const focus = shown.filter(mine);
    strokeEdges(g, colors, place, edges, shown, focus.length && !alone ? 0.3 : 1);
    if (focus.length && !alone) strokeEdges(g, colors, place, edges, focus, 1);
    const ends = shown.flatMap((e) => [edges.u[e], edges.v[e]]);
    const near = alone && new Set([filters.unit, ...ends]);
    marks(g, colors, place, place.radius, near);
    drawGraphAxes(g, colors, place, box_, layout);
    drawLegend(g, colors, 8, box_.bottom + 44, width - 16, true);
    sayShown(filters, alone);
    Object.assign(graph.dataset, { edges: shown.length, ms: (performance.now() - start).toFixed(1),
      draws: Number(graph.dataset.draws ?? 0) + 1 });
  }

  function sayShown(filters, alone) {
    const text = shownText(filters, { shown: shown.length, rho: edges.rho,
      total: model.get("edge_total"), alone: alone && nodes.name[filters.unit] });
    caption.textContent = text;
    graph.setAttribute("aria-label", named(model, `Graph of ${unitCount(nodes.name.length)}. ` +
      `${text}. Arrow keys choose a unit; the table holds the same data`));
  }

  function drawPlane() {
    const [colors, width] = [palette(root), widths()[1]];
    const height = Math.round(Math.min(400, 0.8 * width));
    const g = fit(plane, width, height);
    const [left, right, top, bottom] = [64, width - 20, 10, height - 44];
    const [x, y] = [logAxis(nodes.saliency, left, right), logAxis(nodes.connectivity, bottom, top)];
    planePlace = { x: nodes.saliency.map(x.at), y: nodes.connectivity.map(y.at) };
    const bridges = model.get("bridges");
    const inside = (v, a, b) => Math.min(b, Math.max(a, v));
    const corner = [inside(x.at(bridges.saliency_threshold), left, right),
      inside(y.at(bridges.connectivity_threshold), top, bottom)];
    g.fillStyle = COLORS.bridge;
    g.globalAlpha = 0.16;
    g.fillRect(left, top, corner[0] - left, corner[1] - top);
    g.globalAlpha = 1;
    g.strokeStyle = colors.grid;
    g.lineWidth = 1;
    g.fillStyle = colors.muted;
    const rule = (...points) => {
      g.beginPath();
      points.forEach(([px, py]) => g.lineTo(px, py));
      g.stroke();
    };
    g.textBaseline = "top";
    g.textAlign = "center";
    const labels = (axis) => [...axis.marks, ...(axis.zeros ? [0] : [])]
      .map((value) => [axis.at(value), tickText(value)]);
    for (const [at, text] of labels(x)) {
      rule([at, top], [at, bottom]);
      g.fillText(text, at, bottom + 5);
    }
    g.fillText("saliency (H_uu), nats per token, log", (left + right) / 2, bottom + 24);
    g.textBaseline = "middle";
    g.textAlign = "right";
    for (const [at, text] of labels(y)) {
      rule([left, at], [right, at]);
      g.fillText(text, left - 5, at);
    }
    const label = "connectivity (b_u), nats per token, log";
    drawUpwards(g, g.measureText(label).width < bottom - top ? label : "connectivity (b_u)", 10,
      (top + bottom) / 2);
    g.save();
    g.beginPath();
    g.rect(left, top, right - left, bottom - top);
    g.clip();
    if (line) {
      const ends = nodes.saliency.filter((d) => d > 0);
      g.strokeStyle = colors.muted;
      g.lineWidth = 1.5;
      g.setLineDash([4, 3]);
      rule(...[Math.min(...ends), Math.max(...ends)].map((d) => [x.at(d), y.at(line(d))]));
      g.setLineDash([]);
    }
    marks(g, colors, planePlace, 4, null);
    g.restore();
    g.fillStyle = colors.text;
    g.textAlign = "left";
    g.fillText("bridge region", left + 6, top + 9);
    g.textAlign = "right";
    if (line) g.fillText("dashed: residual 0", right - 6, bottom - 10);
    plane.dataset.draws = Number(plane.dataset.draws ?? 0) + 1;
    plane.setAttribute("aria-label",
      `Saliency against connectivity of ${unitCount(nodes.name.length)}. ${bridges.note}`);
  }

  /** The edges of the selected bridge by layer, or of the first one listed. */
  function drawFlowOf() {
    const { indices, flow: sums } = model.get("bridges");
    const place = Math.max(0, indices.indexOf(model.get("selected_unit")));
    flow.hidden = flowTitle.hidden = !sums || !indices.length;
    if (flow.hidden) return;
    const unit = indices[place];
    flowTitle.textContent = `Edges of ${nodes.name[unit]} by layer (sum of H_uv, nats per token)`;
    flow.setAttribute("aria-label", named(model, flowTitle.textContent));
    const width = widths()[1];
    const g = fit(flow, width, 148);
    drawFlow(g, palette(root), { positive: sums.positive[place], negative: sums.negative[place],
      own: nodes.layer[unit], left: 64, right: width - 20, top: 10, bottom: 112 });
  }

  function drawLists() {
    const [bridges, selected, brushed] = ["bridges", "selected_unit", "brushed"]
      .map((name) => model.get(name));
    const plans = plansNow();
    const { indices, ranked, note, correlation } = bridges;
    listTitle.textContent = !ranked ? counted(indices.length, "bridge unit") : indices.length
      ? `Too few bridges by the thresholds: ${unitCount(indices.length)} most connected for the ` +
        "saliency"
      : "Too few bridges by the thresholds, and no unit is connected beyond its saliency";
    const together = correlation === null ? "" : "Saliency and connectivity correlate at " +
      `${show(correlation)} (the paper reports 0.63 for its 8B). `;
    listNote.textContent = `${note} ${together}Plans at ratio ${show(plans.ratio)}` +
      `${plans.problem ? `; ${plans.problem}` : "."} ${plans.note ?? ""}`;
    const doubt = /preview/.test(oddMatrix(model)) ? ", not to be trusted" : "";
    const wide = graphSide.clientWidth > 720; // else the card has the numbers, the list the plans
    const columns = ["unit", ...(wide ? ["saliency", "connectivity"] : []), "residual",
      "diagonal plan (lambda 0)", `edge-aware plan (lambda 1${doubt})`,
      ...(plans.present ? ["present plan"] : [])];
    const rows = indices.map((u) => {
      const cells = [...(wide ? [show(nodes.saliency[u]), show(nodes.connectivity[u])] : []),
        show(nodes.residual[u]),
        ...["diagonal", "edge_aware"].map((plan) => fate(u, plan, plans)),
        ...(plans.present ? [fate(u, "present", plans)] : [])];
      const chosen = u === selected && "font-weight:600;outline:1px solid var(--cc-accent)";
      return h("tr", { style: chosen }, h("td", {}, unitButton(u)),
        ...cells.map((c) => h("td", {}, c)));
    });
    refill(list, h("table", { class: "cc-numbers", "data-table": "bridges" },
      h("thead", {}, h("tr", {}, ...columns.map((c) => h("th", { scope: "col" }, ...unbroken(c))))),
      h("tbody", {}, ...rows)));
    fillBrushed(brushList, brushed, unitButton, "Drag a rectangle in the plane to brush units.");
  }

  function tableOf(most) {
    if (model.get("table_of") === "edges") {
      const rows = shown.slice(0, most).map((e) => {
        const [u, v, rho] = [edges.u[e], edges.v[e], edges.rho[e]];
        return [nodes.name[u], nodes.name[v], curvature(u, v, rho), rho];
      });
      if (rows.length < shown.length) rows.push([`${shown.length - rows.length} more in the CSV`]);
      return { columns: ["first", "second", "curvature", "correlation"], rows };
    }
    const chosen = model.get("table_of") === "units" ? nodes.name.map((_, u) => u)
      : model.get("bridges").indices;
    return { columns: ["unit", "saliency", "connectivity", "residual", "bridge", "diagonal_plan",
      "edge_aware_plan", "present_plan"],
    rows: chosen.map((u) => [nodes.name[u], nodes.saliency[u], nodes.connectivity[u],
      nodes.residual[u] ?? "", isBridge(u) ? "True" : "False",
      ...["diagonal", "edge_aware", "present"].map((plan) => fate(u, plan))]) };
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
      select(stepUnit(layout, model.get("selected_unit"), event.key));
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
  for (const [canvas, place] of [[graph, () => graphPlace], [plane, () => planePlace]]) {
    canvas.addEventListener("keydown", keys);
    canvas.addEventListener("pointermove", (e) => place() && hover(hitUnit(place(), ...point(e))));
    canvas.addEventListener("pointerleave", () => hover(null));
  }
  graph.addEventListener("click", (e) => select(hitUnit(graphPlace, ...point(e))));
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
    const dragged = !band.hidden;
    if (dragged) put("brushed", unitsInside(planePlace, from, point(event)));
    else select(hitUnit(planePlace, ...point(event)));
    band.hidden = true;
    from = null;
  });
  plane.addEventListener("pointercancel", () => {
    from = null;
    band.hidden = true;
  });

  // Following the traits --------------------------------------------------------------------------

  const parts = { graph: drawGraph, plane: drawPlane, flow: drawFlowOf, card: drawCard,
    lists: drawLists };
  function showControls() {
    const value = String(Number(model.get("threshold").toPrecision(6)));
    slider.value = value;
    if (document.activeElement !== box) box.value = value;
    sign.value = model.get("sign");
    edgesOf.value = model.get("edges_of") ?? "all";
    const share = model.get("compared_ratio");
    if (document.activeElement !== compared) compared.value = share == null ? "" : 100 * share;
    ego.checked = model.get("ego");
    blocks.forEach((b) => (b.checked = model.get("blocks").includes(b.value)));
    quantiles.forEach(([name, input]) => (input.value = model.get(name)));
  }
  const all = Object.keys(parts);
  showControls();
  redrawing(model, cleaner, ui, { parts, first: showControls,
    turned: ["graph", "plane", "flow", "lists"],
    follows: { threshold: ["graph"], edges_of: ["graph"], sign: ["graph"], blocks: ["graph"],
      ego: ["graph"], compared_ratio: ["lists", "card"], selected_unit: all,
      brushed: ["graph", "plane", "lists"], bridges: all, plans: all, table_of: [],
      saliency_quantile: [], connectivity_quantile: [] } });
  return cleaner.run;
}
