"""What the PNG button saves, in Chromium: its heading says what is shown, nothing is cut off."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cocurve_lab as cl
from cocurve_widgets import GenerationCompare, export_html
from helpers.lab import CHROMIUM, NO_BROWSER, Lab
from helpers.pages import page_of
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import GROUPS, tiny_model, word_tokenizer
from helpers.waiting import eventually

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER),
]

# Keeps every text and arc that is drawn, with its box in pixels of its canvas or SVG, a file's own
# words as `head`; the boxes of its heading and pictures; those of one color only, as `blank`.
RECORDER = """(() => {
  Object.assign(window, { drawn: [], boxes: [], blank: [] });
  const { serializeToString } = XMLSerializer.prototype, { toBlob } = HTMLCanvasElement.prototype;
  XMLSerializer.prototype.serializeToString = function (node) {
    const [head, room] = [!(node instanceof SVGElement), node.getBoundingClientRect()];
    const boxOf = (one) => {
      const box = one.getBoundingClientRect();
      return [box.left - room.left, box.top - room.top, box.width, box.height];
    };
    if (head) boxes = [node.firstChild, ...node.lastChild.children].map(boxOf);
    const texts = document.createTreeWalker(node, NodeFilter.SHOW_TEXT);
    while (texts.nextNode()) {
      const range = document.createRange();
      range.selectNodeContents(texts.currentNode);
      const [x, y, wide, tall] = boxOf(range);
      if (wide) drawn.push({ head, text: texts.currentNode.data, x: [x, x + wide], y: [y, y + tall],
        room: [room.width, room.height] });
    }
    return serializeToString.call(this, node);
  };
  HTMLCanvasElement.prototype.toBlob = function (...how) {
    const pixels = (box) => this.getContext('2d').getImageData(...box.map((x) => 2 * x)).data;
    blank = boxes.filter((box) => new Set(new Uint32Array(pixels(box).buffer)).size < 2);
    return toBlob.apply(this, how);
  };
  const pens = CanvasRenderingContext2D.prototype;
  const { fillText, moveTo, quadraticCurveTo } = pens;
  const keep = (pen, text, points) => {
    const at = pen.getTransform();
    const places = points.map(([x, y]) => at.transformPoint({ x, y }));
    const ends = (axis) => [Math.min, Math.max].map((end) => end(...places.map((p) => p[axis])));
    drawn.push({ text, x: ends('x'), y: ends('y'), room: [pen.canvas.width, pen.canvas.height] });
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
# What is drawn as SVG is not recorded: texts and shapes that reach out of their picture.
BEYOND = """root => [...root.querySelectorAll('svg.cc-chart')].flatMap(chart => {
  const room = chart.getBoundingClientRect();
  return [...chart.querySelectorAll('text, :scope > path, g > path')].filter(part => {
    const box = part.getBoundingClientRect();
    return box.left < room.left - 1 || box.top < room.top - 1 || box.right > room.right + 1
      || box.bottom > room.bottom + 1;
  }).map(part => part.textContent || part.outerHTML);
})"""

SMALL = random_curvature(make_units(6, 3, 8), seed=5)
NAMED = SMALL.with_provenance(model_name="tiny")
OPENING = cl.opening_guards(SMALL.units)


@pytest.fixture(scope="module")
def tab(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    file = export_html(NAMED, tmp_path_factory.mktemp("saved") / "page.html")
    with lab.page(file, script=RECORDER, width=825) as page:  # as wide as in a lab
        yield page, file


def opened(tab: Any, address: str) -> list[Any]:
    """The three instruments of the offline page at an address."""
    page, file = tab
    page.goto("about:blank")
    page.goto(file.as_uri() + address)
    page.locator(".cocurve .cc-numbers td").first.wait_for()
    return list(page.locator(".cocurve").all())


def saved(root: Any) -> list[str]:
    """Press PNG; the texts of the file that no picture of the page has: heading, words, legend."""
    page = root.page
    page.evaluate("() => { drawn.length = 0; }")
    more = root.locator(".cc-more > summary")
    if not root.get_by_role("button", name="PNG", exact=True).is_visible():
        more.click()
    with page.expect_download() as download:
        root.get_by_role("button", name="PNG", exact=True).click()
    data = Path(download.value.path()).read_bytes()
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 2000
    assert height >= 200
    assert page.evaluate(OUTSIDE) == []
    assert page.evaluate("() => blank") == []
    texts: list[str] = page.evaluate("() => drawn.filter(d => d.head).map(d => d.text)")
    return texts


def enter(root: Any, label: str, value: str) -> None:
    root.get_by_label(label).fill(value)
    root.get_by_label(label).press("Enter")


def show(x: float) -> str:
    """As the pages write a number."""
    text = f"{x:.4g}" if abs(x) >= 1e-4 else f"{x:.2e}"
    return text.replace("e-0", "e-")


def test_the_picture_of_a_plan_names_model_plan_and_colors(tab: Any) -> None:
    root, *_ = opened(
        tab, "#interaction_strength=0.5&ratio=0.3&protect_first=0&protect_last=2&kinds=ffn"
    )
    plan = cl.solve_greedy(NAMED, 0.3, 0.5, cl.Guards(protect_last=2, kinds=("ffn",)))
    title, words, finding, *legend = saved(root)
    assert title == "Pruning plan by lambda"
    assert words == (
        "tiny, 66 units: ratio 30.0 %, lambda 0.5, last 2 layers whole, ffn only; predicted risk "
        f"{show(plan.predicted_risk)} nats per token."
    )
    assert finding == "At 30 % no plan of these guards is measured."
    assert "A: λ 0" in legend
    assert "B: λ 0.5" in legend

    root.get_by_role("button", name="Pin B as A").click()
    enter(root, "lambda, typed", "1")
    _, words, *rest = saved(root)
    assert "ratio 30.0 %, lambda 1, last 2 layers whole" in words
    assert "A: pinned, λ 0.5, 30 %" in rest

    enter(root, "ratio in percent, typed", "60")
    _, words, *rest = saved(root)
    assert (
        words == "tiny, 66 units: ratio 60.0 %, lambda 1, last 2 layers whole, ffn only; no plan."
    )
    assert "B: no plan" in rest


def test_the_picture_of_the_bridges_names_edges_plan_and_bars(tab: Any) -> None:
    address = "#edges_of=all&threshold=0.1&sign=positive&blocks=cross,ffn&ratio=0.3"
    root = opened(tab, address)[1]
    bars = root.locator("h4", has_text="by layer").text_content()
    title, edges, crossed, flow = saved(root)
    rho = cl.edge_graph(NAMED, threshold=0.1).edges(data="correlation")
    attention = set(range(66)) - {u for u in range(66) if NAMED.units[u].kind == "ffn"}
    shown = sum(r > 0 and not {u, v} <= attention for u, v, r in rho)
    assert title == "Bridges"
    assert edges == f"tiny: {shown} of 2,145 edges: |ρ| ≥ 0.1, positive only, cross and FFN blocks."
    count = len(cl.solve_greedy(NAMED, 0.3, 0.5, OPENING))
    assert crossed == f"Crossed: the {count} units that the present plan removes."
    assert flow == f"Bars: e{bars[1:]}."
    unit = bars.split()[2]
    root.get_by_label("ego view").click()
    root.locator("table button", has_text=unit).first.click()
    eventually(lambda: saved(root)[1], lambda words: words.endswith(f"ego view of {unit}."))


def test_the_picture_of_the_map_names_size_order_and_step(tab: Any) -> None:
    root = opened(tab, "#interaction_strength=0.5&ratio=0.3")[2]
    assert saved(root)[1] == "Correlation ρ of 66 units by layer of tiny"
    root.get_by_label("color").select_option("curvature")
    root.get_by_label("order of rows and columns").select_option("saliency")
    root.get_by_role("button", name="◀ step").click()
    root.get_by_label("only pairs of the plan").click()
    root.get_by_role("button", name="+", exact=True).click()
    plan = cl.solve_greedy(NAMED, 0.3, 0.5, OPENING)
    gone = plan.pruned[:-1]
    share = NAMED.units.costs[list(gone)].sum() / NAMED.units.costs.sum()
    title, what, step, *legend = saved(root)
    assert title == "Map of H"
    assert what == "Curvature H of 66 units by saliency, 41 units across of tiny"
    assert step == (
        f"plan: {len(gone)} of {len(plan)} units removed, {share:.2%} of the cost, predicted risk "
        f"{show(NAMED.risk(gone))}, lambda 0.5; cells of kept units are faded"
    ).replace("%", " %")
    assert "positive: worse together" in legend


def test_the_heading_names_a_matrix_that_is_not_h(lab: Lab, tmp_path: Path) -> None:
    file = export_html(NAMED.with_provenance(surrogate="measured KL"), tmp_path / "page.html")
    with lab.page(file, script=RECORDER) as page:
        for root in opened((page, file), ""):
            heading, *_ = saved(root)
            assert heading == root.get_attribute("aria-label")
            assert heading.endswith(" (measured KL)")


def test_pictures_of_a_file_stand_side_by_side_as_far_as_they_fit(tab: Any) -> None:
    saved(opened(tab, "#edges_of=all&threshold=0.1")[1])
    heading, *pictures = tab[0].evaluate("() => boxes")
    pairs = list(itertools.pairwise(pictures))
    fits = [one[0] + one[2] + 12 + other[2] <= heading[0] + heading[2] for one, other in pairs]
    assert fits == [True, False, True]  # the graph, its key; the plane, the bars
    assert [one[1] == other[1] for one, other in pairs] == fits
    assert [other[0] != heading[0] for _, other in pairs] == fits


def test_the_pictures_of_two_texts_and_of_a_build(lab: Lab, tmp_path: Path) -> None:
    model = tiny_model(max_position_embeddings=400)
    curvature = random_curvature(cl.enumerate_units(model, GROUPS))
    curvature = curvature.with_provenance(model_name="tiny")
    made = GenerationCompare(
        model, word_tokenizer(), curvature, prompt="w1 w5 w7 w20", max_new_tokens=8
    )
    made.selection = plan = cl.solve_greedy(curvature, 0.3, 0.5)
    made.generate()
    file = page_of(tmp_path / "texts.html", "generation.js", "render", made.public_traits())
    made.close()
    with lab.page(file, script=RECORDER) as page:
        title, kl, what = saved(page.locator(".cocurve"))[:3]
    assert title == "Text before and after pruning"
    assert kl.startswith("tiny: KL(dense || B), measured, teacher-forced on ")
    assert "nats per token over " in kl
    assert what == (f"Plan B: λ 0.5, {100 * plan.realized_ratio:.1f} % removed, {len(plan)} units.")
    overlap = [[2, 0.5], [3, 0.75]]
    values = {"done": 3, "total": 8, "overlap": overlap, "status": "3 of 8 sequences."}
    file = page_of(tmp_path / "build.html", "monitor.js", "renderMonitor", values)
    with lab.page(file, script=RECORDER) as page:
        texts = saved(page.locator(".cocurve"))
    wanted = ["Building H", "Overlap of the plans of two halves of the text", "3 of 8 sequences."]
    assert texts[:3] == wanted


def test_no_label_and_no_arc_of_the_bridges_is_cut_off(lab: Lab, tmp_path: Path) -> None:
    tall = random_curvature(make_units(6, 4, 16), seed=5)  # so that arcs of a layer are wide
    file = export_html(tall, tmp_path / "page.html")
    with lab.page(file, script=RECORDER) as page:
        for width in (600, 825, 1280):
            page.set_viewport_size({"width": width, "height": 1000})
            bridges = opened((page, file), "#edges_of=all&threshold=0")[1]
            assert page.evaluate(OUTSIDE) == []
            assert bridges.evaluate(BEYOND) == []
            labels = bridges.locator("svg text").all_text_contents()
            assert any(text.startswith("connectivity (b_u)") for text in labels)
            assert "negative: losses partly cancel" in labels
            arcs = page.evaluate(f"() => drawn.filter({ARC}).length")
            assert arcs > 6 * 5  # of pairs within each of the layers, the last one's too
            saved(bridges)  # and nothing is cut off in the file
