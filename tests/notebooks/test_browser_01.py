"""Notebook 01 in a real JupyterLab and browser: pictures appear, nothing leaves the machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.lab import CHROMIUM, FEW, NO_BROWSER, Lab, Visit
from helpers.layout import require_readable_notebook
from helpers.notebooks import NOTEBOOK, require_built, require_loaded
from helpers.waiting import eventually

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER),
]


@pytest.mark.slow
def test_notebook_01_in_jupyterlab(lab: Lab, tmp_path: Path) -> None:
    folder = lab.bring(tmp_path)  # empty
    with lab.open(NOTEBOOK, FEW, inside=folder) as visit:
        visit.run_all()
        require_built(visit.content(), folder)
        page = visit.page
        page.wait_for_selector(".js-plotly-plot .gtitle", state="attached", timeout=60_000)
        figures = page.locator(".js-plotly-plot")
        eventually(figures.count, lambda count: count == 3)
        all_titles = figures.locator(".gtitle").all_text_contents
        titles = eventually(all_titles, lambda titles: len(titles) == 3)
        assert any("orrelation" in title for title in titles)
        buttons = page.locator(".modebar-btn").evaluate_all(
            "all => all.map(b => b.getAttribute('data-title') || '')"
        )
        assert buttons
        assert not [title for title in buttons if re.search("cloud|share|edit in", title, re.I)]
        visit.require_clean()
        require_readable_notebook(page)
        for theme in ("Light", "Dark"):
            visit.theme(theme)
            for number, figure in enumerate(figures.all()):
                figure.scroll_into_view_if_needed()
                visit.picture(f"01_{theme.lower()}_{number}", figure)
        the_map_plays_the_plan(visit)
    require_loaded(folder)


def the_map_plays_the_plan(visit: Visit) -> None:
    """Page and kernel agree on order, brush and step; the plan plays and stops."""
    page = visit.page
    root = page.get_by_role("region", name="Map of H").last  # the first is of the shipped H
    canvas = root.locator("canvas[data-draws]")
    canvas.wait_for(timeout=60_000)
    visit.becomes("heat.step == len(plan) > 0", "True")
    root.get_by_label("order of rows and columns").select_option("clustering")
    visit.becomes("sorted(heat.clustered) == list(range(len(units)))", "True")
    root.get_by_role("button", name="Brush the plan").click()
    visit.becomes("heat.session.brushed == sorted(plan.pruned)", "True")
    canvas.focus()
    page.keyboard.press("p")
    visit.becomes("heat.playing", "True")
    visit.becomes("2 <= heat.step < len(plan)", "True")
    page.keyboard.press("p")
    visit.becomes("heat.playing", "False")
    page.keyboard.press("ArrowDown")
    visit.becomes("heat.selected_unit == heat.partner == heat.clustered[0]", "True")
    for theme in ("Light", "Dark"):
        visit.theme(theme)
        canvas.scroll_into_view_if_needed()
        visit.picture(f"01_map_{theme.lower()}", root)
    with page.expect_download() as caught:
        root.get_by_role("button", name="PNG").click()
    assert caught.value.suggested_filename == "map.png"
    visit.require_clean()
