"""Notebooks 02 to 05 at 1280 pixels: no word is broken, no text is clipped or covered."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.lab import CHROMIUM, NO_BROWSER, SMALL, Lab
from helpers.layout import require_readable_notebook
from helpers.notebooks import NOTEBOOKS

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER),
]


@pytest.mark.parametrize("notebook", NOTEBOOKS[1:5], ids=lambda p: p.stem)
def test_everything_can_be_read_at_1280(notebook: Path, lab: Lab, tmp_path: Path) -> None:
    with lab.open(notebook, SMALL, inside=lab.bring(tmp_path)) as visit:
        visit.run_all()
        require_readable_notebook(visit.page)
        # a fault is seen here, too: words that may break anywhere, in a narrow line
        narrow = "text => { text.style.width = '30px'; text.style.wordBreak = 'break-all' }"
        visit.page.locator(".jp-MarkdownOutput p").first.evaluate(narrow)
        with pytest.raises(AssertionError, match="breaks inside a word"):
            require_readable_notebook(visit.page)
