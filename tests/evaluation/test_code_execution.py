"""Hostile programs: each is held by the kernel or stopped, none is felt outside; honest ones pass.

Escapes run straight in bubblewrap, with the limits, the user and the filter of a program.
"""

from __future__ import annotations

import errno
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import textwrap
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from cocurve_lab import InputError
from cocurve_lab.evaluation import code_execution, confinement
from cocurve_lab.evaluation.code_execution import (
    RUNNER,
    Limits,
    Outcome,
    run_programs,
    why_not_confined,
)
from cocurve_lab.evaluation.confinement import REFUSED, bwrap, refusals
from helpers.waiting import eventually

WHY_NOT = why_not_confined()
pytestmark = pytest.mark.skipif(
    WHY_NOT is not None, reason=f"{WHY_NOT} (Debian: apt-get install bubblewrap)"
)
ROOT = Path(__file__).resolve().parents[2]
LIMITS = Limits(seconds=60)  # of programs that end by themselves, on a busy machine too
SHORT = Limits(seconds=1.5)  # of endless ones
PREPARE = """
import ctypes, os, resource, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    found = libc.syscall(number, *args)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
"""
ESCAPE = """
import sys
sys.path.insert(0, {folder!r})
import runner
runner.limit(5, 1 << 30, 1 << 20, 9)
{become}
{prepare}
try:
{body}
except (OSError, ValueError) as error:
    print("held:", error)
else:
    print("ESCAPED")
"""


def run_all(programs: list[str], limits: Limits = LIMITS) -> list[Outcome]:
    whole = [textwrap.dedent(program) for program in programs]
    return run_programs(whole, allow_code_execution=True, limits=limits, progress=False)


def run(program: str, limits: Limits = LIMITS) -> Outcome:
    return run_all([program], limits)[0]


def straight(body: str) -> str:
    """Run Python in bubblewrap with the limits, the user and the filter, but without the runner."""
    source = ESCAPE.format(
        folder=str(RUNNER.parent),
        become="" if os.geteuid() else "runner.become(1 << 30)",
        prepare=PREPARE,
        body=textwrap.indent(textwrap.dedent(body).strip(), "    "),
    )
    with tempfile.TemporaryFile() as calls:
        calls.write(refusals())
        calls.seek(0)
        done = subprocess.run(
            [*bwrap(calls.fileno(), 1 << 24, RUNNER), "-c", source],
            pass_fds=[calls.fileno()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=300,
        )
    return done.stdout.decode().strip()


def as_ordinary(*command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(sys.path)
    return subprocess.run(
        command,
        user=65534,
        group=65534,
        extra_groups=[],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=900,
    )


def ordinary_python() -> str:
    """This interpreter, or the system's of the same release where a home folder hides ours."""
    check = "import sys, pytest, cocurve_lab.evaluation.runner; print(*sys.version_info[:2])"
    for candidate in (sys.executable, "/usr/bin/python3"):
        with suppress(OSError):
            if as_ordinary(candidate, "-c", check).stdout.split() == sys.version.split(".")[:2]:
                return candidate
    pytest.skip("no Python that an ordinary user may run with this checkout and its packages")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="not root")
def test_an_ordinary_user_is_confined_too() -> None:
    """Root and other users set up bubblewrap differently, so these tests run as both."""
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = as_ordinary(ordinary_python(), *command)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


def number(name: str) -> int:
    value = REFUSED[name][0 if platform.machine() == "x86_64" else 1]
    return -1 if value is None else value


ESCAPES = {
    "a Unix socket": "socket.socket(socket.AF_UNIX).connect('/tmp/any')",
    "an abstract Unix socket": "socket.socket(socket.AF_UNIX).connect(b'\\0any')",
    "a TCP socket": "socket.socket().connect(('127.0.0.1', 1))",
    "a netlink socket": "socket.socket(16, 3, 0)",
    "a raw socket": "socket.socket(2, 3, 1)",
    "a datagram pair": "socket.socketpair(type=socket.SOCK_DGRAM)",
    "the session keyring": f"call({number('keyctl')}, 0, -3, 0)",
    "a new key": f"call({number('add_key')}, b'user', b'k', b'v', 1, -3)",
    "shared memory": f"call({number('shmget')}, 0, 4096, 0o1777)",
    "semaphores": f"call({number('semget')}, 0, 1, 0o1777)",
    "a message queue": f"call({number('msgget')}, 0, 0o1777)",
    "memory as a file": "os.memfd_create('x')",
    "a user namespace": f"call({number('unshare')}, 0x10000000)",
    "a mount namespace": f"call({number('unshare')}, 0x00020000)",
    "another's namespace": f"call({number('setns')}, 0, 0)",
    "clone with a namespace": "call(56 if os.uname().machine == 'x86_64' else 220, "
    "0x10000000 | 17, 0, 0, 0, 0)",
    "clone3": "call(435, bytes(88), 88)",
    "a mount": f"call({number('mount')}, b'none', b'/tmp', b'tmpfs', 0, 0)",
    "an unmount": f"call({number('umount2')}, b'/tmp', 2)",
    "another root": "os.chroot('/tmp')",
    "a file by its handle": f"call({number('open_by_handle_at')}, -100, bytes(32), 0)",
    "tracing": f"call({number('ptrace')}, 0, 0, 0, 0)",
    "another's memory": f"call({number('process_vm_readv')}, 1, 0, 0, 0, 0, 0)",
    "io_uring": f"call({number('io_uring_setup')}, 1, bytes(120))",
    "BPF": f"call({number('bpf')}, 0, bytes(128), 128)",
    "perf": f"call({number('perf_event_open')}, bytes(128), 0, -1, -1, 0)",
    "a file of the host": "open('/etc/passwd').read()",
    "writing a file of the repository": f"open({str(ROOT / 'README.md')!r}, 'r+')",
    "a file of the repository": f"open({str(ROOT / 'README.md')!r})",
    "/proc": "open('/proc/1/environ').read()",
    "/sys": "os.listdir('/sys')",
    "writing beside the tmpfs": "open('/new', 'w')",
    "writing into the interpreter": "open(os.__file__, 'a')",
    "writing among the packages": "open(os.__file__[:-5] + 'site-packages/x', 'w')",
    "a device": "os.mknod('/tmp/disk', 0o60666, os.makedev(8, 0))",
    "becoming root": "os.setuid(0) if os.getuid() else None; os.chown('/tmp', 0, 0)",
    "root's file rights": "os.chmod('/usr/lib', 0o777)",
    "higher limits": "resource.setrlimit(resource.RLIMIT_NPROC, (999, 999))",
    "the system's clock": "time.clock_settime(0, 1)",
    "the host's name": "socket.sethostname('mine')",
    "killing outside": f"os.kill({os.getpid()}, 0)",
    "killing everything": "os.kill(-1, 0) if os.getpid() > 2 else os.kill(99999, 0)",
    "filling the tmpfs": "[open(str(n), 'wb').write(bytes(1 << 20)) for n in range(40)]",
    "one large file": "open('big', 'wb').write(bytes(2 << 20))",
    "many open files": "kept = [open('/dev/null') for _ in range(100)]",
}


@pytest.mark.parametrize("body", ESCAPES.values(), ids=ESCAPES)
def test_an_escape_is_held_by_the_kernel(body: str) -> None:
    assert straight(body).startswith("held:")


def test_what_is_allowed_is_not_held() -> None:
    """The escapes fail because they are refused, not because nothing works."""
    allowed = "open('x', 'w').write('x'); socket.socketpair(); os.listdir('/'), os.getgroups()"
    assert straight(allowed) == "ESCAPED"


def test_no_capability_is_left() -> None:
    body = """
        header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capget(header, data) == 0
        # effective and permitted; nothing brings one back, because there are no new privileges
        print(data[0], data[1], data[3], data[4], libc.prctl(39, 0, 0, 0, 0))
        """
    assert straight(body).splitlines()[0] == "0 0 0 0 1"


WRONG = "def f(x):\n    return 0\n"
TEST = "\nassert f(1) == 1\n"
HANDLES = (
    "import os\nfor fd in range(3, 64):\n    try: os.write(fd, %s)\n    except OSError: pass\n"
)
FAILURES = {
    "leaving": "import os; os._exit(0)",
    "leaving politely": "import sys; sys.exit(0)",
    "SystemExit without a code": "raise SystemExit",
    "an interrupt of its own": "raise KeyboardInterrupt",
    "leaving at exit": "import atexit, os; atexit.register(os._exit, 0); raise SystemExit(0)",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM); os._exit(0)",
    "a crash": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV); os._exit(0)",
    "a child that says it": "import os\nif os.fork(): os._exit(0)\nraise SystemExit",
    "a guess on every handle": HANDLES % "b'0' * 32" + "os._exit(0)",
    "a flood on every handle": HANDLES % "b'0' * 10**7" + "os._exit(0)",
    "a guess after an error": HANDLES % "b'0' * 32" + "raise ValueError",
    "a finaliser": "class A:\n    def __del__(self):\n        import os; os._exit(0)\n"
    "a = A()\ndel a",
    "an error with a hostile text": "class E(Exception):\n"
    "    def __str__(self): raise self\nraise E",
    "an error of a gigabyte": "raise ValueError('P' * 10**8)",
    "an error that is not text": "raise ValueError('\\ud800' * 9 + '\\0' * 400)",
    "deep folders": "import os\nfor i in range(3000):\n"
    "    os.mkdir('d'); os.chdir('d')\nos._exit(0)",
    "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\ndef g(): g()\ng()",
    "deep source": "(" * 100_000,
    "a zero in the source": "x = 1\0",
}


def test_what_leaves_or_breaks_does_not_pass_and_the_rest_goes_on() -> None:
    wrong = [WRONG + body + TEST for body in FAILURES.values()]
    found = run_all([program for one in wrong for program in (one, "x = 1")])
    assert {outcome.status for outcome in found[1::2]} == {"passed"}
    ends = dict(zip(FAILURES, found[::2], strict=True))
    assert not [name for name, outcome in ends.items() if outcome.status == "passed"]
    assert all(len(outcome.detail.encode()) <= 1000 for outcome in found)
    assert run("assert 1 + 1 == 3, 'wrong sum'").detail == "AssertionError: wrong sum"
    assert "SyntaxError" in run("def f(:").detail


def test_a_program_inherits_no_handle() -> None:
    """It has /dev/null and, for the runner, the file that takes the token; that file is empty."""
    body = """
        import os
        found = []
        for handle in range(64):
            try: found.append(os.fstat(handle).st_size)
            except OSError: pass
        raise ValueError(found)
        """
    assert run(body).detail == "ValueError: [0, 0, 0, 0, 0]"


HONEST = {
    "ClassVar": """
        from dataclasses import dataclass, field, fields, KW_ONLY
        from typing import ClassVar, get_type_hints
        @dataclass
        class A:
            x: int
            _: KW_ONLY
            count: ClassVar[int] = 3
            y: list = field(default_factory=list)
        assert [f.name for f in fields(A)] == ["x", "y"] and A(1, y=[2]).count == 3
        assert get_type_hints(A)["x"] is int and A.__annotations__["x"] is int
        """,
    "pickle": """
        import pickle
        class A:
            def __init__(self): self.x = 1
        assert pickle.loads(pickle.dumps(A())).x == 1 and A.__module__ == "__main__"
        """,
    "doctest": '''
        import doctest
        def f(x):
            """
            >>> f(1)
            2
            """
            return x + 1
        found = doctest.testmod()
        assert (found.attempted, found.failed) == (1, 0)
        ''',
    "modules": "import math, re, json\nassert math.gcd(12, 18) == 6",
    "environment": "import os\n"
    "assert set(os.environ) <= {'PWD', 'MALLOC_ARENA_MAX', 'LC_CTYPE'}, os.environ",
    "memory": "held = bytearray(1 << 20)",
    "names": "assert __name__ == '__main__' and 'main' not in globals() and 'os' not in globals()",
    "threads": """
        import threading
        from concurrent.futures import ThreadPoolExecutor
        gate = threading.Barrier(5)
        with ThreadPoolExecutor(5) as pool:
            assert sum(pool.map(lambda n: gate.wait(10) * 0 + n, range(5))) == 10
        """,
    "processes": """
        import multiprocessing
        with multiprocessing.get_context("fork").Pool(2) as pool:
            assert pool.map(abs, [-1, 2]) == [1, 2]
        """,
    "asyncio": "import asyncio\nasync def f(): return 5\nassert asyncio.run(f()) == 5",
    "files": "import tempfile\nwith tempfile.TemporaryFile() as f: f.write(b'x' * 100_000)",
    "tracing": "import sys\nsys.settrace(None)",
    "ctypes": "import ctypes\nassert ctypes.sizeof(ctypes.c_int) == 4",
    "its end": "import sys\ntry: sys.exit()\nexcept SystemExit: pass",
    "output": "print('x' * 10**7)",
    "input": "import sys\nassert sys.stdin.read() == '' and sys.argv == ['']",
}


@pytest.mark.parametrize("body", HONEST.values(), ids=HONEST)
def test_honest_programs_pass(body: str) -> None:
    assert run(body) == Outcome("passed", "")


def test_time_memory_and_output_are_bounded() -> None:
    assert run("while True: pass", SHORT).status == "stopped"
    outcome = run("import sys\nwhile True:\n    sys.stdout.write('x' * 100000)", SHORT)
    assert (outcome.status, "1.5 s" in outcome.detail) == ("stopped", True)
    assert "MemoryError" in run("held = bytearray(4 << 30)").detail
    together = run(
        """
        import os, time
        for _ in range(3):
            if os.fork() == 0:
                break
        held = bytearray(os.urandom(1 << 20)) * 700
        time.sleep(30)
        """
    )
    assert (together.status, "together held more" in together.detail) == ("stopped", True)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sandbox of its own, told from others of this machine by its command line."""
    shutil.copy(code_execution.RUNNER, tmp_path)
    monkeypatch.setattr(code_execution, "RUNNER", tmp_path / "runner.py")
    return tmp_path


def living(place: Path) -> list[psutil.Process]:
    """Processes of this sandbox that still live."""
    return [
        process
        for process in psutil.process_iter(["cmdline", "status"])
        if str(place / "runner.py") in (process.info["cmdline"] or [])
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="the count of processes is Linux's")
def test_a_fork_bomb_is_bounded_and_leaves_nothing(place: Path) -> None:
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
    eventually(lambda: living(place), lambda found: not found, 1)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_process_that_leaves_its_group_dies_too(place: Path) -> None:
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
    eventually(lambda: living(place), lambda found: not found, 1)


def test_a_sandbox_that_cannot_run_anything_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError):
        run("pass", Limits(memory_bytes=1 << 20))
    monkeypatch.setattr(confinement, "readable", list)
    with pytest.raises(InputError):
        run("pass")


def decide(code: bytes, architecture: int, number: int, *args: int) -> int:
    """Run a filter as the kernel does, for the few instructions that it uses."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *args, *[0] * (6 - len(args)))
    place, held = 0, 0
    while True:
        operation, yes, no, value = struct.unpack_from("=HBBI", code, 8 * place)
        place += 1
        if operation == 0x06:  # return
            return int(value)
        if operation == 0x20:  # load
            (held,) = struct.unpack_from("=I", data, value)
        elif operation == 0x54:  # and
            held &= value
        else:
            tests = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}
            place += yes if tests[operation] else no


@pytest.mark.parametrize(
    ("machine", "architecture", "calls"),
    [
        ("x86_64", 0xC000003E, {"read": 0, "clone": 56, "clone3": 435, "pair": 53}),
        ("aarch64", 0xC00000B7, {"read": 63, "clone": 220, "clone3": 435, "pair": 199}),
    ],
)
def test_the_filter_refuses_what_it_should_and_no_more(
    machine: str, architecture: int, calls: dict[str, int]
) -> None:
    code, allowed, refused = refusals(machine), 0x7FFF0000, 0x00050001
    assert decide(code, architecture, calls["read"]) == allowed
    assert decide(code, architecture, calls["clone"], 0x3D0F00) == allowed  # a thread
    assert decide(code, architecture, calls["clone"], 17) == allowed  # a process
    for namespace in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x40000000):
        assert decide(code, architecture, calls["clone"], 17 | namespace) == refused
    assert decide(code, architecture, calls["clone3"]) == 0x00050000 | errno.ENOSYS
    assert decide(code, architecture, calls["pair"], 1, 1 | 0o2000000) == allowed
    for kind in (2, 2 | 0o2000000, 5):
        assert decide(code, architecture, calls["pair"], 1, kind) == refused
    assert decide(code, 0x40000003, calls["read"]) == 0x80000000  # 32-bit x86
    for name, numbers in REFUSED.items():
        number = numbers[machine == "aarch64"]
        assert number is None or decide(code, architecture, number) == refused, name
    if machine == "x86_64":
        assert decide(code, architecture, 0x40000000 | 41) == 0x80000000  # x32


HEADERS = [
    Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    Path("/usr/include/asm-generic/unistd.h"),
]


@pytest.mark.skipif(not all(h.exists() for h in HEADERS), reason="no kernel headers (libc6-dev)")
def test_numbers_are_those_of_the_kernels_headers() -> None:
    for column, header in enumerate(HEADERS):
        text = header.read_text()
        for name, numbers in REFUSED.items():
            found = re.search(rf"#define __NR_{name}\s+(\d+)", text)
            if numbers[column] is not None and found:
                assert int(found[1]) == numbers[column], name
