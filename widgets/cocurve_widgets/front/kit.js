// Shared by all front ends: the palette, elements, theme, canvas, numbers, tables, files.

// The only palette of the pages, after Okabe-Ito: color-blind readers can tell these apart in both
// themes. One color has one meaning everywhere; all but the last two are in cocurve_lab/extensions/figures.py.
export const COLORS = {
  attention: "#0072B2", // kind of a unit
  ffn: "#E69F00",
  expert: "#8C564B",
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
  if (FOCUSABLE.has(tag) || attributes.tabindex === "0") element.setAttribute("data-lm-suppress-shortcuts", "true");
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

export const button = (text, title, onclick) => h("button", { type: "button", title, onclick }, text);

/** A menu of [value, text] pairs; use(value) is called when one is chosen. */
export function menu(pairs, use = () => undefined, attributes = {}) {
  const select = h("select", { ...attributes, onchange: () => use(select.value) },
    ...pairs.map(([value, text]) => h("option", { value }, text)));
  return select;
}

/** A patch of color for a legend or a heading. */
export const patch = (color, style = "") =>
  h("i", { class: "cc-swatch", style: `background:${color};${style}` });

/** A table; a cell is a text, an element or a list of them, and `heads` may be null. */
export function table(heads, rows, attributes = {}) {
  const line = (tag, more) => (cells) => h("tr", {},
    ...cells.map((cell) => h(tag, more, ...[cell].flat())));
  return h("table", attributes, heads && h("thead", {}, line("th", { scope: "col" })(heads)),
    h("tbody", {}, ...rows.map(line("td", {}))));
}

/** The fate of a unit in a removal order, in words; null is a plan that does not exist. */
export function fateText(unit, removed, ordered = true) {
  if (!removed) return "no plan";
  const step = removed.indexOf(unit);
  if (step < 0) return "kept";
  return ordered ? `removed at step ${step + 1}` : "removed";
}

/** A number field moved into its bounds (its `min` and `max`), whole where its `step` is 1; null for none. */
export function typedNumber(field) {
  if (!Number.isFinite(field.valueAsNumber)) return null;
  const bound = (name, none) => (field[name] === "" ? none : Number(field[name]));
  const value = Math.min(bound("max", Infinity), Math.max(bound("min", -Infinity), field.valueAsNumber));
  return field.step === "1" ? Math.round(value) : value;
}

/** Say something beside a field until it is used again. */
function remark(field, words) {
  field.setCustomValidity(words);
  field.reportValidity();
  field.addEventListener("input", () => field.setCustomValidity(""), { once: true });
}

/**
 * Keep a control and a trait equal: an event of the control sets the trait, a number in its bounds. The
 * control has shown(value) of the trait, and the trait meant(value) of the control. A field without a
 * number gets back its value; one that had to be moved says so, and hint(value) is what else it says.
 */
export function tied(model, cleaner, trait, control,
  { event = "change", shown = (x) => x, meant = (x) => x, hint = () => "" } = {}) {
  const key = control.type === "checkbox" ? "checked" : "value";
  const fill = () => { control[key] = shown(model.get(trait)); };
  control.addEventListener(event, () => {
    const value = ["number", "range"].includes(control.type) ? typedNumber(control) : control[key];
    const asked = control.valueAsNumber;
    if (value !== null) assign(model, { [trait]: meant(value) });
    fill(); // what is out of bounds was brought in, or is no number
    const words = value === null || value === asked ? hint(asked) : `${control.min || "−∞"} to ${control.max || "∞"}, not ${asked}`;
    if (control.type === "number" && words) remark(control, words);
  });
  cleaner.follow(model, [trait], fill);
  return control;
}

/** A checkbox in its label for each of the names that a list trait may hold. */
export const checks = (model, cleaner, trait, names) => names.map((name) => h("label", { class: "cc-row" },
  tied(model, cleaner, trait, h("input", { type: "checkbox" }), { shown: (held) => held.includes(name),
    meant: (on) => names.filter((one) => (one === name ? on : model.get(trait).includes(one))) }),
  name === "ffn" ? "FFN" : name));

/** A number field that follows a trait of that name and sets it. */
export const numberInput = (model, cleaner, name, attributes) =>
  tied(model, cleaner, name, h("input", { type: "number", ...attributes }));

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

export const unitCount = (x) => counted(x, "unit");

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
  /** Show some traits now, and again whenever one of them changes. */
  follow(model, names, show) {
    for (const name of names) this.on(model, `change:${name}`, show);
    show();
  }
}

let pen; // gives the system's colors as numbers

/** The colors of the present theme, read at an element. */
export function palette(root) {
  const style = getComputedStyle(root);
  pen ??= document.createElement("canvas").getContext("2d");
  const read = (name) => {
    pen.fillStyle = style.getPropertyValue(name);
    return pen.fillStyle;
  };
  return { text: read("--cc-text"), muted: read("--cc-muted"), grid: read("--cc-grid"),
    back: read("--cc-back"), kept: read("--cc-kept"), accent: read("--cc-accent") };
}

/** Call redraw when the theme or the width changes; the height follows text and cards. */
export function watch(root, cleaner, redraw) {
  let [next, look] = [0, ""];
  const soon = () => {
    cancelAnimationFrame(next);
    next = requestAnimationFrame(() => {
      const now = JSON.stringify([root.clientWidth, palette(root)]);
      if (root.isConnected && now !== look) redraw();
      look = now;
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
  const closed = new AbortController();
  const onMedia = (name, job) => matchMedia(name).addEventListener("change", job, { signal: closed.signal });
  onMedia("(prefers-color-scheme: dark)", late);
  onMedia("(forced-colors: active)", late);
  onMedia("print", redraw); // has a width and colors of its own, and does not wait
  cleaner.add(() => {
    themes.disconnect();
    sizes.disconnect();
    closed.abort();
  });
}

/** A canvas with a label for screen readers. */
export function picture(label) {
  return h("canvas", { class: "cc-picture", role: "img", "aria-label": label, tabindex: "0" });
}

/** What the matrix is, where it is not H: "measured KL"; else "". */
function oddMatrix(model) {
  const name = model.get("matrix_name") ?? "H";
  return name === "H" ? "" : name;
}

/** A label, with a remark on a matrix that is not H. */
export function named(model, label) {
  return oddMatrix(model) ? `${label}. From the ${oddMatrix(model)}` : label;
}

/** The stem of an instrument's file names. */
export function stemOf(model, name) {
  const odd = oddMatrix(model).replaceAll(" ", "_");
  return odd ? `${name}_${odd}` : name;
}

let saving = false; // while a file is made, pictures have at least twice the screen's size

function scaleOf() {
  const screen = window.devicePixelRatio || 1;
  return saving ? Math.max(2, screen) : screen;
}

/** Size a canvas in CSS pixels, sharp on every screen; return its cleared context. */
export function fit(canvas, width, height) {
  const scale = scaleOf() * (canvas.currentCSSZoom ?? 1);
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
  const [from, to] = [low, high].map(Math.log10);
  return ticks(from, to, Math.max(1, to - from)).filter(Number.isInteger).map((e) => 10 ** e);
}

/** Log axis from pixel start to end; values of 0 get a strip of their own before it. */
export function logAxis(values, start, end) {
  const live = values.filter((v) => v > 0);
  const zeros = live.length < values.length;
  let [low, high] = live.length ? [Math.min(...live), Math.max(...live)] : [0.1, 1];
  const room = Math.max(1.25, (high / low) ** 0.04);
  [low, high] = [low / room, high * room];
  const strip = zeros ? 22 * Math.sign(end - start) : 0;
  const scale = (end - start - strip) / Math.log(high / low);
  const at = (v) => (v > 0 ? start + strip + scale * Math.log(v / low) : start + strip / 2);
  const inRange = (v) => v >= low && v <= high;
  let marks = decades(low, high);
  if (marks.length > 7) marks = marks.filter((_, i) => i % 2 === 0);
  if (marks.length < 3) marks = decades(low / 10, high).flatMap((d) => [d, 2 * d, 5 * d]);
  if (marks.filter(inRange).length < 2) marks = ticks(low, high, 3);
  marks = marks.filter(inRange);
  return { at, marks, zeros, first: start + strip };
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
  const shown = (value) => (typeof value !== "number" ? value ?? ""
    : Number.isInteger(value) ? count(value) : show(value));
  return table(columns, rows.map((row) => row.map(shown)));
}

/**
 * The frame of an instrument: controls above, pictures, then table twin, files, error and status.
 *
 * options: title; name (stem of files); table() -> {columns, rows}; canvases() -> list to save as
 * one PNG, with caption() -> its lines of text, legend() -> [[color, text]] and redraw() where the
 * picture alone does not say what it shows; json() and gexf() offer the plan and the graph (both
 * optional).
 */
export function frame(model, el, cleaner, options) {
  const odd = oddMatrix(model);
  const [title, stem] = [options.title + (odd && ` (${odd})`), stemOf(model, options.name)];
  const controls = h("div", { class: "cc-controls" });
  const body = h("div", { class: "cc-body" });
  const error = h("p", { class: "cc-error", role: "alert" });
  const status = h("p", { class: "cc-status", role: "status", "aria-live": "polite" });
  const twin = h("details", { class: "cc-table", ontoggle: () => root.refreshTable() },
    h("summary", {}, "Table"), h("div", { class: "cc-scroll", tabindex: "0", role: "group", "aria-label": "table" }));
  const files = h("div", { class: "cc-files" }, twin,
    button("CSV", "save the data of the picture", () => {
      offer(`${stem}.csv`, toCsv(options.table()), "text/csv");
    }),
    button("PNG", "save the picture", () => savePicture(options, stem, root,
      [title, ...(options.caption?.() ?? []).filter(Boolean)])),
    options.json && button("JSON", options.jsonHint ?? "save the plan", options.json),
    options.gexf && button("GEXF", "save the graph, for Gephi and similar programs", options.gexf));
  const root = h("div", { class: "cocurve", role: "region", "aria-label": title },
    h("h3", {}, title),
    controls, body, error, status, files);
  root.refreshTable = () => {
    if (!twin.open) return;
    twin.lastChild.replaceChildren(tableElement(options.table()));
  };
  const complain = (text) => {
    error.textContent = text;
    error.hidden = !text;
  };
  cleaner.follow(model, ["status", "error"], () => {
    status.textContent = model.get("status") || "";
    complain(model.get("error") || "");
  });
  root.addEventListener("keydown", (event) => { // JupyterLab does not see keys in a control: Ctrl+S is passed on
    if (event.key !== "s" || !(event.ctrlKey || event.metaKey) || model.get("kernel") === false) return;
    event.preventDefault();
    const { key, code, keyCode, ctrlKey, metaKey } = event;
    root.parentElement.dispatchEvent(new KeyboardEvent("keydown", { key, code, keyCode, ctrlKey, metaKey, bubbles: true }));
  });
  el.append(root);
  cleaner.add(() => root.remove());
  return { root, controls, body, status, complain };
}

/**
 * Download the files that the kernel sends as {file: ".gexf"} with a buffer. Returns the function
 * that asks for one, and calls `otherwise` where no answer comes.
 */
export function receiveFiles(model, cleaner, name) {
  const asked = new Set(); // by this view: the answer reaches every view of the model
  cleaner.on(model, "msg:custom", (content, buffers) => {
    if (!asked.delete(content?.file)) return;
    offer(stemOf(model, name) + content.file, buffers[0], "application/octet-stream");
  });
  return (want, otherwise) => {
    asked.add(want);
    ask(model, cleaner, { want }, ["msg:custom"], otherwise);
  };
}

const SHEET = 1000; // least width of a saved picture, CSS pixels

/** The text of an SVG as an image. */
async function imageOf(text) {
  const image = new Image();
  const valid = text.replace(/[\x00-\x08\x0b\x0c\x0e-\x1f]/g, ""); // XML, without what a token may hold
  image.src = `data:image/svg+xml,${encodeURIComponent(valid)}`;
  await image.decode();
  return image;
}

/**
 * Save lines of text, the first as heading, the legend and the pictures as one PNG. The browser lays
 * them out as HTML, which is drawn as an SVG, and each picture then in the place kept for it.
 */
async function savePicture(options, name, root, [heading, ...lines]) {
  const shown = options.canvases().filter((one) => one?.clientWidth > 0);
  const width = Math.max(SHEET, ...shown.map((one) => one.clientWidth + 24));
  const { text, back } = palette(root);
  const box = (style, ...children) => h("div", { style }, ...children);
  const row = (gap, ...children) => box(`display:flex;flex-wrap:wrap;gap:${gap};margin-top:6px`, ...children);
  const places = shown.map((one) => box(`width:${one.clientWidth}px;height:${one.clientHeight}px`));
  const legend = (options.legend?.() ?? []).map(([color, words]) =>
    box("display:flex;gap:6px;align-items:center", box(`width:12px;height:12px;background:${color}`), words));
  const page = box("all:initial;forced-color-adjust:none;display:block;position:relative;padding:12px;" +
    `width:${width - 24}px;font:12px/18px ${FONT};overflow-wrap:anywhere;color:${text};background:${back}`,
  box(`font:600 15px/24px ${FONT}`, heading), ...lines.map((line) => box("", line)),
  row("2px 16px", ...legend), row("12px", ...places));
  document.body.append(page); // until it is measured
  const tall = page.offsetHeight;
  const boxes = places.map((one) => [one.offsetLeft, one.offsetTop, one.offsetWidth, one.offsetHeight]);
  const xml = new XMLSerializer();
  const sheet = imageOf(`<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${tall}">` +
    `<foreignObject width="100%" height="100%">${xml.serializeToString(page)}</foreignObject></svg>`);
  page.remove();
  const images = await Promise.all([sheet, ...shown.map((one) =>
    (one instanceof SVGElement ? imageOf(xml.serializeToString(one)) : one))]);
  saving = true;
  options.redraw?.();
  const scale = scaleOf();
  const file = h("canvas", { width: width * scale, height: tall * scale });
  const pen = file.getContext("2d");
  pen.scale(scale, scale);
  [[0, 0, width, tall], ...boxes].forEach((where, k) => pen.drawImage(images[k], ...where));
  saving = false;
  options.redraw?.();
  file.toBlob((blob) => offer(`${name}.png`, blob, "image/png"));
}

/** Stretch an element over a picture between two corners, in pixels. */
export function stretch(element, one, other) {
  ["left", "top"].forEach((side, k) => { element.style[side] = `${Math.min(one[k], other[k])}px`; });
  ["width", "height"].forEach((side, k) => {
    element.style[side] = `${Math.abs(one[k] - other[k])}px`;
  });
}

/** Replace the content of a list, keeping the focus on its button. */
export function refill(place, ...content) {
  const buttons = () => [...place.querySelectorAll("button")];
  const held = buttons().indexOf(document.activeElement);
  place.replaceChildren(...content);
  if (held >= 0) buttons()[held]?.focus({ preventScroll: true });
}

/** Fill a row with the brushed units, at most 40, each a button made by unitButton(unit). */
export function fillBrushed(place, brushed, unitButton, none) {
  const most = 40;
  refill(place, h("span", { class: "cc-muted" }, brushed.length
    ? `${unitCount(brushed.length)} brushed:` : none), ...brushed.slice(0, most).map(unitButton),
  brushed.length > most ? `and ${count(brushed.length - most)} more` : "");
}

/**
 * Redraw with the next frame what a change concerns, and the table a little later.
 *
 * parts: drawing functions by name; follows: the names of parts that each trait concerns; turned:
 * the parts that theme and width concern; first(trait), if any, runs before, at once.
 */
export function redrawing(model, cleaner, { root }, { parts, follows, turned, first = () => undefined }) {
  const stale = new Set();
  let [frame, late, timer] = [0, 0, 0];
  const draw = () => {
    clearTimeout(late);
    frame = 0;
    const names = [...stale];
    stale.clear();
    if (!root.isConnected) return;
    names.forEach((name) => parts[name]());
    clearTimeout(timer);
    timer = setTimeout(() => root.refreshTable(), 200);
  };
  let seen = true; // off the screen, it is drawn when the hand rests
  const sight = new IntersectionObserver((entries) => { seen = entries.at(-1).isIntersecting; });
  sight.observe(root);
  const redraw = (names, soon = seen) => {
    names.forEach((name) => stale.add(name));
    clearTimeout(late);
    if (soon) frame ||= requestAnimationFrame(draw);
    else late = setTimeout(draw, 150);
  };
  for (const [trait, names] of Object.entries(follows)) {
    cleaner.on(model, `change:${trait}`, () => {
      first(trait);
      redraw(names);
    });
  }
  watch(root, cleaner, () => redraw(turned, true));
  cleaner.add(() => {
    sight.disconnect();
    [late, timer].forEach(clearTimeout);
  });
  redraw(Object.keys(parts));
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

/** Call use(u, v, k) for every pair of the upper triangle row by row, the diagonal included. */
export function eachPair(size, use) {
  let k = 0;
  for (let u = 0; u < size; u++) for (let v = u; v < size; v++, k++) use(u, v, k);
}

/** The square [M * M] of an upper triangle that was sent row by row, as an array of the given class. */
export function squareOf(triangle, size, Kind) {
  const found = new Kind(size * size);
  eachPair(size, (u, v, k) => { found[u * size + v] = found[v * size + u] = triangle[k]; });
  return found;
}
