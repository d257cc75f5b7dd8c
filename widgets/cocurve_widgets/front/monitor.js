// The build monitor: a progress bar, and the overlap of the plans of two halves of the text.

import { levels, sheet, svg, text } from "./svg.js";
import { COLORS, Cleaner, frame, h, palette, percent, ticks, watch } from "./kit.js";

const TITLE = "Overlap of the plans of two halves of the text";

export function renderMonitor({ model, el }) {
  const cleaner = new Cleaner();
  const chart = h("div", { role: "img", "aria-label": `${TITLE} over the sequences done`, tabindex: "0" });
  const ui = frame(model, el, cleaner, {
    title: "Building H",
    name: "build",
    words: ["unit"],
    table: () => ({ columns: ["sequences", "overlap"], rows: model.get("overlap") }),
    canvases: () => [chart.firstChild],
    caption: () => [TITLE, model.get("status")],
  });
  const bar = h("progress", { max: 1, value: 0, "aria-label": "sequences done" });
  ui.controls.append(bar);
  ui.body.append(h("div", {}, h("h4", {}, TITLE), chart));

  function paint() {
    const [done, total, points] = ["done", "total", "overlap"].map((name) => model.get(name));
    bar.max = Math.max(1, total);
    bar.value = done;
    bar.hidden = total > 0 && done >= total;
    const colors = palette(ui.root);
    const [width, height] = [Math.min(620, (ui.root.clientWidth || 640) - 30), 170];
    const [left, right, top, base] = [52, width - 12, 10, height - 36];
    const x = (n) => left + (n / Math.max(1, total)) * (right - left);
    const y = (share) => base - share * (base - top);
    const middle = { "text-anchor": "middle" };
    const whole = ticks(0, Math.max(1, total), 6).filter(Number.isInteger); // half a row is none
    const places = points.map(([n, share]) => `${x(n)} ${y(share)}`);
    chart.replaceChildren(sheet(width, height, colors, {},
      ...levels([0, 0.5, 1], y, left, right, colors, (share) => percent(share, 0)),
      ...whole.map((n) => text(x(n), base + 16, n, middle)),
      text((left + right) / 2, base + 32, "sequences done", middle),
      svg("polyline", { points: places.join(), fill: "none", stroke: COLORS.attention, "stroke-width": 2 }),
      svg("path", { d: places.map((at) => `M${at}m-2-2h4v4h-4z`).join(""), fill: COLORS.attention })));
    ui.root.refreshTable();
  }
  watch(ui.root, cleaner, paint);
  cleaner.follow(model, ["done", "total", "overlap"], paint);
  return cleaner.run;
}
