"""Slide: lambda moves, plan and picture follow, offline and in JupyterLab with its kernel."""

from __future__ import annotations

import re
from typing import Any

import pytest

import cocurve_lab as cl
from cocurve_widgets.packing import plan_mark
from helpers.lab import SMALL, Lab, Visit, in_browser
from helpers.layout import require_readable, require_readable_notebook, serious_violations
from helpers.notebooks import NOTEBOOKS
from helpers.pages import curvature_of, data_of
from helpers.waiting import eventually

PAGE = NOTEBOOKS[0].with_name("explore_demo.html")
SLIDER = "lambda, weight of the edges"
SESSION = "' '.join(map(str, explorer.session.selection.pruned))"


def plan(root: Any) -> str:
    """The plan that the page draws, as units in the order of removal."""
    return str(root.get_attribute("data-pruned"))


def shows(root: Any, wanted: cl.Selection) -> None:
    """Wait until the page draws the plan that Python solves."""
    eventually(lambda: sorted(map(int, plan(root).split())), lambda u: u == sorted(wanted.pruned))


def picture(root: Any) -> str:
    """The pixels of the map of units."""
    return str(root.locator("canvas[role=img]").first.evaluate("map => map.toDataURL()"))


def enter(root: Any, label: str, value: object) -> None:
    root.get_by_label(label, exact=True).fill(str(value))
    root.get_by_label(label, exact=True).press("Enter")


def measured(root: Any) -> str:
    """What the first row says of plan B: its measured KL."""
    return str(root.locator(".cc-four tbody tr").first.locator("td").nth(2).text_content())


@in_browser
def test_the_offline_page_draws_what_python_solves(lab: Lab) -> None:
    curvature = curvature_of(PAGE)
    guards = cl.opening_guards(curvature.units)
    path = cl.lambda_path(curvature, 0.2, guards)
    kept = {mark["plan"]: mark["risk"] for mark in data_of(PAGE)["lambda"]["_marks"]["measured"]}
    with lab.page(PAGE) as page:
        root, bridges = page.locator(".cocurve").all()
        tour = root.locator(".cc-tour")  # a first visit is guided
        tour.get_by_text("Which one would you remove first?").wait_for()
        root.locator("canvas[role=img]").first.click()
        tour.get_by_text("by price").wait_for()
        root.get_by_role("button", name="Skip").click()
        root.locator("summary", has_text="exact values").click()
        for strength, percent in ((0, 50), (1, 35), (0.3, 20)):
            before = picture(root)
            enter(root, "lambda, typed", strength)
            enter(root, "ratio in percent, typed", percent)
            wanted = cl.solve_greedy(curvature, percent / 100, strength, guards)
            shows(root, wanted)
            eventually(lambda before=before: picture(root) != before)
        said = eventually(lambda: measured(root), lambda text: "kept" in text)
        assert float(said.split(" ± ")[0]) == pytest.approx(
            kept[plan_mark(path.at(0.3).selection.pruned)], rel=0.01
        )

        key = root.locator(".cc-key")
        eventually(key.text_content, lambda text: "being computed" not in text, 90)
        root.get_by_label(SLIDER).press("End")
        shows(root, path.segments[-1].selection)
        root.get_by_label(SLIDER).press("ArrowLeft")  # one key press is one plan
        shows(root, path.segments[-2].selection)
        root.locator("canvas[role=img]").first.press("ArrowDown")
        name = curvature.units[0].name
        eventually(bridges.inner_text, lambda text: name in text)  # the other views follow

        solved = str(root.get_attribute("data-shown"))
        root.locator("canvas[role=img]").first.press("Enter")  # removed by hand
        mine = eventually(lambda: root.get_attribute("data-shown"), lambda x: x != solved)
        assert set(mine.split()) ^ set(solved.split()) == {"0"}
        assert "not measured" in root.locator(".cc-kl").inner_text()  # no neighbor's value
        page.keyboard.press("Control+z")
        eventually(lambda: root.get_attribute("data-shown"), lambda x: x == solved)
        page.keyboard.press("Control+Shift+z")
        eventually(lambda: root.get_attribute("data-shown"), lambda x: x == mine)
        root.get_by_role("button", name="Back to the solver").click()
        eventually(lambda: root.get_attribute("data-shown"), lambda x: x == solved)
        for step, more in (("+1", 1), ("−1", 0)):  # the solver's next unit goes, and returns
            root.get_by_role("button", name=step, exact=True).click()
            found = eventually(
                lambda: root.get_attribute("data-shown").split(),
                lambda x, more=more: len(x) == len(solved.split()) + more,
            )
            assert set(solved.split()) <= set(found)
        root.locator(".cc-strip button").nth(-2).click()  # the strip goes back to the plan before
        longer = len(solved.split()) + 1
        eventually(lambda: len(root.get_attribute("data-shown").split()), lambda n: n == longer)
        page.keyboard.press("Control+Shift+z")
        enter(root, "ratio in percent, typed", 20)
        shows(root, path.segments[-2].selection)

        link = eventually(lambda: page.evaluate("location.href"), lambda x: "selected_unit=" in x)
        page.goto("about:blank")
        page.goto(link)  # a link reopens what was shown
        shows(root, path.segments[-2].selection)
        eventually(bridges.inner_text, lambda text: name in text)
        require_readable(page, "header, .cocurve")
        for theme in ("dark", "light"):
            page.emulate_media(color_scheme=theme)
            assert serious_violations(page) == []

        root.get_by_role("button", name="Guided").click()
        root.locator("canvas[role=img]").first.click()
        follow = tour.get_by_role("button", name="Next")
        follow.click()
        shows(root, path.at(0).selection)
        root.locator("button.cc-word").first.click()
        follow.click()
        for strength, shown in ((0, 0), (0, 1)):  # what is set for the guess, and then shown
            shows(root, path.at(strength).selection)
            tour.get_by_role("button", name="Show").click()
            shows(root, path.at(shown).selection)
            follow.click()
        assert root.locator("button.cc-word").count() == 0  # the last step asks for no word
        tour.get_by_role("button", name="Skip").click()
        shows(root, path.segments[-2].selection)  # it ends where it began
        assert len(re.findall(rb"/Type\s*/Page\b", page.pdf(prefer_css_page_size=True))) == 1
        page.emulate_media(media="print")
        assert [one.is_visible() for one in page.locator(".cocurve").all()] == [True, False]


def same_in_the_kernel(visit: Visit, root: Any) -> None:
    """Wait until the session of the kernel has the plan that the page draws."""
    visit.becomes("explorer.agrees", "True")
    visit.becomes(SESSION, repr(plan(root)))


@in_browser
def test_in_jupyterlab_the_session_has_the_plan_on_the_page(lab: Lab) -> None:
    with lab.open(NOTEBOOKS[1], SMALL) as visit:
        visit.run_all()
        root, mouse = visit.page.locator(".cocurve"), visit.page.mouse
        eventually(root.count, lambda count: count == 1)
        first, drawn = plan(root), picture(root)
        root.get_by_label(SLIDER).press("Home")
        eventually(lambda: plan(root) != first and picture(root) != drawn)
        visit.becomes("explorer.interaction_strength", "0.0")
        same_in_the_kernel(visit, root)

        slider = root.get_by_label("ratio, share of cost to remove")
        box = slider.bounding_box()
        mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2)
        mouse.down()
        for step in range(30):
            mouse.move(box["x"] + box["width"] * (0.33 + step * 0.008), box["y"] + 8)
        mouse.up()
        shown = float(slider.input_value())
        assert 0.3 < shown < 0.4
        visit.becomes("round(explorer.ratio, 3)", f"{shown:g}")
        same_in_the_kernel(visit, root)

        visit.set("explorer", ratio=0.15, interaction_strength=1.0)  # from code as by hand
        eventually(slider.input_value, lambda value: float(value) == pytest.approx(0.15))
        same_in_the_kernel(visit, root)

        def agrees(said: str) -> bool:
            """Whether the page has this plan's KL, not still that of the plan before."""
            if "just now" not in said:
                return False
            risk = visit.ask("getattr(explorer.damage.of(explorer.selection), 'risk', 0)")
            return float(re.split(" ± |[^0-9.]", said)[0]) == pytest.approx(float(risk), rel=0.05)

        eventually(lambda: measured(root), agrees)  # at rest
        require_readable_notebook(visit.page)
        drawn = picture(root)
        visit.theme("Dark")
        eventually(lambda: picture(root) != drawn)

        canvas = root.locator("canvas[role=img]").first
        canvas.press("ArrowDown")
        canvas.press("Enter")  # removed by hand, and undone
        by_hand = "len(set(explorer.pinned.pruned) ^ set(explorer.selection.pruned))"
        visit.becomes(f"{by_hand} if explorer.pinned else 0", "1")
        canvas.press("Control+z")
        visit.becomes("explorer.pinned is None", "True")

        visit.restart_kernel()
        root.locator("summary", has_text="exact values").click()
        enter(root, "lambda, typed", "0.3")
        root.locator(".cc-facts", has_text="does not answer").wait_for()
        visit.require_clean()
