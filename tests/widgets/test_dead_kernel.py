"""Exports of the instruments after a restart of the kernel: a file, or the reason for none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

from helpers.lab import CHROMIUM, NO_BROWSER, Lab
from helpers.problems import make_units, random_curvature

MAKE = """\
import cocurve_lab as cl
from cocurve_widgets import BridgeExplorer, CurvatureMap, LambdaExplorer
curvature = cl.Curvature.load("H.pkl")"""
SHOWN = ("LambdaExplorer(curvature)", "BridgeExplorer(curvature)", "CurvatureMap(curvature)")
FROM_THE_PAGE = ("CSV", "PNG")  # data and picture are in the page, and the plan that it solves


def notebook(folder: Path) -> Path:
    cells = [nbformat.v4.new_code_cell(source) for source in (MAKE, *SHOWN)]
    content = nbformat.v4.new_notebook(cells=cells)
    content.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    path = folder / "dead.ipynb"
    nbformat.write(content, path)
    return path


def exported(page: Any, root: Any, name: str) -> bool:
    """Whether a button downloads a file."""
    with page.expect_download() as download:
        root.get_by_role("button", name=name, exact=True).click()
    return Path(download.value.path()).stat().st_size > 100


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER)
def test_exports_work_or_say_why_not_once_the_kernel_is_gone(lab: Lab, tmp_path: Path) -> None:
    random_curvature(make_units(6, 3, 8), seed=5).save(lab.folder / "H.pkl")
    with lab.open(notebook(tmp_path)) as visit:
        visit.run_all()
        page = visit.page
        roots = {
            title: page.get_by_role("region", name=title)
            for title in ("Pruning plan by lambda", "Bridges", "Map of H")
        }
        page.evaluate(
            "() => jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()"
        )
        for title, root in roots.items():
            root.scroll_into_view_if_needed()
            names = root.locator(".cc-files button").all_text_contents()
            assert {*FROM_THE_PAGE} < {*names}
            for name in names:
                if name in FROM_THE_PAGE or (title.startswith("Pruning") and name == "JSON"):
                    assert exported(page, root, name), (title, name)
                else:
                    root.get_by_role("button", name=name, exact=True).click()
                    root.locator(".cc-error", has_text="does not answer").wait_for()
        assert not visit.errors
