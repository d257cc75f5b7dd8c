"""The check of layout finds planted faults, and none in the exported page at 1280 pixels."""

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
        (
            "<p>risk</p><canvas style='position: absolute; top: 0; left: 0'></canvas>",
            "is covered: risk",
        ),
    ],
)
def test_a_planted_fault_is_found(page: Any, planted: str, fault: str | None) -> None:
    page.set_content(f"<div id='root' style='position: relative'>{planted}</div>")
    assert layout_faults(page, "#root") == ([] if fault is None else [fault])


def test_the_offline_page_is_readable_at_1280(page: Any, tmp_path: Path) -> None:
    file = export_html(random_curvature(make_units(6, 3, 5), seed=4), tmp_path / "page.html")
    page.goto(file.as_uri())
    page.locator(".cocurve canvas[role=img]").first.wait_for()
    for more in page.locator("details > summary").all():
        more.click()
    require_readable(page, ".cocurve")
    page.locator(".cocurve h3").first.evaluate("title => title.style.wordBreak = 'break-all'")
    page.locator(".cocurve h3").first.evaluate("title => title.style.width = '60px'")
    with pytest.raises(AssertionError, match="breaks inside a word"):
        require_readable(page, ".cocurve")
