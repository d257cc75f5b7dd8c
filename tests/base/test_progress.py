"""Bars: text on a screen, one line in a notebook that goes when all is done."""

from __future__ import annotations

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from cocurve_lab.base.progress import open_bar

# cells, and whether the bar that they show stays
CELLS = {
    "for step in Bar(range(3), desc='steps', mininterval=0): pass": False,
    "for step in Bar(range(3), desc='steps', mininterval=0): 1 / (1 - step)": True,
    "with Bar(total=3, mininterval=0) as bar: bar.update()": False,
    "with Bar(total=3, mininterval=0) as bar: bar.update(); 1 / 0": True,
}


@pytest.mark.slow
def test_in_a_notebook_a_bar_stays_only_where_its_work_was_interrupted() -> None:
    cells = [new_code_cell(code) for code in ("from cocurve_lab.base.progress import Bar", *CELLS)]
    content = new_notebook(cells=cells)
    done = NotebookClient(content, kernel_name="python3", allow_errors=True).execute()
    for cell, stays in zip(done.cells[1:], CELLS.values(), strict=True):
        (bar,) = [dict(o.data) for o in cell.outputs if o.output_type == "display_data"]
        assert ("1/3" in bar["text/plain"]) if stays else bar == {}


def test_a_hidden_bar_and_one_of_nothing_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for progress, total in ((False, 3), (True, 0)):
        with open_bar(progress, total=total) as bar:
            bar.update()
    assert capsys.readouterr() == ("", "")


def test_lines_for_a_log_say_how_far_and_how_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    with open_bar("lines", total=400, initial=100, desc="H", unit="ablation") as bar:
        for _ in range(4):
            clock[0] += 20
            bar.update(50)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "H: 200 of 400 ablations (50%), 00:40 so far, 01:20 left"
    assert len(said) == 3
