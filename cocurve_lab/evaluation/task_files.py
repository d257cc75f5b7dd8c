"""Tasks as the harness reads them: a YAML beside a JSONL of records.

`make_task` joins a kind, data/tasks/KIND.yaml, with records; `write_task_files` writes both for
the harness; `local_tasks` makes tasks of a user's own JSONL files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.atomic import write_atomically
from ..base.errors import InputError
from ..extensions.texts.records import read_objects
from ..models.identity import demo_folder

Record = dict[str, Any]
Program = Callable[[Record, str], str]  # (record, reply) -> Python source, its tests at the end


@dataclass(frozen=True)
class TaskFile:
    """One task for the harness.

    Attributes:
        name: the task's name in the report and, unless `own` has another, for the harness.
        config: the harness's settings for it: the YAML file to include, and changes.
        records: the samples, written beside the settings.
        average: the metric that enters the suite's average; None where it does not.
        program: for code, makes the program to execute from a record and a reply; pass@1 then
            replaces the harness's metric.
        dataset: for one of the harness's own tasks, its dataset on the hub.
    """

    name: str
    config: Record
    records: tuple[Record, ...] = ()
    average: str | None = None
    program: Program | None = None
    dataset: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise InputError(f"a task is named {self.name!r}. Use letters, digits, _, - and dots.")


# Kinds of tasks -----------------------------------------------------------------------------------
# kind -> the fields of a record, with their types; a user's file is of the first kind that fits
FIELDS: dict[str, dict[str, type]] = {
    "multiple_choice": {"query": str, "choices": list, "gold": int},
    "schema": {"context_options": list, "continuation": str, "gold": int},
    "cloze": {"context": str, "continuation": str},
    "generation": {"prompt": str, "answer": str},
    "humaneval": {"prompt": str, "test": str, "entry_point": str},
    "mbpp": {"text": str, "code": str, "test_list": list, "task_id": int},
}
AVERAGED = {  # kind -> the metric that enters an average
    "multiple_choice": "acc_norm",
    "schema": "acc",
    "cloze": "acc",
    "generation": "exact_match",
    "humaneval": "pass@1",
    "mbpp": "pass@1",
}
PROGRAMS: dict[str, Program] = {
    "humaneval": lambda record, reply: (
        f"{record['prompt']}{reply}\n{record['test']}\ncheck({record['entry_point']})\n"
    ),
    "mbpp": lambda record, reply: "\n".join(
        [reply, record["test_setup_code"], *record["test_list"], ""]
    ),
}
_TESTED = range(11, 511)  # task ids of MBPP's test split; data/tasks/mbpp.yaml has its examples


def make_task(
    kind: str, rows: Iterable[Record], name: str | None = None, **changes: Any
) -> TaskFile:
    """Make a task of rows: the settings of data/tasks/KIND.yaml, with changes.

    Args:
        kind: a file of data/tasks. "mmlu", "mmlu_letters" and "gsm8k" take the rows of these
            datasets, "rolling_text" those with a text; `FIELDS` has the others' fields.
        rows: the records.
        name: the task's name; None takes the kind.
        changes: settings of the harness.
    """
    settings: Record = {"include": str(demo_folder().parent / "tasks" / f"{kind}.yaml")} | changes
    if kind == "mbpp":
        rows = [
            row | {"test_setup_code": row.get("test_setup_code") or ""}
            for row in rows
            if row["task_id"] in _TESTED
        ]
    elif kind in FIELDS:
        rows = ({field: row[field] for field in FIELDS[kind]} for row in rows)
    records = tuple(rows)
    if not records:
        raise InputError(
            f"{name or kind} has no record to score (of MBPP tasks {_TESTED[0]} to {_TESTED[-1]} "
            "are scored). Give a file that has some."
        )
    return TaskFile(name or kind, settings, records, AVERAGED.get(kind), PROGRAMS.get(kind))


def replies(until: Sequence[str], most: int) -> Record:
    """Return the settings of greedy replies that end at one of these texts or after most tokens."""
    return {"until": list(until), "do_sample": False, "max_gen_toks": most}


# Files for the harness ----------------------------------------------------------------------------
def write_task_files(tasks: Iterable[TaskFile], folder: str | os.PathLike[str]) -> None:
    """Write NAME.yaml and NAME.jsonl of each task into a folder.

    `lm_eval --include_path FOLDER --tasks NAME` runs one; paths in the YAML are absolute. Code
    tasks are not scored there: the harness would execute code without our confinement.
    """
    folder = Path(folder).resolve()
    for task in tasks:
        settings: Record = {"task": task.name} | task.config
        if not task.dataset:
            data = folder / f"{task.name}.jsonl"
            lines = (json.dumps(record, ensure_ascii=False) for record in task.records)
            write_atomically(data, ("\n".join(lines) + "\n").encode())
            # its cache lies beside it, so nothing is left in the user's own
            files = {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")}
            settings |= {"dataset_path": "json", "dataset_kwargs": files}
        # JSON is YAML; ASCII escapes of characters beyond 16 bits are not
        text = json.dumps(settings, indent=1, ensure_ascii=False)
        write_atomically(folder / f"{task.name}.yaml", text.encode())


_LOCAL_TOKENS = 64  # the most of a generated reply to a question of a file


# Local files --------------------------------------------------------------------------------------
def local_tasks(files: Iterable[str | os.PathLike[str]]) -> list[TaskFile]:
    """Make tasks of JSONL files (also .gz); a folder stands for those inside.

    The kind of a task is told by the fields of the first record: "multiple_choice" (query, choices,
    gold), "schema" (context_options, continuation, gold), "cloze" (context, continuation),
    "generation" (prompt, answer; a reply ends with its line, after 64 tokens at most), "humaneval"
    (prompt, test, entry_point), "mbpp" (text, code, test_list, task_id; asked with three
    examples, scored on tasks 11 to 510).
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
    kinds = [kind for kind, fields in FIELDS.items() if fields.keys() <= rows[0].keys()]
    if not kinds:
        known = "; ".join(f"{kind}: {', '.join(fields)}" for kind, fields in FIELDS.items())
        raise InputError(
            f"{path} has fields {', '.join(rows[0])}, which are of no known kind. Use the fields "
            f"of one: {known}."
        )
    for number, row in enumerate(rows, start=1):
        _check(row, kinds[0], f"{path}, record {number}")
    ends = {"generation_kwargs": replies(("\n",), _LOCAL_TOKENS)}
    return make_task(kinds[0], rows, name, **(ends if kinds[0] == "generation" else {}))


def _check(row: Record, kind: str, where: str) -> None:
    for field, wanted in FIELDS[kind].items():
        value: Any = row.get(field)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise InputError(
                f"{where}: {field} is {value!r:.60}; {kind} needs a {wanted.__name__}. Correct it."
            )
    if kind in ("multiple_choice", "schema"):
        options = row["choices" if kind == "multiple_choice" else "context_options"]
        if not options or not all(isinstance(option, str) and option for option in options):
            raise InputError(f"{where}: a choice is empty or no text. Give strings.")
        if not 0 <= row["gold"] < len(options):
            raise InputError(
                f"{where}: gold is {row['gold']}, of {len(options)} choices. Count from 0."
            )
