// Texts of the dense model, pruned and refitted, side by side, and KL at every token of one of them.
// A token is [id, text] or, without text of its own (the end token), [id, "", name].
import { compared, markedWords } from "./compare.js";
import { levels, place, sheet, stop, svg, text } from "./svg.js";
import { Cleaner, GONE, ask, assign, button, counted, frame, h, labeled, menu, numberInput, palette, percent,
  receiveFiles, show, ticks, tied, watch } from "./kit.js";

const COLUMNS = { refitted: { dense: "Dense", pruned: "Pruned", refitted: "Refitted" },
  plans: { dense: "Dense", diagonal: "A", pruned: "B" } };

// Without a page ------------------------------------------------------------------------------

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
export function replyMark(right, answer) {
  if (answer === null || answer === undefined || typeof right !== "boolean") return "";
  return right ? "✓ right" : `✗ wrong: it is ${answer}`;
}

/** A token for a label, with white space made visible. */
export function visible(token) {
  return token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/ /g, "␣");
}

/** The bar of the first token that differs, or null where the ribbon's text has no such bar. */
export const forkBar = (bars, divergence) =>
  [...bars.keys()].filter((k) => bars[k].generated)[divergence] ?? null;

/** Menu entries by group, in order: [[group, [[index, entry], ...]], ...]. */
export function grouped(menu) {
  const entries = [...menu.entries()];
  const groups = new Set(menu.map((entry) => entry.group));
  return [...groups].map((group) => [group, entries.filter(([, entry]) => entry.group === group)]);
}

/** A long prompt on one line; its end is kept, because the question is there. */
export function short(prompt, length = 56) {
  const line = prompt.trim().replaceAll(/\s+/g, " ");
  return line.length > length ? `…${line.slice(1 - length)}` : line;
}

// Controls ------------------------------------------------------------------------------------

function menuSelect(model, cleaner) {
  const groups = grouped(model.get("menu")).map(([group, entries]) => h("optgroup", { label: group },
    ...entries.map(([index, entry]) => h("option", { value: index }, short(entry.prompt)))));
  const select = h("select", { style: "max-width: 26em", onchange: () => {
    if (select.value !== "") assign(model, { prompt: model.get("menu")[select.value].prompt });
  } }, h("option", { value: "" }, "a prompt of your own"), ...groups);
  cleaner.follow(model, ["prompt"], () => {
    const at = model.get("menu").findIndex(({ prompt }) => prompt === model.get("prompt"));
    select.value = at < 0 ? "" : at;
  });
  return select;
}

/** A slider of a trait from 0 to `max`; words(value) stand beside its name. */
function slider(model, cleaner, trait, name, max, words) {
  const shown = h("output", {});
  const input = tied(model, cleaner, trait,
    h("input", { type: "range", min: 0, max, step: 0.01, "aria-label": name }), { event: "input" });
  cleaner.follow(model, [trait], () => {
    shown.textContent = words(model.get(trait));
    input.setAttribute("aria-valuetext", shown.textContent);
  });
  return h("div", { class: "cc-slider", style: "flex: 1 1 260px" }, input,
    h("div", { class: "cc-row", style: "justify-content: space-between" }, h("span", {}, name), shown));
}

/** A field for a text of several lines that a trait holds, in its label. */
function textField(model, cleaner, trait, name, wide, attributes) {
  const label = labeled(name, tied(model, cleaner, trait, h("textarea",
    { style: "width: 100%; box-sizing: border-box", spellcheck: "false", ...attributes })));
  label.style.flex = `1 1 ${wide}`;
  return label;
}

function buildControls(model, cleaner, view) {
  const prompt = textField(model, cleaner, "prompt", "Prompt (Ctrl+Enter generates)", "100%", { rows: 3,
    onkeydown: (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        generate();
      }
    } });
  const generate = () => {
    // in one message: a trait update could arrive later
    const set = { prompt: prompt.control.value };
    for (const name of ["max_new_tokens", "temperature", "seed"]) set[name] = model.get(name);
    ask(model, cleaner, { do: "generate", set }, ["change:busy", "change:status", "change:error"],
      () => view.complain(GONE));
  };
  const number = (trait, min, max, step) => numberInput(model, cleaner, trait, { min, max, step });
  const seed = number("seed", 0, 2 ** 31 - 1, 1);
  const halt = button("Stop", "stop within a token", () => model.send({ do: "stop" }));
  cleaner.follow(model, ["busy", "temperature"], () => {
    halt.disabled = !model.get("busy");
    seed.disabled = model.get("temperature") === 0;
  });
  view.controls.append(
    slider(model, cleaner, "interaction_strength", "λ, weight of the edges: 0 none, 1 in full", 1, show),
    slider(model, cleaner, "ratio", "share to remove (ratio)", 0.6, (x) => percent(x)),
    prompt,
    model.get("menu").length ? labeled("Choose a prompt", menuSelect(model, cleaner)) : "",
    labeled("Columns", tied(model, cleaner, "columns", menu([["refitted", "dense, pruned, refitted"],
      ["plans", "dense, plans A and B"]]))),
    h("div", { class: "cc-row" }, button("Generate", "write all texts", generate), halt),
    h("label", { class: "cc-row" }, tied(model, cleaner, "live", h("input", { type: "checkbox" })),
      "regenerate on change"),
    h("details", { class: "cc-more" }, h("summary", {}, "More"), h("div", { class: "cc-controls" },
      labeled("New tokens, at most", number("max_new_tokens", 1, 4096, 1)),
      labeled("Temperature (0: greedy)", number("temperature", 0, 5, 0.1),
        "above 0, all texts use the same random number at every step"),
      labeled("Seed", seed, "seed of the random numbers; no effect at temperature 0"))),
  );
  view.controls.after(view.root.querySelector(".cc-error")); // beside what it speaks of
}

// Texts ---------------------------------------------------------------------------------------

/** A column: a head, what is right, and a text. */
function column(title) {
  const [head, answer] = [h("h4", {}), h("p", {})];
  const paper = h("div", { class: "cc-paper", tabindex: "0", role: "group", "aria-label": `${title} text`,
    "aria-live": "polite", "data-lm-suppress-shortcuts": "true" });
  return { root: h("section", {}, head, answer, paper), head, answer, paper, title };
}

function buildTexts(model, cleaner, view) {
  const notice = h("p", { role: "note", class: "cc-notice" });
  const asked = h("p", { class: "cc-muted cc-asked" });
  const row = h("div", { class: "cc-columns" });
  const box = h("div", { style: "flex: 1 1 100%" }, notice, asked, row);
  view.body.append(box);
  let parts = {};
  cleaner.follow(model, ["columns"], () => {
    parts = Object.fromEntries(Object.entries(COLUMNS[model.get("columns")])
      .map(([side, title]) => [side, column(title)]));
    row.replaceChildren(...Object.values(parts).map((part) => part.root));
  });
  let state = null;
  const draw = () => {
    box.hidden = !state;
    if (!state) return;
    asked.textContent = state.prompt;
    asked.hidden = state.prompt === model.get("prompt");
    const { tokens, plans, finished } = state;
    const there = Object.entries(parts).filter(([side]) => tokens[side]);
    const texts = there.map(([side]) => tokens[side].map(([, piece]) => piece).join(""));
    compared(texts, !finished).forEach((words, k) => {
      const [side, part] = there[k];
      const end = tokens[side].at(-1)?.[2]; // a token without text
      part.paper.replaceChildren(...markedWords(words), end ? h("span", { class: "cc-muted", title: "a token without text" }, end) : "");
      part.answer.textContent = finished ? replyMark(state.right[side], state.answer) : "";
      const plan = plans[side] ? `: ${plans[side]}` : "";
      part.head.textContent = part.title + plan + (finished && state.stopped ? " (stopped)" : "");
    });
    for (const [side, part] of Object.entries(parts)) part.root.hidden = !tokens[side];
  };
  cleaner.follow(model, ["shown"], () => {
    const shown = model.get("shown");
    if (shown.run) state = { ...shown, tokens: model.get("tokens"), finished: true };
    draw();
  });
  for (const trait of ["prompt", "columns"]) cleaner.on(model, `change:${trait}`, draw);
  cleaner.follow(model, ["stale", "busy"], () => {
    const stale = model.get("stale");
    notice.hidden = !stale || (model.get("live") && model.get("busy"));
    notice.textContent = `This is text ${stale}. Press Generate for the present one.`;
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

const HINT = "Point at a bar, or use the arrow keys on the picture. Each bar belongs to the token below it.";

/** KL at every token as bars, `fork` is the one below the mark; read(words) tells of a bar, or of none. */
function ribbonChart({ bars, fork, colors, width, label, read }) {
  const [left, right, top, base] = [70, width - 12, 26, 176];
  const slot = (right - left) / bars.length;
  const wide = Math.max(1, slot - (slot > 4 ? 2 : 0));
  const names = slot < 9 ? [] : bars.map(({ token }) => visible(token).replace(/^(.{9}).{2,}$/u, "$1…"));
  const height = base + (names.length ? 14 + 6.5 * Math.max(...names.map((name) => name.length)) : 8);
  const most = Math.max(...bars.map((bar) => bar.kl), 1e-9);
  const y = (kl) => base - ((base - top) * Math.max(kl, 0)) / most;
  const marks = bars.map((bar, k) => {
    const words = `Token ${k + 2} of the text, "${visible(bar.token)}"` +
      `${bar.generated ? " (continuation)" : ""}: ${show(bar.kl)} nats.`;
    const tell = () => read(words);
    const [x, level] = [left + k * slot, y(bar.kl)];
    const paint = bar.generated ? { fill: colors.accent } : { fill: "none", stroke: colors.muted };
    return stop({ class: "cc-bar", role: "img", "aria-label": words, onpointerenter: tell, onfocus: tell },
      tell, svg("rect", { x: x - 1, y: top - 2, width: slot, height: height - top + 1, fill: "transparent" }),
      svg("rect", { x, y: level, width: wide, height: base - level, ...paint }),
      names.length > 0 && text(0, 0, names[k], { "text-anchor": "end", "font-size": 10,
        transform: `translate(${x + wide / 2 + 4} ${base + 6}) rotate(-90)` }));
  });
  const first = bars.findIndex((bar) => bar.generated);
  const border = left + first * slot - 1;
  const fits = border < width - 90;
  const parts = first < 0 ? [] : [
    svg("path", { d: `M${border} 2V${base}`, stroke: colors.muted, "stroke-dasharray": "4 3" }),
    border > left + 50 && text(border - 6, 12, fits ? "prompt" : "prompt, then continuation",
      { "text-anchor": "end" }),
    fits && text(border + 6, 12, "continuation")];
  return sheet(width, height, colors, { role: "group", "aria-label": label, onpointerleave: () => read(HINT),
    onkeydown: (event) => {
      const end = { Home: marks[0], End: marks.at(-1) }[event.key];
      if (!end) return;
      event.preventDefault();
      end.focus();
    } },
  svg("style", {}, `.cc-bar:is(:hover, :focus) { fill: ${colors.text}; font-weight: bold; }`,
    `.cc-bar:is(:hover, :focus) > :first-child { stroke: ${colors.text}; }`),
  ...levels(ticks(0, most, 4), y, left, right, colors), ...marks,
  text(0, 0, "nats per token", { "text-anchor": "middle",
    transform: `translate(16 ${(top + base) / 2}) rotate(-90)` }),
  ...parts,
  fork !== null && text(left + (fork + 0.5) * slot, top - 4, "▼",
    { "text-anchor": "middle", fill: colors.text }));
}

function buildRibbon(model, cleaner, view) {
  const title = h("h4", {});
  const home = h("div", {});
  const reading = h("p", { class: "cc-muted", style: "min-height: 1.45em" });
  const choose = menu([["dense", "prompt and dense continuation"],
    ["pruned", "prompt and continuation of B"], ["custom", "a text of your own"]],
  (value) => assign(model, { forced_text: value }));
  const custom = textField(model, cleaner, "custom_text", "Your own text (measured when you leave the field)",
    "300px", { rows: 2 });
  const root = h("section", { style: "flex: 1 1 100%; min-width: 0" }, title,
    h("div", { class: "cc-controls" }, labeled("Both models read", choose), custom), home, reading);
  view.body.append(root);
  const read = (words) => { reading.textContent = words; };
  const draw = () => {
    const bars = model.get("ribbon");
    const mean = bars.reduce((sum, bar) => sum + bar.kl, 0) / bars.length;
    title.textContent = "KL(dense || B), " + (bars.length
      ? `measured, teacher-forced on ${model.get("ribbon_text")}: mean ${show(mean)} nats per token` +
        ` over ${counted(bars.length, "token")}`
      : "measured at every token of a text both models read: no text yet");
    read(bars.length ? HINT : "");
    const fork = model.get("forced_text") === "custom" ? null : forkBar(bars, model.get("divergence"));
    if (bars.length) {
      const width = Math.max(280, root.clientWidth);
      place(home, ribbonChart({ bars, fork, read, width, colors: palette(view.root),
        label: `${title.textContent}. The table has every value.` }));
    } else home.replaceChildren();
    view.root.refreshTable();
  };
  cleaner.follow(model, ["forced_text"], () => {
    choose.value = model.get("forced_text");
    custom.hidden = choose.value !== "custom";
  });
  watch(view.root, cleaner, draw);
  cleaner.follow(model, ["ribbon", "ribbon_text"], draw);
  return { home, title };
}

const HELP = "Gray: words that all texts hold. Marked: the first word that differs. Refitted: the same units are " +
  "removed, and what stays is scaled by the gains that H gives (cl.solve_gains). A is the diagonal plan (λ 0) of " +
  "the same ratio. All texts come from one batch, in which units are switched off, at the dense model's speed.";

function render({ model, el }) {
  const cleaner = new Cleaner();
  const table = () => ({
    columns: ["position", "token", "generated", "KL, nats"],
    rows: model.get("ribbon").map((bar, i) =>
      [i + 2, visible(bar.token), bar.generated ? "yes" : "no", bar.kl]),
  });
  const view = frame(model, el, cleaner, { title: "Text before and after pruning",
    name: "text_before_after", words: ["unit", "nats"], table,
    json: () => request(".json", () => view.complain(GONE)),
    jsonHint: "save the plan; Selection.from_json reads it", canvases: () => [ribbon.home.firstChild],
    caption: () => [`${model.get("model_name") || "a model"}: ${ribbon.title.textContent}.`,
      model.get("shown").plans && `Plan: ${model.get("shown").plans.pruned}.`].filter(Boolean) });
  const request = receiveFiles(model, cleaner, "text_before_after");
  buildControls(model, cleaner, view);
  buildTexts(model, cleaner, view);
  const ribbon = buildRibbon(model, cleaner, view);
  view.body.after(h("p", { class: "cc-muted", style: "max-width: 70em" }, HELP));
  return cleaner.run;
}
