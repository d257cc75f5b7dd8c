"""What the PNG button saves, in Chromium: its heading says what is shown, nothing is cut off."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cocurve_lab as cl
from cocurve_widgets import BuildMonitor, GenerationCompare, export_html
from cocurve_widgets.instrument import KIT, front
from helpers.lab import CHROMIUM, NO_BROWSER, Lab
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import GROUPS, tiny_model, word_tokenizer
from helpers.waiting import eventually

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER),
]

# Keeps every text and arc that is drawn, with its box in pixels of its canvas.
RECORDER = """(() => {
  window.drawn = [];
  const pens = CanvasRenderingContext2D.prototype;
  const { fillText, moveTo, quadraticCurveTo } = pens;
  const keep = (pen, text, points) => {
    const at = pen.getTransform();
    const places = points.map(([x, y]) => at.transformPoint({ x, y }));
    const ends = (axis) => [Math.min, Math.max].map((end) => end(...places.map((p) => p[axis])));
    drawn.push({ canvas: pen.canvas, text, x: ends('x'), y: ends('y'),
      room: [pen.canvas.width, pen.canvas.height] });
  };
  pens.fillText = function (text, x, y, ...most) {
    const size = this.measureText(text);
    const [left, right] = [x - size.actualBoundingBoxLeft, x + size.actualBoundingBoxRight];
    const [top, bottom] = [y - size.actualBoundingBoxAscent, y + size.actualBoundingBoxDescent];
    keep(this, String(text), [[left, top], [right, top], [left, bottom], [right, bottom]]);
    return fillText.call(this, text, x, y, ...most);
  };
  pens.moveTo = function (x, y) {
    this.from = [x, y];
    return moveTo.call(this, x, y);
  };
  pens.quadraticCurveTo = function (cx, cy, x, y) {
    const middle = [(this.from[0] + 2 * cx + x) / 4, (this.from[1] + 2 * cy + y) / 4];
    keep(this, null, [this.from, middle, [x, y]]); // where an arc is farthest from its chord
    return quadraticCurveTo.call(this, cx, cy, x, y);
  };
})()"""
ARC = "d => d.text === null && Math.abs(d.x[1] - d.x[0]) < d.y[1] - d.y[0]"
OUTSIDE = """() => drawn.filter(d => [d.x, d.y].some((ends, axis) =>
  ends[0] < -1 || ends[1] > d.room[axis] + 1))
  .map(d => `${d.text ?? 'arc'}: ${d.x}; ${d.y} in ${d.room}`)"""

# one instrument on plain values
ALONE = """<!doctype html><meta charset="utf-8"><style>%s</style><div id="here"></div>
<script type="module">%s
const values = %s;
const [none, el] = [() => {}, document.getElementById("here")];
const model = { get: name => values[name], set: none, save_changes: none, on: none, off: none };
(typeof render === "function" ? render : renderMonitor)({ model, el });
</script>"""

SMALL = random_curvature(make_units(6, 3, 8), seed=5)
NAMED = SMALL.with_provenance(model_name="tiny")


@pytest.fixture
def page(lab: Lab) -> Iterator[Any]:
    found = lab.browser.new_page(viewport={"width": 825, "height": 1000})  # as wide as in a lab
    found.add_init_script(RECORDER)
    wrong: list[str] = []
    found.on("pageerror", lambda error: wrong.append(str(error)))
    yield found
    found.close()
    assert not wrong


def saved(page: Any, root: Any) -> list[str]:
    """Press PNG; the texts of the file that no picture of the page has: heading, words, legend."""
    page.evaluate("() => { drawn.length = 0; }")
    with page.expect_download() as download:
        root.get_by_role("button", name="PNG", exact=True).click()
    data = Path(download.value.path()).read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 2000
    assert height >= 200
    assert page.evaluate(OUTSIDE) == []
    texts: list[str] = page.evaluate(
        "() => drawn.filter(d => d.text !== null && !d.canvas.isConnected).map(d => d.text)"
    )
    return texts


def show(x: float) -> str:
    """As the pages write a number."""
    text = f"{x:.4g}" if abs(x) >= 1e-4 else f"{x:.2e}"
    return text.replace("e-0", "e-")


def test_the_picture_of_a_plan_names_model_plan_and_colors(page: Any, tmp_path: Path) -> None:
    file = export_html(NAMED, tmp_path / "page.html")
    page.goto(file.as_uri() + "#interaction_strength=0.5&ratio=0.3&protect_last=2&kinds=ffn")
    root = page.locator(".cocurve").first
    root.locator(".cc-facts td").first.wait_for()
    plan = cl.solve_greedy(NAMED, 0.3, 0.5, cl.Guards(protect_last=2, kinds=("ffn",)))
    title, words, strokes, *legend = saved(page, root)
    assert title == "Pruning plan by lambda"
    assert words == (
        "tiny, 66 units: ratio 30.0 %, lambda 0.5, last 2 layers whole, ffn only; predicted risk "
        f"{show(plan.predicted_risk)} nats per token."
    )
    assert strokes.startswith("Curves: Predicted risk by ratio, solid: total, dashed: units alone")
    assert strokes.endswith("Bars: Removed share of each layer, plan B.")
    assert "A: diagonal, lambda 0" in legend
    assert "B: present, lambda 0.5" in legend

    page.get_by_role("button", name="Pin B as A").click()
    page.get_by_label("lambda, typed").fill("1")
    page.get_by_label("lambda, typed").press("Enter")
    _, words, *rest = saved(page, root)
    assert "ratio 30.0 %, lambda 1, last 2 layers whole" in words
    assert "A: pinned, lambda 0.5, 30.0 %" in rest

    page.get_by_label("ratio in percent, typed").fill("60")
    page.get_by_label("ratio in percent, typed").press("Enter")
    _, words, *rest = saved(page, root)
    assert (
        words == "tiny, 66 units: ratio 60.0 %, lambda 1, last 2 layers whole, ffn only; no plan."
    )
    assert "B: no plan" in rest


def test_the_picture_of_the_bridges_names_edges_plan_and_bars(page: Any, tmp_path: Path) -> None:
    file = export_html(NAMED, tmp_path / "page.html")
    page.goto(
        file.as_uri() + "#edges_of=all&threshold=0.1&sign=positive&blocks=cross,ffn&ratio=0.3"
    )
    page.locator(".cocurve .cc-facts td").first.wait_for()
    root = page.locator(".cocurve").nth(1)
    bars = root.locator("h4", has_text="by layer").text_content()
    title, edges, crossed, flow = saved(page, root)
    rho = cl.edge_graph(NAMED, threshold=0.1).edges(data="correlation")
    attention = set(range(66)) - {u for u in range(66) if NAMED.units[u].kind == "ffn"}
    shown = sum(r > 0 and not {u, v} <= attention for u, v, r in rho)
    assert title == "Bridges"
    assert edges == f"tiny: {shown} of 2,145 edges: |ρ| ≥ 0.1, positive only, cross and FFN blocks."
    count = len(cl.solve_greedy(NAMED, 0.3))
    assert crossed == f"Crossed: the {count} units that the present plan removes."
    assert flow == f"Bars: e{bars[1:]}."
    unit = bars.split()[2]
    root.get_by_label("ego view").click()
    root.locator("table button", has_text=unit).first.click()
    eventually(lambda: saved(page, root)[1], lambda words: words.endswith(f"ego view of {unit}."))


def test_the_picture_of_the_map_names_size_order_and_step(page: Any, tmp_path: Path) -> None:
    file = export_html(NAMED, tmp_path / "page.html")
    page.goto(file.as_uri() + "#interaction_strength=0.5&ratio=0.3")
    page.locator(".cocurve .cc-facts td").first.wait_for()
    root = page.locator(".cocurve").nth(2)
    assert saved(page, root)[1] == "Correlation ρ of 66 units by layer of tiny"
    root.get_by_label("color").select_option("curvature")
    root.get_by_label("order of rows and columns").select_option("saliency")
    root.get_by_role("button", name="◀ step").click()
    root.get_by_label("only pairs of the plan").click()
    root.get_by_role("button", name="+", exact=True).click()
    plan = cl.solve_greedy(NAMED, 0.3, 0.5)
    gone = plan.pruned[:-1]
    share = NAMED.units.costs[list(gone)].sum() / NAMED.units.costs.sum()
    title, what, step, *legend = saved(page, root)
    assert title == "Map of H"
    assert what == "Curvature H of 66 units by saliency, 41 units across of tiny"
    assert step == (
        f"plan: {len(gone)} of {len(plan)} units removed, {share:.2%} of the cost, predicted risk "
        f"{show(NAMED.risk(gone))}, lambda 0.5; cells of kept units are faded"
    ).replace("%", " %")
    assert "positive: worse together" in legend


def test_the_heading_of_a_preview_says_so(page: Any, tmp_path: Path) -> None:
    preview = NAMED.with_provenance(method="probe", probes=64, rank=8, noise_floor=0.0997)
    assert preview.is_preview
    page.goto(export_html(preview, tmp_path / "page.html").as_uri())
    page.locator(".cocurve .cc-facts td").first.wait_for()
    for k, title in enumerate(("Pruning plan by lambda", "Bridges", "Map of H")):
        heading, *words = saved(page, page.locator(".cocurve").nth(k))
        assert heading == f"{title} (preview)"
        assert " ".join(words).count(preview.note().split(".")[0]) == 1


def alone(page: Any, folder: Path, modules: tuple[str, ...], values: dict[str, Any]) -> Any:
    """A page with one instrument on plain values; its root."""
    file = folder / "alone.html"
    script = front(*KIT, *modules).replace("export default", "export const all =")
    text = ALONE % (front("instrument.css"), script, json.dumps(values))
    file.write_text(text, encoding="utf-8")
    page.goto(file.as_uri())
    return page.locator(".cocurve")


def test_the_picture_of_two_texts_names_text_and_plan(page: Any, tmp_path: Path) -> None:
    model = tiny_model(max_position_embeddings=400)
    curvature = random_curvature(cl.enumerate_units(model, GROUPS))
    curvature = curvature.with_provenance(model_name="tiny")
    made = GenerationCompare(
        model, word_tokenizer(), curvature, prompt="w1 w5 w7 w20", max_new_tokens=8
    )
    made.selection = plan = cl.solve_greedy(curvature, 0.3, 0.5)
    made.generate()
    root = alone(page, tmp_path, ("generation.js",), made.public_traits())
    made.close()
    title, kl, what = saved(page, root)[:3]
    assert title == "Text before and after pruning"
    assert kl.startswith("tiny: KL(dense || pruned), measured, teacher-forced on ")
    assert "nats per token over " in kl
    assert what == (
        f"Plan: {len(plan)} of {len(plan.units)} units off, "
        f"{100 * plan.realized_ratio:.1f} % of their cost, lambda 0.5."
    )


def test_the_picture_of_a_build_says_how_far_it_is(page: Any, tmp_path: Path) -> None:
    monitor = BuildMonitor()
    monitor.set_trait("done", 3)
    monitor.set_trait("total", 8)
    monitor.set_trait("overlap", [[2, 0.5], [3, 0.75]])
    monitor.set_trait("status", "3 of 8 sequences.")
    names = ("done", "total", "overlap", "status", "error")
    values = {name: getattr(monitor, name) for name in names}
    texts = saved(page, alone(page, tmp_path, ("monitor.js",), values))
    wanted = ["Building H", "Overlap of the plans of two halves of the text", "3 of 8 sequences."]
    assert texts[:3] == wanted


@pytest.mark.parametrize("width", [600, 825, 1280])
def test_no_label_and_no_arc_of_the_bridges_is_cut_off(
    page: Any, tmp_path: Path, width: int
) -> None:
    tall = random_curvature(make_units(6, 4, 16), seed=5)  # so that arcs of a layer are wide
    file = export_html(tall, tmp_path / "page.html")
    page.set_viewport_size({"width": width, "height": 1000})
    page.goto(file.as_uri() + "#edges_of=all&threshold=0")
    page.locator(".cocurve .cc-facts td").first.wait_for()
    assert page.evaluate(OUTSIDE) == []
    labels = page.evaluate("() => drawn.map(d => d.text)")
    assert any(str(text).startswith("connectivity (b_u)") for text in labels)
    arcs = page.evaluate(f"() => drawn.filter({ARC}).length")
    assert arcs > 6 * 5  # of pairs within each of the layers, the last one's too
    saved(page, page.locator(".cocurve").nth(1))  # and nothing is cut off in the file
