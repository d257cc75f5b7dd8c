// Texts of the dense model and of plans A and B that grow together, and KL at every token of one.
// A token is [id, text] or, without text of its own (the end token), [id, "", name].
import { Cleaner, FONT, GONE, ask, assign, button, counted, drawRules, drawUpwards, fit, frame, h, labeled,
  menu, numberInput, palette, percent, picture, receiveFiles, show, ticks, typedNumber, watch } from "./kit.js";

const TITLES = { dense: "Dense", diagonal: "A", pruned: "B" };
const BARS = { left: 70, right: 12, top: 26, height: 150, named: 10 };

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
  for (const [side, count] of Object.entries(message.after)) {
    if ((state.tokens[side]?.length ?? 0) !== count) return null;
    tokens[side] = (state.tokens[side] ?? []).concat(message.append[side]);
  }
  return { ...state, tokens };
}

/** The mark of a reply whose right answer is known. */
export function verdict(right, answer) {
  if (answer === null || answer === undefined || typeof right !== "boolean") return "";
  return right ? "✓ right" : `✗ wrong: it is ${answer}`;
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

/** A slider of a trait from 0 to `max`; text(value) stands beside its name. */
function slider(model, cleaner, trait, name, max, text) {
  const shown = h("output", {});
  const input = h("input", { type: "range", min: 0, max, step: 0.01, "aria-label": name,
    oninput: () => assign(model, { [trait]: Number(input.value) }) });
  cleaner.follow(model, [trait], () => {
    input.value = model.get(trait);
    shown.textContent = text(model.get(trait));
    input.setAttribute("aria-valuetext", shown.textContent);
  });
  return h("div", { class: "cc-slider", style: "flex: 1 1 260px" }, input,
    h("div", { class: "cc-row", style: "justify-content: space-between" }, h("span", {}, name), shown));
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
  const live = h("input", { type: "checkbox", onchange: () => assign(model, { live: live.checked }) });
  cleaner.follow(model, ["busy", "live", "temperature"], () => {
    stop.disabled = !model.get("busy");
    live.checked = model.get("live");
    inputs.seed.disabled = model.get("temperature") === 0;
  });
  const wide = labeled("Prompt (Ctrl+Enter generates)", prompt);
  wide.style.cssText = "flex: 1 1 100%";
  view.controls.append(
    slider(model, cleaner, "interaction_strength", "λ, weight of the edges: 0 none, 1 in full", 1, show),
    slider(model, cleaner, "ratio", "share to remove (ratio)", 0.6, (x) => percent(x)),
    wide,
    model.get("menu").length ? labeled("Choose a prompt", menuSelect(model, cleaner)) : "",
    h("div", { class: "cc-row" }, button("Generate", "write all texts", generate), stop),
    h("label", { class: "cc-row" }, live, "regenerate on change"),
    h("details", { class: "cc-more" }, h("summary", {}, "More"), h("div", { class: "cc-controls" },
      labeled("New tokens, at most", inputs.max_new_tokens),
      labeled("Temperature (0: greedy)", inputs.temperature,
        "above 0, all texts use the same random number at every step"),
      labeled("Seed", inputs.seed, "seed of the random numbers; no effect at temperature 0"))),
  );
  view.controls.after(view.root.querySelector(".cc-error")); // beside what it speaks of
}

// Texts ---------------------------------------------------------------------------------------

/** A text with its head; what follows the first divergence is underlined. */
function line(side) {
  const [head, answer] = [h("h4", {}), h("p", {})];
  const [same, apart] = [h("span", {}), h("u", {})];
  const paper = h("div", { class: "cc-paper", tabindex: "0", role: "group", "aria-label": `${TITLES[side]} text`,
    "aria-live": "polite", "data-lm-suppress-shortcuts": "true" }, same, apart);
  return { root: h("section", { class: "cc-line" }, h("div", {}, head, answer), paper),
    head, answer, same, apart, run: null, count: 0, fork: null };
}

const tokenNode = ([, piece, name]) =>
  (name ? h("span", { class: "cc-muted", title: "a token without text" }, name) : piece);

/** Bring a text up to a state; tokens already there are not written (and read out) again. */
function paint(part, side, state, fork) {
  const tokens = state.tokens[side] ?? [];
  const late = fork !== part.fork && Math.min(fork ?? Infinity, part.fork ?? Infinity) < part.count;
  if (part.run !== state.run || part.count > tokens.length || late) {
    part.same.replaceChildren();
    part.apart.replaceChildren();
    part.count = 0;
  }
  tokens.slice(part.count).forEach((token, k) => {
    (part.count + k < (fork ?? Infinity) ? part.same : part.apart).append(tokenNode(token));
  });
  Object.assign(part, { run: state.run, count: tokens.length, fork });
  part.root.hidden = side === "diagonal" && !state.plans.diagonal;
  part.answer.textContent = state.finished ? verdict(state.right[side], state.answer) : "";
  const stopped = state.finished && state.stopped ? " (stopped)" : "";
  part.head.textContent = TITLES[side] + (state.plans[side] ? `: ${state.plans[side]}` : "") + stopped;
}

function buildTexts(model, cleaner, view) {
  const parts = Object.fromEntries(Object.keys(TITLES).map((side) => [side, line(side)]));
  const notice = h("p", { role: "note", class: "cc-notice" });
  const asked = h("p", { class: "cc-muted cc-asked" });
  const box = h("div", { style: "flex: 1 1 100%" }, notice, asked, ...Object.values(parts).map((part) => part.root));
  view.body.append(box);
  let state = null;
  const draw = () => {
    box.hidden = !state;
    if (!state) return;
    asked.textContent = state.prompt;
    asked.hidden = state.prompt === model.get("prompt");
    for (const [side, part] of Object.entries(parts)) {
      const { dense, [side]: own = [] } = state.tokens;
      const ended = state.finished && own.length !== dense.length ? Math.min(own.length, dense.length) : null;
      paint(part, side, state, side === "dense" ? null : firstDivergence(dense, own) ?? ended);
    }
  };
  cleaner.follow(model, ["shown"], () => {
    const shown = model.get("shown");
    if (shown.run) state = { ...shown, tokens: model.get("tokens"), finished: true };
    draw();
  });
  cleaner.on(model, "change:prompt", draw);
  cleaner.follow(model, ["stale", "busy"], () => {
    const stale = model.get("stale");
    notice.hidden = !stale || (model.get("live") && model.get("busy"));
    notice.textContent = `This is ${stale}. Press Generate for the current one.`;
    box.setAttribute("aria-busy", String(model.get("busy")));
  });
  let coming = null; // a run that has no token yet: until then the old texts stay
  cleaner.on(model, "msg:custom", (content) => {
    if (content.start) coming = { ...content.start, tokens: { dense: [] } };
    else if (content.append) {
      state = grown(coming ?? state, content) ?? state;
      coming = null;
      draw();
    }
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
  const fits = x < width - 90;
  if (x > BARS.left + 50) pen.fillText(fits ? "prompt" : "prompt, then continuation", x - 6, 8);
  pen.textAlign = "left";
  if (fits) pen.fillText("continuation", x + 6, 8);
}

function buildRibbon(model, cleaner, view) {
  const title = h("h4", {});
  const canvas = picture("");
  const reading = h("p", { class: "cc-muted", "aria-live": "polite", style: "min-height: 1.45em" });
  const choose = menu([["dense", "prompt and dense continuation"],
    ["pruned", "prompt and continuation of B"], ["custom", "a text of your own"]],
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
    title.textContent = "KL(dense || B), " + (bars.length
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

const HELP = "A is the diagonal plan (λ 0) of the same ratio; underlined is what follows the first token " +
  "that is not the dense model's. All texts come from one batch, in which units are switched off, at the " +
  "dense model's speed. To measure speed, cut the model with cl.prune(model, selection).";

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
      model.get("shown").plans && `Plan B: ${model.get("shown").plans.pruned}.`].filter(Boolean) });
  const request = receiveFiles(model, cleaner, "text_before_after");
  buildControls(model, cleaner, view);
  buildTexts(model, cleaner, view);
  ribbon = buildRibbon(model, cleaner, view);
  view.body.after(h("p", { class: "cc-muted", style: "max-width: 70em" }, HELP));
  return cleaner.run;
}

export default { render };
