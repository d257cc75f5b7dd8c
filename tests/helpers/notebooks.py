"""Notebooks run without a browser, and what they showed and left."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import cocurve_lab as cl
from helpers.lab import CHROMIUM, KEPT, NO_BROWSER, Visit, red_boxes, set_parameters
from helpers.layout import require_readable_notebook

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))
README = NOTEBOOKS[0].with_name("README.md").read_text(encoding="utf-8")
# number of a notebook -> the solution of its exercise
SOLUTIONS = dict(
    re.findall(r"^# notebook (\d\d)\n(.*?)(?=\n\n\n# notebook|^```)", README, re.M | re.S)
)
BAR = "(a bar that is gone)"  # what `text_of` says where something was measured or built
OUTPUT = 105  # characters of a line of output in JupyterLab at 1280 pixels


@dataclass
class Ran:
    """A notebook whose cells have all run on a cold kernel."""

    notebook: Path
    values: dict[str, Any]
    folder: Path
    content: nbformat.NotebookNode
    visit: Visit | None  # its page in JupyterLab

    @property
    def text(self) -> str:
        return text_of(self.content)

    @property
    def kept(self) -> Path:
        return self.folder / KEPT

    @property
    def curvature(self) -> cl.Curvature:
        """The one H that it left."""
        (path,) = self.kept.glob("H_demo_*.pkl")
        return cl.Curvature.load(path)

    def shown_in_lab(self) -> Visit:
        """Its page; skips where there is no browser."""
        if self.visit is None:
            pytest.skip(NO_BROWSER)
        return self.visit

    def again(self) -> nbformat.NotebookNode:
        """A second run in the same folder, which writes no file anew."""
        before = written(self.folder)
        done = run(self.notebook, self.folder, self.values)
        assert written(self.folder) == before
        return done


def cold(
    request: pytest.FixtureRequest, notebook: Path, values: dict[str, Any], script: str = ""
) -> Iterator[Ran]:
    """Run a notebook in JupyterLab, whose page stays open; without Chromium in a bare kernel."""
    if not CHROMIUM.exists():
        folder = request.getfixturevalue("tmp_path_factory").mktemp("notebook")
        yield Ran(notebook, values, folder, run(notebook, folder, values), None)
        return
    with request.getfixturevalue("lab").open(notebook, values, script) as visit:
        visit.run_all()
        yield Ran(notebook, values, visit.folder, visit.content(), visit)


def judge_of(values: dict[str, Any]) -> tuple[Any, cl.CalibrationSet, cl.CalibrationSet]:
    """The demo model, the rows of H, and those that notebooks 06 to 11 judge plans on."""
    model, tokenizer = cl.load_model("demo")
    every = {"seq_len": values["LENGTH"], "positions_per_sequence": "all"}
    rows, rest = cl.default_calibration("demo", tokenizer, values["ROWS"], 4, **every)
    return model, rows, rest.rows(2, 4)


def require_shown(visit: Visit, pictures: int) -> None:
    """So many pictures are on the page, all of it can be read, and nothing failed."""
    if pictures:
        visit.page.locator(".js-plotly-plot").first.wait_for()
    assert len(figures(visit.content())) == pictures
    require_readable_notebook(visit.page)
    visit.require_clean()


def run(
    notebook: Path, folder: Path, values: dict[str, Any], timeout: int = 600
) -> nbformat.NotebookNode:
    """Execute a notebook in a kernel of its own, with other parameters; seconds are of a cell."""
    content = nbformat.read(notebook, as_version=4)
    set_parameters(content, values)
    client = NotebookClient(
        content,
        timeout=timeout,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        store_widget_state=False,
        coalesce_streams=True,  # one print can arrive in several messages
    )
    done = client.execute()
    broken = broken_lines(done)
    assert broken == [], broken
    assert red_boxes(done) == []
    return done


def broken_lines(notebook: nbformat.NotebookNode) -> list[str]:
    """Printed lines that JupyterLab would break inside a word at 1280 pixels."""
    outputs = (o for cell in notebook.cells for o in cell.get("outputs", []))
    printed = [o.text for o in outputs if o.output_type == "stream" and o.name == "stdout"]
    lines = "\n".join(printed).splitlines()
    return [line for line in lines if len(line) > OUTPUT and " " in line.strip()]


def text_of(notebook: nbformat.NotebookNode) -> str:
    """Everything the cells printed or showed as text."""
    shown = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data")
            gone = BAR if data == {} else ""
            shown.append(output.get("text", "") or (data or {}).get("text/plain", gone))
    return "\n".join(shown)


def findings_of(text: str) -> list[str]:
    """The findings that cells showed, each on one line; `told` breaks them."""
    found = re.findall(
        r"^- ((?:Paper|Lab) \(.*?(?:Agrees|Does\s+not\s+agree|Cannot\s+be\s+told)\.)$",
        text,
        re.M | re.S,
    )
    return [" ".join(finding.split()) for finding in found]


def figures(notebook: nbformat.NotebookNode) -> list[dict[str, Any]]:
    """Every Plotly figure that the cells showed."""
    kind = "application/vnd.plotly.v1+json"
    shown = [o.get("data", {}) for cell in notebook.cells for o in cell.get("outputs", [])]
    return [data[kind] for data in shown if kind in data]


def written(folder: Path) -> dict[str, int]:
    """When each file a notebook left was written; the notebook itself and checkpoints aside."""
    files = (path for path in folder.rglob("*") if path.is_file())
    kept = (path for path in files if path.suffix not in (".ipynb", ".lock"))
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in kept}
