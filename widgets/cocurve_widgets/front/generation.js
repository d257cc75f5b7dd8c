// Two columns of text that grow together, and the KL at every token of one text.
// A token is [id, text] or, without text of its own (the end token), [id, "", name].
import { Cleaner, FONT, GONE, ask, assign, button, counted, drawRules, drawUpwards, fit, frame, h, labeled,
  menu, palette, picture, receiveFiles, show, ticks, typedNumber, watch } from "./kit.js";

const SIDES = ["dense", "pruned"];
const TITLES = { dense: "Dense", pruned: "Pruned" };
const BARS = { left: 56, right: 12, top: 26, height: 150, named: 10 };

// Without a page ------------------------------------------------------------------------------

/** Index of the first token that differs in two lists of tokens, or null. */
export function firstDivergence(left, right) {
  const shared = Math.min(left.length, right.length);
  for (let i = 0; i < shared; i++) if (left[i][0] !== right[i][0]) return i;
  return null;
}

/** The texts after a message {append, after, run}; null where it does not follow on them. */
export function grown(state, message) {
  if (!state || state.run !== message.run) return null;
  const tokens = {};
  for (const [k, side] of SIDES.entries()) {
    if (state.tokens[side].length !== message.after[k]) return null;
    tokens[side] = state.tokens[side].concat(message.append[side]);
  }
  return { ...state, tokens };
}

/** The line above a reply whose right answer is known. */
export function verdict(right, answer) {
  if (answer === null || answer === undefined || typeof right !== "boolean") return "";
  return right ? `✓ right: ${answer}` : `✗ wrong: the answer is ${answer}`;
}

/** A token for a label, with white space made visible. */
export function visible(token) {
  return token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/ /g, "␣");
}

/** The bar of the first token that differs, or null where the ribbon's text has no such bar. */
export function forkBar(bars, divergence) {
  if (divergence === null || divergence === undefined) return null;
  const first = bars.findIndex((bar) => bar.generated);
  const index = first + divergence;
  return first >= 0 && index < bars.length ? index : null;
}

/** The bar at a horizontal place of the canvas, or null beside the bars. */
export function barAt(x, count, width) {
  const slot = (width - BARS.left - BARS.right) / count;
  const index = Math.floor((x - BARS.left) / slot);
  return count > 0 && index >= 0 && index < count ? index : null;
}

/** Where an arrow key moves the marked bar; undefined for other keys. */
export function moved(key, index, count) {
  const from = index ?? -1;
  const to = { ArrowRight: from + 1, ArrowLeft: Math.max(from, 1) - 1, Home: 0, End: count - 1 };
  return key in to && count > 0 ? Math.min(to[key], count - 1) : undefined;
}

/** Menu entries by group, in order: [[group, [[index, entry], ...]], ...]. */
export function grouped(menu) {
  const groups = new Map();
  menu.forEach((entry, index) => {
    if (!groups.has(entry.group)) groups.set(entry.group, []);
    groups.get(entry.group).push([index, entry]);
  });
  return [...groups];
}

/** A long prompt on one line; its end is kept, because the question is there. */
export function short(prompt, length = 56) {
  const line = prompt.trim().replaceAll(/\s+/g, " ");
  return line.length > length ? `…${line.slice(1 - length)}` : line;
}

// Controls ------------------------------------------------------------------------------------

function numberInput(model, cleaner, name, attributes) {
  const input = h("input", { type: "number", ...attributes, onchange: () => {
    const value = typedNumber(input); // what is out of bounds is brought in, and shown
    input.value = value ?? model.get(name);
    if (value !== null) assign(model, { [name]: value });
  } });
  cleaner.follow(model, [name], () => { input.value = model.get(name); });
  return input;
}

function menuSelect(model, cleaner) {
  const select = h("select", { style: "max-width: 26em", onchange: () => {
    assign(model, { choice: select.value === "" ? null : Number(select.value) });
  } });
  const fill = () => {
    const groups = grouped(model.get("menu")).map(([group, entries]) =>
      h("optgroup", { label: group }, ...entries.map(([index, entry]) =>
        h("option", { value: index }, short(entry.prompt)))));
    select.replaceChildren(h("option", { value: "" }, "a prompt of your own"), ...groups);
    follow();
  };
  const follow = () => { select.value = model.get("choice") ?? ""; };
  cleaner.follow(model, ["menu"], fill);
  cleaner.on(model, "change:choice", follow);
  return select;
}

function buildControls(model, cleaner, view) {
  const prompt = h("textarea", { rows: 3, style: "width: 100%; box-sizing: border-box",
    spellcheck: "false", onchange: () => assign(model, { prompt: prompt.value }),
    onkeydown: (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        generate();
      }
    } });
  cleaner.follow(model, ["prompt"], () => {
    if (prompt.value !== model.get("prompt")) prompt.value = model.get("prompt");
  });
  const inputs = {
    max_new_tokens: numberInput(model, cleaner, "max_new_tokens", { min: 1, max: 4096, step: 1 }),
    temperature: numberInput(model, cleaner, "temperature", { min: 0, max: 5, step: 0.1 }),
    seed: numberInput(model, cleaner, "seed", { min: 0, max: 2 ** 31 - 1, step: 1 }),
  };
  const generate = () => {
    const set = { prompt: prompt.value };
    for (const [name, input] of Object.entries(inputs)) {
      const value = typedNumber(input);
      if (value !== null) set[name] = value;
    }
    // in one message: a trait update could arrive later
    ask(model, cleaner, { do: "generate", set }, ["change:busy", "change:status", "change:error"],
      () => view.complain(GONE));
  };
  const stop = button("Stop", "stop within a token", () => model.send({ do: "stop" }));
  const live = h("input", { type: "checkbox",
    onchange: () => assign(model, { live: live.checked }) });
  cleaner.follow(model, ["busy", "live", "temperature"], () => {
    stop.disabled = !model.get("busy");
    live.checked = model.get("live");
    inputs.seed.disabled = model.get("temperature") === 0;
  });
  const wide = labeled("Prompt (Ctrl+Enter generates)", prompt);
  wide.style.cssText = "flex: 1 1 100%";
  if (model.get("menu").length) {
    view.controls.append(labeled("Choose a prompt", menuSelect(model, cleaner)));
  }
  view.controls.append(
    wide,
    labeled("New tokens, at most", inputs.max_new_tokens),
    labeled("Temperature (0: greedy)", inputs.temperature,
      "above 0, both columns use the same random number at every step"),
    labeled("Seed", inputs.seed, "seed of the random numbers; no effect at temperature 0"),
    h("div", { class: "cc-row" }, button("Generate", "write both texts", generate), stop),
    h("label", { class: "cc-row" }, live, "write again when the plan changes"),
  );
}

// Columns -------------------------------------------------------------------------------------

function column(side) {
  // one line, so that the two texts stand side by side; the whole of it is the hint
  const head = h("h4", { style: "white-space: nowrap; overflow: hidden; text-overflow: ellipsis" },
    TITLES[side]);
  const answer = h("p", { style: "min-height: 1.45em; font-weight: 600" });
  const prompt = h("span", { class: "cc-muted" });
  const text = h("span", { "aria-live": "polite" });
  const paper = h("div", { style: "white-space: pre-wrap; overflow-wrap: anywhere; " +
    "font-family: var(--jp-code-font-family, monospace); border: 1px solid var(--cc-grid); " +
    "border-radius: 3px; padding: 6px 8px; min-height: 5em; max-height: 26em; overflow: auto",
    tabindex: "0", role: "group", "aria-label": `${TITLES[side]} text`,
    "data-lm-suppress-shortcuts": "true" }, prompt, text);
  const root = h("section", { style: "flex: 1 1 300px; min-width: 0" }, head, answer, paper);
  return { root, head, answer, prompt, text, paper, run: null, count: 0 };
}

function tokenNode([, piece, name], forked) {
  const silent = { class: "cc-muted", title: "a token without text" };
  const inner = name ? h("span", silent, name) : piece;
  if (!forked) return inner;
  return h("mark", { title: "the first token that differs", style: "color: inherit; " +
    "background: none; font-weight: 700; border-bottom: 3px double var(--cc-accent)" },
    h("span", { role: "img", "aria-label": "first divergence:" }, "▼"), inner);
}

/** Bring a column up to a state; tokens already there are not written (and read out) again. */
function paint(part, side, state, fork) {
  if (part.run !== state.run || part.count > state.tokens[side].length) {
    part.text.replaceChildren();
    Object.assign(part, { run: state.run, count: 0 });
  }
  part.prompt.textContent = state.prompt;
  state.tokens[side].slice(part.count).forEach((token, k) => {
    part.text.append(tokenNode(token, part.count + k === fork));
  });
  part.count = state.tokens[side].length;
  part.answer.textContent = state.finished ? verdict(state.right[side], state.answer) : "";
  const stopped = state.finished && state.stopped ? " (stopped)" : "";
  part.head.textContent = (side === "dense" ? "Dense" : `Pruned: ${state.plan}`) + stopped;
  part.head.title = part.head.textContent;
}

function buildColumns(model, cleaner, view) {
  const parts = Object.fromEntries(SIDES.map((side) => [side, column(side)]));
  const notice = h("p", { role: "note", style: "flex: 1 1 100%; margin: 0; padding: 2px 8px; " +
    "border: 1px dashed var(--cc-muted)" });
  const fork = h("p", { class: "cc-muted",
    style: "flex: 1 1 100%; margin: 0; min-height: 1.45em" });
  const row = h("div", { style: "display: flex; flex-wrap: wrap; gap: 6px 20px; flex: 1 1 100%" },
    notice, ...SIDES.map((side) => parts[side].root), fork);
  view.body.append(row);
  let state = null;
  const draw = () => {
    if (!state) return;
    const place = state.finished ? model.get("divergence")
      : firstDivergence(state.tokens.dense, state.tokens.pruned);
    for (const side of SIDES) paint(parts[side], side, state, place);
    const same = !state.finished ? ""
      : `The two texts are the same${state.stopped ? " so far" : ""}.`;
    fork.textContent = place === null ? same
      : `▼ marks where they part: token ${place + 1}, ` + SIDES.map((side) => {
        const [, piece, name] = state.tokens[side][place] ?? [0, "", "nothing"];
        return `${side} "${name ?? visible(piece)}"`;
      }).join(", ") + ".";
  };
  cleaner.follow(model, ["shown"], () => {
    const shown = model.get("shown");
    if (shown.run) state = { ...shown, tokens: model.get("tokens"), finished: true };
    draw();
  });
  cleaner.follow(model, ["stale"], () => {
    const stale = model.get("stale");
    notice.hidden = !stale;
    notice.textContent = `This is ${stale}. Press Generate for the present one.`;
  });
  cleaner.follow(model, ["busy"], () => row.setAttribute("aria-busy", String(model.get("busy"))));
  cleaner.on(model, "msg:custom", (content) => {
    if (content.start) state = { ...content.start, tokens: { dense: [], pruned: [] } };
    else if (content.append) state = grown(state, content) ?? state;
    else return;
    draw();
  });
}

// The ribbon ----------------------------------------------------------------------------------

function drawBars(canvas, width, bars, marked, fork, colors) {
  const named = (width - BARS.left - BARS.right) / bars.length >= 9;
  const floor = BARS.top + BARS.height;
  const longest = Math.max(...bars.map((bar) => bar.token.length));
  const below = named ? 14 + 6.5 * Math.min(BARS.named, longest) : 8;
  const pen = fit(canvas, width, floor + below);
  const slot = (width - BARS.left - BARS.right) / bars.length;
  const most = Math.max(...bars.map((bar) => bar.kl), 1e-9);
  const y = (kl) => floor - (BARS.height * Math.max(kl, 0)) / most;
  drawRules(pen, colors, ticks(0, most, 4), { y, text: show, left: BARS.left,
    right: width - BARS.right });
  drawUpwards(pen, "nats per token", 12, BARS.top + BARS.height / 2);
  bars.forEach((bar, i) => {
    const left = BARS.left + i * slot;
    const wide = Math.max(1, slot - (slot > 4 ? 2 : 0));
    pen.fillStyle = pen.strokeStyle = bar.generated ? colors.accent : colors.muted;
    if (bar.generated) pen.fillRect(left, y(bar.kl), wide, floor - y(bar.kl));
    else pen.strokeRect(left + 0.5, y(bar.kl), Math.max(1, wide - 1), floor - y(bar.kl));
    if (i === marked) {
      pen.strokeStyle = colors.text;
      pen.strokeRect(left - 1, BARS.top - 2, slot, BARS.height + 4);
    }
    if (named) label(pen, visible(bar.token), left + wide / 2, floor + 6, colors, i === marked);
  });
  drawParts(pen, bars, slot, width, floor, colors);
  if (fork !== null) {
    pen.fillStyle = colors.text;
    pen.textAlign = "center";
    pen.fillText("▼", BARS.left + (fork + 0.5) * slot, BARS.top - 8);
  }
}

function label(pen, token, x, y, colors, strong) {
  pen.save();
  pen.translate(x, y);
  pen.rotate(-Math.PI / 2);
  pen.textAlign = "right";
  pen.fillStyle = strong ? colors.text : colors.muted;
  pen.font = `${strong ? "bold " : ""}10px ${FONT}`;
  pen.fillText(token.length > BARS.named ? `${token.slice(0, BARS.named - 1)}…` : token, 0, 0);
  pen.restore();
}

function drawParts(pen, bars, slot, width, floor, colors) {
  const first = bars.findIndex((bar) => bar.generated);
  if (first < 0) return;
  const x = BARS.left + first * slot - 1;
  pen.strokeStyle = colors.muted;
  pen.setLineDash([4, 3]);
  pen.beginPath();
  pen.moveTo(x, 2);
  pen.lineTo(x, floor);
  pen.stroke();
  pen.setLineDash([]);
  pen.fillStyle = colors.muted;
  pen.textAlign = "right";
  if (x > BARS.left + 50) pen.fillText("prompt", x - 6, 8);
  pen.textAlign = x < width - 90 ? "left" : "right";
  pen.fillText("continuation", x < width - 90 ? x + 6 : width, 8);
}

function buildRibbon(model, cleaner, view) {
  const title = h("h4", {});
  const canvas = picture("");
  const reading = h("p", { class: "cc-muted", "aria-live": "polite", style: "min-height: 1.45em" });
  const choose = menu([["dense", "prompt and dense continuation"],
    ["pruned", "prompt and pruned continuation"], ["custom", "a text of your own"]],
  (value) => assign(model, { forced_text: value }));
  const custom = h("textarea", { rows: 2, style: "width: 100%; box-sizing: border-box",
    spellcheck: "false", onchange: () => assign(model, { custom_text: custom.value }) });
  const wide = labeled("Your own text (measured when you leave the field)", custom);
  wide.style.cssText = "flex: 1 1 300px";
  const root = h("section", { style: "flex: 1 1 100%; min-width: 0" }, title,
    h("div", { class: "cc-controls" }, labeled("Both models read", choose), wide),
    canvas, reading);
  view.body.append(root);
  let marked = null;
  const draw = () => {
    const bars = model.get("ribbon");
    const mean = bars.reduce((sum, bar) => sum + bar.kl, 0) / bars.length;
    const name = model.get("ribbon_text");
    title.textContent = "KL(dense || pruned), " + (bars.length
      ? `measured, teacher-forced on ${name}: mean ${show(mean)} nats per token` +
        ` over ${counted(bars.length, "token")}`
      : "measured at every token of a text both models read: no text yet");
    canvas.hidden = !bars.length;
    if (marked !== null && marked >= bars.length) marked = null;
    const bar = bars[marked];
    reading.textContent = !bars.length ? "" : bar
      ? `Token ${marked + 2} of the text, "${visible(bar.token)}"` +
        `${bar.generated ? " (continuation)" : ""}: ${show(bar.kl)} nats.`
      : "Point at a bar, or use the arrow keys on the picture. Each bar belongs to the token below it.";
    canvas.setAttribute("aria-label", `${title.textContent}. The table has every value.`);
    const fork = model.get("forced_text") === "custom" ? null
      : forkBar(bars, model.get("divergence"));
    if (bars.length) {
      drawBars(canvas, Math.max(280, root.clientWidth), bars, marked, fork, palette(view.root));
    }
    view.root.refreshTable();
  };
  const mark = (index) => {
    if (index === marked) return;
    marked = index;
    draw();
  };
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    mark(barAt(event.clientX - box.left, model.get("ribbon").length, box.width));
  });
  canvas.addEventListener("pointerleave", () => mark(null));
  canvas.addEventListener("keydown", (event) => {
    const index = moved(event.key, marked, model.get("ribbon").length);
    if (index === undefined) return;
    event.preventDefault();
    mark(index);
  });
  cleaner.follow(model, ["forced_text", "custom_text"], () => {
    choose.value = model.get("forced_text");
    wide.hidden = choose.value !== "custom";
    wide.style.display = wide.hidden ? "none" : "";
    if (custom.value !== model.get("custom_text")) custom.value = model.get("custom_text");
  });
  watch(view.root, cleaner, draw);
  cleaner.follow(model, ["ribbon", "ribbon_text"], draw);
  return { canvas, title };
}

const HELP = "Both columns come from one batch of two rows: one runs whole, one with the plan's " +
  "units switched off. Such a batch runs at the dense model's speed, so no speed is shown here. To " +
  "measure speed, cut the model with cl.prune(model, selection).";

function render({ model, el }) {
  const cleaner = new Cleaner();
  let ribbon = null;
  const table = () => ({
    columns: ["position", "token", "generated", "KL, nats"],
    rows: model.get("ribbon").map((bar, i) =>
      [i + 2, visible(bar.token), bar.generated ? "yes" : "no", bar.kl]),
  });
  const view = frame(model, el, cleaner, { title: "Text before and after pruning",
    name: "text_before_after", words: ["unit", "nats"], table,
    json: () => request(".json", () => view.complain(GONE)),
    jsonHint: "save the plan; Selection.from_json reads it", canvases: () => [ribbon.canvas],
    caption: () => [`${model.get("model_name") || "a model"}: ${ribbon.title.textContent}.`,
      model.get("shown").plan && `Plan: ${model.get("shown").plan}.`].filter(Boolean) });
  const request = receiveFiles(model, cleaner, "text_before_after");
  buildControls(model, cleaner, view);
  buildColumns(model, cleaner, view);
  ribbon = buildRibbon(model, cleaner, view);
  view.body.after(h("p", { class: "cc-muted", style: "max-width: 70em" }, HELP));
  return cleaner.run;
}

export default { render };
