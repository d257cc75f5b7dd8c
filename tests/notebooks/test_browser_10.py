"""Notebook 10 in JupyterLab: it leaves a smaller model, which another process reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.lab import SMALL
from helpers.notebooks import NOTEBOOKS, Ran, cold, require_shown

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> Iterator[Ran]:
    yield from cold(request, NOTEBOOKS[9], SMALL)


def test_it_leaves_a_smaller_model(ran: Ran) -> None:
    assert len(ran.curvature.units) == 160
    assert (ran.folder / "smaller" / "README.md").stat().st_size > 1000


def test_in_jupyterlab(ran: Ran) -> None:
    visit = ran.shown_in_lab()
    assert visit.ask("pruned.num_parameters() < model.num_parameters()") == "True"
    # the other process wrote the prompt and went on
    assert visit.ask("done.stdout.startswith(prompt) and not done.returncode") == "True"
    visit.page.locator(".cocurve").wait_for(timeout=60_000)
    require_shown(visit, 0)
