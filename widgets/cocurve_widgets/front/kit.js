// Shared by all front ends: the palette, elements, theme, canvas, numbers, tables, files.

// The only palette of the pages (Okabe-Ito): colour-blind readers can tell these apart in both
// themes. The first three are those of cocurve_lab/figures.py.
export const COLORS = {
  attention: "#0072B2",
  ffn: "#E69F00",
  bridge: "#D55E00",
  flip: "#CC79A7",
  zero: "#56B4E9",
  one: "#009E73",
};

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
export function labelled(text, control, hint = "") {
  return h("label", { class: "cc-control", title: hint }, h("span", {}, text), control);
}

/** A number for people: four digits, exponents only where they help. */
export function show(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "-";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size < 1e-3 || size >= 1e6) return x.toExponential(2);
  return String(Number(x.toPrecision(4)));
}

/** A share in percent. */
export function percent(x, digits = 1) {
  return x === null || x === undefined ? "-" : `${(100 * x).toFixed(digits)} %`;
}

/** A count with thousands separators. */
export function count(x) {
  return x.toLocaleString("en-US");
}

/** "1 unit", "12 units". */
export function unitCount(x) {
  return `${count(x)} ${x === 1 ? "unit" : "units"}`;
}

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

/** The colours of the present theme, read at an element. */
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

/** A label, with a remark if H is a preview. */
export function named(model, label) {
  return model.get("preview") ? `${label}. From a preview of H` : label;
}

/** The stem of an instrument's file names. */
export function stemOf(model, name) {
  return model.get("preview") ? `${name}_preview` : name;
}

/** A fill of diagonal lines in one colour. */
export function hatch(context, color) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const pen = tile.getContext("2d");
  Object.assign(pen, { strokeStyle: color, lineWidth: 1.4 });
  for (const shift of [-6, 0, 6]) { // the corners belong to the neighbours' lines
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

/** Size a canvas in CSS pixels, sharp on every screen; return its cleared context. */
export function fit(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
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
  context.font = "12px system-ui, sans-serif";
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
 * The note on a preview of H (`preview`) is shown under the title and in the picture.
 *
 * options: title; name (stem of files); table() -> {columns, rows}; canvases() -> list to save as
 * one PNG; json() -> text of the plan, gexf() -> asks for the graph (both optional).
 */
export function frame(model, el, cleaner, options) {
  const preview = model.get("preview") || "";
  const [title, stem] = [options.title + (preview && " (preview)"), stemOf(model, options.name)];
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
    file("PNG", "save the picture", () => savePicture(options.canvases(), stem, root, preview)),
  );
  if (options.json) {
    files.append(file("JSON", "save the plan", () => {
      const text = options.json(); // empty if the kernel sends the file
      if (text) offer(`${stem}.json`, text, "application/json");
    }));
  }
  if (options.gexf) {
    files.append(file("GEXF", "save the graph, for Gephi and similar programs", options.gexf));
  }
  const root = h("div", { class: "cocurve", role: "region", "aria-label": title },
    h("h3", {}, title), preview ? h("p", { class: "cc-preview", role: "note",
      style: `border-left-color:${COLORS.bridge}` }, preview) : null,
    controls, body, error, status, files);
  root.refreshTable = () => {
    if (table.open) table.lastChild.replaceChildren(tableElement(options.table()));
  };
  const say = () => {
    status.textContent = model.get("status") || "";
    error.textContent = model.get("error") || "";
    error.hidden = !error.textContent;
  };
  cleaner.on(model, "change:status", say);
  cleaner.on(model, "change:error", say);
  say();
  el.append(root);
  cleaner.add(() => root.remove());
  return { root, controls, body, status, error };
}

/** Download the files that the kernel sends as {file: ".gexf"} with a buffer. */
export function receiveFiles(model, cleaner, name) {
  cleaner.on(model, "msg:custom", (content, buffers) => {
    if (!content || !content.file) return;
    offer(stemOf(model, name) + content.file, buffers[0], "application/octet-stream");
  });
}

function savePicture(canvases, name, root, note) {
  const shown = canvases.filter((canvas) => canvas.width > 0 && canvas.isConnected);
  const gap = 8;
  const sheet = document.createElement("canvas");
  const context = sheet.getContext("2d");
  const size = 12 * (window.devicePixelRatio || 1);
  const font = `${size}px system-ui, sans-serif`;
  sheet.width = Math.max(1, ...shown.map((canvas) => canvas.width));
  context.font = font;
  const lines = wrapped(note, sheet.width - 2 * gap, (line) => context.measureText(line).width);
  let top = lines.length ? 1.5 * size * lines.length + 2 * gap : 0;
  sheet.height = shown.reduce((sum, canvas) => sum + canvas.height + gap, top);
  context.fillStyle = palette(root).back;
  context.fillRect(0, 0, sheet.width, sheet.height);
  Object.assign(context, { font, fillStyle: palette(root).text, textBaseline: "top" });
  lines.forEach((line, k) => context.fillText(line, gap, gap + 1.5 * size * k));
  for (const canvas of shown) {
    context.drawImage(canvas, 0, top);
    top += canvas.height + gap;
  }
  sheet.toBlob((blob) => offer(`${name}.png`, blob, "image/png"));
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
