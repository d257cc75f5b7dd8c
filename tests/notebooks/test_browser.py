"""The journeys in a browser: slide (page and JupyterLab), measure, generate."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cocurve_lab as cl
from cocurve_widgets import refresh_html
from cocurve_widgets.make_page import demo_model, with_model
from cocurve_widgets.packing import plan_mark
from helpers.lab import NOTEBOOKS, SMALL, Lab, Visit, in_browser, running_lab
from helpers.pages import curvature_of, data_of, serious_violations
from helpers.waiting import eventually


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One JupyterLab and one browser for all journeys."""
    with running_lab(tmp_path_factory.mktemp("lab")) as running:
        yield running


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


def share(plan: Any) -> str:
    """The share that a plan of the strip removes."""
    return str(plan.get_attribute("title")).split(" removed")[0]


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
        found = pytest.approx(kept[plan_mark(path.at(0.3).selection.pruned)], rel=0.01)
        eventually(  # a closed section is drawn when the hand rests
            lambda: measured(root),
            lambda text: "kept" in text and float(text.split(" ± ")[0]) == found,
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
        strip = root.locator(".cc-strip button")
        for step, more in (("+1", 1), ("−1", 0)):  # the solver's next unit goes, and returns
            before = share(strip.last)
            root.get_by_role("button", name=step, exact=True).click()
            found = eventually(
                lambda: root.get_attribute("data-shown").split(),
                lambda x, more=more: len(x) == len(solved.split()) + more,
            )
            assert set(solved.split()) <= set(found)
            # it is in the strip once the hand rests
            eventually(lambda: share(strip.last), lambda now, before=before: now != before)
        strip.nth(-2).click()  # the strip goes back to the plan before
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


def bars(root: Any, side: int) -> list[str]:
    """The next words that one of the models says, likeliest first."""
    column = root.locator(".cc-sentence .cc-next").first.locator("> div").nth(side)
    return [str(text) for text in column.locator(".cc-word > span").all_inner_texts()]


@in_browser
def test_the_page_reads_a_sentence_and_measures_a_plan_offline(lab: Lab, tmp_path: Path) -> None:
    page_file = tmp_path / "page.html"
    page_file.write_bytes(PAGE.read_bytes())
    packed = demo_model()
    text = with_model(refresh_html(page_file).read_text(encoding="utf-8"), packed)
    page_file.write_text(text, encoding="utf-8")
    assert page_file.stat().st_size < 12_000_000
    before = page_file.read_bytes()
    assert refresh_html(page_file).read_bytes() == before  # the model stays
    with lab.page(page_file) as page:
        root = page.locator(".cocurve").first
        root.get_by_role("button", name="Skip").click()
        box = root.get_by_label("sentence", exact=True)
        box.fill("For dinner Yuri always wants")
        eventually(lambda: bars(root, 0), lambda words: words[:2] == ["bread", "beans"])
        slider = root.get_by_label("ratio, share of cost to remove")
        slider.fill("0.5")
        eventually(lambda: bars(root, 1)[0], lambda word: word != "bread")
        eventually(root.locator(".cc-goes mark").count)  # both go on, and not alike

        root.locator("canvas[role=img]").first.press("ArrowDown")
        root.locator("canvas[role=img]").first.press("Enter")  # removed by hand
        order = [int(u) for u in str(root.get_attribute("data-shown")).split()]
        line, number = root.locator(".cc-measuring"), root.locator(".cc-kl b")
        model, _ = cl.load_model("demo")
        units = cl.enumerate_units(model)
        rows = cl.CalibrationSet(torch.tensor(json.loads(packed)["rows"]))
        kl = cl.pruning_risk(model, [units[u] for u in order], rows)
        # both may still be about the plan before
        eventually(
            lambda: (line.inner_text()[:6], number.inner_text()),
            lambda seen: (
                seen[0] == "8 of 8"
                and seen[1][:1].isdigit()
                and float(seen[1]) == pytest.approx(kl, rel=0.01)
            ),
            60,
        )

        root.locator("canvas[role=img]").first.press("ArrowDown")
        root.locator("canvas[role=img]").first.press("Enter")
        eventually(line.inner_text, lambda said: not said.startswith("8 of 8"))
        line.get_by_role("button", name="Stop").click()
        eventually(line.get_by_role("button", name="Measure").count)
        assert not line.inner_text().startswith("8 of 8")
        eventually(
            lambda: root.locator(".cc-sentence [style*='0.5']").count(), lambda dim: dim == 0
        )
        for theme in ("dark", "light"):
            page.emulate_media(color_scheme=theme)
            assert serious_violations(page) == []


def same_plan(visit: Visit, root: Any) -> None:
    """Wait until the session of the kernel has the plan that the page draws."""
    visit.becomes("explorer.agrees", "True")
    visit.becomes(SESSION, repr(plan(root)))


@in_browser
def test_in_jupyterlab_the_session_has_the_plan_on_the_page(lab: Lab) -> None:
    with lab.open(NOTEBOOKS[1], SMALL) as visit:
        visit.run_all()
        root, mouse = visit.page.locator(".cocurve"), visit.page.mouse
        eventually(root.count, lambda count: count == 1)
        first = plan(root)
        root.get_by_label(SLIDER).press("Home")
        eventually(lambda: plan(root) != first)
        visit.becomes("explorer.interaction_strength", "0.0")
        same_plan(visit, root)

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
        same_plan(visit, root)

        visit.set("explorer", ratio=0.15, interaction_strength=1.0)  # from code as by hand
        eventually(slider.input_value, lambda value: float(value) == pytest.approx(0.15))
        same_plan(visit, root)

        def agrees(said: str) -> bool:
            """Whether the page has this plan's KL, not still that of the plan before."""
            if "just now" not in said:
                return False
            risk = visit.ask("getattr(explorer.damage.of(explorer.selection), 'risk', 0)")
            return float(re.split(" ± |[^0-9.]", said)[0]) == pytest.approx(float(risk), rel=0.05)

        eventually(lambda: measured(root), agrees)  # at rest

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


# Measure ------------------------------------------------------------------------------------------


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


# Generate -----------------------------------------------------------------------------------------


# Keeps how long the text of an element was after each change.
WATCH = """root => {
  window.lengths = [];
  new MutationObserver(() => window.lengths.push(root.textContent.length))
    .observe(root, {childList: true, subtree: true});
}"""


def same_text(visit: Visit, group: Any, side: str) -> None:
    """The page shows the text that the kernel has."""
    text = ast.literal_eval(visit.ask(f"' '.join(compare.texts[{side!r}].split())"))

    def shown() -> str:
        return " ".join(group.inner_text().split()).removesuffix("<eos>").strip()

    eventually(shown, lambda found: found == text)


@in_browser
def test_both_texts_follow_prompt_and_slider_and_can_be_stopped(lab: Lab) -> None:
    with lab.open(NOTEBOOKS[4], SMALL) as visit:
        visit.run_all()
        page, root = visit.page, visit.page.locator(".cocurve").first
        root.wait_for(timeout=60_000)
        root.scroll_into_view_if_needed()
        dense, pruned = (root.get_by_role("group", name=f"{n} text") for n in ("Dense", "Pruned"))
        prompt = root.get_by_label("Prompt (Ctrl+Enter generates)")
        visit.becomes("compare.busy, bool(compare.texts)", "(False, True)")  # after Run all
        assert visit.ask("compare.shown['right']['dense']") == "True"  # chosen by computation

        prompt.click()
        page.keyboard.press("Control+a")
        page.keyboard.type("The job of Wren and Kit")  # letters stay in the field
        page.keyboard.press("Control+Enter")
        visit.becomes("compare.shown.get('prompt')", "'The job of Wren and Kit'")
        visit.becomes("compare.busy", "False")
        same_text(visit, dense, "dense")
        same_text(visit, pruned, "pruned")
        assert len(dense.inner_text()) > 3

        # without a press of Generate; the first word that differs is marked
        for ratio, keys in ((0.0, ["Home"]), (0.3, ["PageUp"] * 5)):
            for key in keys:
                root.get_by_label("share to remove (ratio)").press(key)
            now = "(round(compare.ratio, 2), compare.stale, compare.busy)"
            visit.becomes(now, f"({ratio}, '', False)")
            same_text(visit, pruned, "pruned")
            assert pruned.locator("mark").count() == (ratio > 0)

        root.locator("summary", has_text="More").click()
        prompt.fill("def f(x):")
        root.get_by_label("Temperature (0: greedy)").fill("1.2")
        root.get_by_label("New tokens, at most").fill("230")
        page.evaluate(WATCH, dense.element_handle())
        with visit.slow_model(0.1):
            root.get_by_role("button", name="Generate", exact=True).click()
            page.wait_for_function("() => new Set(window.lengths).size > 3")  # it streams
            root.get_by_role("button", name="Stop", exact=True).click()
            visit.becomes("compare.shown.get('stopped'), compare.busy", "(True, False)")
        eventually(root.inner_text, lambda text: "(stopped)" in text)
        assert 0 < int(visit.ask("len(compare.tokens['dense'])")) < 230
        same_text(visit, dense, "dense")
        visit.require_clean()
