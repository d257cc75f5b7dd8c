"""Bars: text on a screen, one line in a notebook that goes when all is done."""

from __future__ import annotations

import gc
import io
import sys
from contextlib import suppress
from typing import Any

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from cocurve_lab.base.progress import Bar, open_bar

LOOP = (
    "from cocurve_lab.base.progress import Bar\n"
    "for step in Bar(range(3), desc='steps', mininterval=0):"
)


def shown(code: str, allow_errors: bool = False) -> list[Any]:
    """The outputs of a cell in a kernel, errors aside."""
    content = new_notebook(cells=[new_code_cell(code)])
    done = NotebookClient(content, kernel_name="python3", allow_errors=allow_errors).execute()
    return [o for o in done.cells[0].outputs if o.output_type != "error"]


def test_a_bar_of_a_terminal_is_text_and_stays() -> None:
    place = io.StringIO()
    assert list(Bar(range(3), desc="steps", file=place)) == [0, 1, 2]
    assert "steps: 100%" in place.getvalue()


@pytest.mark.slow
def test_in_a_notebook_a_done_bar_leaves_nothing_and_no_widget() -> None:
    (bar,) = shown(f"{LOOP}\n    pass")
    assert dict(bar.data) == {}
    outputs = shown(f"{LOOP}\n    print(step)")
    assert "".join(o.text for o in outputs if o.output_type == "stream") == "0\n1\n2\n"


@pytest.mark.slow
def test_in_a_notebook_an_interrupted_bar_stays() -> None:
    (bar,) = shown(f"{LOOP}\n    1 / (1 - step)", allow_errors=True)
    assert "steps:  33%" in bar.data["text/plain"]
    assert "1/3" in bar.data["text/plain"]


@pytest.mark.slow
def test_in_a_notebook_the_bar_of_work_that_ends_early_goes() -> None:
    work = "with Bar(total=3, mininterval=0) as bar:\n    bar.update()"
    (bar,) = shown(f"from cocurve_lab.base.progress import Bar\n{work}")
    assert dict(bar.data) == {}
    (bar,) = shown(f"from cocurve_lab.base.progress import Bar\n{work}; 1 / 0", allow_errors=True)
    assert "1/3" in bar.data["text/plain"]


def test_a_hidden_bar_and_one_of_nothing_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for progress, total in ((False, 3), (True, 0)):
        with open_bar(progress, total=total) as bar:
            bar.update()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("hidden", [True, False])
def test_a_bar_that_was_interrupted_while_it_was_made_is_silent(
    hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    told: list[Any] = []
    monkeypatch.setattr(Bar, "_get_free_pos", stop)
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    with suppress(KeyboardInterrupt):
        Bar(total=1, disable=hidden)
    gc.collect()
    assert not told


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
    assert said == [
        "H: 200 of 400 ablations (50%), 00:40 so far, 01:20 left",
        "H: 300 of 400 ablations (75%), 01:20 so far, 00:40 left",
        "H: 300 of 400 ablations (75%), 01:20 so far, 00:40 left",
    ]
