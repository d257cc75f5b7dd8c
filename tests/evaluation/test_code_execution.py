"""Hostile programs: each is stopped, none is felt outside, and the honest ones pass."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cocurve_lab import InputError
from cocurve_lab.evaluation import code_execution, confinement
from cocurve_lab.evaluation.code_execution import Limits, Outcome, run_programs, why_not_confined

WHY_NOT = why_not_confined()
pytestmark = pytest.mark.skipif(
    WHY_NOT is not None, reason=f"{WHY_NOT} (Debian: apt-get install bubblewrap)"
)
LIMITS = Limits(seconds=60)  # of programs that end by themselves, on a busy machine too
SHORT = Limits(seconds=1.5)  # of endless ones
Run = Callable[..., Outcome]


@pytest.fixture
def run() -> Run:
    """Run one program, confined by bubblewrap."""

    def run_one(program: str, limits: Limits = LIMITS) -> Outcome:
        programs = [textwrap.dedent(program)]
        return run_programs(programs, allow_code_execution=True, limits=limits, progress=False)[0]

    return run_one


def test_honest_programs_and_their_order() -> None:
    programs = [
        "import math, re, json\nassert math.gcd(12, 18) == 6",
        "assert 1 + 1 == 3, 'wrong sum'",
        "def f(:",
        "import os\nassert set(os.environ) <= {'PWD', 'MALLOC_ARENA_MAX', 'LC_CTYPE'}, os.environ",
        "with open('note', 'w') as file:\n    file.write('x')\nassert open('note').read() == 'x'",
    ]
    found = run_programs(
        programs, allow_code_execution=True, limits=LIMITS, workers=2, progress=False
    )
    assert [outcome.status for outcome in found] == [
        "passed",
        "failed",
        "failed",
        "passed",
        "passed",
    ]
    assert found[1].detail == "AssertionError: wrong sum"
    assert "SyntaxError" in found[2].detail


def test_endless_loops_and_floods_of_output_are_stopped(run: Run) -> None:
    assert run("while True: pass", SHORT).status == "stopped"
    outcome = run("import sys\nwhile True:\n    sys.stdout.write('x' * 100000)", SHORT)
    assert (outcome.status, "1.5 s" in outcome.detail) == ("stopped", True)
    # every handle it finds, the verdict's among them
    flood = "import os\nfor fd in range(500):\n    try: os.write(fd, b'x' * 10**7)\n"
    assert run(flood + "    except OSError: pass\n").status == "failed"


def test_memory_and_files_are_bounded(run: Run) -> None:
    assert "MemoryError" in run("held = bytearray(4 << 30)").detail
    assert "File too large" in run("open('big', 'wb').write(b'x' * (8 << 20))").detail
    assert run("held = bytearray(1 << 20)").status == "passed"


@pytest.mark.skipif(sys.platform != "linux", reason="the count of processes is Linux's")
def test_a_fork_bomb_is_bounded_and_leaves_nothing(run: Run, place: Path) -> None:
    outcome = run(
        """
        import os, time
        born = 0
        while True:
            try:
                child = os.fork()
            except OSError:
                raise RuntimeError(f"stopped after {born}")
            if child == 0:
                time.sleep(1234.5)
            born += 1
        """
    )
    assert "stopped after" in outcome.detail
    assert int(outcome.detail.split()[-1]) <= Limits().processes
    assert not left_over(place)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_leaves_its_group_dies_too(run: Run, place: Path) -> None:
    escape = """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(1234.5)
            os._exit(0)
        time.sleep(0.2)
        """
    assert run(escape).status in ("passed", "stopped")
    assert not left_over(place)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sandbox of its own, told from others of this machine by its command line."""
    shutil.copy(code_execution.RUNNER, tmp_path)
    monkeypatch.setattr(code_execution, "RUNNER", tmp_path / "runner.py")
    return tmp_path


def left_over(place: Path) -> list[str]:
    """Processes of this sandbox that still live after the second that the kernel may take."""
    deadline = time.monotonic() + 1
    while (found := living(place)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def living(place: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0] if line else "Z"
        except OSError:
            continue
        if bytes(place) in line and state != "Z":
            found.append(entry.name)
    return found


def test_files_elsewhere_are_out_of_reach(run: Run, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("kept")
    os.chmod(tmp_path, 0o777)
    os.chmod(precious, 0o666)  # permissions are not what protects it
    for program in (
        f"open({str(precious)!r}, 'w').write('lost')",
        f"import os; os.remove({str(precious)!r})",
        f"import os; os.rename({str(precious)!r}, 'mine')",
        f"import os; os.truncate({str(precious)!r}, 0)",
        f"import os; os.symlink({str(precious)!r}, 'link'); open('link', 'w').write('lost')",
        f"open({str(tmp_path / 'new')!r}, 'w')",
    ):
        assert run(program).status == "failed", program
    assert precious.read_text() == "kept"
    assert os.listdir(tmp_path) == ["precious"]


def test_its_folder_is_gone_afterwards(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(code_execution.tempfile, "tempdir", str(tmp_path))
    assert run("import os\nos.mkdir('a')\nopen('a/b', 'w').close()").status == "passed"
    assert not os.listdir(tmp_path)


def test_a_sandbox_that_cannot_run_anything_says_so(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError):
        run("pass", Limits(memory_bytes=1 << 20))
    monkeypatch.setattr(confinement, "readable", list)
    with pytest.raises(InputError):
        run("pass")
