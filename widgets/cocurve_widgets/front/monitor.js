// The build monitor: a progress bar, and the overlap of the plans of two halves of the text.

import { COLORS, Cleaner, drawRules, fit, frame, h, palette, percent, picture, ticks, watch } from "./kit.js";

export function renderMonitor({ model, el }) {
  const cleaner = new Cleaner();
  const chart = picture("Overlap of the plans of two halves of the text over the sequences done");
  const ui = frame(model, el, cleaner, {
    title: "Building H",
    name: "build",
    words: ["unit"],
    table: () => ({ columns: ["sequences", "overlap"], rows: model.get("overlap") }),
    canvases: () => [chart],
    caption: () => [title.textContent, model.get("status")],
  });
  const bar = h("progress", { max: 1, value: 0, "aria-label": "sequences done" });
  ui.controls.append(bar);
  const title = h("h4", {}, "Overlap of the plans of two halves of the text");
  ui.body.append(h("div", {}, title, chart));

  function paint() {
    const [done, total, points] = ["done", "total", "overlap"].map((name) => model.get(name));
    bar.max = Math.max(1, total);
    bar.value = done;
    bar.hidden = total > 0 && done >= total;
    const colors = palette(ui.root);
    const [width, height] = [Math.min(620, (ui.root.clientWidth || 640) - 30), 170];
    const pen = fit(chart, width, height);
    const [left, right, top, base] = [52, width - 12, 10, height - 36];
    const x = (n) => left + (n / Math.max(1, total)) * (right - left);
    const y = (share) => base - share * (base - top);
    drawRules(pen, colors, [0, 0.5, 1], { y, text: (share) => percent(share, 0), left, right });
    pen.textAlign = "center";
    const whole = ticks(0, Math.max(1, total), 6).filter(Number.isInteger); // half a row is none
    for (const n of whole) pen.fillText(n, x(n), base + 12);
    pen.fillText("sequences done", (left + right) / 2, base + 28);
    pen.strokeStyle = pen.fillStyle = COLORS.attention;
    pen.lineWidth = 2;
    pen.beginPath();
    for (const [n, share] of points) pen.lineTo(x(n), y(share));
    pen.stroke();
    for (const [n, share] of points) pen.fillRect(x(n) - 2, y(share) - 2, 4, 4);
    ui.root.refreshTable();
  }
  watch(ui.root, cleaner, paint);
  cleaner.follow(model, ["done", "total", "overlap"], paint);
  return cleaner.run;
}

export default { render: renderMonitor };
