"""The state of the offline page in its address, in Chromium: a link reopens what was shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cocurve_widgets import export_html
from helpers.lab import CHROMIUM, NO_BROWSER, Lab
from helpers.problems import make_units, random_curvature
from helpers.waiting import eventually

SMALL = random_curvature(make_units(6, 3, 8), seed=5)
FILTERS = {  # of the bridge explorer, and another value
    "edges of": "all",
    "sign of the edges": "negative",
    "plans compared at": "40",
}
MAP = {
    "order of rows and columns": "clustering",
    "color": "curvature",
    "step of the plan": "3",
}
UNSAFE = "#ratio=9&kinds=heads&_problem=1&axis=<script>&selected_unit=999"


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER)
def test_a_link_reopens_what_was_shown(lab: Lab, tmp_path: Path) -> None:
    path = export_html(SMALL, tmp_path / "page.html")
    page = lab.browser.new_page(viewport={"width": 1280, "height": 1000})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(path.as_uri())
    plan, bridges, heat = page.locator(".cocurve").all()

    def field(root: Any, label: str) -> Any:
        return root.locator("input, select").and_(root.get_by_label(label))

    def address() -> str:
        return str(page.evaluate("location.hash"))

    def pinned() -> str:
        return " ".join(str(c) for c in plan.locator(".cc-numbers thead th").all_text_contents())

    def state() -> list[str | None]:
        names = ("data-pruned", "data-joined", "data-left")
        facts = [plan.get_attribute(name) for name in names]
        labels = ("lambda, typed", "ratio in percent, typed", "layer cap", "size of the cap")
        facts += [page.get_by_label(label, exact=True).input_value() for label in labels]
        facts += [plan.locator(".cc-card h4").first.text_content(), pinned()]
        for label in ("threshold as number", *FILTERS):
            facts.append(field(bridges, label).input_value())
        facts += [str(field(bridges, label).is_checked()) for label in ("ego view", "cross")]
        facts += [field(heat, label).input_value() for label in MAP]
        facts += [
            heat.locator("h4").first.text_content(),
            heat.locator(".cc-card h4").first.text_content(),
        ]
        return facts

    plan.locator(".cc-facts td").first.wait_for()
    assert address() == ""  # as it opens
    opening = state()
    page.get_by_label("lambda, typed").fill("0.5")
    page.get_by_label("lambda, typed").press("Enter")
    page.get_by_role("button", name="Pin B as A").click()
    page.get_by_label("ratio in percent, typed").fill("35")
    page.get_by_label("ratio in percent, typed").press("Enter")
    plan.locator(".cc-more summary").click()
    page.get_by_label("layer cap", exact=True).select_option("factor")
    plan.locator("canvas[role=img]").first.click(position={"x": 90, "y": 10})
    bridges.get_by_label("threshold as number").fill("0.2")
    bridges.get_by_label("threshold as number").press("Enter")
    bridges.locator(".cc-more summary").click()
    for root, values in ((bridges, FILTERS), (heat, MAP)):
        for label, value in values.items():
            control = field(root, label)
            if control.evaluate("control => control.tagName") == "SELECT":
                control.select_option(value)
            else:
                control.fill(value)
                control.dispatch_event("change")
    bridges.get_by_label("ego view").check()
    bridges.get_by_label("cross").uncheck()
    picture = heat.locator("canvas")
    picture.press("+")
    picture.press("ArrowRight")
    heat.get_by_label("only pairs of the plan").check()
    eventually(address, lambda text: "map.only_plan=true" in text and "map.window=" in text)
    eventually(address, lambda text: all(f"{name}=" in text for name in ("ratio", "threshold")))
    eventually(address, lambda text: "pin.interaction_strength=0.5" in text)
    link, shown = page.url, state()
    assert shown != opening

    page.goto("about:blank")
    page.goto(link)
    plan.locator(".cc-facts td").first.wait_for()
    eventually(state, lambda now: now == shown)

    page.get_by_role("button", name="Swap").click()  # plan A came with its controls
    eventually(
        lambda: page.get_by_label("ratio in percent, typed").input_value(), lambda x: x == "20"
    )
    page.evaluate("location.hash = ''")  # and another address while the page is open
    eventually(state, lambda now: now == opening)

    page.goto("about:blank")
    page.goto(path.as_uri() + UNSAFE)
    plan.locator(".cc-facts td").first.wait_for()
    eventually(state, lambda now: now == opening)
    assert not errors
    page.close()
