"""Tasks as the harness reads them: a YAML beside a JSONL of records.

One builder per kind of task makes a `TaskFile` of the settings in data/tasks/KIND.yaml;
`write_task_files` writes it; `local_tasks` makes tasks of a user's own JSONL files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..base.atomic import write_atomically
from ..base.errors import InputError
from ..base.files import MOST_JSON, read_regular
from ..extensions.texts.records import read_objects
from ..models.identity import demo_folder

Record = dict[str, Any]
Program = Callable[[Record, str], str]  # (record, reply) -> Python source, its tests at the end


class HarnessTask(NamedTuple):
    """One of the harness's own tasks: its name, its folder among the tasks, its hub dataset."""

    task: str
    folder: str
    dataset: str


@dataclass(frozen=True)
class TaskFile:
    """One task for the harness.

    Attributes:
        name: the task's name in the report and, unless `own` has another, for the harness.
        config: the harness's settings for it; empty for one of the harness's own tasks.
        records: the samples, written beside the settings; empty for one of the harness's own tasks.
        average: the metric that enters the suite's average; None where it does not.
        program: for code, makes the program to execute from a record and a reply; pass@1 then
            replaces the harness's metric.
        own: the harness's own task that this stands for; None for one with a config.
    """

    name: str
    config: Record
    records: tuple[Record, ...] = ()
    average: str | None = None
    program: Program | None = None
    own: HarnessTask | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise InputError(f"a task is named {self.name!r}. Use letters, digits, _, - and dots.")


# Kinds of tasks -----------------------------------------------------------------------------------
def _config(kind: str, **changes: Any) -> Record:
    """Read the harness's settings of a kind of task from data/tasks/KIND.yaml, with changes."""
    import yaml

    file = demo_folder().parent / "tasks" / f"{kind}.yaml"
    settings: Record = yaml.safe_load(read_regular(file, MOST_JSON))
    return settings | changes


def _replies(until: Sequence[str], max_new_tokens: int) -> Record:
    return {"until": list(until), "do_sample": False, "max_gen_toks": max_new_tokens}


def multiple_choice(name: str, records: Iterable[Record]) -> TaskFile:
    """Make a task of records with query, choices and gold: the likeliest choice after the query."""
    return TaskFile(name, _config("multiple_choice"), tuple(records), "acc_norm")


def schema(name: str, records: Iterable[Record]) -> TaskFile:
    """Make a task of records with context_options, continuation and gold."""
    return TaskFile(name, _config("schema"), tuple(records), "acc")


def cloze(name: str, records: Iterable[Record]) -> TaskFile:
    """Make a task of records with context and continuation."""
    # the harness puts a space before choices, but not before a single continuation
    asked = (row | {"continuation": " " + row["continuation"]} for row in records)
    return TaskFile(name, _config("cloze"), tuple(asked), "acc")


def generation(
    name: str, records: Iterable[Record], until: Sequence[str], max_new_tokens: int
) -> TaskFile:
    """Make a task of records with prompt and answer, scored by exact match of greedy replies."""
    config = _config("generation", generation_kwargs=_replies(until, max_new_tokens))
    return TaskFile(name, config, tuple(records), "exact_match")


def code(
    name: str, records: Iterable[Record], program: Program, until: Sequence[str], most: int
) -> TaskFile:
    """Make a task of records with prompt; pass@1 is the share of programs that run to their end."""
    config = _config("code", generation_kwargs=_replies(until, most))
    return TaskFile(name, config, tuple(records), "pass@1", program)


def rolling_text(name: str, records: Iterable[Record]) -> TaskFile:
    """Make a task of records with text: the likelihood of whole documents, per word and byte."""
    return TaskFile(name, _config("rolling_text"), tuple(records))


_HUMANEVAL_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
_SHOTS, _TESTED = (2, 3, 4), range(11, 511)  # task ids of MBPP: its prompt and its test split


def humaneval(rows: Iterable[Record], name: str = "humaneval") -> TaskFile:
    """Make HumanEval, zero-shot, with the stops and length of the harness's own task (pass@1)."""
    kept = [_only(row, "humaneval") for row in rows]

    def program(record: Record, reply: str) -> str:
        test = f"{record['test']}\ncheck({record['entry_point']})"
        return f"{record['prompt']}{reply}\n{test}\n"

    return code(name, kept, program, _HUMANEVAL_STOPS, 1024)


def mbpp(rows: Iterable[Record], name: str = "mbpp") -> TaskFile:
    """Make MBPP with three examples between [BEGIN] and [DONE] (appendix "Evaluation Protocol")."""
    by_number = {row["task_id"]: row for row in rows}
    tested = [row for number, row in by_number.items() if number in _TESTED]
    if not tested or any(number not in by_number for number in _SHOTS):
        raise InputError(
            f"{name} has {len(by_number)} tasks; the three-shot protocol takes tasks "
            f"{', '.join(map(str, _SHOTS))} as examples and scores {_TESTED[0]} to {_TESTED[-1]}. "
            "Give the file that has both."
        )
    shots = (by_number[number] for number in _SHOTS)
    examples = "".join(f"{_ask_mbpp(row)}{row['code']}\n[DONE]\n\n" for row in shots)
    asked = [
        {
            "prompt": examples + _ask_mbpp(row),
            "test": "\n".join([row.get("test_setup_code") or "", *row["test_list"]]),
        }
        for row in tested
    ]

    def program(record: Record, reply: str) -> str:
        return f"{reply}\n{record['test']}\n"

    return code(name, asked, program, ("[DONE]",), 256)


def _ask_mbpp(row: Record) -> str:
    tests = "\n".join(row["test_list"][:3])
    return (
        f"You are an expert Python programmer, and here is your task: {row['text']} Your code "
        f"should pass these tests:\n\n{tests}\n[BEGIN]\n"
    )


# Tasks asked as the authors' release asks them ----------------------------------------------------
def mmlu(rows: Iterable[Record], name: str = "mmlu") -> TaskFile:
    """Make MMLU, zero-shot: the likeliest text of an option, which the prompt does not show.

    The rows are records with subject, question, choices and answer, the number of the right choice.
    """
    asked = (
        {
            "query": f"Subject: {row['subject']}\nQuestion: {row['question']}\nAnswer:",
            "choices": row["choices"],
            "gold": row["answer"],
        }
        for row in rows
    )
    return multiple_choice(name, asked)


def mmlu_letters(rows: Iterable[Record], name: str = "mmlu_letters") -> TaskFile:
    """Make MMLU as the harness asks it, zero-shot: options in the prompt, their letters scored.

    The prompt is that of the harness's 57 tasks `mmlu_SUBJECT`. Their mean by size is the mean
    over all questions, so one task serves for all. The rows are those of `mmlu`.
    """

    def query(row: Record) -> str:
        subject = row["subject"].replace("_", " ")
        head = f"The following are multiple choice questions (with answers) about {subject}."
        options = (f"{a}. {b}" for a, b in zip("ABCD", row["choices"], strict=True))
        return "\n".join((head, "", row["question"].strip(), *options, "Answer:"))

    letters = list("ABCD")
    asked = ({"query": query(row), "choices": letters, "gold": row["answer"]} for row in rows)
    return multiple_choice(name, asked)


# commas separate thousands; they are ignored where numbers are compared
_NUMBER = r"-?\d[\d,]*(?:\.\d+)?"


def gsm8k(rows: Iterable[Record], name: str = "gsm8k") -> TaskFile:
    """Make GSM8K, zero-shot: the last number of a reply of 256 tokens is the answer's.

    The rows are records with question and answer, whose last number is the solution.
    """
    asked = (
        {
            "prompt": f"Question: {row['question']}\nLet's solve this step by step.\n",
            "answer": re.findall(_NUMBER, row["answer"].split("####")[-1])[-1],
        }
        for row in rows
    )
    return TaskFile(name, _config("gsm8k"), tuple(asked), "exact_match")


# Files for the harness ----------------------------------------------------------------------------
def write_task_files(tasks: Iterable[TaskFile], folder: str | os.PathLike[str]) -> list[Path]:
    """Write NAME.yaml and NAME.jsonl of each task into a folder; return the YAML files.

    `lm_eval --include_path FOLDER --tasks NAME` runs one; paths in the YAML are absolute. Code
    tasks are not scored there: the harness would execute code without our confinement.
    """
    written = []
    folder = Path(folder).resolve()
    for task in tasks:
        if not task.config:
            continue  # one of the harness's own
        data = folder / f"{task.name}.jsonl"
        lines = (json.dumps(record, ensure_ascii=False) for record in task.records)
        write_atomically(data, ("\n".join(lines) + "\n").encode())
        source = {
            "task": task.name,
            "dataset_path": "json",
            # its cache lies beside it, so nothing is left in the user's own
            "dataset_kwargs": {
                "data_files": {"test": str(data)},
                "cache_dir": str(folder / "cache"),
            },
            "test_split": "test",
            "num_fewshot": 0,
            "metadata": {"version": 1.0},
        }
        path = folder / f"{task.name}.yaml"
        # JSON is YAML; ASCII escapes of characters beyond 16 bits are not
        content = json.dumps(source | task.config, indent=1, ensure_ascii=False)
        write_atomically(path, content.encode())
        written.append(path)
    return written


_LOCAL_TOKENS = 64  # the most of a generated reply to a question of a file

# Local files --------------------------------------------------------------------------------------
# kind -> the fields a record must have, with their types; the first kind that fits is taken
_FIELDS: dict[str, dict[str, type]] = {
    "multiple_choice": {"query": str, "choices": list, "gold": int},
    "schema": {"context_options": list, "continuation": str, "gold": int},
    "cloze": {"context": str, "continuation": str},
    "generation": {"prompt": str, "answer": str},
    "humaneval": {"prompt": str, "test": str, "entry_point": str},
    "mbpp": {"text": str, "code": str, "test_list": list, "task_id": int},
}


def local_tasks(files: Iterable[str | os.PathLike[str]]) -> list[TaskFile]:
    """Make tasks of JSONL files (also .gz); a folder stands for those inside.

    The kind of a task is told by the fields of the first record: "multiple_choice" (query, choices,
    gold), "schema" (context_options, continuation, gold), "cloze" (context, continuation),
    "generation" (prompt, answer; a reply ends with its line, after 64 tokens at most), "humaneval"
    (prompt, test, entry_point), "mbpp" (text, code, test_list, task_id; asked with tasks 2, 3 and 4
    as examples, scored on 11 to 510).
    """
    paths: list[Path] = []
    for path in map(Path, files):
        inside = sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")])
        paths += inside if path.is_dir() else [path]
    if not paths:
        raise InputError("there is no JSONL file to evaluate on. Give files, or a folder of them.")
    found = {path.name.removesuffix(".gz").removesuffix(".jsonl"): path for path in paths}
    if len(found) < len(paths):
        raise InputError(
            f"two files have one name among {', '.join(found)}. Give one of them another name."
        )
    return [_task(name, path) for name, path in found.items()]


def _task(name: str, path: Path) -> TaskFile:
    rows = read_objects(path)
    kind = _kind_of(rows[0], path)
    for number, row in enumerate(rows, start=1):
        _check(row, kind, f"{path}, record {number}")
    if kind == "humaneval":
        return humaneval(rows, name)
    if kind == "mbpp":
        return mbpp(rows, name)
    rows = [_only(row, kind) for row in rows]
    if kind == "generation":
        return generation(name, rows, ("\n",), _LOCAL_TOKENS)
    make = {"multiple_choice": multiple_choice, "schema": schema, "cloze": cloze}[kind]
    return make(name, rows)


def _kind_of(row: Record, path: Path) -> str:
    for kind, fields in _FIELDS.items():
        if fields.keys() <= row.keys():
            return kind
    known = "; ".join(f"{kind}: {', '.join(fields)}" for kind, fields in _FIELDS.items())
    raise InputError(
        f"{path} has fields {', '.join(row)}, which are of no known kind. Use the fields of one: "
        f"{known}."
    )


def _check(row: Record, kind: str, where: str) -> None:
    for field, wanted in _FIELDS[kind].items():
        value: Any = row.get(field)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise InputError(
                f"{where}: {field} is {value!r:.60}; {kind} needs a {wanted.__name__}. Correct it."
            )
    options = row.get("choices" if kind == "multiple_choice" else "context_options")
    if kind in ("multiple_choice", "schema"):
        if not all(isinstance(option, str) and option for option in options or [""]):
            raise InputError(f"{where}: a choice is empty or no text. Give strings.")
        if not 0 <= row["gold"] < len(options or []):
            raise InputError(
                f"{where}: gold is {row['gold']}, of {len(options or [])} choices. Count from 0."
            )


def _only(row: Record, kind: str) -> Record:
    return {field: row[field] for field in _FIELDS[kind]}
