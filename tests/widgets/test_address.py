"""The state of the offline page in its address, in Chromium: a link reopens what was shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cocurve_widgets import export_html
from helpers.lab import Lab, in_browser
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


PLAN = ("lambda, typed", "ratio in percent, typed", "layer cap", "size of the cap")


def every_field(plan: Any, bridges: Any, heat: Any) -> list[tuple[Any, str]]:
    """The fields whose values a link must bring back."""
    labels = ((plan, PLAN), (bridges, ("threshold as number", *FILTERS)), (heat, MAP))
    return [(root, label) for root, names in labels for label in names]


@in_browser
def test_a_link_reopens_what_was_shown(lab: Lab, tmp_path: Path) -> None:
    path = export_html(SMALL, tmp_path / "page.html")
    with lab.page(path) as page:
        plan, bridges, heat = page.locator(".cocurve").all()

        def field(root: Any, label: str) -> Any:
            return root.locator("input, select").and_(root.get_by_label(label, exact=label in PLAN))

        def enter(root: Any, label: str, value: str) -> None:
            field(root, label).fill(value)
            field(root, label).press("Enter")

        def address() -> str:
            return str(page.evaluate("location.hash"))

        def state() -> list[str | None]:
            facts = [plan.get_attribute(f"data-{name}") for name in ("pruned", "joined", "left")]
            facts += [
                field(root, label).input_value() for root, label in every_field(plan, bridges, heat)
            ]
            facts += [str(field(bridges, label).is_checked()) for label in ("ego view", "cross")]
            facts += plan.locator(".cc-numbers thead th").all_text_contents()
            titles = (heat.locator("h4"), heat.locator(".cc-card h4"))
            return facts + [title.first.text_content() for title in titles]

        plan.locator(".cc-numbers td").first.wait_for()
        assert address() == ""  # as it opens
        opening = state()
        enter(plan, "lambda, typed", "0.25")
        plan.locator(".cc-more > summary").click()
        page.get_by_role("button", name="Pin B as A").click()
        enter(plan, "ratio in percent, typed", "35")
        enter(plan, "protect first layers", "0")
        field(plan, "layer cap").select_option("factor")
        plan.locator("canvas[role=img]").first.click(position={"x": 90, "y": 10})
        enter(bridges, "threshold as number", "0.2")
        bridges.locator(".cc-more > summary").click()
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
        heat.locator("canvas").press("+")
        heat.locator("canvas").press("ArrowRight")
        heat.get_by_label("only pairs of the plan").check()
        written = ("map.only_plan=true", "map.window=", "ratio=", "threshold=", "protect_first=0")
        written += ("pin.interaction_strength=0.25",)
        eventually(address, lambda text: all(part in text for part in written))
        link, shown = page.url, state()
        assert shown != opening

        page.goto("about:blank")
        page.goto(link)
        plan.locator(".cc-numbers td").first.wait_for()
        eventually(state, lambda now: now == shown)

        plan.locator(".cc-more > summary").click()
        page.get_by_role("button", name="Swap").click()  # plan A came with its controls
        percent = field(plan, "ratio in percent, typed")
        eventually(percent.input_value, lambda value: value == "20")
        page.evaluate("location.hash = ''")  # and another address while the page is open
        eventually(state, lambda now: now == opening)

        page.goto("about:blank")
        page.goto(path.as_uri() + UNSAFE)
        plan.locator(".cc-numbers td").first.wait_for()
        eventually(state, lambda now: now == opening)
