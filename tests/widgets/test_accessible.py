"""The shipped pages for everyone: axe-core, pixels, zoom, forced colors, no motion, no scripts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.lab import Lab, in_browser
from helpers.layout import require_readable, serious_violations

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
THEMES = ("light", "dark")
# The colors in a box of a picture by how often they occur, and that of the page behind it.
COLORS = """([canvas, [x, y, w, t]]) => {
  const scale = canvas.width / canvas.clientWidth;
  const { data } = canvas.getContext('2d').getImageData(x * scale, y * scale, w * scale, t * scale);
  const root = getComputedStyle(canvas.closest('.cocurve')).backgroundColor;
  const back = root.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const found = new Map();
  for (let k = 0; k < data.length; k += 4) {
    const alpha = data[k + 3] / 255;
    const color = [0, 1, 2].map(i => Math.round(data[k + i] * alpha + back[i] * (1 - alpha)));
    found.set(String(color), (found.get(String(color)) ?? 0) + 1);
  }
  return [back, [...found].map(([color, count]) => [color.split(',').map(Number), count])];
}"""


@pytest.fixture(scope="module", params=["explore_demo", "explore_smollm2"])
def page(request: pytest.FixtureRequest, lab: Lab) -> Iterator[Any]:
    file = FOLDER / f"{request.param}.html"
    with lab.page(file, viewport={"width": 1280, "height": 900}) as page:
        page.locator(".cc-four td").first.wait_for()
        yield page


def look(page: Any, **media: str) -> None:
    page.emulate_media(**media)
    page.wait_for_timeout(600)  # pictures follow the theme


def contrast(one: Any, other: Any) -> float:
    """Of two colors [r, g, b], as in WCAG."""
    values = np.array([one, other]) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    low, high = sorted(linear @ [0.2126, 0.7152, 0.0722])
    return float((high + 0.05) / (low + 0.05))


def contrasts(page: Any, box: list[int]) -> list[tuple[float, int]]:
    """Of the colors in a box of the map to what is behind it, with the number of their pixels."""
    canvas = page.locator("canvas[role=img]").first.element_handle()
    back, colors = page.evaluate(COLORS, [canvas, box])
    return [(contrast(color, back), count) for color, count in colors]


@in_browser
def test_no_rule_of_axe_is_broken(page: Any) -> None:
    page.evaluate("() => document.querySelectorAll('details').forEach(d => { d.open = true; })")
    for theme in THEMES:
        look(page, color_scheme=theme, forced_colors="none")
        assert serious_violations(page) == []
    page.evaluate("() => document.querySelectorAll('details').forEach(d => { d.open = false; })")


@in_browser
@pytest.mark.parametrize("forced", ["none", "active"])
def test_states_and_labels_of_the_map_have_contrast(page: Any, forced: str) -> None:
    for theme in THEMES:
        look(page, color_scheme=theme, forced_colors=forced)
        wide = page.locator("canvas[role=img]").first.bounding_box()
        cells = contrasts(page, [64, 4, int(wide["width"]) - 70, int(wide["height"]) - 34])
        area = sum(count for _, count in cells)
        # kept, its outline, removed: what fills a hundredth of the map is no smoothed edge
        states = [value for value, count in cells if count > 0.01 * area and value > 1.1]
        assert len(states) >= (2 if forced == "none" else 1), theme
        assert min(states) >= (3 if forced == "none" else 20.9), theme  # black on white, or so
        # the darkest pixel of a text counts: others are the smoothed edges of letters
        assert max(value for value, _ in contrasts(page, [0, 4, 60, 60])) >= 4.5, theme
        for patch in page.locator(".cc-unit").all() if forced == "active" else []:  # its legend
            assert patch.evaluate("p => getComputedStyle(p).forcedColorAdjust") == "none"
    look(page, color_scheme="light", forced_colors="none")


@in_browser
def test_zoom_to_200_percent_hides_nothing(page: Any) -> None:
    """The zoom of a browser halves the page in its own pixels."""
    page.set_viewport_size({"width": 640, "height": 450})
    page.wait_for_timeout(500)
    assert page.evaluate("document.documentElement.scrollWidth") <= 640
    require_readable(page, "header, .cocurve")
    page.set_viewport_size({"width": 1280, "height": 900})


@in_browser
def test_nothing_moves_where_no_motion_is_wanted(page: Any) -> None:
    """A step of lambda draws the map at once, or fades it in."""
    slider = page.get_by_label("lambda, weight of the edges")
    for motion, moves in (("no-preference", True), ("reduce", False)):
        look(page, reduced_motion=motion)
        slider.press("End")
        page.wait_for_timeout(600)
        before, at_once = slider.evaluate(
            """slider => {
              const map = document.querySelector('canvas[role=img]');
              const before = map.toDataURL();
              slider.value = 0;
              slider.dispatchEvent(new Event('input'));
              return [before, map.toDataURL()];
            }"""
        )
        page.wait_for_timeout(600)
        after = page.evaluate("document.querySelector('canvas[role=img]').toDataURL()")
        assert before != after
        assert (at_once != after) == moves, motion


@in_browser
@pytest.mark.parametrize("scripts", [False, True])
def test_where_scripts_are_blocked_the_page_says_so(lab: Lab, scripts: bool) -> None:
    with lab.page(FOLDER / "explore_demo.html", java_script_enabled=scripts) as page:
        page.wait_for_timeout(2500)
        assert page.get_by_text("Scripts are blocked here").is_visible() != scripts
