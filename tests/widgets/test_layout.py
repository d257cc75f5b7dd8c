"""The check of layout finds planted faults, and none in the exported page at any width."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cocurve_widgets import export_html
from helpers.lab import CHROMIUM, NO_BROWSER, Lab
from helpers.layout import layout_faults, require_readable
from helpers.problems import make_units, random_curvature

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER),
]


@pytest.fixture
def page(lab: Lab) -> Iterator[Any]:
    found = lab.browser.new_page(viewport={"width": 1280, "height": 1000})
    yield found
    found.close()


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
    ],
)
def test_a_planted_fault_is_found(page: Any, planted: str, fault: str | None) -> None:
    page.set_content(f"<div id='root' style='position: relative'>{planted}</div>")
    assert layout_faults(page, "#root") == ([] if fault is None else [fault])


@pytest.mark.parametrize("width", [600, 780, 1280, 1920])
def test_the_offline_page_is_readable_and_fits(page: Any, tmp_path: Path, width: int) -> None:
    file = export_html(random_curvature(make_units(6, 3, 5), seed=4), tmp_path / "page.html")
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(file.as_uri())
    page.locator(".cocurve canvas[role=img]").first.wait_for()
    for more in page.locator("details > summary").all():
        more.click()
    require_readable(page, ".cocurve, header")
    root = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert root[0] <= root[1], "scrolls sideways"
    page.locator(".cocurve h3").first.evaluate("title => title.style.wordBreak = 'break-all'")
    page.locator(".cocurve h3").first.evaluate("title => title.style.width = '60px'")
    with pytest.raises(AssertionError, match="breaks inside a word"):
        require_readable(page, ".cocurve")


@pytest.mark.parametrize(("width", "height"), [(1280, 900), (1920, 1080)])
def test_bridges_and_map_are_seen_at_once(
    page: Any, tmp_path: Path, width: int, height: int
) -> None:
    file = export_html(random_curvature(make_units(8, 4, 16), seed=4), tmp_path / "page.html")
    page.set_viewport_size({"width": width, "height": height})
    page.goto(file.as_uri())
    page.locator(".cc-facts td").first.wait_for()
    _, bridges, heat = page.locator(".cocurve").all()
    graph, plane = bridges.locator("canvas[role=img]").all()[:2]
    cells = heat.locator("canvas")
    seen = height - 110  # less the bars of JupyterLab, above and below a notebook
    scale = 72  # of the colors, below the cells
    for root, picture, below in ((bridges, graph, 0), (bridges, plane, 0), (heat, cells, scale)):
        inside, top = picture.bounding_box(), root.bounding_box()["y"]
        assert inside["y"] + inside["height"] - below - top < seen
    card = heat.locator(".cc-cards").bounding_box()
    assert card["y"] < cells.bounding_box()["y"]  # beside the picture, not below it
    assert card["x"] + card["width"] > 0.8 * width  # up to the right edge
