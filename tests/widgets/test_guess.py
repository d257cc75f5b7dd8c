"""Predict, then reveal: what is measured stays covered until it is visited or revealed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.pretrained.kept import kept_curvature, kept_plans
from helpers.lab import Lab, in_browser
from helpers.waiting import eventually

PAGE = Path(__file__).resolve().parents[2] / "notebooks" / "explore_smollm2.html"
LESSON = "#ratio=0.2&protect_first=0&protect_last=0&guess=1"
ELSEWHERE = "() => [document.cookie, localStorage.length, sessionStorage.length]"


def measured(ratio: float, strength: float) -> tuple[float, float]:
    """Measured and predicted KL of a plan that is kept."""
    curvature = kept_curvature("smollm2")
    assert curvature is not None
    plan = cl.solve_greedy(curvature, ratio, strength)
    known = kept_plans(curvature)
    assert known is not None
    kl = next(x.kl["c4"] for x in known.plans if set(x.selection.pruned) == set(plan.pruned))
    assert plan.predicted_risk is not None
    return float(kl.mean()), plan.predicted_risk


@in_browser
def test_guess_by_keys_alone_then_reveal(lab: Lab) -> None:
    level, _ = measured(0.2, 0)
    with lab.page(PAGE, LESSON) as page:
        root = page.locator(".cocurve").first
        handles = root.locator(".cc-chart [role=slider]")
        finding, marks = root.locator(".cc-finding"), root.locator(".cc-mark")
        handles.first.wait_for()

        def values() -> list[float]:
            return [float(one.get_attribute("aria-valuenow")) for one in handles.all()]

        def press(*keys: str) -> None:
            for key in keys:
                page.keyboard.press(key)

        assert values() == pytest.approx([level, level], rel=5e-3)
        assert page.get_by_label("lambda, typed").input_value() == "0"
        assert marks.count() == 1
        assert root.locator("[data-strength]").count() == 8
        assert len(re.findall("M", root.locator(".cc-predicted").get_attribute("d"))) <= 1
        assert "lowest" not in finding.inner_text()
        assert not root.locator(".cc-others").is_visible()
        assert not re.search(r"plan \d", root.locator(".cc-key").inner_text())

        press("Tab")
        focused = "() => document.activeElement.getAttribute('aria-label')"
        assert page.evaluate(focused) == "lambda, weight of the edges"  # first of all
        for _ in range(12):
            if str(page.evaluate(focused)).startswith("your guess at lambda 1:"):
                break
            press("Tab")
        press("ArrowUp", "ArrowUp", "ArrowUp")
        assert values() == pytest.approx([level, 1.331 * level], rel=0.01)
        address = eventually(lambda: page.evaluate("location.hash"), lambda x: "guesses=" in x)
        assert page.evaluate(ELSEWHERE) == ["", 0, 0]
        page.goto("about:blank")
        page.goto(PAGE.as_uri() + address)
        handles.first.wait_for()
        assert values() == pytest.approx([level, 1.331 * level], rel=0.01)

        for _ in range(12):
            if page.evaluate("() => document.activeElement.textContent") == "Reveal":
                break
            press("Tab")
        press("Enter")
        eventually(finding.inner_text, lambda text: "lowest measured KL" in text)
        said = re.findall(r"λ (\S+): you (\S+), H (\S+), measured ([\d.]*\d)", finding.inner_text())
        found = [[float(number) for number in line] for line in said]
        for (at, *shown), guess in zip(found, (level, 1.331 * level), strict=True):
            kl, predicted = measured(0.2, at)
            assert shown == pytest.approx([guess, predicted, kl], rel=0.01)
        assert [at for at, *_ in found] == [0.5, 1]
        assert marks.count() == 8


@in_browser
def test_a_visit_uncovers_one_plan_and_a_handle_follows_the_pointer(lab: Lab) -> None:
    with lab.page(PAGE, LESSON.removesuffix("&guess=1")) as page:
        root = page.locator(".cocurve").first
        marks, handles = root.locator(".cc-mark"), root.locator(".cc-chart [role=slider]")
        marks.nth(7).wait_for()
        root.get_by_role(
            "button", name="Guess first"
        ).click()  # λ 1, which it opens with, is covered
        eventually(marks.count, lambda count: count == 1)
        root.locator("[data-strength='0.25']").click()
        eventually(marks.count, lambda count: count == 2)
        label = root.locator("[data-strength='0.25']").get_attribute("aria-label")
        assert f"measured KL {measured(0.2, 0.25)[0]:.2f}" in label
        assert root.locator("[data-strength='0.5']").get_attribute("aria-label").endswith("covered")

        def middle() -> tuple[float, float]:
            box: Any = handles.nth(1).bounding_box()
            return box["x"] + box["width"] - 20, box["y"] + box["height"] / 2

        x, y = middle()
        before = float(handles.nth(1).get_attribute("aria-valuenow"))
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x, y + 30, steps=6)
        page.mouse.up()
        page.mouse.move(x, y + 60)
        assert middle()[1] == pytest.approx(y + 30, abs=2)
        assert float(handles.nth(1).get_attribute("aria-valuenow")) < before
        page.evaluate("location.hash += '&ratio=0.3'")
        level, _ = measured(0.3, 0)  # guesses are of their ratio
        first = handles.first
        eventually(
            lambda: float(first.get_attribute("aria-valuenow") or 0),
            lambda now: now == pytest.approx(level, rel=5e-3),
        )
