"""Notebook 04 in JupyterLab: points of the fidelity scatter appear while they are measured."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from helpers.lab import KEPT, SMALL, Visit
from helpers.layout import require_readable_notebook
from helpers.notebooks import NOTEBOOKS, SOLUTIONS, Ran, cold, findings_of
from helpers.waiting import eventually

pytestmark = [pytest.mark.browser, pytest.mark.slow]
FIGURE = ".cocurve[data-plans]"


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """The notebook with the solution of its exercise, checked, after the reader's attempt."""
    notebook = NOTEBOOKS[3]
    content = nbformat.read(notebook, as_version=4)
    (check,) = (c for c in content.cells if "exercises.rank_correlation" in c.source)
    place = content.cells.index(check) + 1
    more = [nbformat.v4.new_code_cell(SOLUTIONS["04"]), nbformat.v4.new_code_cell(check.source)]
    content.cells[place:place] = more
    solved = tmp_path_factory.mktemp("solved") / notebook.name
    nbformat.write(content, solved)
    yield from cold(request, solved, SMALL | {"HELD_OUT": 6})


def plans(page: Any) -> int:
    return int(page.locator(FIGURE).get_attribute("data-plans"))


@pytest.fixture
def page(ran: Ran) -> Any:
    """The page, with its first six plans measured and nothing going on."""
    page = ran.shown_in_lab().page
    page.locator(FIGURE).wait_for(state="attached", timeout=60_000)
    eventually(lambda: plans(page), lambda found: found >= 6, 120)
    idle(page)
    page.locator(FIGURE).scroll_into_view_if_needed()
    return page


def idle(page: Any) -> None:
    """Until Cancel can no longer be pressed: nothing is being measured."""
    page.wait_for_selector("button:has-text('Cancel'):disabled", timeout=120_000)


def grown(page: Any, act: Callable[[], None], wanted: int) -> list[int]:
    """The numbers of plans in the picture from `act` on until there are `wanted`."""
    act()
    seen = [plans(page)]
    while seen[-1] < wanted:
        page.wait_for_timeout(30)
        if plans(page) != seen[-1]:
            seen.append(plans(page))
    return seen


def type_into(page: Any, label: str, value: str) -> None:
    page.get_by_label(label, exact=True).fill(value)
    page.get_by_label(label, exact=True).press("Tab")


def test_it_says_what_was_measured_and_the_solution_passes(ran: Ran) -> None:
    assert f"Saved H to {KEPT}/H_demo_" in ran.text
    assert "measured / predicted" in ran.text
    assert "not yet: 0 of " in ran.text
    assert "\nright\n" in ran.text
    claims = " ".join(findings_of(ran.text))
    for claim in ("½ H_uu is the KL", "Spearman 0.81", "the joint prediction ½ sᵀHs is accurate"):
        assert claim in claims


def test_the_figure_has_a_name_and_offers_no_upload(ran: Ran, page: Any) -> None:
    visit = ran.shown_in_lab()
    assert page.locator(FIGURE).count() == 1
    assert visit.received <= 1e6
    visit.require_no_upload()
    named = page.locator(f"{FIGURE} .cc-chart[aria-label]").first
    assert "measured KL" in (named.get_attribute("aria-label") or "")
    singles = page.locator(".cc-singles").get_attribute("d") or ""
    assert singles.count("h0") == 160
    require_readable_notebook(page)
    visit.require_clean()


def test_a_pool_by_keyboard_and_a_sweep_by_mouse(page: Any) -> None:
    page.get_by_role("button", name="Same-budget pool").focus()
    seen = grown(page, lambda: page.keyboard.press("Enter"), plans(page) + 25)  # one was known
    assert len(seen) >= 4, f"points came in {len(seen)} steps: {seen}"
    idle(page)
    scores = page.locator(f"{FIGURE} table").first
    scores.filter(has_text="same-budget pool, ratio 0.2").wait_for()
    type_into(page, "Ratio", "0.4")
    grown(page, page.get_by_role("button", name="Lambda sweep").click, plans(page) + 2)
    idle(page)


def test_cancel_keeps_what_it_has(ran: Ran, page: Any) -> None:
    before = plans(page)
    type_into(page, "Seed", "7")
    with ran.shown_in_lab().slow_model(0.05):
        grown(page, page.get_by_role("button", name="Same-budget pool").click, before + 3)
        page.get_by_role("button", name="Cancel").click()
        idle(page)
    page.wait_for_timeout(500)
    kept = plans(page)
    assert before + 3 <= kept < before + 20
    page.wait_for_timeout(1000)
    assert plans(page) == kept


def test_a_click_on_a_point_is_the_sessions_plan_seen_by_another_cell(ran: Ran, page: Any) -> None:
    page.wait_for_timeout(300)
    box = page.locator(f"{FIGURE} .cc-mark").last.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.locator(".cc-card", has_text="removes").wait_for()
    page.mouse.down()
    page.mouse.up()
    eventually(page.locator(".cc-chosen").count, lambda rings: rings == 1)
    # the ring is drawn first, the words follow
    name = eventually(page.get_by_role("combobox", name="Show plan").input_value, bool)
    assert "random" in name or "swap" in name or "λ" in name
    page.locator(".cc-status", has_text=f"chosen: {name}").wait_for(state="attached")
    ran.shown_in_lab().run_cell("print(f.session.selection)")
    page.get_by_text(re.compile(r"^Selection of \d+ of 160 units")).first.wait_for()


def test_a_plan_and_a_unit_by_keyboard(ran: Ran, page: Any) -> None:
    visit: Visit = ran.shown_in_lab()
    before = visit.settled()
    page.get_by_role("combobox", name="Show plan").select_option("λ 1, ratio 0.2")
    page.locator(".cc-status", has_text="chosen: λ 1, ratio 0.2").wait_for(state="attached")
    assert visit.settled() - before <= 20_000  # bytes
    type_into(page, "Mark unit", "L1.ffn[3]")
    eventually(page.locator(".cc-chosen").count, lambda rings: rings == 2)
    type_into(page, "Mark unit", "L77.ffn[3]")
    page.locator(".cc-error", has_text="L77.ffn[3]").wait_for()
    type_into(page, "Mark unit", "L1.ffn[4]")
    page.locator(f"{FIGURE} .cc-error").wait_for(state="hidden")


def test_a_method_less_and_the_table_with_its_file(page: Any) -> None:
    shown = plans(page)
    page.get_by_label("random", exact=True).focus()
    page.keyboard.press("Space")
    eventually(lambda: plans(page), lambda found: found < shown)
    page.locator(f"{FIGURE} summary").click()
    with page.expect_download() as download:
        page.locator(FIGURE).get_by_role("button", name="CSV").click()
    lines = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("kind,method,name,")
    assert len(lines) == 1 + plans(page) + 160
    page.locator(f"{FIGURE} summary").click()
    page.get_by_label("random", exact=True).click()
    eventually(lambda: plans(page), lambda found: found == shown)


def test_the_figure_follows_the_window_in_both_directions(ran: Ran, page: Any) -> None:
    figure = page.locator(FIGURE)
    for width in (1920, 1280):
        page.set_viewport_size({"width": width, "height": 1600})
        eventually(
            lambda: figure.bounding_box()["width"],
            lambda found, width=width: 0.75 * width < found < width,
        )
    ran.shown_in_lab().require_clean()
