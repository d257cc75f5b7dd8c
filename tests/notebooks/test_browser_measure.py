"""Measure: points of the scatter appear while they are measured, and one becomes the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from helpers.lab import SMALL, Lab, in_browser
from helpers.notebooks import NOTEBOOKS
from helpers.waiting import eventually

FIGURE = ".cocurve-fidelity"

# points of all traces but the first four, which are lines and single units, and the last, a ring
PLANS = """() => [...document.querySelector('.cocurve-fidelity .js-plotly-plot').data].slice(4, -1)
  .reduce((sum, trace) => sum + (trace.x?.length ?? 0), 0)"""


def plans(page: Any) -> int:
    """How many plans the picture shows."""
    return int(page.evaluate(PLANS))


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


@in_browser
def test_points_appear_cancel_keeps_them_and_a_click_makes_the_plan(lab: Lab) -> None:
    with lab.open(NOTEBOOKS[3], SMALL | {"HELD_OUT": 6}) as visit:
        visit.run_all()
        page, pool = visit.page, visit.page.get_by_role("button", name="Same-budget pool")
        page.locator(FIGURE).wait_for(state="attached", timeout=60_000)
        eventually(lambda: plans(page) >= 4, seconds=120)
        idle(page)
        page.locator(FIGURE).scroll_into_view_if_needed()

        seen = grown(page, lambda: pool.press("Enter"), plans(page) + 25)  # one was known
        assert len(seen) >= 4, f"points came in {len(seen)} steps: {seen}"
        idle(page)

        before = plans(page)
        page.get_by_label("Seed", exact=True).fill("7")
        page.get_by_label("Seed", exact=True).press("Tab")
        with visit.slow_model(0.05):
            grown(page, pool.click, before + 3)
            page.get_by_role("button", name="Cancel").click()
            idle(page)
        visit.becomes("f.measurer.active", "False")
        kept = int(visit.ask("sum(f.points['kind'] == 'plan')"))
        assert before + 3 <= kept < before + 20
        eventually(lambda: plans(page) == kept)

        assert visit.ask("f.session.selection") == "None"
        box = page.locator(f"{FIGURE} .scatterlayer .trace .point").last.bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        page.locator(".hoverlayer", has_text="removes").wait_for()
        page.mouse.down()
        page.mouse.up()
        name = eventually(page.get_by_role("combobox", name="Show plan").input_value, bool)
        assert name
        visit.becomes("any(m.selection is f.session.selection for m in f.session.measured)", "True")
        visit.require_clean()
