"""Notebook 01 in a real JupyterLab and browser: pictures appear, nothing leaves the machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.lab import CHROMIUM, FEW, NO_BROWSER, Lab
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
        for theme in ("Light", "Dark"):
            visit.theme(theme)
            for number, figure in enumerate(figures.all()):
                figure.scroll_into_view_if_needed()
                visit.picture(f"01_{theme.lower()}_{number}", figure)
    require_loaded(folder)
