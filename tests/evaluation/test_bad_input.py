"""Bad input of the room: each is refused, and the message names the value."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cocurve_lab as cl
from cocurve_lab.evaluation.code_execution import Limits, run_programs
from cocurve_lab.evaluation.confinement import refusals
from cocurve_lab.evaluation.efficiency import EfficiencyOptions, measure_efficiency
from cocurve_lab.evaluation.task_files import local_tasks, make_task
from cocurve_lab.evaluation.tasks import TaskOptions, evaluate_tasks
from cocurve_lab.extensions.texts.records import read_objects
from helpers.tiny_models import tiny_model, word_tokenizer

CHOICE = {"query": "q", "choices": ["a", "b"], "gold": 0}
HUMAN = {"prompt": "def f(x):\n", "test": "pass", "entry_point": "f"}
LONG = CHOICE | {"choices": ["b", "a " * 65]}
WRITTEN = {"prompt": "w1", "answer": "w2"}
MBPP = {"text": "", "code": "", "test_list": [], "task_id": 4}


def file(folder: Path, content: str | bytes, name: str = "bad.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def records(folder: Path, *rows: dict[str, Any]) -> Path:
    return file(folder, "".join(json.dumps(row) + "\n" for row in rows))


def evaluate(suite: str = "demo", limit: int | None = None, **options: Any) -> Any:
    return evaluate_tasks(
        tiny_model(layers=1), word_tokenizer(), suite, limit, options=TaskOptions(**options)
    )


def efficiency(other: Any = None, **options: Any) -> Any:
    model = tiny_model(layers=1)
    return measure_efficiency(model, other or model, EfficiencyOptions(**options))


BAD: list[tuple[Callable[[Path], Any], str]] = [
    # records and files
    (lambda at: local_tasks([records(at, CHOICE, CHOICE | {"gold": 2})]), "record 2: gold is 2"),
    (lambda at: local_tasks([records(at, CHOICE | {"gold": -1})]), "gold is -1"),
    (lambda at: local_tasks([records(at, CHOICE | {"gold": True})]), "gold is True"),
    (lambda at: local_tasks([records(at, CHOICE | {"choices": ["a", ""]})]), "record 1"),
    (lambda at: local_tasks([records(at, CHOICE | {"choices": []})]), "record 1"),
    (lambda at: local_tasks([records(at, CHOICE, {"query": "q"})]), "record 2: choices is None"),
    (lambda at: local_tasks([records(at, {"question": "?"})]), "question"),
    (lambda at: local_tasks([records(at)]), "bad.jsonl"),
    (lambda at: local_tasks([records(at, CHOICE)] * 2), "bad"),
    (lambda at: local_tasks([at]), "JSONL"),  # an empty folder
    (lambda at: read_objects(file(at, '{"a": 1}\nnot json\n')), "line 2"),
    (lambda at: read_objects(file(at, "[1]\n")), "record 1"),
    (lambda at: read_objects(file(at, gzip.compress(b"{}" * 999)[:-9], "a.jsonl.gz")), "a.jsonl"),
    (lambda at: read_objects(at / "absent.jsonl"), "absent.jsonl"),
    (lambda at: make_task("rolling_text", [{"text": "w1"}], "../x"), "'../x'"),
    (lambda at: make_task("mbpp", [MBPP]), "11 to 510"),
    # suites
    (lambda at: evaluate("piqa"), "'piqa'"),
    (lambda at: evaluate(limit=0), "limit is 0"),
    (lambda at: evaluate("local"), "files"),
    (lambda at: evaluate(tasks=("sums",)), "'sums'"),
    (lambda at: evaluate("local", files=[records(at, HUMAN)]), "allow_code_execution=True"),
    (lambda at: evaluate("paper"), "allow_code_execution=True"),
    (lambda at: evaluate("demo", data=at), "demo"),
    (lambda at: evaluate("paper", data=at / "absent"), "absent"),
    (
        lambda at: evaluate("local", files=[records(at, WRITTEN, WRITTEN | {"prompt": " "})]),
        "bad, record 2",
    ),
    (lambda at: evaluate("local", files=[records(at, CHOICE | {"query": ""})]), "bad, record 1"),
    (lambda at: evaluate("local", files=[records(at, CHOICE, LONG)]), "65 tokens"),
    # programs
    (lambda at: Limits(seconds=0), "seconds is 0"),
    (lambda at: refusals("riscv64"), "riscv64"),
    *(
        (lambda at, no=no: run_programs(["pass"], allow_code_execution=no), f"{no!r}")
        for no in (False, None, 1, "yes")
    ),
    # efficiency
    (lambda at: efficiency(prompt_tokens=63, new_tokens=2), "64"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_bad_input_is_named(case: int, tmp_path: Path) -> None:
    call, named = BAD[case]
    with pytest.raises(cl.InputError, match=re.escape(named)):
        call(tmp_path)


def test_models_of_two_dtypes_are_not_compared() -> None:
    import torch

    with pytest.raises(cl.MismatchError):
        efficiency(tiny_model(layers=1, dtype=torch.float64))
