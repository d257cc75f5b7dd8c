"""Notebook 02 in JupyterLab: the lambda explorer by key, mouse and code, one with the kernel."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.lab import SMALL, Visit
from helpers.layout import serious_violations
from helpers.notebooks import NOTEBOOKS, Ran, cold, require_shown
from helpers.waiting import eventually

pytestmark = [pytest.mark.browser, pytest.mark.slow]
OPENING = {"ratio": 0.2, "interaction_strength": 1.0, "layer_cap": None, "layer_cap_factor": None}
OPENING |= {
    "protect_first": 1,
    "protect_last": 1,
    "kinds": ["attention", "ffn"],
    "mode": "mark",
    "pair": [],
}
OPENING |= {"pinned": None, "selected_unit": None}
UNIT_0 = {"x": 80, "y": 8}  # where it stands on the map
NAME = "(e) => e.ariaLabel ?? (e.labels?.[0] ?? e).textContent"
STOP = f"() => ({NAME})(document.activeElement)"
# The names of what takes the focus; of a group of steps one does.
FOCUSABLE = "input, select, button, summary, canvas, [tabindex='0']"
STOPS = f"""root => [...root.querySelectorAll("{FOCUSABLE}")]
  .filter(e => e.checkVisibility() && !e.disabled && e.tabIndex >= 0).map({NAME})"""
ABILITIES = "__import__('json').dumps(list(explorer.damage.asked))"


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> Iterator[Ran]:
    yield from cold(request, NOTEBOOKS[1], SMALL)


@pytest.fixture
def visit(ran: Ran) -> Visit:
    """The page with the controls as they were in the beginning."""
    visit = ran.shown_in_lab()
    visit.set("explorer", **OPENING)
    visit.becomes("explorer.agrees", "True")
    return visit


@pytest.fixture
def root(visit: Visit) -> Any:
    return visit.page.locator(".cocurve")


def unfold(root: Any) -> None:
    """Show what is behind "More"."""
    if not root.get_by_label("protect first layers").is_visible():
        root.locator(".cc-more > summary").click()


def plan(root: Any) -> str:
    return str(root.get_attribute("data-pruned"))


def changes(root: Any, act: Callable[[], Any]) -> None:
    """Do something that must change the plan on the page."""
    before = plan(root)
    act()
    eventually(lambda: plan(root), lambda now: now != before)


def enter(root: Any, label: str, value: str) -> None:
    root.get_by_label(label, exact=True).fill(value)
    root.get_by_label(label, exact=True).press("Enter")


def pixels(root: Any) -> list[str]:
    """The pictures as data addresses."""
    canvases = root.locator("canvas[role=img]")
    return list(canvases.evaluate_all("all => all.map(c => c.toDataURL())"))


def redrawn(root: Any, before: list[str]) -> None:
    """Wait until no picture is as before."""
    eventually(lambda: pixels(root), lambda now: not set(before) & set(now))


def test_after_run_all_it_stands_as_the_text_above_says(ran: Ran) -> None:
    visit = ran.shown_in_lab()
    found = "explorer.ratio, explorer.interaction_strength, explorer.layer_cap"
    visit.becomes(found, "(0.2, 0.5, None)")
    visit.becomes("explorer.guards == guards == cl.Guards(protect_first=1, protect_last=1)", "True")
    assert (
        "SmolLM2: Attention units that λ 1 removes, against λ 0: more at 15% (17 for 11" in ran.text
    )
    root = visit.page.locator(".cocurve")
    eventually(root.count, lambda count: count == 1)
    # the numbers stand on the first screen, above what clicks and prompts add
    rows = root.locator(".cc-four").bounding_box()
    assert rows["y"] + rows["height"] - root.bounding_box()["y"] < 780
    assert len(ran.curvature.units) == 160
    require_shown(visit, 0)


def test_lambda_by_keyboard(visit: Visit, root: Any) -> None:
    root.get_by_label("lambda, weight of the edges").focus()
    changes(root, lambda: visit.page.keyboard.press("Home"))
    visit.becomes("explorer.interaction_strength", "0.0")
    visit.becomes("explorer.flips_stale", "False")
    for key in ("PageUp", "PageDown"):
        changes(root, lambda key=key: visit.page.keyboard.press(key))
    changes(root, lambda: enter(root, "lambda, typed", "1"))
    visit.becomes("explorer.interaction_strength, explorer.agrees", "(1.0, True)")


def test_the_ratio_by_mouse_ends_in_the_kernel_where_the_page_shows_it(
    visit: Visit, root: Any
) -> None:
    slider, mouse, before = (
        root.get_by_label("ratio, share of cost to remove"),
        visit.page.mouse,
        pixels(root),
    )
    box = slider.bounding_box()
    mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2)
    mouse.down()
    for step in range(30):
        mouse.move(box["x"] + box["width"] * (0.33 + step * 0.008), box["y"] + 8)
    mouse.up()
    shown = float(slider.input_value())
    assert 0.3 < shown < 0.4
    visit.becomes("round(explorer.ratio, 3)", f"{shown:g}")
    visit.becomes("' '.join(map(str, explorer.selection.pruned))", f"'{plan(root)}'")
    visit.becomes("explorer.agrees", "True")
    redrawn(root, before)


def test_guards_and_typed_values_are_the_same_in_page_and_kernel(visit: Visit, root: Any) -> None:
    unfold(root)
    changes(root, lambda: enter(root, "protect first layers", "2"))
    visit.becomes("explorer.protect_first", "2")
    visit.set("explorer", ratio=0.5)
    visit.becomes("explorer.agrees", "True")
    changes(root, lambda: root.get_by_label("kinds of units").select_option("ffn"))
    visit.becomes("explorer.kinds", "['ffn']")
    root.get_by_label("layer cap", exact=True).select_option("factor")
    enter(root, "size of the cap", "1e99")
    visit.becomes("explorer.layer_cap_factor", "100.0")
    # what is out of bounds is brought in, what is no number changes nothing; both are shown
    percent = root.get_by_label("ratio in percent, typed")
    for text, shown in (("25", "25"), ("", "25"), ("99", "60")):
        enter(root, "ratio in percent, typed", text)
        eventually(percent.input_value, lambda value, shown=shown: value == shown)
        visit.becomes("round(100 * explorer.ratio, 6)", f"{shown}.0")


def test_a_unit_by_keyboard_and_by_mouse(visit: Visit, root: Any) -> None:
    unit_map, title = root.locator("canvas[role=img]").first, root.locator(".cc-card h4").first
    unit_map.focus()
    visit.page.keyboard.press("ArrowDown")
    visit.page.keyboard.press("ArrowDown")
    visit.becomes("explorer.selected_unit", "1")
    eventually(title.text_content, lambda text: text.startswith("L0.attention[1]"))
    unit_map.click(position=UNIT_0)
    visit.becomes("explorer.selected_unit", "0")
    # what was chosen last is shown, where the mouse still rests on another unit
    visit.page.keyboard.press("ArrowDown")
    eventually(title.text_content, lambda text: text.startswith("L0.attention[1]"))


def test_setting_from_code_is_the_same_as_dragging(visit: Visit, root: Any) -> None:
    changes(root, lambda: visit.set("explorer", ratio=0.15))
    slider = root.get_by_label("ratio, share of cost to remove")
    eventually(slider.input_value, lambda value: float(value) == pytest.approx(0.15))
    unfold(root)
    for name in ("CSV", "JSON", "PNG"):
        with visit.page.expect_download() as download:
            root.get_by_role("button", name=name, exact=True).click()
        assert Path(download.value.path()).stat().st_size > 500


def test_the_kernel_decides_and_the_page_says_when_its_plan_was_another_one(
    visit: Visit, root: Any
) -> None:
    order = "explorer._view['order']"
    swap = f"setattr(explorer, '_view', {{**explorer._view, 'order': {order}[:-1] + [0]}})"
    changes(root, lambda: visit.ask(swap))
    root.locator(".cc-facts", has_text="differ in 2 units").wait_for()
    visit.becomes("explorer.agrees", "False")
    visit.set("explorer", ratio=0.25)
    visit.becomes("explorer.agrees", "True")


def test_a_plan_is_pinned_swapped_and_unpinned(visit: Visit, root: Any) -> None:
    present = plan(root)
    unfold(root)
    root.get_by_role("button", name="Pin B as A").click()
    visit.becomes("explorer.pinned.interaction_strength", "1.0")
    root.locator(".cc-details", has_text="remove the same units").wait_for()
    changes(root, lambda: visit.set("explorer", interaction_strength=0.0))
    left = set(str(root.get_attribute("data-left")).split())
    assert left == set(present.split()) - set(plan(root).split()) != set()
    changes(root, root.get_by_role("button", name="Swap", exact=True).click)
    found = "explorer.interaction_strength, explorer.pinned.interaction_strength"
    visit.becomes(found, "(1.0, 0.0)")
    assert plan(root) == present
    root.get_by_role("button", name="Unpin").click()
    visit.becomes("explorer.pinned is None", "True")


def test_damage_is_measured_when_the_hand_rests(visit: Visit, root: Any) -> None:
    rows = root.locator(".cc-four tbody tr")

    def cell(row: int) -> str:
        """Of plan B."""
        return str(rows.nth(row).locator("td").nth(2).text_content())

    enter(root, "ratio in percent, typed", "45")
    visit.becomes("round(explorer.ratio, 3)", "0.45")
    eventually(lambda: cell(0), lambda text: re.search(r"(?<!of )2 rows, just now", text))
    found = float(visit.ask("explorer.damage.of(explorer.selection).risk"))
    assert float(cell(0).split(" ± ")[0]) == pytest.approx(found, rel=0.01)
    assert found > 0
    eventually(lambda: cell(2), lambda text: " of " in text)
    unfold(root)
    abilities = set(json.loads(visit.ask(ABILITIES)[1:-1]))
    names = root.locator(".cc-details td:first-child")
    eventually(
        names.all_text_contents, lambda all_: {f"right: {name}" for name in abilities} <= set(all_)
    )
    root.get_by_label("measure automatically").uncheck()
    visit.becomes("explorer.live", "False")
    visit.set("explorer", ratio=0.52)
    eventually(lambda: cell(0), lambda text: "off" in text)  # nothing measures it
    root.get_by_label("measure automatically").check()
    eventually(lambda: cell(0), lambda text: "just now" in text)


def test_a_plan_is_made_and_an_edge_measured_by_clicks(visit: Visit, root: Any) -> None:
    page, unit_map = visit.page, root.locator("canvas[role=img]").first
    unfold(root)
    root.get_by_label("a click on a unit").select_option("remove")
    root.get_by_role("button", name="Start empty").click()
    visit.becomes("explorer.pinned.pruned", "()")
    unit_map.click(position=UNIT_0)
    visit.becomes("explorer.pinned.pruned", "(0,)")
    unit_map.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")  # the same by keyboard
    visit.becomes("explorer.pinned.pruned", "(0, 1)")
    root.locator(".cc-four thead", has_text="A: your plan").wait_for()
    visit.becomes("explorer.damage.of(explorer.pinned) is not None", "True")
    root.get_by_role("button", name="Same budget for B").click()
    visit.becomes("explorer.ratio == round(explorer.pinned.realized_ratio, 4)", "True")

    root.get_by_label("a click on a unit").select_option("pair")
    unit_map.click(position=UNIT_0)
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    visit.becomes("explorer.pair", "[0, 1]")
    panel = root.locator(".cc-edge")
    text = str(eventually(panel.text_content, lambda text: "being" not in text and "±" in text))
    found = float(visit.ask("explorer._damage['edge']['difference']"))
    shown = text.split(", measured ")[1].split(" ± ")[0].replace("−", "-")
    assert float(shown) == pytest.approx(found, rel=0.01)

    said = root.locator(".cc-says").first
    assert "soup" not in str(said.text_content())
    enter(root, "prompt", "Name: Kit. Food:")
    eventually(said.text_content, lambda text: "“ soup”" in str(text), 60)


def test_it_breaks_no_rule_of_axe_and_is_used_without_a_mouse(visit: Visit, root: Any) -> None:
    """Lambda is the first stop of Tab, each control has one, and none keeps the focus."""
    page, keys = visit.page, visit.page.keyboard
    unfold(root)
    slider = root.get_by_label("lambda, weight of the edges")
    slider.focus()
    keys.press("Shift+Tab")
    assert not root.evaluate("root => root.contains(document.activeElement)")
    keys.press("Tab")
    seen = []
    for _ in range(80):
        seen.append(page.evaluate(STOP))
        keys.press("Tab")
        if not root.evaluate("root => root.contains(document.activeElement)"):
            break
    # a measured step says its KL and age, which change meanwhile
    names = {stop.split(":")[0] for stop in seen}
    stops = [stop for stop in root.evaluate(STOPS) if stop.split(":")[0] not in names]
    assert (seen[0], stops) == ("lambda, weight of the edges", [])
    slider.focus()
    changes(root, lambda: keys.press("Home"))
    changes(root, lambda: enter(root, "ratio in percent, typed", "35"))
    visit.becomes("explorer.interaction_strength, explorer.ratio", "(0.0, 0.35)")
    for theme in ("Dark", "Light"):
        visit.theme(theme)
        assert serious_violations(page, ".cocurve") == []


def test_a_dark_theme_changes_every_picture(visit: Visit, root: Any) -> None:
    light = pixels(root)
    visit.theme("Dark")
    redrawn(root, light)
    visit.theme("Light")
    visit.require_clean()


def test_running_the_cell_again_leaves_no_old_widget(visit: Visit) -> None:
    count = "len(__import__('ipywidgets').widgets.widget._instances)"
    before = visit.ask(count)
    for _ in range(2):
        visit.run_cell("explorer = ")
    visit.becomes(count, before)
    eventually(visit.page.locator(".cocurve").count, lambda count: count == 1)


def test_a_kernel_that_is_gone_is_told(visit: Visit, root: Any) -> None:
    assert visit.page.locator(".cocurve-still").first.is_hidden()  # for saved notebooks
    visit.restart_kernel()
    enter(root, "lambda, typed", "0.3")
    root.locator(".cc-facts", has_text="does not answer").wait_for()
    assert "by this page" in str(root.locator(".cc-status").text_content())
    unfold(root)
    with visit.page.expect_download():
        root.get_by_role("button", name="JSON", exact=True).click()
    visit.require_clean()
