"""What goes on around a computation: Ctrl-C, programs of others, memory, bars."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

import cocurve_lab as cl
from cocurve_lab.base.interrupts import uninterrupted, within
from cocurve_lab.base.memory import free_memory
from cocurve_lab.base.progress import open_bar
from cocurve_lab.extensions.texts import documents
from cocurve_lab.extensions.texts.documents import written_chat
from helpers.tiny_models import word_tokenizer


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_while_a_sequence_is_booked_waits_until_it_is_whole() -> None:
    booked = []
    handler = signal.getsignal(signal.SIGINT)

    def book() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            booked.append("all of it")

    with pytest.raises(KeyboardInterrupt):
        book()
    assert booked == ["all of it"]
    assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignored, as in a background job: it stays so
    book()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_program_ends_in_time_or_is_left() -> None:
    assert within(20, "a sum", lambda: 1 + 1) == 2
    with pytest.raises(ZeroDivisionError):
        within(20, "a quotient", lambda: 1 // 0)
    end = threading.Event()
    with pytest.raises(cl.InputError, match=r"a wait did not end within 0\.01 s"):
        within(0.01, "a wait", end.wait)
    end.set()


def test_a_template_that_never_ends_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "within", lambda _, name, run: within(0.2, name, run))
    tokenizer = word_tokenizer()
    loops = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    tokenizer.chat_template = loops
    with pytest.raises(cl.InputError, match=r"did not end within 0\.2 s"):
        written_chat(tokenizer, [{"role": "user", "content": "w1"}], "Give chat=False")


# The memory that a process may take, under made-up control groups and real limits -----------------


GIB = 1 << 30


def group(folder: Path, bound: str, most: int | str, used: str, now: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / bound).write_text(f"{most}\n")
    (folder / used).write_text(f"{now}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {GIB // 8}\nactive_file 0\n")


@pytest.mark.parametrize(
    ("line", "place"), [("0::/a/b", "a/b"), ("0::/a/b", "a"), ("0::/gone/on/the/host", "")]
)
def test_the_tightest_group_of_version_2_counts(line: str, place: str, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text(f"{line}\n")
    group(tmp_path / "a" / "b", "memory.max", "max", "memory.current", 1)
    group(tmp_path / place, "memory.max", GIB, "memory.current", GIB // 2)
    assert free_memory(tmp_path, own) == GIB // 2 + GIB // 8


def test_a_group_of_version_1_counts(tmp_path: Path) -> None:
    own, folder = tmp_path / "own", tmp_path / "memory" / "job"
    own.write_text("9:name=systemd:/x\n4:memory:/job/1\n")
    group(folder, "memory.limit_in_bytes", GIB, "memory.usage_in_bytes", GIB // 2)
    assert free_memory(tmp_path, own) == GIB // 2 + GIB // 8


def test_a_limit_of_the_process_counts() -> None:
    program = (
        "import resource; from cocurve_lab.base.memory import free_memory;"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31)); print(free_memory())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert 0 < float(ran.stdout) < 1 << 31


# Bars ---------------------------------------------------------------------------------------------


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
