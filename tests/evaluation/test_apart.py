"""A program judged apart from its test: what crosses is plain, and nothing forges a pass."""

from __future__ import annotations

import textwrap
from typing import Any

import pytest

from cocurve_lab.evaluation import confinement
from cocurve_lab.evaluation.code_execution import Limits, Outcome, run_programs
from cocurve_lab.evaluation.code_execution import Tested as Program
from cocurve_lab.evaluation.task_files import humaneval, mbpp

WHY_NOT = confinement.why_not_confined()
pytestmark = pytest.mark.skipif(
    WHY_NOT is not None, reason=f"{WHY_NOT} (Debian: {confinement.INSTALL})"
)


def outcomes(programs: list[Any], seconds: float = 20) -> list[Outcome]:
    limits = Limits(seconds=seconds)
    return run_programs(
        programs, allow_code_execution=True, limits=limits, workers=2, progress=False
    )


def apart(code: str, test: str = "assert f(1) == 1") -> Program:
    return Program(textwrap.dedent(code), test, ("f",))


FORGERIES = {
    "equal to everything": """
        class Any:
            def __eq__(self, other): return True
        def f(x): return Any()
        """,
    "a number equal to everything": """
        class Any(int):
            def __eq__(self, other): return True
            __hash__ = int.__hash__
        def f(x): return Any(7)
        """,
    "a pickle that changes a type": """
        import pickle, os
        class Any:
            def __reduce__(self): return (int, (7,), None, None, None)
        class Changed:
            def __reduce__(self): return (setattr, (int, '__eq__', int))
        def f(x): return [Changed(), Any()]
        """,
    "a pickle that runs code": """
        import os
        class Runs:
            def __reduce__(self):
                return (eval, ("type('Any', (), {'__eq__': lambda *_: True})()",))
        def f(x): return Runs()
        """,
    "an answer on every handle": """
        import os, pickle
        for fd in range(64):
            for said in (b'P' + bytes(332), b'C' + bytes(332), pickle.dumps((True, 1)) * 9):
                try: os.write(fd, said)
                except OSError: pass
        def f(x): return 0
        """,
    "the record of a pass": """
        import os
        for fd in range(3, 64):
            try: os.write(fd, b'P' + bytes(332))
            except OSError: pass
        os.kill(os.getppid(), 9)
        """,
    "leaving": "import os\ndef f(x): os._exit(0)",
    "leaving at once": "import os; os._exit(0)",
    "SystemExit": "def f(x): raise SystemExit(0)",
    "no function": "g = 1",
    "ending the judge": """
        import os, signal
        def f(x):
            for one in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
                try: os.kill(os.getppid(), one)
                except OSError: pass
        """,
    "changing what the test calls": """
        import builtins
        builtins.all = lambda values: True
        def f(x): return 0
        """,
    "an interrupted iteration": "def f(x): raise StopIteration",
    "StopIteration of its own": "class StopIteration(Exception): pass\n"
    "def f(x): raise StopIteration",
    "not a value": "def f(x): return (x for x in [1])",
    "not a number": "def f(x): return float('nan')",
}


def test_no_forgery_passes_apart_and_the_rest_goes_on() -> None:
    tests = ["assert f(1) == 1", "assert all(map(f, [1]))", "assert list(map(f, [1])) == [1]"]
    right = apart("def f(x): return 1")
    programs = [apart(code, tests[0]) for code in FORGERIES.values()]
    iterated = [apart(FORGERIES[name], tests[1]) for name in FORGERIES if "teration" in name]
    found = outcomes([*programs, *iterated, right, apart(right.code, "\n".join(tests))], 6)
    passed = [name for name, one in zip(FORGERIES, found, strict=False) if one.status == "passed"]
    assert passed == []
    assert [one.status for one in found[len(programs) :]] == ["failed"] * 2 + ["passed"] * 2
    assert not any(one.forgeable for one in found)


HONEST = {
    "a Counter": ("from collections import Counter\ndef f(x): return Counter(x)", "'aab'",
                  "{'a': 2, 'b': 1}"),
    "a defaultdict": ("from collections import defaultdict as d\ndef f(x): return d(int, a=1)",
                      "0", "{'a': 1}"),
    "a named tuple": ("from collections import namedtuple as n\nP = n('P', 'x')\n"
                      "def f(x): return [P(x)]", "(1,)", "[((1,),)]"),
    "plain values": ("def f(*x, **y): return x, y",
                     "2j, {1}, frozenset([2]), b'x', None, k='\\ud800'",
                     "((2j, {1}, frozenset([2]), b'x', None), {'k': '\\ud800'})"),
    "a range": ("def f(x): return range(x)", "3", "range(3)"),
    "a state": ("n = 0\ndef f(x):\n    global n\n    n += x\n    return n", "1", "1 and f(1) == 2"),
    "a module of its own": ("import ctypes, gc\ndef f(x): return len(gc.get_objects()) > x",
                            "0", "True"),
}  # fmt: skip


def test_honest_values_cross_and_errors_are_the_programs_own() -> None:
    programs = [Program(code, f"assert f({x}) == {y}", ("f",)) for code, x, y in HONEST.values()]
    caught = "try:\n    f(1)\nexcept KeyError as error:\n    assert 'mine' in str(error)\n"
    programs.append(apart("def f(x): raise KeyError('mine')", f"{caught}else:\n    assert False"))
    found = outcomes(programs)
    assert [one.detail for one in found if one.status != "passed"] == []
    (failed,) = outcomes([apart("def f(x): raise ValueError('mine')")])
    assert (failed.status, failed.detail) == ("failed", "ValueError: mine")


def test_a_test_that_shares_objects_runs_together_and_says_so() -> None:
    code = "def f(x): return x(1)"
    shared = [apart(code, f"assert f(lambda n: n) == {n}") for n in (1, 2)]
    made = apart("def f(x): return x.y", "class A: y = 1\nassert f(A()) == 1")
    found = outcomes([*shared, made])
    assert [(one.status, one.forgeable) for one in found] == [
        ("passed", True), ("failed", True), ("passed", True),
    ]  # fmt: skip


def test_the_program_does_not_see_its_test() -> None:
    """Of the judge's memory the child has what was there before the test was read."""
    look = """
        import gc, sys
        def f(x):
            frame, seen = sys._getframe(), []
            while frame:
                seen.append(repr((frame.f_locals, frame.f_globals)))
                frame = frame.f_back
            seen.append(repr(gc.get_objects()))
            return int('-'.join(['a', 'mark']) not in ''.join(seen))
        """
    (found,) = outcomes([apart(look, "mark = 'a-mark'\nassert f(1) == 1")])
    assert found.status == "passed", found


def test_helpers_of_the_prompt_are_the_tests_own() -> None:
    row = {
        "prompt": 'def twice(x):\n    return 2 * x\n\ndef half(x):\n    """Half."""\n',
        "entry_point": "half",
        "test": "def check(candidate):\n    assert twice(candidate(6)) == 6\n",
    }
    task: Any = humaneval([row])
    replies = ["    return x // 2\n", "    return 1\n\ntwice = lambda x: 6\n"]
    found = outcomes([task.program(task.records[0], reply) for reply in replies])
    assert [one.status for one in found] == ["passed", "failed"]
    assert not any(one.forgeable for one in found)


@pytest.mark.parametrize(
    ("test", "names"),
    [
        ("assert set(f([1])) == {1}", ("f",)),
        ("assert sum(1, 2) == 3", ("sum",)),
        ("assert [f(x) for x in [1]] == [g(1)]", ("f", "g")),
        ("assert f(Node(1))", None),
        ("assert constant == 1", None),
    ],
    ids=["f", "a builtin's name", "two", "a class", "a constant"],
)
def test_a_test_of_functions_alone_is_apart(test: str, names: tuple[str, ...] | None) -> None:
    code = "def f(x): pass\ndef g(x): pass\ndef sum(a, b): pass\nclass Node: pass\nconstant = 1"
    rows = [{"task_id": n, "text": "", "code": code, "test_list": [test]} for n in (2, 3, 4, 11)]
    task: Any = mbpp(rows)
    made = task.program(task.records[0], "reply")
    assert made == (f"reply\n\n{test}\n" if names is None else ("reply", f"\n{test}", names))


FREED = """
import io, os
class R(io.RawIOBase):
  def readable(s): return True
  def readinto(s, b): return len(b)
K = []; T = None
for i in range(40):
  r = io.BufferedReader(R(), SIZE); K.append(r)
  d = r.peek(SIZE)
  for o in range(0, len(d) - 63):
    if d[o+16:o+24] == MARK and o + 64 <= len(d):
      T = d[o+32:o+64]
      break
  if T: break
if T:
  for f in range(3, 64):
    try: os.write(f, b'P' + T + bytes(300))
    except OSError: pass
  os._exit(0)
assert False
"""


def freed(length: int) -> str:
    """A program of about this length that looks for its judge's freed memory, then fails."""
    source, filling = FREED, max(0, length - len(FREED) - 30)
    for _ in range(5):
        size = len(source)
        source = FREED.replace("SIZE", str(65 + size)) + "#" * filling
        source = source.replace("MARK", f"({32 + size}).to_bytes(8, 'little')")
    return source


def test_freed_memory_gives_no_pass() -> None:
    row = {"prompt": "def f(x):\n", "entry_point": "f", "test": "def check(f):\n    assert f(1)\n"}
    task: Any = humaneval([row])
    attacks = [freed(length) for length in (100, 654, 5_000, 60_000)]
    replies = [f"    return 0\n{source}" for source in attacks]
    found = outcomes([*(task.program(row, reply) for reply in replies), *attacks])
    assert {one.status for one in found} <= {"failed", "stopped"}, found
