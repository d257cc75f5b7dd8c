"""Hostile programs: each is stopped, none is felt outside, and the honest ones pass."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cocurve_lab import InputError
from cocurve_lab.evaluation import code_execution, confinement
from cocurve_lab.evaluation.code_execution import Limits, Outcome, run_programs, why_not_confined

WHY_NOT = why_not_confined()
pytestmark = pytest.mark.skipif(
    WHY_NOT is not None, reason=f"{WHY_NOT} (Debian: apt-get install bubblewrap)"
)
LIMITS = Limits(seconds=1.5)
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
        "with open('note', 'w') as file:\n    file.write('x')\nassert open('note').read() == 'x'",
    ]
    found = run_programs(
        programs, allow_code_execution=True, limits=LIMITS, workers=2, progress=False
    )
    assert [outcome.status for outcome in found] == ["passed", "failed", "failed", "passed"]
    assert found[1].detail == "AssertionError: wrong sum"
    assert "SyntaxError" in found[2].detail


def test_endless_loops_and_floods_of_output_are_stopped(run: Run) -> None:
    assert run("while True: pass").status == "stopped"
    outcome = run("import sys\nwhile True:\n    sys.stdout.write('x' * 100000)")
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


@pytest.fixture
def listener() -> Iterator[tuple[int, list[object]]]:
    """A port of this machine, and what connected to it."""
    came: list[object] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def wait() -> None:
            with suppress(OSError):
                came.append(server.accept()[0])

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        yield server.getsockname()[1], came
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)
    for connection in came:
        connection.close()  # type: ignore[attr-defined]


def test_there_is_no_network(run: Run, listener: tuple[int, list[object]]) -> None:
    port, came = listener
    call = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)"
    outcome = run(call)
    assert outcome.status == "failed"
    assert "Error" in outcome.detail
    assert not came
    datagram = "import socket\nsocket.socket(2, 2).sendto(b'x', ('192.0.2.1', 53))"
    assert run(datagram).status == "failed"
    # the same call is answered outside: the test could fail
    subprocess.run([sys.executable, "-c", call], check=True)


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


def test_secrets_of_the_environment_are_not_there(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "hush")
    told = run("import os; raise RuntimeError(str(dict(os.environ)))")
    assert "hush" not in told.detail
    look = """
        import glob
        for name in glob.glob('/proc/*/environ'):
            try:
                if b'hush' in open(name, 'rb').read():
                    raise RuntimeError('found')
            except OSError:
                pass
        """
    assert run(look).detail != "RuntimeError: found"


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
