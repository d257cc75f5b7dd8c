"""The offline page can be read at every width and in both themes; planted faults are found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cocurve_widgets import export_html
from cocurve_widgets.instrument import front
from helpers.lab import Lab, in_browser
from helpers.layout import faint_texts, layout_faults, require_readable
from helpers.problems import make_units, random_curvature
from helpers.waiting import eventually

WIDE = "document.documentElement.scrollWidth"


@pytest.fixture(scope="module")
def page(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page of a small H."""
    file = tmp_path_factory.mktemp("page") / "page.html"
    export_html(random_curvature(make_units(6, 3, 8), seed=5), file)
    with lab.page(file) as page:
        page.locator(".cc-numbers td").first.wait_for()
        yield page


def resize(page: Any, width: int, height: int = 900) -> None:
    page.set_viewport_size({"width": width, "height": height})
    page.wait_for_timeout(400)  # pictures follow the width


@in_browser
@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        ("<p style='width: 60px'>predicted risk of a plan</p>", None),
        ("<pre style='width: 60px; overflow: auto'>predicted risk of a plan</pre>", None),
        (
            "<p style='width: 40px; word-break: break-all'>predicted</p>",
            "breaks inside a word: predicted",
        ),
        (
            "<p style='width: 40px; overflow: hidden; white-space: nowrap'>predicted risk</p>",
            "is clipped: predicted risk",
        ),
        (
            "<button style='width: 40px; overflow: hidden; white-space: nowrap'>Measure</button>",
            "is clipped: Measure",
        ),
        ("<p style='width: 60px'>plan of lambda 0</p>", None),
        (
            "<table><th style='width: 60px; max-width: 60px'>plan, lambda 0</th></table>",
            "breaks inside a word: lambda 0",
        ),
        (
            "<p>risk</p><canvas style='position: absolute; top: 0; left: 0'></canvas>",
            "is covered: risk",
        ),
        ("<p style='color: #b0b0b0; background: #fff'>faint</p>", "is faint: faint"),
    ],
)
def test_a_planted_fault_is_found(page: Any, planted: str, fault: str | None) -> None:
    page.evaluate(
        "html => document.body.insertAdjacentHTML('afterbegin', html)",
        f"<div id='root' style='position: relative'>{planted}</div>",
    )
    found = layout_faults(page, "#root") + faint_texts(page, "#root [style*=color]")
    page.evaluate("() => document.getElementById('root').remove()")
    assert found == ([] if fault is None else [fault])


@in_browser
def test_the_first_screen_has_what_matters(page: Any) -> None:
    root = page.locator(".cocurve").first
    names = (
        "canvas[aria-label^='Map of units']",
        ".cc-chart[role=group]",
        ".cc-four",
        "input[type=range]",
    )
    parts = [root.locator(name).first for name in names]
    box = page.get_by_label("lambda, typed")
    box.fill("0.00005555")  # where the plans of a large model change
    box.press("Enter")
    assert box.evaluate("field => field.scrollWidth <= field.clientWidth"), "a number is clipped"
    wide = {}
    # 825 is the width of an output in JupyterLab at 1280, which shows 800 pixels of the notebook
    for width in (825, 1280, 1920):
        resize(page, width)
        boxes = [part.bounding_box() for part in parts]
        wide[width] = boxes[0]["width"]
        top = root.bounding_box()["y"]
        assert max(box["y"] + box["height"] - top for box in boxes) < 780, width
    assert wide[1920] > 1.2 * wide[1280]


@in_browser
def test_a_word_is_explained_on_hover_and_on_focus(page: Any) -> None:
    found = json.loads(front("glossary.js").split("TERMS = ")[1].split(";\n\n")[0])
    assert {"lambda", "ratio", "KL", "plan", "guard"} < set(found)
    stops = page.locator(".cocurve").first.locator("input[type=range], .cc-words .cc-term")
    order = [stop.get_attribute("aria-label") or stop.inner_text() for stop in stops.all()]
    assert order[0] == "lambda, weight of the edges"
    assert order[2:] == list(found)  # after both sliders
    word = page.locator(".cc-words .cc-term", has_text="saliency").first

    def tip() -> str:
        return str(word.evaluate("w => getComputedStyle(w, '::after').content"))

    assert tip() == "none"
    word.hover()
    eventually(tip, lambda text: "H_uu" in text)
    page.mouse.move(0, 0)
    eventually(tip, lambda text: text == "none")
    word.focus()
    eventually(tip, lambda text: "H_uu" in text)
    page.keyboard.press("Escape")
    eventually(tip, lambda text: text == "none")


@in_browser
def test_it_is_readable_at_every_width_and_in_both_themes(page: Any) -> None:
    for more in page.locator("details > summary").all():
        more.click()
    for width in (600, 780, 1280, 1920):
        resize(page, width)
        require_readable(page, ".cocurve, header")
        for word in page.locator(".cc-term").all():  # no tip makes the page wider either
            word.focus()
            assert page.evaluate(WIDE) <= width
    for theme in ("dark", "light"):
        page.emulate_media(color_scheme=theme)
        page.wait_for_timeout(500)
        assert faint_texts(page, ".cocurve *") == []


@in_browser
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (1920, 1080)])
def test_bridges_and_map_are_seen_at_once(
    lab: Lab, tmp_path: Path, width: int, height: int
) -> None:
    file = export_html(random_curvature(make_units(8, 4, 16), seed=4), tmp_path / "page.html")
    with lab.page(file, viewport={"width": width, "height": height}) as page:
        page.locator(".cc-numbers td").first.wait_for()
        _, bridges, heat = page.locator(".cocurve").all()
        graph = bridges.locator("canvas[role=img]")
        plane = bridges.locator("[role=img][aria-label^='Saliency against']")
        cells = heat.locator("canvas")
        seen = height - 110  # less the bars of JupyterLab, above and below a notebook
        scale = 72  # of the colors, below the cells
        for root, picture, below in (
            (bridges, graph, 0),
            (bridges, plane, 0),
            (heat, cells, scale),
        ):
            inside, top = picture.bounding_box(), root.bounding_box()["y"]
            assert inside["y"] + inside["height"] - below - top < seen
        card = heat.locator(".cc-cards").bounding_box()
        assert card["y"] < cells.bounding_box()["y"]  # beside the picture, not below it
        assert card["x"] + card["width"] > 0.8 * width  # up to the right edge
