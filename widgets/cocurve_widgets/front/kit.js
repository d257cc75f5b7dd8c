// Shared by all front ends: the palette, elements, theme, canvas, numbers, tables, files.

import { TERMS, term } from "./glossary.js";

// The only palette of the pages, after Okabe-Ito: color-blind readers can tell these apart in both
// themes. One color has one meaning everywhere; all but the last two are in cocurve_lab/figures.py.
export const COLORS = {
  attention: "#0072B2", // kind of a unit
  ffn: "#E69F00",
  bridge: "#D55E00",
  positive: "#8E5BB5", // sign of an edge
  negative: "#009E73",
  a: "#56B4E9", // plan A and plan B
  b: "#CC79A7",
};

export const FONT = "system-ui, sans-serif"; // of pictures; that of the page is in instrument.css

const FOCUSABLE = new Set(["input", "select", "textarea", "button", "canvas", "summary"]);

/** Element with attributes (on* are listeners, true/false switch) and children. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  // JupyterLab takes arrow keys and letters from the focused element unless it has this attribute
  if (FOCUSABLE.has(tag)) element.setAttribute("data-lm-suppress-shortcuts", "true");
  // JupyterLab keeps Enter to itself, so the browser would not commit the typed value
  if (tag === "input") {
    element.addEventListener("keydown", (event) => {
      if (event.key === "Enter") element.dispatchEvent(new Event("change"));
    });
  }
  element.append(...children.filter((child) => child != null));
  return element;
}

/** A control inside its label, so that screen readers name it. */
export function labeled(text, control, hint = "") {
  return h("label", { class: "cc-control", title: hint }, h("span", {}, text), control);
}

/** A number field moved into its bounds (its `min` and `max`); null where it holds no number. */
export function typedNumber(field, round = (x) => x) {
  if (!Number.isFinite(field.valueAsNumber)) return null;
  const bound = (name, none) => (field[name] === "" ? none : Number(field[name]));
  return round(Math.min(bound("max", Infinity), Math.max(bound("min", -Infinity), field.valueAsNumber)));
}

// A kernel that was restarted drops what is sent to it, mostly without an error.
export const SILENCE = 3000; // ms without an answer after which the page says so
export const GONE = "The kernel does not answer: it is busy, or it was restarted. If it was, run this " +
  "cell again.";

/** Send to the kernel. If none of the events follows in time, call `otherwise`. */
export function ask(model, cleaner, content, events, otherwise) {
  const timer = setTimeout(() => done(otherwise), SILENCE);
  const heard = (message) => {
    if (message === undefined || message.file === content.want) done();
  };
  const done = (then) => {
    clearTimeout(timer);
    for (const event of events) model.off(event, heard);
    then?.();
  };
  for (const event of events) model.on(event, heard);
  cleaner.add(done);
  try {
    model.send(content);
  } catch { // where it is an error, it is certain
    done(otherwise);
  }
}

/** A number for people: four digits, a minus as wide as a plus, exponents only where they help. */
export function show(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "-";
  if (x === 0) return "0";
  const size = Math.abs(x), sign = x < 0 ? "−" : "";
  if (size < 1e-4 || size >= 1e6) return sign + size.toExponential(2);
  return sign + String(Number(size.toPrecision(4)));
}

/** A share in percent. */
export function percent(x, digits = 1) {
  return x === null || x === undefined ? "-" : `${(100 * x).toFixed(digits)} %`;
}

/** A count with thousands separators. */
export function count(x) {
  return x.toLocaleString("en-US");
}

/** "1 layer", "12 layers". */
export function counted(x, noun) {
  return `${count(x)} ${noun}${x === 1 ? "" : "s"}`;
}

/** "1 unit", "12 units". */
export const unitCount = (x) => counted(x, "unit");

/** A text whose "lambda 0.3" is not broken over two lines, as the children of an element. */
export const unbroken = (text) => text.split(/(lambda [\d.]+)/).map((part, k) =>
  (k % 2 ? h("span", { class: "cc-unbroken" }, part) : part));

/** The functions to call when a view closes; render() returns `cleaner.run`. */
export class Cleaner {
  constructor() {
    this.jobs = [];
    this.run = () => this.jobs.splice(0).forEach((job) => job());
  }
  add(job) {
    this.jobs.push(job);
  }
  /** Follow model events ("change:ratio", "msg:custom") until the view closes. */
  on(model, event, handler) {
    model.on(event, handler);
    this.add(() => model.off(event, handler));
  }
}

/** The colors of the present theme, read at an element. */
export function palette(root) {
  const style = getComputedStyle(root);
  const read = (name) => style.getPropertyValue(name).trim();
  return { text: read("--cc-text"), muted: read("--cc-muted"), grid: read("--cc-grid"),
    back: read("--cc-back"), kept: read("--cc-kept"), accent: read("--cc-accent") };
}

/** Call redraw when the theme or the width changes. */
export function watch(root, cleaner, redraw) {
  let queued = false;
  const soon = () => {
    if (queued) return;
    queued = true;
    requestAnimationFrame(() => {
      queued = false;
      if (root.isConnected) redraw();
    });
  };
  const late = () => {
    soon();
    setTimeout(soon, 400); // a theme's style sheet arrives after its name
  };
  const themes = new MutationObserver(late);
  for (const node of [document.body, document.documentElement]) {
    themes.observe(node, { attributes: true });
  }
  const sizes = new ResizeObserver(soon);
  sizes.observe(root);
  const scheme = matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", late);
  cleaner.add(() => {
    themes.disconnect();
    sizes.disconnect();
    scheme.removeEventListener("change", late);
  });
}

/** A canvas with a label for screen readers. */
export function picture(label) {
  return h("canvas", { class: "cc-picture", role: "img", "aria-label": label, tabindex: "0" });
}

/** What the matrix is, where it is not the H of ablations: "preview of H", "pair KL"; else "". */
export function oddMatrix(model) {
  const name = model.get("matrix_name") ?? "H";
  return name === "H" ? "" : name;
}

/** A label, with a remark on a matrix that is not the H of ablations. */
export function named(model, label) {
  return oddMatrix(model) ? `${label}. From a ${oddMatrix(model)}` : label;
}

/** The stem of an instrument's file names. */
export function stemOf(model, name) {
  const odd = oddMatrix(model).replace(" of H", "").replaceAll(" ", "_");
  return odd ? `${name}_${odd}` : name;
}

/** A fill of diagonal lines in one color. */
export function hatch(context, color) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  Object.assign(pen, { strokeStyle: color, lineWidth: 1.4 });
  for (const shift of [-6, 0, 6]) { // the corners belong to the neighbors' lines
    pen.moveTo(shift - 1, 7);
    pen.lineTo(shift + 7, -1);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}

/** The lines of a text, each at most `width` by `measure(line)`; a longer word is a line. */
export function wrapped(text, width, measure) {
  const lines = [];
  for (const word of text.split(" ").filter(Boolean)) {
    const longer = lines.length ? `${lines.at(-1)} ${word}` : word;
    if (lines.length && measure(longer) <= width) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}

let saving = false; // while a file is made, pictures have at least twice the screen's size

function scaleOf() {
  const screen = window.devicePixelRatio || 1;
  return saving ? Math.max(2, screen) : screen;
}

/** Size a canvas in CSS pixels, sharp on every screen; return its cleared context. */
export function fit(canvas, width, height) {
  const scale = scaleOf();
  const [w, t] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== t) {
    canvas.width = w;
    canvas.height = t;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `12px ${FONT}`;
  return context;
}

/** Round values for an axis, about `wanted` of them, between low and high. */
export function ticks(low, high, wanted = 5) {
  if (!(high > low)) return [low];
  const rough = (high - low) / wanted;
  const base = 10 ** Math.floor(Math.log10(rough));
  const step = base * [1, 2, 5, 10].find((m) => m * base >= rough * 0.999);
  const found = [];
  for (let t = Math.ceil(low / step - 1e-9); t * step <= high + step * 1e-9; t++) {
    found.push(Number((t * step).toPrecision(12)));
  }
  return found;
}

/** Powers of ten between low and high (both > 0). */
export function decades(low, high) {
  const found = [];
  const last = Math.floor(Math.log10(high) + 1e-9);
  for (let e = Math.ceil(Math.log10(low) - 1e-9); e <= last; e++) {
    found.push(10 ** e);
  }
  return found;
}

/** Download a file; content is text or bytes. */
export function offer(name, content, type) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  const link = h("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** {columns, rows} as CSV text. */
export function toCsv({ columns, rows }) {
  // a spreadsheet would run a text that begins like a formula; it does not show the apostrophe
  const safe = (v) => (typeof v === "string" && /^[=+\-@\t\r]/.test(v) ? `'${v}` : v);
  const quote = (v) => (/[",\n\r]/.test(String(v)) ? `"${String(v).replaceAll('"', '""')}"` : v);
  return [columns, ...rows].map((row) => row.map(safe).map(quote).join(",")).join("\n") + "\n";
}

function tableElement({ columns, rows }) {
  const shown = (number) => (Number.isInteger(number) ? count(number) : show(number));
  const cell = (tag) => (value) => h(tag, {}, typeof value === "number" ? shown(value) : value ?? "");
  return h("table", {},
    h("thead", {}, h("tr", {}, ...columns.map(cell("th")))),
    h("tbody", {}, ...rows.map((row) => h("tr", {}, ...row.map(cell("td"))))));
}

/**
 * The frame of an instrument: controls above, pictures, then table twin, files, error and status.
 * The note on anything but the H of ablations (`preview`) is shown under the title and in the picture.
 *
 * options: title; name (stem of files); table() -> {columns, rows}; canvases() -> list to save as
 * one PNG, with caption() -> its lines of text, legend() -> [[color, text]] and redraw() where the
 * picture alone does not say what it shows; json() and gexf() offer the plan and the graph (both
 * optional); words: those of the glossary that stand beside the title.
 */
export function frame(model, el, cleaner, options) {
  const preview = model.get("preview") || "";
  const odd = oddMatrix(model).replace(" of H", "");
  const [title, stem] = [options.title + (odd && ` (${odd})`), stemOf(model, options.name)];
  const controls = h("div", { class: "cc-controls" });
  const body = h("div", { class: "cc-body" });
  const error = h("p", { class: "cc-error", role: "alert" });
  const status = h("p", { class: "cc-status", role: "status", "aria-live": "polite" });
  const table = h("details", { class: "cc-table", ontoggle: () => root.refreshTable() },
    h("summary", {}, "Table"), h("div", { class: "cc-scroll" }));
  const files = h("div", { class: "cc-files" }, table);
  const file = (text, hint, save) => h("button", { type: "button", title: hint, onclick: save }, text);
  files.append(
    file("CSV", "save the data of the picture", () => {
      offer(`${stem}.csv`, toCsv(options.table()), "text/csv");
    }),
    file("PNG", "save the picture", () => savePicture(options, stem, root, [title, ...[
      ...(options.caption?.() ?? []), preview].filter(Boolean)])),
  );
  if (options.json) {
    files.append(file("JSON", "save the plan", options.json));
  }
  if (options.gexf) {
    files.append(file("GEXF", "save the graph, for Gephi and similar programs", options.gexf));
  }
  const words = (options.words ?? Object.keys(TERMS)).map((word) => term(word));
  const root = h("div", { class: "cocurve", role: "region", "aria-label": title },
    h("div", { class: "cc-head" }, h("h3", {}, title), h("span", { class: "cc-words" }, ...words)),
    preview ? h("p", { class: "cc-preview", role: "note",
      style: `border-left-color:${COLORS.bridge}` }, preview) : null,
    controls, body, error, status, files);
  root.refreshTable = () => {
    if (table.open) table.lastChild.replaceChildren(tableElement(options.table()));
  };
  const complain = (text) => {
    error.textContent = text;
    error.hidden = !text;
  };
  const say = () => {
    status.textContent = model.get("status") || "";
    complain(model.get("error") || "");
  };
  cleaner.on(model, "change:status", say);
  cleaner.on(model, "change:error", say);
  say();
  el.append(root);
  cleaner.add(() => root.remove());
  return { root, controls, body, status, complain };
}

/**
 * Download the files that the kernel sends as {file: ".gexf"} with a buffer. Returns the function
 * that asks for one, and calls `otherwise` where no answer comes.
 */
export function receiveFiles(model, cleaner, name) {
  cleaner.on(model, "msg:custom", (content, buffers) => {
    if (!content || !content.file) return;
    offer(stemOf(model, name) + content.file, buffers[0], "application/octet-stream");
  });
  return (want, otherwise) => ask(model, cleaner, { want }, ["msg:custom"], otherwise);
}

const SHEET = 1000; // width of a saved picture, CSS pixels

function savePicture(options, name, root, lines) {
  saving = true;
  options.redraw?.();
  const scale = scaleOf();
  const shown = options.canvases().filter((canvas) => canvas.width > 0 && canvas.isConnected);
  const sheet = composed(shown, { lines, legend: options.legend?.() ?? [], scale }, palette(root));
  saving = false;
  options.redraw?.();
  sheet.toBlob((blob) => offer(`${name}.png`, blob, "image/png"));
}

/** One canvas with a heading, a legend and the pictures side by side as far as they fit. */
function composed(shown, { lines, legend, scale }, colors) {
  const gap = 12;
  const width = Math.max(SHEET, ...shown.map((canvas) => canvas.width / scale + 2 * gap));
  const sheet = document.createElement("canvas");
  const pen = sheet.getContext("2d");
  const font = (size, weight = "") => `${weight} ${size}px ${FONT}`;
  pen.font = font(12);
  const [heading, ...rest] = lines;
  const text = rest.flatMap((line) =>
    wrapped(line, width - 2 * gap, (part) => pen.measureText(part).width));
  const entries = placed(legend.map(([, label]) => pen.measureText(label).width + 34), 16, gap, width);
  let top = gap + 24 + 18 * text.length;
  const key = top;
  top += legend.length ? 20 * entries.at(-1).row + 26 : 6;
  const places = placed(shown.map((canvas) => canvas.width / scale + gap), 0, gap, width);
  const rows = [];
  shown.forEach((canvas, k) => {
    const { row } = places[k];
    rows[row] = Math.max(rows[row] ?? 0, canvas.height / scale + gap);
  });
  sheet.width = width * scale;
  sheet.height = (top + rows.reduce((sum, tall) => sum + tall, 0)) * scale;
  pen.scale(scale, scale);
  pen.fillStyle = colors.back;
  pen.fillRect(0, 0, sheet.width, sheet.height);
  Object.assign(pen, { font: font(15, "600"), fillStyle: colors.text, textBaseline: "top" });
  pen.fillText(heading, gap, gap);
  pen.font = font(12);
  text.forEach((line, k) => pen.fillText(line, gap, gap + 24 + 18 * k));
  legend.forEach(([color, label], k) => {
    const { left, row } = entries[k];
    pen.fillStyle = color;
    pen.fillRect(left, key + 20 * row + 1, 12, 12);
    pen.fillStyle = colors.text;
    pen.fillText(label, left + 18, key + 20 * row);
  });
  shown.forEach((canvas, k) => {
    const { left, row } = places[k];
    const above = rows.slice(0, row).reduce((sum, tall) => sum + tall, top);
    pen.drawImage(canvas, left, above, canvas.width / scale, canvas.height / scale);
  });
  return sheet;
}

/** Places of boxes of some widths in rows of a width: [{left, row}]. */
export function placed(widths, space, margin, width) {
  let [left, row] = [margin, 0];
  return widths.map((wide, k) => {
    if (k && left + wide > width - margin / 2) [left, row] = [margin, row + 1];
    const place = { left, row };
    left += wide + space;
    return place;
  });
}

/** Set traits and send them in one message. */
export function assign(model, values) {
  for (const [name, value] of Object.entries(values)) model.set(name, value);
  model.save_changes();
}

/** The numbers of a binary trait (a DataView) as a typed array of the given class. */
export function typed(view, Kind) {
  if (view instanceof Kind) return view;
  const copy = view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
  return new Kind(copy);
}
