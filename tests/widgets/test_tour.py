"""The tour in the offline page, in Chromium with a clock that the test turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cocurve_widgets import export_html
from helpers.lab import Lab, in_browser
from helpers.problems import make_units, random_curvature
from helpers.waiting import eventually

SMALL = random_curvature(make_units(6, 3, 8), seed=5)


@contextmanager
def page_of(lab: Lab, folder: Path, **options: Any) -> Iterator[Any]:
    """The offline page, its clock stopped after the first second."""
    with lab.page(export_html(SMALL, folder / "page.html"), **options) as page:
        page.clock.install(time=0)
        page.reload()
        page.locator(".cc-facts td").first.wait_for()
        page.clock.pause_at(600_000)  # the plans are known, and only the test turns the clock
        yield page


def value(page: Any, label: str) -> float:
    return float(page.get_by_label(label).input_value())


def shown(page: Any) -> str:
    return str(page.locator(".cc-tour b").text_content())


@in_browser
def test_the_tour_moves_the_controls_and_puts_them_back(lab: Lab, tmp_path: Path) -> None:
    with page_of(lab, tmp_path) as page:
        root, bar = page.locator(".cocurve").first, page.locator(".cc-tour")
        share, strength = "ratio in percent, typed", "lambda, typed"
        assert bar.is_hidden()
        before = root.get_attribute("data-pruned")
        button = page.get_by_role("button", name="Tour (60 seconds)")
        button.focus()
        page.keyboard.press("Enter")
        eventually(lambda: shown(page), lambda text: text == "1 of 5")
        assert value(page, share) == 0  # rests first
        assert root.locator(".cc-here").get_attribute("aria-label").startswith("Map of units")
        page.clock.run_for(5000)
        assert 0 < value(page, share) < 20
        page.clock.run_for(5000)
        assert (value(page, share), value(page, strength)) == (20, 0)
        page.clock.run_for(2100)
        assert shown(page) == "2 of 5"
        page.clock.run_for(5000)
        assert 0 < value(page, strength) < 1
        page.clock.run_for(5000)
        assert value(page, strength) == 1
        page.clock.run_for(12_000)
        assert (shown(page), value(page, share)) == ("3 of 5", 40)
        page.clock.run_for(12_000)
        last = int(str(root.get_attribute("data-pruned")).split()[-1])
        assert shown(page) == "4 of 5"
        assert SMALL.units[last].name in str(root.locator(".cc-card h4").first.text_content())
        page.clock.run_for(12_000)
        assert (shown(page), value(page, "size of the cap")) == ("5 of 5", 0.6)
        page.clock.run_for(12_000)
        assert bar.is_hidden()
        assert root.locator(".cc-here").count() == 0
        assert root.get_attribute("data-pruned") == before
        assert (value(page, share), value(page, strength)) == (20, 1)
        assert root.locator(".cc-card h4").first.text_content() == "Unit"


@in_browser
def test_escape_goes_back_and_a_hand_on_a_control_keeps_what_it_sees(
    lab: Lab, tmp_path: Path
) -> None:
    with page_of(lab, tmp_path) as page:
        bar, share = page.locator(".cc-tour"), "ratio in percent, typed"
        start = page.get_by_role("button", name="Tour (60 seconds)")
        start.click()
        page.clock.run_for(5000)
        page.keyboard.press("Tab")  # to "Next", which goes on with the tour
        page.keyboard.press("Enter")
        eventually(lambda: shown(page), lambda text: text == "2 of 5")
        page.keyboard.press("Escape")
        bar.wait_for(state="hidden")
        assert (value(page, share), value(page, "lambda, typed")) == (20, 1)
        assert start.is_visible()

        start.click()
        page.clock.run_for(5000)
        halfway = value(page, share)
        assert 0 < halfway < 20
        page.locator("canvas[role=img]").first.click()
        bar.wait_for(state="hidden")
        page.clock.run_for(20_000)
        assert value(page, share) == halfway
        assert value(page, "lambda, typed") == 0

        start.click()
        page.get_by_role("button", name="Stop the tour").click()
        bar.wait_for(state="hidden")
        assert value(page, share) == halfway  # as it was when the tour began


@in_browser
def test_without_motion_a_step_is_there_at_once(lab: Lab, tmp_path: Path) -> None:
    with page_of(lab, tmp_path, reduced_motion="reduce") as page:
        page.get_by_role("button", name="Tour (60 seconds)").click()
        eventually(lambda: value(page, "ratio in percent, typed"), lambda share: share == 20)
        assert shown(page) == "1 of 5"
