"""Ctrl-C and SIGTERM at any time, and kills and full disks at any call: a verb can be repeated."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import cocurve_lab as cl
from cocurve_lab.base.interrupts import interruptible, run_child
from helpers import verbs
from helpers.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
# a signal at the import number argv[2], counted from when the handlers are set
AT_AN_IMPORT = """
import os, runpy, signal, sys
number, left = (int(word) for word in sys.argv[1:3])
def hook(event, _):
    global left
    if event == "import" and callable(signal.getsignal(signal.SIGTERM)):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), number)
sys.addaudithook(hook)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["cocurve", "inventory", "demo"]
runpy.run_module("cocurve_lab", run_name="__main__", alter_sys=True)
"""
# what is imported until the first handler is set
BEFORE = """
import runpy, signal, sys
known = {*sys.modules, "__future__"}
def tell(*_):
    print(*sorted(set(sys.modules) - known))
    sys.exit()
signal.signal = tell
runpy.run_module("cocurve_lab", run_name="__main__", alter_sys=True)
"""


def test_nothing_slow_is_imported_before_the_handlers_are_set() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BEFORE]
    found = subprocess.check_output(command, text=True, env=environment).split()
    here = ["", ".base", ".base.first_signals", ".base.seams", ".extensions"]
    assert found == [f"cocurve_lab{name}" for name in here]


@pytest.mark.parametrize(
    ("number", "left"),
    [(signal.SIGINT, 1), (signal.SIGTERM, 40), (signal.SIGINT, 700)],
    ids=["ctrl-c at the first import", "sigterm among the imports", "ctrl-c among those of torch"],
)
def test_a_signal_during_the_imports_ends_a_verb_with_a_word(number: int, left: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_AN_IMPORT, str(int(number)), str(left)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 130
    assert done.stderr == (
        "cocurve: interrupted before anything was done; nothing is left behind.\n"
    )
    assert not done.stdout


class Loses:
    """An object in whose `__del__` the interrupt arrives, where Python drops it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)
        time.sleep(0.01)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupt_that_python_drops_is_raised_again(number: int) -> None:
    before = sys.unraisablehook, signal.getsignal(signal.SIGTERM)

    def lose() -> None:
        with interruptible():
            Loses(number)
            time.sleep(30)

    with pytest.raises(KeyboardInterrupt):
        lose()
    assert (sys.unraisablehook, signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
def test_an_interrupt_that_python_wraps_is_one(number: int) -> None:
    class Field:
        def __set_name__(self, *_: object) -> None:
            os.kill(os.getpid(), number)

    def wrap(how: str) -> None:
        with interruptible():
            try:
                type("Config", (), {"field": Field()})
            except RuntimeError as error:
                if how == "kept":
                    raise
                raise ValueError(how) from (error if how == "explained" else None)

    def fail(error: Exception) -> None:
        with interruptible():
            try:
                os.kill(os.getpid(), number)
            finally:
                raise error

    for how in ("kept", "explained", "hidden"):
        with pytest.raises(KeyboardInterrupt):
            wrap(how)
    for known in (cl.InputError("no such unit"), OSError("no such file")):
        with pytest.raises(type(known), match=str(known)):
            fail(known)
    with pytest.raises(KeyboardInterrupt):  # as torch, of a mode that it was about to enter
        fail(RuntimeError("trying to pop from empty mode stack"))


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_ends_a_child_and_its_children(tmp_path: Path) -> None:
    mark = f"6{os.getpid()}"
    command = ["sh", "-c", f"sleep {mark} & echo > started; sleep {mark}"]

    def stop() -> None:
        eventually((tmp_path / "started").exists, seconds=60)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    with pytest.raises(KeyboardInterrupt), interruptible():
        run_child(["env", "-C", str(tmp_path), *command])
    left = subprocess.run(["pgrep", "-f", f"sleep {mark}"], capture_output=True, check=False)
    assert not left.stdout
    assert run_child(["sh", "-c", "echo out; echo error >&2; exit 3"]).returncode == 3


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="its registers are those of x86-64")
@pytest.mark.skipif(sys.platform != "linux", reason="needs ptrace")
def test_a_verb_that_was_stopped_anywhere_can_be_repeated(tmp_path: Path) -> None:
    """One trial of each kind per verb, of long ones a signal; `helpers.verbs` can try more."""
    tests = ROOT / "tests"
    path = os.pathsep.join(map(str, (tests, ROOT, ROOT / "widgets", ROOT / "notebooks")))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "helpers.verbs", str(tmp_path / "work"), "1", "0"],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "ptrace" in done.stderr and "Operation not permitted" in done.stderr:
        pytest.skip("this container allows no ptrace")
    assert done.returncode == 0, done.stderr[-2000:]
    trials = [json.loads(line) for line in done.stdout.splitlines()]
    assert {verb for verb, *_ in trials} == set(verbs.VERBS | verbs.LONG)
    assert [trial for trial in trials if trial[3]] == []
