// Predicted against measured KL of plans and of single units, on two logarithmic axes of one range.

import { keyEntry, logPlane, nearest, place, pointer, sheet, stop, svg, text } from "./svg.js";
import { brief, withError } from "./compare.js";
import { Cleaner, GONE, ORDERED, ask, assign, button, checks, frame, h, labeled, menu, numberInput,
  palette, percent, receiveFiles, redrawing, show, showBeside, table, tied, unitCount } from "./kit.js";

const RATIOS = [ // upper end of the realized ratio, name
  [0.075, "up to 7.5 %"], [0.15, "7.5 to 15 %"], [0.25, "15 to 25 %"],
  [0.35, "25 to 35 %"], [0.45, "35 to 45 %"], [Infinity, "above 45 %"]];
const SHAPES = { // name -> path around (0, 0)
  "diagonal, λ = 0": "M-5.5 0a5.5 5.5 0 1 0 11 0a5.5 5.5 0 1 0-11 0z",
  "edge-aware, λ < 0.1": "M0-7L7 0 0 7-7 0z",
  "edge-aware, 0.1 ≤ λ < 1": "M-5-5H5V5H-5z",
  "edge-aware, λ ≥ 1": "M0-6.5L6.5 5H-6.5z",
  "local swap": "M-2-6H2V-2H6V2H2V6H-2V2H-6V-2H-2z",
  random: "M0-2.5L3.5-6 6-3.5 2.5 0 6 3.5 3.5 6 0 2.5-3.5 6-6 3.5-2.5 0-6-3.5-3.5-6z",
  "other plan": "M0-7L2-2.2 7-2.2 3 1 4.4 6 0 3-4.4 6-3 1-7-2.2-2-2.2z" };
const SINGLE = "single unit";
const BUTTONS = {
  "Measure this plan": "the plan that all instruments of this session show",
  "Lambda sweep": "greedy plans at the ratio, one for each λ to sweep, under the opening guards",
  "Ratio sweep": "greedy plans at λ, one for each ratio to sweep, under the opening guards",
  "Same-budget pool": "26 sets at the ratio, no guards: greedy, diagonal, 14 random, 10 swaps",
  Cancel: "stop measuring; measured plans are kept" };
const LABEL = "Scatter of plans: predicted risk to the right, measured KL upwards. On the dashed line the two " +
  "are equal. The table below holds the same points";

// Without a page ------------------------------------------------------------------------------

/** The color of a realized ratio. */
export const colorOf = (ratio) => ORDERED[RATIOS.findIndex(([upper]) => ratio <= upper)];

/** The name of the mark of a method and its lambda. */
export function shapeOf(method, strength) {
  const names = Object.keys(SHAPES);
  if (method.startsWith("diagonal")) return names[0];
  if (!method.startsWith("edge-aware")) return method in SHAPES ? method : "other plan";
  return names[1 + (strength >= 0.1) + (strength >= 1)];
}

/** The rows of a table that is sent by column. */
export function rowsOf(columns) {
  const names = Object.keys(columns);
  return (columns[names[0]] ?? []).map((_, k) => Object.fromEntries(names.map((name) => [name, columns[name][k]])));
}

/** Numbers from a text such as "0, 0.5 1"; null if it holds anything else, none, or one out of bounds. */
export function numbersOf(typed, low, below) {
  const found = typed.replaceAll(",", " ").split(" ").filter(Boolean).map(Number);
  return found.length && found.every((x) => x >= low && x < below) ? found : null;
}

/** A row as a point, with its words; null where an axis cannot show it. */
export function pointOf(row) {
  const [x, y, error] = [row.predicted_risk, row.measured_risk, row.measured_risk_error];
  if (!(x > 0 && y > 0)) return null;
  const lines = [`${row.name}${row.kind === "plan" ? ` (${row.method})` : ""}`,
    `removes ${percent(row.realized_ratio, 2)} of removable cost, ${unitCount(row.units)}`,
    `predicted ${brief(x)}`, `measured ${withError({ risk: y, error })} (${brief(y / x)} x)`, `on ${row.text}`];
  return { x, y, error: error ?? 0, name: row.name, lines, color: colorOf(row.realized_ratio),
    shape: shapeOf(row.method, row.interaction_strength) };
}

// The picture ---------------------------------------------------------------------------------

const dashed = (d, dash, colors) => svg("path", { d, stroke: colors.muted, "stroke-width": 1.5,
  "stroke-dasharray": dash });

/**
 * plans, singles: points with choose(); rings: points; waiting: the prediction of a plan that is not
 * measured, or null. tell(point, x, y) is called with what is pointed at, or null, and its place in the
 * page.
 */
export function scatterChart({ plans, singles, rings, waiting, colors, width, height, label, tell }) {
  const values = [...plans, ...singles].flatMap(({ x, y }) => [x, y]).concat(waiting ?? []);
  const ends = values.length ? [Math.min(...values), Math.max(...values)] : [1e-4, 1];
  const [low, high] = ends;
  const { x: across, y: up, box: { top, base }, axes } = logPlane({ xs: ends, ys: ends, colors, width, height,
    names: ["predicted ½ sᵀHs, nats per token", "measured KL(dense ‖ pruned), nats per token"] });
  const at = ({ x, y }) => [across.at(x), up.at(y)];
  const line = (from, to, dash) => dashed(`M${at(from)}L${at(to)}`, dash, colors);
  const mark = (point) => {
    const [x, y] = at(point);
    const [most, least] = [1, -1].map((sign) => { // the ends of the error bar, inside the axes
      const end = point.y + sign * point.error;
      return y - (end > 0 ? Math.min(base, Math.max(top, up.at(end))) : base);
    });
    return stop({ role: "button", "aria-label": point.lines.join(", "), transform: `translate(${x} ${y})`,
      "data-here": rings.includes(point) ? "1" : null, onblur: () => tell(null), onfocus: (event) => {
        const box = event.currentTarget.getBoundingClientRect();
        tell(point, box.right, box.top);
      } }, point.choose,
    point.error > 0 && svg("path", { d: `M0 ${-most}V${-least}`, stroke: colors.muted }),
    svg("path", { class: "cc-mark", d: SHAPES[point.shape], fill: point.color, stroke: colors.back }));
  };
  const near = (event) => [plans, singles].map((group) => { // within 16 px of the pointer, plans before units
    const places = { x: group.map(({ x }) => across.at(x)), y: group.map(({ y }) => up.at(y)) };
    return group[nearest(places, ...pointer(event), 16)];
  }).find(Boolean);
  return sheet(width, height, colors, { role: "group", "aria-label": label,
    onpointermove: (event) => tell(near(event) ?? null, event.clientX, event.clientY),
    onpointerleave: () => tell(null), onclick: (event) => near(event)?.choose() },
  ...axes, line({ x: low, y: low }, { x: high, y: high }, "6 4"),
  ...(high > 2 * low ? [line({ x: low, y: 2 * low }, { x: high / 2, y: high }, "2 4"),
    line({ x: 2 * low, y: low }, { x: high, y: high / 2 }, "2 4")] : []),
  waiting > 0 && svg("g", { class: "cc-waiting" }, line({ x: waiting, y: low }, { x: waiting, y: high }, "8 3 2 3")),
  svg("path", { class: "cc-singles", d: singles.map((point) => `M${at(point)}h0`).join(""), stroke: colors.muted,
    "stroke-width": 5, "stroke-linecap": "round", "stroke-opacity": 0.55 }),
  ...plans.map(mark),
  ...rings.map((point) => svg("circle", { class: "cc-chosen", cx: at(point)[0], cy: at(point)[1], r: 10, fill: "none",
    stroke: colors.text, "stroke-width": 2.5, "pointer-events": "none" })));
}

/** What colors, marks and lines mean. */
export function scatterKey(colors) {
  let y = -6;
  const head = (words) => text(0, (y += 24), words, { fill: colors.text, "font-weight": 600 });
  const entry = (sign, words) => keyEntry(0, (y += 19), sign, words);
  const rows = [head("Removed (color)"),
    ...RATIOS.flatMap(([, name], k) => entry(svg("path", { d: "M-6-6H6V6H-6z", fill: ORDERED[k] }), name)),
    head("Method (mark)"), ...Object.entries(SHAPES).flatMap(([name, d]) => entry(svg("path", { d }), name)),
    ...entry(svg("circle", { r: 2.5 }), "one unit alone"), head("Lines"),
    ...[["6 4", "measured = predicted"], ["2 4", "within a factor of 2"], ["8 3 2 3", "chosen, not measured"]]
      .flatMap(([dash, name]) => entry(dashed("M-12 0H12", dash, colors), name)),
    ...entry(svg("circle", { r: 7, fill: "none", stroke: colors.text, "stroke-width": 2.5 }), "chosen plan or unit")];
  return sheet(190, y + 12, colors, { role: "img", "aria-label": "legend" }, ...rows);
}

// Controls ------------------------------------------------------------------------------------

function buildControls(model, cleaner, view, say) {
  const { methods, rows } = model.get("offered");
  const number = (name, attributes) => numberInput(model, cleaner, name, attributes);
  const list = (name, below) => tied(model, cleaner, name, h("input", { style: "width: 14em" }), {
    shown: (numbers) => numbers.map(show).join(", "),
    meant: (typed) => {
      const numbers = numbersOf(typed, 0, below);
      view.complain(numbers ? "" : `${JSON.stringify(typed)} is not a list of numbers that are 0 or more` +
        `${below < Infinity ? ` and below ${below}` : ""}. Separate them with commas: 0, 0.5.`);
      return numbers ?? model.get(name);
    } });
  const buttons = Object.entries(BUTTONS).map(([name, title]) => button(name, title, () => say({ press: name })));
  const bar = h("progress", { style: "width: 200px", "aria-label": "progress" });
  const moving = h("span", {});
  const plan = menu([], (value) => value && say({ choose: value }), { style: "max-width: 22em" });
  const on = menu([], (value) => assign(model, { text: value }), { style: "max-width: 22em" });
  const unit = h("input", { placeholder: "such as L0.ffn[3]", style: "width: 11em",
    onchange: () => say({ mark: unit.value.trim() }) });
  const fill = (select, names, value, none = "") => {
    if (select.dataset.names !== names.join("\n")) {
      select.replaceChildren(...names.map((name) => h("option", { value: name }, name || none)));
    }
    select.dataset.names = names.join("\n");
    select.value = value;
  };
  const draw = () => {
    const now = model.get("view");
    buttons.forEach((one) => { one.disabled = one.textContent === "Cancel" ? !now.total : Boolean(now.reason); });
    Object.assign(bar, { max: Math.max(1, now.total), value: now.done });
    bar.style.visibility = now.total ? "visible" : "hidden";
    moving.textContent = now.reason || now.moving;
    fill(plan, ["", ...new Set(model.get("plans").name)], now.chosen);
    fill(on, ["", ...now.texts], model.get("text"), "all texts");
    if (!unit.matches(":focus")) { // else someone is typing
      unit.value = now.unit;
    }
  };
  cleaner.follow(model, ["view", "plans", "text", "error"], draw);
  const row = (...parts) => h("div", { class: "cc-controls", style: "flex: 1 1 100%" }, ...parts);
  view.controls.append(
    row(labeled("Ratio", number("ratio", { min: 0.01, max: 0.99, step: 0.05 })),
      labeled("Lambdas (λ) to sweep", list("strengths", Infinity)),
      labeled("Lambda (λ) of ratio sweep and pool", number("interaction_strength", { min: 0, step: 0.1 })),
      labeled("Ratios to sweep", list("ratios", 1)), labeled("Seed", number("seed", { min: 0, step: 1 })),
      labeled("Rows of text (0: all)", number("rows", { min: 0, max: rows, step: 1 }))),
    row(...buttons, bar, moving),
    row(...checks(model, cleaner, "methods", methods)));
  return row(labeled("Show plan", plan), labeled("Mark unit", unit), labeled("Text", on));
}

function scoresTable(scores) {
  const number = (x) => (x === null ? "-" : x.toFixed(3));
  return table(["", "points", "Spearman", "of ½ Σ H_uu", "of Σ KL alone", "Pearson of logs",
    "median measured / predicted", "worst"], Object.entries(scores).map(([name, score]) => {
    const rivals = name === "single units" ? ["-", "-"] // of one unit, either score is an axis of the picture
      : [number(score.spearman_diagonal), number(score.spearman_single_units)];
    const ranks = score.note ? [score.note, "-", "-", "-"] : [number(score.spearman), ...rivals, number(score.pearson_log)];
    const known = score.points > 0;
    return [name, String(score.points), ...ranks, known ? brief(score.median_ratio) : "-",
      known ? `${score.worst} (${brief(score.worst_ratio)} x)` : "-"];
  }));
}

export function render({ model, el }) {
  const cleaner = new Cleaner();
  const shownUnits = () => (model.get("methods").includes(SINGLE) ? rowsOf(model.get("units")) : []);
  const tableOf = (most = Infinity) => {
    const rows = [...rowsOf(model.get("plans")), ...shownUnits()].slice(0, most);
    return { columns: Object.keys(rows[0] ?? {}), rows: rows.map((row) => Object.values(row).map((x) => x ?? "")) };
  };
  const [chart, key, scores] = [{ style: "flex: 1 1 420px" }, {}, { class: "cc-scroll" }]
    .map((looks) => h("div", looks));
  const view = frame(model, el, cleaner, { title: "Predicted and measured risk of plans", name: "fidelity",
    table: tableOf, mostRows: 300, json: () => files(".json", () => view.complain(GONE)),
    canvases: () => [chart.firstChild, key.firstChild], caption: () => [caption.textContent] });
  const files = receiveFiles(model, cleaner, "fidelity");
  const card = h("div", { class: "cc-card", popover: "manual" });
  const caption = h("p", { class: "cc-muted" });
  const say = (content) => {
    view.complain("");
    ask(model, cleaner, content, ["msg:custom", "change:error"], () => view.complain(GONE));
  };
  const choosing = buildControls(model, cleaner, view, say);
  view.body.append(chart, key, card);
  view.body.after(caption, choosing, h("h4", {}, "Agreement"), scores);
  const tell = (point, x, y) => {
    if (point) {
      card.replaceChildren(...point.lines.map((line, k) => h(k ? "div" : "b", {}, line)));
      showBeside(card, x - 12, x + 12, y + 12);
    } else if (card.matches(":popover-open")) card.hidePopover();
  };
  const draw = () => {
    const [now, colors] = [model.get("view"), palette(view.root)];
    const pointsOf = (rows, choose) => rows.map((row, k) => (
      { ...pointOf(row), choose: () => choose(row, k) })).filter((point) => point.x);
    const plans = pointsOf(rowsOf(model.get("plans")), (row) => say({ choose: row.name }));
    const units = pointsOf(shownUnits(), (_, k) => assign(model, { selected_unit: k }));
    const chosen = [now.chosen, model.get("units").name?.[model.get("selected_unit")]];
    const rings = [...plans, ...units].filter((point) => chosen.includes(point.name));
    tell(null);
    place(chart, scatterChart({ plans, singles: units, rings, waiting: now.waiting, colors, tell,
      width: Math.max(300, chart.clientWidth), height: 560, label: LABEL }));
    key.replaceChildren(scatterKey(colors));
    caption.textContent = now.caption;
    scores.replaceChildren(scoresTable(now.scores));
    view.root.dataset.plans = plans.length;
  };
  const follows = ["view", "plans", "methods", "selected_unit"].map((name) => [name, ["all"]]);
  redrawing(model, cleaner, view, { parts: { all: draw }, follows: Object.fromEntries(follows),
    turned: ["all"] });
  return cleaner.run;
}
