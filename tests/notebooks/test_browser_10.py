"""Notebook 10 in a real JupyterLab: it leaves a smaller model, which another process reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.lab import CHROMIUM, KEPT, NO_BROWSER, SMALL, Lab
from helpers.layout import require_readable_notebook

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "10_take_it_away.ipynb"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER),
]


def test_notebook_10_in_jupyterlab(lab: Lab, tmp_path: Path) -> None:
    folder = lab.bring(tmp_path)  # empty
    with lab.open(NOTEBOOK, SMALL, inside=folder) as visit:
        visit.run_all()
        assert list((folder / KEPT).glob("H_demo_*.pkl"))
        assert (folder / "smaller" / "README.md").stat().st_size > 1000
        assert visit.ask("pruned.num_parameters() < model.num_parameters()") == "True"
        # the other process wrote the prompt and went on
        assert visit.ask("done.stdout.startswith(prompt) and not done.returncode") == "True"
        root = visit.page.locator(".cocurve")
        root.wait_for(timeout=60_000)
        root.scroll_into_view_if_needed()
        visit.picture("10_light", root)
        require_readable_notebook(visit.page)
        visit.require_clean()
