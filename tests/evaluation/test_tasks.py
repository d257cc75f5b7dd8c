"""Tasks through the real harness, against likelihoods and replies by hand; reports and sizes."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.evaluation import task_files, tasks
from cocurve_lab.evaluation.code_execution import Limits, run_programs, why_not_confined
from cocurve_lab.evaluation.confinement import refusals
from cocurve_lab.evaluation.efficiency import EfficiencyOptions, measure_efficiency
from cocurve_lab.evaluation.report import EvaluationReport
from cocurve_lab.evaluation.task_files import local_tasks, make_task, write_task_files
from cocurve_lab.evaluation.tasks import TaskOptions, evaluate_tasks
from cocurve_lab.extensions.texts.records import read_objects
from helpers.tiny_models import full_logits, tiny_model, word_tokenizer

WHY_NOT = why_not_confined()
confined = pytest.mark.skipif(WHY_NOT is not None, reason=f"{WHY_NOT}")
ASSETS = Path(__file__).resolve().parents[3] / "shared" / "assets" / "tasks"


def rows_of(count: int, seed: int = 0) -> list[list[str]]:
    generator = np.random.default_rng(seed)
    return [[f"w{n}" for n in generator.integers(90, size=9)] for _ in range(count)]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def log_likelihood(model: Any, words: list[str], scored: int) -> tuple[float, bool]:
    """Of the last words given those before, and whether each is the likeliest."""
    ids = torch.tensor([[int(word[1:]) + 2 for word in words]])
    log_p = torch.log_softmax(full_logits(model, ids)[0], dim=-1)
    where = range(len(words) - scored - 1, len(words) - 1)
    wanted = [float(log_p[t, ids[0, t + 1]]) for t in where]
    greedy = all(int(log_p[t].argmax()) == int(ids[0, t + 1]) for t in where)
    return sum(wanted), greedy


def run(model: Any, *files: Any, allow: bool = False) -> Any:
    options = TaskOptions(files=files, progress=False, batch_size=3)
    return evaluate_tasks(
        model, word_tokenizer(), "local", allow_code_execution=allow, options=options
    )


def test_multiple_choice_equals_likelihoods_by_hand(tmp_path: Path) -> None:
    model, rows = tiny_model(), rows_of(12)
    choices = [[" ".join(row[4:6]), row[6], " ".join(row[6:9])] for row in rows]
    records = [
        {"query": " ".join(row[:4]), "choices": offered, "gold": n % 3}
        for n, (row, offered) in enumerate(zip(rows, choices, strict=True))
    ]
    right = {"acc": 0, "acc_norm": 0}
    for record, row in zip(records, rows, strict=True):
        parts = [choice.split() for choice in record["choices"]]
        values = np.array([log_likelihood(model, row[:4] + part, len(part))[0] for part in parts])
        bytes_ = np.array([len(choice.encode()) for choice in record["choices"]])
        right["acc"] += int(values.argmax() == record["gold"])
        right["acc_norm"] += int((values / bytes_).argmax() == record["gold"])
    report = run(model, write(tmp_path / "three.jsonl", records))
    assert report["three"] == {name: pytest.approx(count / 12) for name, count in right.items()}
    assert report.samples == {"three": 12}
    assert report.averaged == {"three": "acc_norm"}
    assert report.errors["three"]["acc"] > 0
    assert report.versions["lm_eval"] == version("lm_eval")


def test_schema_cloze_and_generation_equal_those_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_files, "_LOCAL_TOKENS", 2)
    model, rows = tiny_model(), rows_of(10, seed=1)
    contexts = [[" ".join(row[:3]), " ".join(row[3:6])] for row in rows]
    schemas = [
        {"context_options": pair, "continuation": " ".join(row[6:]), "gold": 1}
        for pair, row in zip(contexts, rows, strict=True)
    ]
    better = [
        log_likelihood(model, row[3:], 3)[0] > log_likelihood(model, row[:3] + row[6:], 3)[0]
        for row in rows
    ]
    greedy = []
    for row in rows:
        ids = torch.tensor([[int(word[1:]) + 2 for word in row[:5]]])
        for _ in range(2):
            ids = torch.cat([ids, full_logits(model, ids)[:, -1:].argmax(-1)], dim=1)
        greedy.append([f"w{int(token) - 2}" for token in ids[0, 5:]])
    # every second continuation is what the model itself would write
    words = {f"w{n}" for n in range(90)}
    told = [
        mine if n % 2 and words.issuperset(mine) else row[5:7]
        for n, (row, mine) in enumerate(zip(rows, greedy, strict=True))
    ]
    clozes = [
        {"context": " ".join(row[:5]), "continuation": " ".join(end)}
        for row, end in zip(rows, told, strict=True)
    ]
    asked = [{"prompt": c["context"], "answer": c["continuation"]} for c in clozes]
    found = [log_likelihood(model, row[:5] + end, 2) for row, end in zip(rows, told, strict=True)]
    report = run(
        model,
        write(tmp_path / "schema.jsonl", schemas),
        write(tmp_path / "cloze.jsonl.gz", clozes),
        write(tmp_path / "written.jsonl", asked),
    )
    assert report["schema"]["acc"] == pytest.approx(np.mean(better))
    assert report["cloze"]["acc"] == pytest.approx(np.mean([is_greedy for _, is_greedy in found]))
    assert report["written"]["exact_match"] == report["cloze"]["acc"] > 0
    parts = [np.mean(better), report["cloze"]["acc"], report["written"]["exact_match"]]
    assert report.average == pytest.approx(np.mean(parts))


def test_the_demo_suite_is_the_models_card() -> None:
    model, tokenizer = cl.load_model("demo")
    before = tokenizer.padding_side, model.generation_config
    report = evaluate_tasks(model, tokenizer, limit=6, options=TaskOptions(progress=False))
    families = ["arithmetic", "code", "commonsense", "knowledge", "stories"]
    assert list(report.averaged) == families
    asked = cl.demo_questions(6)
    for family in families:
        mine = [
            question.is_right(cl.continue_text(model, tokenizer, question.prompt, 16))
            for question in asked
            if question.capability == family
        ]
        assert report[family] == {"exact_match": np.mean(mine)}
        assert report.samples[family] == 6
    assert {"acc", "acc_norm"} == report["stories_choice"].keys()
    assert 1 < report["texts"]["byte_perplexity"] < 2
    assert (tokenizer.padding_side, model.generation_config) == before
    assert report.settings["limit"] == 6
    assert not any(report.settings["truncated"].values())


def test_a_streamed_model_has_the_scores_of_the_loaded_one() -> None:
    options = TaskOptions(tasks=("knowledge", "knowledge_choice"), progress=False)
    dense, same = (
        evaluate_tasks(
            *cl.load_model("demo", device="cpu", stream=stream), limit=4, options=options
        )
        for stream in (False, True)
    )
    assert dense.values == same.values
    assert dense["knowledge"]["exact_match"] == 1


def test_long_prompts_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_files, "_LOCAL_TOKENS", 3)
    rows = [{"prompt": " ".join(["w1"] * n), "answer": "w2"} for n in (5, 60, 63)]
    report = run(tiny_model(), write(tmp_path / "long.jsonl", rows))
    assert report.settings["truncated"] == {"long": 1}  # 61 and fewer tokens leave room for 3


# pass@1 -----------------------------------------------------------------------------------------


def code_rows() -> list[dict[str, Any]]:
    test = "def check(f):\n    assert f(2) == 4"
    return [{"prompt": "def double(x):\n", "test": test, "entry_point": "double"}] * 3


@confined
def test_pass_at_1_is_the_share_of_programs_that_run() -> None:
    task = make_task("humaneval", code_rows())
    replies = ["    return 2 * x", "    return x", "    import sys; sys.exit(0)"]
    samples = [{"doc_id": n, "resps": [[reply]]} for n, reply in reversed(list(enumerate(replies)))]
    scores = EvaluationReport("local", {})
    results = {"samples": {"humaneval": samples}}
    tasks.execute_code(results, task, TaskOptions(progress=False), scores)
    assert scores.values == {"humaneval": {"pass@1": pytest.approx(1 / 3)}}
    assert scores.errors["humaneval"]["pass@1"] == pytest.approx(1 / 3)


def test_without_bubblewrap_no_program_runs_and_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write(tmp_path / "human.jsonl", code_rows()), write(tmp_path / "one.jsonl", [CHOICE])]
    monkeypatch.setenv("PATH", "/nowhere")
    report = run(tiny_model(), *files, allow=True)
    assert list(report.values) == ["one"]
    assert "bwrap" in report.failed["human"]


@confined
def test_code_goes_through_the_harness(tmp_path: Path) -> None:
    report = run(tiny_model(), write(tmp_path / "human.jsonl", code_rows()), allow=True)
    assert report["human"] == {"pass@1": 0.0}
    assert report.samples["human"] == 3


def test_mbpp_asks_with_three_examples(tmp_path: Path) -> None:
    from lm_eval.tasks import TaskManager

    known = {"text": "Task 4.", "code": "f = 4", "test_list": ["assert f == 4"], "task_id": 4}
    new = known | {"text": "Task 11.", "test_setup_code": "g = 1", "task_id": 11}
    task = make_task("mbpp", [known, new])
    assert [record["task_id"] for record in task.records] == [11]
    write_task_files([task], tmp_path)
    (made,) = TaskManager(None, str(tmp_path), False).load("mbpp")["tasks"].values()
    made.set_fewshot_seed(1)
    asked = made.fewshot_context(next(iter(made.test_docs())), 3)
    assert asked.count("[BEGIN]\n") == 4
    assert asked.count("[DONE]\n\n") == 3
    assert asked.startswith("You are an expert Python programmer, and here is your task: Write a ")
    assert asked.endswith("Task 11. Your code should pass these tests:\n\nassert f == 4\n[BEGIN]\n")
    assert task.program is not None
    assert task.program(task.records[0], "f = 4") == "f = 4\ng = 1\nassert f == 4\n"


CHOICE = {"query": "q", "choices": ["a", "b"], "gold": 0}


# Real data --------------------------------------------------------------------------------------

real = pytest.mark.skipif(not ASSETS.is_dir(), reason=f"{ASSETS} is not on this machine")


@real
def test_real_files_are_understood() -> None:
    known = {"piqa": 1838, "openbook_qa": 500, "arc_easy": 2376, "winogrande": 1267}
    found = {task.name: task for task in local_tasks([ASSETS])}
    assert {name: len(found[name].records) for name in known} == known
    assert len(found["HumanEval"].records) == 164
    assert len(found["mbpp"].records) == 500
    assert found["winogrande"].average == "acc"


@real
@confined
@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "kind", "solution"),
    [("HumanEval.jsonl.gz", "humaneval", "canonical_solution"), ("mbpp.jsonl", "mbpp", "code")],
)
def test_canonical_solutions_pass(file: str, kind: str, solution: str) -> None:
    rows = read_objects(ASSETS / file)
    task = make_task(kind, rows)
    assert task.program is not None
    if kind == "mbpp":
        rows = [row for row in rows if 11 <= row["task_id"] <= 510]
    programs = [
        task.program(record, row[solution]) for record, row in zip(task.records, rows, strict=True)
    ]
    limits = Limits(seconds=60)
    found = run_programs(programs, allow_code_execution=True, progress=False, limits=limits)
    assert [outcome.detail for outcome in found if outcome.status != "passed"] == []


# Reports ------------------------------------------------------------------------------------------


REPORT = EvaluationReport(
    suite="local",
    values={"a": {"acc": 0.5, "acc_norm": 0.25}, "b": {"exact_match": 0.75}},
    errors={"a": {"acc": 0.1, "acc_norm": 0.3}, "b": {"exact_match": 0.4}},
    samples={"a": 4, "b": 8},
    averaged={"a": "acc_norm", "b": "exact_match"},
    settings={"limit": None, "notes": ["2 of a lost their start"]},
    versions={"lm_eval": "0.4.13"},
)


def test_average_and_rows() -> None:
    assert REPORT.average == 0.5
    rows = REPORT.rows()
    assert [(row["task"], row["metric"], row["averaged"]) for row in rows] == [
        ("a", "acc", False),
        ("a", "acc_norm", True),
        ("b", "exact_match", True),
    ]
    assert rows[1]["value_error"] == 0.3
    assert rows[2]["samples"] == 8
    assert REPORT["a"]["acc"] == 0.5


# Sizes against counting by hand, and speeds with their quartiles ----------------------------------


SHORT = EfficiencyOptions(batch_sizes=(1, 2), new_tokens=2, repeats=2, progress=False)


def test_sizes_are_those_counted_by_hand() -> None:
    model = tiny_model(layers=2)
    units = cl.enumerate_units(model, 4)
    plan = cl.Selection.from_pruned(units, [0, 2, 3])  # one of two KV heads, two FFN groups
    pruned = cl.prune(model, plan)
    found = measure_efficiency(model, pruned, SHORT)
    gone = units[0].cost + units[2].cost + units[3].cost
    rows = {(row["quantity"], row["batch_size"]): row for row in found.rows}
    assert rows["parameters", None]["dense"] - rows["parameters", None]["pruned"] == gone
    assert rows["weights", None]["pruned"] == 4 * rows["parameters", None]["pruned"]
    # two layers, two KV heads of 8, keys and values, four bytes; one head of one layer is gone
    assert rows["KV cache per token", None]["dense"] == 2 * 2 * 8 * 2 * 4
    assert rows["KV cache per token", None]["ratio"] == 0.75
    for batch in (1, 2):
        for quantity in ("prefill", "decode"):
            row = rows[quantity, batch]
            assert row["dense"] > 0
            assert row["low"] <= row["ratio"] <= row["high"]
            assert row["repeats"] == 2


def test_half_precision_takes_half_the_bytes() -> None:
    model = tiny_model(layers=1, dtype=torch.bfloat16)
    rows = measure_efficiency(model, model, SHORT).rows
    assert rows[1]["dense"] == 2 * rows[0]["dense"]
    assert rows[1]["ratio"] == 1


# Bad input of the room ----------------------------------------------------------------------------


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
    with pytest.raises(cl.MismatchError):
        efficiency(tiny_model(layers=1, dtype=torch.float64))
