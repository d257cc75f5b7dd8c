"""Escapes, each tried as the user of the tests and, by root, as an ordinary one too.

They run straight in bubblewrap, with the limits, the user and the filter of a program.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from cocurve_lab import InputError
from cocurve_lab.evaluation.code_execution import RUNNER, run_programs, why_not_confined
from cocurve_lab.evaluation.confinement import REFUSED, refusals

WHY_NOT = why_not_confined()
pytestmark = pytest.mark.skipif(
    WHY_NOT is not None, reason=f"{WHY_NOT} (Debian: apt-get install bubblewrap)"
)
ORDINARY = 65534
ROOT = Path(__file__).resolve().parents[2]
PACKAGES = str(Path(psutil.__file__).parents[1])
SEE = f"import sys; sys.path[:0] = [{str(ROOT)!r}]; sys.path.append({PACKAGES!r});"
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


def users() -> list[Any]:
    if os.name != "posix" or os.geteuid() != 0:
        return ["this user"]
    return ["root", "ordinary"]


@pytest.fixture(params=users())
def user(request: pytest.FixtureRequest) -> str:
    """Who starts bubblewrap."""
    who: str = request.param
    if who == "ordinary" and ordinary_python() is None:
        pytest.skip("no Python that an ordinary user may run with this checkout and its packages")
    return who


@cache
def ordinary_python() -> str | None:
    """This interpreter, or the system's of the same release where a home folder hides ours."""
    check = f"{SEE} import psutil, tqdm, cocurve_lab.evaluation.runner; print(sys.version_info[:2])"
    for candidate in (sys.executable, "/usr/bin/python3"):
        with suppress(OSError):
            done = as_ordinary([candidate, "-c", check])
            if done.stdout.decode().strip() == str(sys.version_info[:2]):
                return candidate
    return None


def as_ordinary(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command,
        user=ORDINARY,
        group=ORDINARY,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        **options,
    )


def by(who: str, script: str, *args: str, given: bytes = b"") -> bytes:
    """Run a script of ours, which imports cocurve_lab, as a user; its output."""
    ordinary = who == "ordinary"
    command = [(ordinary_python() or "") if ordinary else sys.executable, "-c", f"{SEE}\n{script}"]
    run: Callable[..., Any] = as_ordinary if ordinary else subprocess.run
    options = {} if ordinary else {"capture_output": True}
    done = run([*command, *args], input=given, timeout=900, **options)
    assert done.returncode == 0, done.stderr.decode()
    return bytes(done.stdout)


def straight(who: str, body: str) -> str:
    """Run Python in bubblewrap with the limits, the user and the filter, but without the runner."""
    own = """
import os, subprocess, tempfile
from cocurve_lab.evaluation import code_execution as e, confinement as c
become = "" if os.geteuid() else "runner.become(1 << 30)"
body = sys.stdin.read().replace("{become}", become)
with tempfile.TemporaryFile() as calls:
    calls.write(c.refusals())
    calls.seek(0)
    subprocess.run([*c.bwrap(calls.fileno(), 1 << 24, e.RUNNER), "-c", body],
                   pass_fds=[calls.fileno()], timeout=300, stdin=subprocess.DEVNULL)
"""
    source = ESCAPE.format(
        folder=str(RUNNER.parent),
        become="{become}",
        prepare=PREPARE,
        body=textwrap.indent(textwrap.dedent(body).strip(), "    "),
    )
    return by(who, own, given=source.encode()).decode().strip()


def outcomes(who: str, programs: list[str], **options: Any) -> list[list[str]]:
    """[status, detail] of every program, run by this user."""
    script = """
import json
from cocurve_lab.evaluation.code_execution import Limits, run_programs
programs, options = json.load(sys.stdin)
found = run_programs(programs, allow_code_execution=True, progress=False,
                     limits=Limits(seconds=60), **options)
print(json.dumps([[o.status, o.detail] for o in found]))
"""
    sent = json.dumps([[textwrap.dedent(p) for p in programs], options]).encode()
    found: list[list[str]] = json.loads(by(who, script, given=sent))
    return found


@pytest.fixture
def listener(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A Unix socket that everyone may connect to."""
    path = f"/tmp/cocurve-{os.getpid()}.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        os.chmod(path, 0o777)
        server.listen()
        yield path
    with suppress(OSError):
        os.unlink(path)


def number(name: str) -> int:
    import platform

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
def test_an_escape_is_held_by_the_kernel(user: str, body: str) -> None:
    assert straight(user, body).startswith("held:")


def test_what_is_allowed_is_not_held(user: str) -> None:
    """The escapes fail because they are refused, not because nothing works."""
    assert straight(user, "open('x', 'w').write('x'); socket.socketpair()") == "ESCAPED"
    told = straight(user, "print(os.getuid(), os.getgroups(), sorted(os.listdir('/')))")
    assert told.endswith("ESCAPED")


def test_no_capability_is_left(user: str) -> None:
    body = """
        header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        assert libc.capget(header, data) == 0
        # effective and permitted; nothing brings one back, because there are no new privileges
        print(data[0], data[1], data[3], data[4], libc.prctl(39, 0, 0, 0, 0))
        """
    assert straight(user, body).splitlines()[0] == "0 0 0 0 1"


def test_a_socket_of_the_host_is_not_there(user: str, listener: str) -> None:
    connect = f"socket.socket(socket.AF_UNIX).connect({listener!r})"
    assert straight(user, connect).startswith("held:")
    subprocess.run([sys.executable, "-c", f"import socket; {connect}"], check=True)  # it listens


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


def test_what_leaves_or_breaks_does_not_pass_and_the_rest_goes_on(user: str) -> None:
    wrong = [WRONG + body + TEST for body in FAILURES.values()]
    programs = [program for one in wrong for program in (one, "x = 1")]
    found = outcomes(user, programs, workers=2)
    passed = {name for name, (status, _) in zip(FAILURES, found[::2], strict=True)
              if status == "passed"}  # fmt: skip
    assert not passed, found[::2]
    assert [status for status, _ in found[1::2]] == ["passed"] * len(wrong)
    assert all(len(detail.encode()) <= 1000 for _, detail in found)


def test_a_program_inherits_no_handle(user: str) -> None:
    """It has /dev/null and, for the runner, the file that takes the token; that file is empty."""
    body = """
        import os
        found = []
        for handle in range(64):
            try: found.append(os.fstat(handle).st_size)
            except OSError: pass
        raise ValueError(found)
        """
    ((_, detail),) = outcomes(user, [body])
    assert detail == "ValueError: [0, 0, 0, 0, 0]"


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


def test_honest_programs_pass_with_several_workers(user: str) -> None:
    programs = [body for body in HONEST.values() for _ in range(3)]
    found = outcomes(user, programs, workers=4)
    failed = [
        (name, outcome)
        for name, outcome in zip([n for n in HONEST for _ in range(3)], found, strict=True)
        if outcome[0] != "passed"
    ]
    assert not failed


def test_memory_of_all_processes_together_is_bounded(user: str) -> None:
    body = """
        import os, time
        for _ in range(3):
            if os.fork() == 0:
                break
        held = bytearray(os.urandom(1 << 20)) * 700
        time.sleep(30)
        """
    ((status, detail),) = outcomes(user, [body])
    assert (status, "together held more" in detail) == ("stopped", True)


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


def test_without_bubblewrap_pass_at_1_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError):
        run_programs(["x = 1"], allow_code_execution=True)
