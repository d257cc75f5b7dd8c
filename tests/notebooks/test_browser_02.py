"""Notebook 02 in a real JupyterLab: every control by key and mouse, both themes, no request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.lab import CHROMIUM, KEPT, NO_BROWSER, SMALL, Lab, Visit
from helpers.waiting import eventually

ABILITIES = "__import__('json').dumps(list(explorer.damage.asked))"
NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "02_lambda.ipynb"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER),
]


def plan(root: Any) -> str:
    return str(root.get_attribute("data-pruned"))


def changes(visit: Visit, root: Any, act: Any) -> tuple[str, str]:
    """The plan before and after an action; fails if it stays."""
    before = plan(root)
    act()
    visit.page.wait_for_function(
        "([root, before]) => root.dataset.pruned !== before",
        arg=[root.element_handle(), before],
        timeout=20_000,
    )
    return before, plan(root)


def pixels(root: Any) -> list[str]:
    """The three pictures as data addresses."""
    canvases = root.locator("canvas[role=img]")
    return list(canvases.evaluate_all("all => all.map(c => c.toDataURL())"))


def test_lambda_explorer_in_jupyterlab(lab: Lab, tmp_path: Path) -> None:
    folder = lab.bring(tmp_path)  # empty
    with lab.open(NOTEBOOK, SMALL, inside=folder) as visit:
        visit.run_all()
        # the last cells put back what the text above speaks of
        for name, value in (
            ("ratio", "0.2"),
            ("interaction_strength", "1.0"),
            ("layer_cap", "None"),
        ):
            visit.becomes(f"explorer.{name}", value)
        page = visit.page
        root = page.locator(".cocurve")
        eventually(root.count, lambda count: count == 1)
        root.scroll_into_view_if_needed()
        by_label = root.get_by_label
        # the numbers stand on the first screen, above what clicks and prompts add
        facts = root.locator(".cc-facts tr", has_text="measured KL")
        facts = eventually(facts.bounding_box, lambda box: box is not None)  # it is drawn anew
        assert facts["y"] + facts["height"] - root.bounding_box()["y"] < 780

        # lambda by keyboard: End and Home of a native slider, typed, and the plan keys
        slider = by_label("lambda, weight of the edges")
        slider.focus()
        changes(visit, root, lambda: page.keyboard.press("Home"))
        visit.becomes("explorer.interaction_strength", "0.0")
        page.wait_for_function(
            "root => !root.querySelector('.cc-key').textContent.includes('being computed')",
            arg=root.element_handle(),
        )
        old, new = changes(visit, root, lambda: page.keyboard.press("PageUp"))
        assert set(old.split()) != set(new.split())
        changes(visit, root, lambda: page.keyboard.press("PageDown"))
        typed = by_label("lambda, typed")
        typed.fill("1")
        changes(visit, root, lambda: typed.press("Enter"))
        visit.becomes("explorer.interaction_strength", "1.0")

        # the ratio by mouse: the kernel ends on what the page shows
        ratio = by_label("ratio, share of cost to remove")
        box = ratio.bounding_box()
        before = pixels(root)
        page.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2)
        page.mouse.down()
        for step in range(60):
            page.mouse.move(box["x"] + box["width"] * (0.33 + step * 0.004), box["y"] + 8)
            page.wait_for_timeout(10)
        page.mouse.up()
        page.wait_for_timeout(1000)
        shown = float(ratio.input_value())
        assert 0.3 < shown < 0.4
        visit.becomes("round(explorer.ratio, 3)", f"{shown:g}")
        visit.becomes("' '.join(map(str, explorer.selection.pruned))", f"'{plan(root)}'")
        visit.becomes("explorer.agrees", "True")
        assert all(a != b for a, b in zip(before, pixels(root), strict=True))

        # guards, behind "More"
        root.locator(".cc-more summary").click()
        by_label("protect first layers").fill("2")
        changes(visit, root, lambda: by_label("protect first layers").press("Enter"))
        visit.becomes("explorer.protect_first", "2")
        by_label("protect first layers").fill("0")
        by_label("protect first layers").press("Enter")
        changes(visit, root, lambda: by_label("kinds of units").select_option("ffn"))
        visit.becomes("explorer.kinds", "['ffn']")
        by_label("kinds of units").select_option("attention+ffn")
        by_label("layer cap", exact=True).select_option("share")
        by_label("size of the cap").fill("0.2")
        by_label("size of the cap").press("Enter")
        page.wait_for_function(
            "root => root.querySelector('.cc-error').textContent.includes('out of reach')",
            arg=root.element_handle(),
        )
        root.locator(".cc-facts", has_text="at most").wait_for()
        by_label("layer cap", exact=True).select_option("factor")
        by_label("size of the cap").fill("1e99")
        by_label("size of the cap").press("Enter")
        visit.becomes("explorer.layer_cap_factor", "100.0")  # page and kernel take the same
        by_label("layer cap", exact=True).select_option("none")
        visit.becomes("explorer.layer_cap is None and explorer.selection is not None", "True")

        # what is out of bounds is brought in, what is no number changes nothing; both are shown
        percent = by_label("ratio in percent, typed")
        for text, shown in (("25", "25"), ("", "25"), ("99", "60"), ("20", "20")):
            percent.fill(text)
            percent.press("Enter")
            eventually(percent.input_value, lambda value, shown=shown: value == shown)
            visit.becomes("round(100 * explorer.ratio, 6)", f"{shown}.0")

        # a unit by keyboard and by mouse, its ledger, and its table twin
        unit_map = root.locator("canvas[role=img]").first
        unit_map.focus()
        page.keyboard.press("Escape")
        visit.becomes("explorer.selected_unit is None", "True")
        page.keyboard.press("ArrowDown")
        page.keyboard.press("ArrowDown")
        visit.becomes("explorer.selected_unit", "1")
        root.locator(".cc-card", has_text="L0.attention[1]").wait_for()
        unit_map.click(position={"x": 80, "y": 8})
        visit.becomes("explorer.selected_unit", "0")
        root.locator(".cc-table summary").click()
        root.locator(".cc-table tbody tr").nth(159).wait_for()

        # setting from code is the same as dragging
        changes(visit, root, lambda: visit.ask("setattr(explorer, 'ratio', 0.15)"))
        eventually(ratio.input_value, lambda value: float(value) == pytest.approx(0.15))
        root.locator(".cc-table summary").click()

        for name in ("CSV", "JSON", "PNG"):
            with page.expect_download() as download:
                root.get_by_role("button", name=name, exact=True).click()
            assert Path(download.value.path()).stat().st_size > 500

        # the kernel decides, and the page says when its own plan was another one
        order = "explorer._view['order']"
        swap = f"setattr(explorer, '_view', {{**explorer._view, 'order': {order}[:-1] + [0]}})"
        changes(visit, root, lambda: visit.ask(swap))
        root.locator(".cc-facts", has_text="differ in 2 units").wait_for()
        visit.becomes("explorer.agrees", "False")
        changes(visit, root, lambda: visit.ask("setattr(explorer, 'ratio', 0.2)"))
        visit.becomes("explorer.agrees", "True")

        a_plan_is_pinned_swapped_and_unpinned(visit, root)
        the_tour_moves_the_controls_of_the_kernel(visit, root)
        damage_is_measured_when_the_hand_rests(visit, root)
        a_plan_is_made_and_an_edge_measured_by_clicks(visit, root)
        light = pixels(root)
        visit.picture("02_light", root)
        visit.theme("Dark")
        eventually(
            lambda: zip(light, pixels(root), strict=True),
            lambda pairs: all(a != b for a, b in pairs),
        )
        visit.picture("02_dark", root)
        page.set_viewport_size({"width": 1920, "height": 1000})
        page.wait_for_timeout(500)
        visit.picture("02_dark_1920", root)
        visit.theme("Light")
        visit.require_clean()
        what_was_chosen_last_is_shown_where_the_mouse_rests(root)
        running_a_cell_again_leaves_no_old_widget(visit)
        a_kernel_that_is_gone_is_told(visit)
        visit.require_clean()
        assert list((folder / KEPT).glob("H_demo_*.pkl"))


def damage_is_measured_when_the_hand_rests(visit: Visit, root: Any) -> None:
    rows = root.locator(".cc-damage", has_text="Measured damage").locator("tbody tr")

    def cells(row: int) -> list[str]:
        return list(rows.nth(row).locator("td").all_text_contents())

    root.get_by_label("ratio in percent, typed").fill("45")
    root.get_by_label("ratio in percent, typed").press("Enter")
    visit.becomes("round(explorer.ratio, 3)", "0.45")
    eventually(lambda: cells(rows.count() - 1)[3], lambda text: text == "2 rows, just now")
    found = float(visit.ask("explorer.damage.of(explorer.selection).risk"))
    assert float(cells(0)[3].split(" ± ")[0]) == pytest.approx(found, rel=0.01)
    assert found > 0
    # all twenty questions of an ability in the end, beside the dense model's
    eventually(lambda: cells(1), lambda all_: all(text.endswith("of 20") for text in all_[1:4]), 90)
    of_a, of_b = (int(text.split()[0]) for text in cells(1)[2:4])
    assert cells(1)[4] == f"{of_b - of_a:+d}".replace("-", "−").replace("+0", "0")
    assert {cells(row)[0] for row in range(1, 6)} == set(json.loads(visit.ask(ABILITIES)[1:-1]))
    root.get_by_label("measure automatically").uncheck()
    visit.becomes("explorer.live", "False")
    visit.ask("setattr(explorer, 'ratio', 0.52)")
    eventually(lambda: cells(0)[3], lambda text: text == "–")  # nothing measures it
    root.get_by_label("measure automatically").check()
    eventually(lambda: cells(0)[3], lambda text: text not in "…–")
    visit.ask("setattr(explorer, 'ratio', 0.2)")


def a_plan_is_made_and_an_edge_measured_by_clicks(visit: Visit, root: Any) -> None:
    page, unit_map = visit.page, root.locator("canvas[role=img]").first
    clicks = root.get_by_label("a click on a unit")
    clicks.select_option("remove")
    root.get_by_role("button", name="Start empty").click()
    visit.becomes("explorer.pinned.pruned", "()")
    unit_map.click(position={"x": 80, "y": 8})
    visit.becomes("explorer.pinned.pruned", "(0,)")
    unit_map.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")  # the same by keyboard
    visit.becomes("explorer.pinned.pruned", "(0, 1)")
    root.locator(".cc-numbers", has_text="A: your plan").wait_for()
    root.locator("h4", has_text="your plan (A)").wait_for()
    measured = "explorer.damage.of(explorer.pinned) is not None"
    visit.becomes(measured, "True")
    unit_map.click(position={"x": 80, "y": 8})  # restored
    visit.becomes("explorer.pinned.pruned", "(1,)")
    root.get_by_role("button", name="Same budget for B").click()
    visit.becomes("explorer.ratio == round(explorer.pinned.realized_ratio, 4)", "True")

    clicks.select_option("pair")
    visit.ask("setattr(explorer, 'pair', [])")
    unit_map.click(position={"x": 80, "y": 8})
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    visit.becomes("explorer.pair", "[0, 1]")
    panel = root.locator(".cc-damage", has_text="Two units and their edge")
    edge = panel.locator("tbody tr").last.locator("td")
    eventually(edge.all_text_contents, lambda texts: "±" in texts[2])
    found = float(visit.ask("explorer._damage['edge']['difference']"))
    shown = edge.all_text_contents()[2].split(" ± ")[0].replace("−", "-")
    assert float(shown) == pytest.approx(found, rel=0.01)

    panel = root.locator(".cc-damage", has_text="Next token")
    before = panel.locator("tbody tr").first.text_content()
    panel.get_by_label("prompt").fill("Name: Kit. Food:")
    panel.get_by_label("prompt").press("Enter")
    eventually(panel.locator("tbody tr").first.text_content, lambda text: "“ soup”" in str(text))
    assert "soup" not in str(before)
    visit.picture("02_by_hand", root)
    clicks.select_option("mark")
    root.get_by_role("button", name="Unpin").click()
    visit.ask("setattr(explorer, 'ratio', 0.2)")


def a_plan_is_pinned_swapped_and_unpinned(visit: Visit, root: Any) -> None:
    def units(name: str) -> set[str]:
        return set(str(root.get_attribute(name)).split())

    visit.ask("setattr(explorer, 'interaction_strength', 1.0)")
    visit.becomes("explorer.agrees", "True")
    joined, left = units("data-joined"), units("data-left")
    assert joined <= units("data-pruned")
    assert not left & units("data-pruned")
    assert joined | left  # against the diagonal plan
    present = plan(root)
    root.get_by_role("button", name="Pin B as A").click()
    visit.becomes("explorer.pinned.interaction_strength", "1.0")
    root.locator(".cc-facts", has_text="remove the same units").wait_for()
    visit.ask("setattr(explorer, 'interaction_strength', 0.0)")
    eventually(lambda: units("data-left"), lambda found: found == joined)
    root.get_by_role("button", name="Swap", exact=True).click()
    visit.becomes(
        "explorer.interaction_strength, explorer.pinned.interaction_strength", "(1.0, 0.0)"
    )
    eventually(lambda: plan(root), lambda now: now == present)
    root.get_by_role("button", name="Unpin").click()
    visit.becomes("explorer.pinned is None", "True")
    root.locator(".cc-facts", has_text="A: diagonal").wait_for()


def the_tour_moves_the_controls_of_the_kernel(visit: Visit, root: Any) -> None:
    before = visit.ask("explorer._key()")
    # without motion a step is there at once, and a slow machine is not overtaken by the next one
    visit.page.emulate_media(reduced_motion="reduce")
    root.get_by_role("button", name="Tour (60 seconds)").click()
    visit.becomes("explorer.tour_step, explorer.interaction_strength", "(1, 0.0)")
    visit.becomes("explorer.ratio", "0.2")
    root.get_by_role("button", name="Next").click()
    visit.becomes("explorer.tour_step, explorer.interaction_strength", "(2, 1.0)")
    visit.becomes("explorer.agrees", "True")
    visit.ask("setattr(explorer, 'tour_step', 5)")  # from code
    visit.becomes("explorer.layer_cap", "0.6")
    visit.page.keyboard.press("Escape")
    visit.becomes("explorer.tour_step, explorer._key()", f"(None, {before})")
    visit.page.emulate_media(reduced_motion="no-preference")


def what_was_chosen_last_is_shown_where_the_mouse_rests(root: Any) -> None:
    unit_map = root.locator("canvas[role=img]").first
    unit_map.click(position={"x": 80, "y": 8})
    title = root.locator(".cc-card h4").first
    first = title.text_content()
    root.page.keyboard.press("ArrowDown")
    eventually(title.text_content, lambda text: text != first)
    assert title.text_content().startswith("L0.attention[1]")


def a_kernel_that_is_gone_is_told(visit: Visit) -> None:
    page, root = visit.page, visit.page.locator(".cocurve")
    assert page.locator(".cocurve-still").first.is_hidden()  # for saved notebooks
    page.evaluate("() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    page.get_by_label("lambda, typed").fill("0.3")
    page.get_by_label("lambda, typed").press("Enter")
    root.locator(".cc-facts", has_text="does not answer").wait_for()
    assert "by this page" in str(root.locator(".cc-status").text_content())
    with page.expect_download():
        root.get_by_role("button", name="JSON", exact=True).click()


def running_a_cell_again_leaves_no_old_widget(visit: Visit) -> None:
    count = "len(__import__('ipywidgets').widgets.widget._instances)"
    before = visit.ask(count)
    cells = "jupyterapp.shell.currentWidget.content"
    made = "c.model.sharedModel.source.includes('explorer = ')"
    for _ in range(3):
        visit.page.evaluate(
            f"""async () => {{
              const all = {cells};
              all.activeCellIndex = all.widgets.findIndex(c => {made});
              await jupyterapp.commands.execute('notebook:run-cell');
            }}"""
        )
    visit.becomes(count, before)
    eventually(visit.page.locator(".cocurve").count, lambda count: count == 1)
