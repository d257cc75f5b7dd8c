"""Signals, and kills and full disks at any call: what is written is whole, and is made again."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.pretrained.smollm2 import run_child
from helpers import verbs
from helpers.problems import make_units, random_curvature
from helpers.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
SOLVE = [sys.executable, "-m", "cocurve_lab", "solve", "H.pkl", "--ratio", "0.2", "--out"]


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_ends_a_child_and_its_children(tmp_path: Path) -> None:
    mark = f"6{os.getpid()}"
    command = ["sh", "-c", f"sleep {mark} & echo > started; sleep {mark}"]

    def waits() -> bool:
        main = sys._current_frames()[threading.main_thread().ident or 0]
        return any(call.name == "communicate" for call in traceback.extract_stack(main))

    def stop() -> None:
        eventually((tmp_path / "started").exists, seconds=60)
        eventually(waits, seconds=60)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop).start()
    with pytest.raises(KeyboardInterrupt):
        run_child(["env", "-C", str(tmp_path), *command])
    left = subprocess.run(["pgrep", "-f", f"sleep {mark}"], capture_output=True, check=False)
    assert not left.stdout
    assert run_child(["sh", "-c", "echo out; echo error >&2; exit 3"]).returncode == 3


@pytest.mark.parametrize("output", ["full", "left"])
def test_an_output_that_cannot_be_written_ends_a_verb_with_1(output: str, tmp_path: Path) -> None:
    random_curvature(make_units()).save(tmp_path / "H.pkl")
    command, environment = [*SOLVE, "plan.json"], os.environ | {"PYTHONPATH": str(ROOT)}
    with (
        open("/dev/full", "w") as full,
        subprocess.Popen(
            command,
            stdout=full if output == "full" else subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment,
        ) as running,
    ):
        if running.stdout is not None:
            running.stdout.close()  # as `| head -0` does
        said = running.communicate()[1]
    assert running.returncode == 1
    assert "No space left" in said or "Broken pipe" in said
    assert said.count("\n") == 1
    assert cl.Selection.from_json((tmp_path / "plan.json").read_text()).pruned


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
