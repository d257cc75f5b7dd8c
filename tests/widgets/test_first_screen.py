"""The page of the real model on one screen: its numbers are those kept, no move empties a row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.pretrained.kept import (
    KeptPlan,
    kept_curvature,
    kept_interactions,
    kept_plans,
)
from helpers.lab import Lab, in_browser
from helpers.waiting import eventually

PAGE = Path(__file__).resolve().parents[2] / "notebooks" / "explore_smollm2.html"
STRENGTHS = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 1.0)
CHART = ".cc-chart[role=group]"
CONTROLS = "input, select, button, textarea, summary"
BOXES = """() =>
  [".cc-chart[role=group]", ".cc-others", ".cc-four", ".cc-texts", ".cc-edge", ".cc-more", "canvas"]
    .map(name => document.querySelector(name).getBoundingClientRect())
    .map(box => [box.x, box.y, box.width, box.height])"""
# What the rows say at every frame in which one of them changed.
WATCH = """() => {
  window.seen = [];
  const root = document.querySelector('.cc-four');
  const look = () => seen.push([0, 2].flatMap(row => [1, 2].map(k =>
    root.querySelectorAll('tbody tr')[row].querySelectorAll('td')[k].innerText))
    .concat([...root.querySelectorAll('.cc-says')].map(said => said.innerText)));
  new MutationObserver(look).observe(root, {childList: true, characterData: true, subtree: true});
}"""


@pytest.fixture(scope="module")
def page(lab: Lab) -> Iterator[Any]:
    with lab.page(PAGE, viewport={"width": 1280, "height": 900}) as page:
        known = page.locator(".cc-key")
        eventually(known.text_content, lambda text: "being computed" not in text, 120)
        yield page


@pytest.fixture(scope="module")
def kept() -> dict[tuple[float, float], KeptPlan]:
    """What was measured of the plans of H, by ratio and lambda; not read from the page."""
    curvature = kept_curvature("smollm2")
    assert curvature is not None
    plans = kept_plans(curvature)
    assert plans is not None
    known = {frozenset(plan.selection.pruned): plan for plan in plans.plans}
    asked = [(ratio, strength) for ratio in (0.1, 0.2, 0.3) for strength in STRENGTHS]
    return {at: known[frozenset(cl.solve_greedy(curvature, *at).pruned)] for at in asked}


def show(page: Any, **values: object) -> None:
    """Set what the address holds, under the guards that the kept plans have."""
    given = {"protect_first": 0, "protect_last": 0, "interaction_strength": 1.0} | values
    text = "&".join(f"{name}={value}" for name, value in given.items())
    page.evaluate("text => { location.hash = text; }", text)
    wanted = str(given["interaction_strength"]).removesuffix(".0")
    eventually(page.get_by_label("lambda, typed").input_value, lambda now: now == wanted)
    key = page.locator(".cc-key")
    eventually(key.text_content, lambda text: "being computed" not in text, 120)


def value(text: str) -> float:
    return float(text.split(" ± ")[0].replace("−", "-"))


@in_browser
def test_controls_and_rows_stand_on_one_screen(page: Any) -> None:
    show(page, ratio=0.2)
    names = (
        "canvas[aria-label^='Map of units']",
        CHART,
        ".cc-edge",
        ".cc-four",
        "input[type=range]",
    )
    for name in names:
        for part in page.locator(".cocurve").first.locator(name).all():
            box = part.bounding_box()
            assert box is None or box["y"] + box["height"] <= 900, name
    controls = page.locator(".cocurve").first.locator(CONTROLS)
    assert sum(control.is_visible() for control in controls.all()) <= 8


@in_browser
def test_steps_are_what_was_measured_and_lead_there(page: Any, kept: Any) -> None:
    for ratio in (0.1, 0.2, 0.3):
        show(page, ratio=ratio)
        steps = page.locator(CHART).locator("[data-strength]")
        found = {round(float(step.get_attribute("data-strength")), 3): step for step in steps.all()}
        plans = {at: plan for at, plan in kept.items() if at[0] == ratio}
        assert set(found) <= {strength for _, strength in plans}
        assert len(found) == len({plan.selection.fingerprint for plan in plans.values()})
        for strength, step in found.items():
            words = str(step.get_attribute("aria-label"))
            plan = plans[ratio, strength]
            measured, predicted = re.findall(r"(?:measured KL|predicted) ([\d.]+)", words)
            assert float(measured) == pytest.approx(plan.kl["c4"].mean(), rel=0.01)
            assert float(predicted) == pytest.approx(plan.selection.predicted_risk, rel=0.01)
            mark = step.locator(".cc-mark").bounding_box()
            assert min(mark["width"], mark["height"]) >= 6
    show(page, ratio=0.2)
    chart = page.locator(CHART)
    chart.locator("[data-strength='0.25']").click()
    assert page.get_by_label("lambda, typed").input_value() == "0.25"
    chart.locator("[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.get_by_label("lambda, typed").input_value() == "0.4"
    page.locator(".cc-others [role=radio]", has_text="30 %").click()
    assert page.get_by_label("ratio in percent, typed").input_value() == "30"


def even(rows: dict[float, np.ndarray], one: float, other: float) -> bool:
    """Whether two lambdas cannot be told apart, within two paired errors."""
    apart = rows[one] - rows[other]
    return bool(abs(apart.mean()) < 2 * apart.std(ddof=1) / np.sqrt(len(apart)))


@in_browser
def test_the_finding_is_that_of_the_kept_rows(page: Any, kept: Any) -> None:
    for ratio in (0.1, 0.2, 0.3):
        show(page, ratio=ratio)
        rows = {s: kept[ratio, s].kl["c4"] for s in STRENGTHS}
        best = min(rows, key=lambda strength: rows[strength].mean())
        text = str(page.locator(".cc-finding").text_content())
        assert text.startswith(f"At {ratio:.0%}".replace("%", " %"))
        level = [f"{at:g}" for at in STRENGTHS if at not in (0, 1, best) and even(rows, at, best)]
        beside = f" (level with it: {', '.join(level)})" if level else ""
        assert f"lowest measured KL is at λ = {best:g}{beside};" in text
        for end in {0.0, 1.0} - {best}:
            apart = rows[end] - rows[best]
            error = apart.std(ddof=1) / np.sqrt(len(apart))
            (clause,) = re.findall(rf"λ = {end:g} costs ([^;]*)", text)
            assert value(clause) == pytest.approx(apart.mean(), abs=0.06 * error)
            assert ("inconclusive" in clause) == (abs(apart.mean()) < 2 * error)
            if "inconclusive" not in clause:
                dearer = kept[ratio, end].selection.predicted_risk
                way = "same" if dearer > kept[ratio, best].selection.predicted_risk else "other"
                assert f"H ranks them the {way} way" in text


@in_browser
def test_rows_are_what_was_kept_and_no_move_empties_one_or_shifts_the_page(
    page: Any, kept: Any
) -> None:
    show(page, ratio=0.2, interaction_strength=0.25)
    rows = page.locator(".cc-four tbody tr")
    cells = [rows.nth(k).locator("td").nth(2) for k in range(3)]
    plan = kept[0.2, 0.25]
    assert value(cells[0].inner_text()) == pytest.approx(plan.kl["c4"].mean(), rel=0.01)
    assert "kept, 6 rows" in cells[0].inner_text()
    assert value(cells[1].inner_text()) == pytest.approx(plan.selection.predicted_risk, rel=0.01)
    right = sum(n for n, _ in plan.right.values())
    assert cells[2].inner_text().startswith(f"{right} of {sum(n for _, n in plan.right.values())}")
    assert page.locator(".cc-says").nth(2).inner_text() == plan.replies[0].replace("\n", " ⏎ ")

    before = page.evaluate(BOXES)
    page.evaluate(WATCH)
    slider = page.get_by_label("lambda, weight of the edges")
    slider.focus()
    for _ in range(40):
        page.keyboard.press("ArrowRight")
    box = page.get_by_label("ratio, share of cost to remove").bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 9)
    page.mouse.down()
    ratios = set()
    for step in range(60):
        page.mouse.move(box["x"] + 5 + (box["width"] - 10) * step / 59, box["y"] + 9)
        ratios.add(page.get_by_label("ratio in percent, typed").input_value())
    page.mouse.up()
    assert ratios == {"0", "2", "5", "10", "15", "20", "30", "40"}  # snaps
    seen = page.evaluate("() => seen")
    assert len(seen) > 40
    empty = [texts for texts in seen if any(not t.strip() or t[0] in "–…" for t in texts)]
    assert empty == []
    assert page.evaluate(BOXES) == before
    page.get_by_label("ratio, share of cost to remove").press("Shift+ArrowLeft")
    assert page.get_by_label("ratio in percent, typed").input_value() == "39.9"
    slider.evaluate("s => s.blur()")


@in_browser
def test_one_exchanged_unit_makes_a_value_gray_and_names_the_distance(page: Any) -> None:
    show(page, ratio=0.2, interaction_strength=0.25)
    order = page.locator(".cocurve").first.get_attribute("data-pruned").split()
    exchanged = [*order[1:], next(str(u) for u in range(570) if str(u) not in order)]
    show(page, ratio=0.2, interaction_strength=0.25, **{"pin.units": ",".join(exchanged)})
    a, b = (page.locator(".cc-four tbody tr").first.locator("td").nth(k) for k in (1, 2))
    eventually(a.inner_text, lambda text: "20 %, λ 0.25, 2 units off" in text)
    assert (a.get_attribute("class"), b.get_attribute("class")) == ("cc-stand-in", None)
    assert a.inner_text().split("\n")[0] == b.inner_text().split("\n")[0]
    show(page, ratio=0.2, interaction_strength=0.25, **{"pin.units": ",".join(sorted(order))})
    eventually(a.inner_text, lambda text: "kept, 6 rows" in text)


@in_browser
def test_the_card_of_a_unit_opens_beside_it_and_closes(page: Any) -> None:
    show(page, ratio=0.2)
    cells, card = page.locator("canvas[role=img]").first, page.locator(".cc-card[popover]")
    assert card.is_hidden()
    cells.hover(position={"x": 200, "y": 100})
    card.wait_for()
    box = card.bounding_box()
    assert box["y"] >= 0
    assert box["y"] + box["height"] <= 900
    page.mouse.move(5, 5)
    card.wait_for(state="hidden")
    cells.focus()
    page.keyboard.press("ArrowDown")
    card.wait_for()
    assert "L0.attention[0]" in card.inner_text()
    page.keyboard.press("Escape")
    card.wait_for(state="hidden")


@in_browser
def test_states_of_units_are_told_apart_without_color(page: Any) -> None:
    show(page, ratio=0.2, interaction_strength=0.25)
    root = page.locator(".cocurve").first
    for theme in ("dark", "light"):
        page.emulate_media(color_scheme=theme)
        page.wait_for_timeout(600)  # pictures follow the theme
        looks = {"kept": [], "solid": []}
        gone = {int(u) for u in root.get_attribute("data-pruned").split()}
        for unit in (*list(gone)[:6], *(u for u in range(40) if u not in gone)):
            back, edge, inside = page.evaluate(LOOK, unit)
            looks["solid" if unit in gone else "kept"].append((back, edge, inside))
        for back, _, inside in looks["solid"]:
            assert contrast(back, inside) >= 3, theme
        for back, edge, inside in looks["kept"]:
            assert contrast(back, edge) >= 3, theme
            assert contrast(back, inside) < 1.1, theme


def contrast(one: list[int], other: list[int]) -> float:
    """Of two colors [r, g, b], as in WCAG."""
    values = np.array([one, other]) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    low, high = sorted(linear @ [0.2126, 0.7152, 0.0722])
    return float((high + 0.05) / (low + 0.05))


# The color behind the map, and those of a unit at its edge and a little inside of it.
LOOK = """unit => {
  const canvas = document.querySelector('canvas[role=img]');
  const packed = JSON.parse(document.getElementById('cocurve-data').textContent).lambda._problem;
  const rows = [0, 1].map(kind =>  // of each kind
    1 + Math.max(...packed.places.filter((_, u) => packed.kinds[u] === kind)));
  const width = canvas.parentElement.clientWidth, w = (width - 70) / packed.num_layers;
  const t = Math.min(22, Math.max(250, Math.min(430, 0.72 * width)) / (rows[0] + rows[1]));
  const x = 64 + packed.layers[unit] * w;
  const y = 4 + packed.places[unit] * t + (packed.kinds[unit] ? 8 + rows[0] * t : 0);
  const at = (x, y) => [...canvas.getContext('2d').getImageData(x, y, 1, 1).data].slice(0, 3);
  const back = getComputedStyle(document.querySelector('.cocurve')).backgroundColor;
  return [back.match(/\\d+/g).slice(0, 3).map(Number), at(Math.round(x), Math.round(y + t / 4)),
    at(Math.round(x + w / 4), Math.round(y + t / 4))];
}"""


@in_browser
def test_layers_have_a_map_a_chart_and_a_graph_of_their_own(lab: Lab) -> None:
    found = kept_interactions("smollm2", "layers")
    assert found is not None
    with lab.page(PAGE) as page:
        page.locator(".cc-more > summary").first.click()
        page.get_by_label("what is removed").select_option("layers")
        root = page.locator(".cocurve").first
        eventually(lambda: root.get_attribute("aria-label"), lambda name: "measured KL" in name)
        key = page.locator(".cc-key")
        eventually(key.text_content, lambda text: "plan" in text and "computed" not in text, 120)
        gone = [int(u) for u in root.get_attribute("data-pruned").split()]
        share = float(page.get_by_label("ratio in percent, typed").input_value()) / 100
        plan = cl.solve_greedy(found.curvature, share, 1.0)
        assert sorted(gone) == sorted(plan.pruned)
        assert "scale=layers" in page.evaluate("location.hash")
        assert page.locator(".cocurve").count() == 3
        assert (
            page.locator(".cc-four tbody tr").first.locator("td").nth(2).inner_text()[0].isdigit()
        )
