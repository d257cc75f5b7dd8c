"""Tasks from JSONL files that a user points at: read and checked, never copied for good."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from .task_files import Record, TaskFile, cloze, code, generation, multiple_choice, schema

# kind -> the fields a record must have, with their types; the first kind that fits is taken
_FIELDS: dict[str, dict[str, type]] = {
    "multiple_choice": {"query": str, "choices": list, "gold": int},
    "schema": {"context_options": list, "continuation": str, "gold": int},
    "cloze": {"context": str, "continuation": str},
    "generation": {"prompt": str, "answer": str},
    "humaneval": {"prompt": str, "test": str, "entry_point": str},
    "mbpp": {"text": str, "code": str, "test_list": list, "task_id": int},
}
_HUMANEVAL_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
_SHOTS, _TESTED = (2, 3, 4), range(11, 511)  # task ids of MBPP: its prompt and its test split


@dataclass(frozen=True)
class LocalTask:
    """A JSONL file (also .gz) and how it is asked.

    Kinds, told by the fields of the first record unless given: "multiple_choice" (query, choices,
    gold), "schema" (context_options, continuation, gold), "cloze" (context, continuation),
    "generation" (prompt, answer), "humaneval" (prompt, test, entry_point), "mbpp" (text, code,
    test_list, task_id; asked with tasks 2, 3 and 4 as examples, scored on 11 to 510).

    Attributes:
        path: the file.
        name: in the report; None takes the file's.
        kind: see above.
        suffix: put after a query or prompt, such as "\\nAnswer:".
        until: where a generated reply ends; code has its own.
        max_new_tokens: of a generated reply; code has its own.
    """

    path: str | os.PathLike[str]
    name: str | None = None
    kind: str | None = None
    suffix: str = ""
    until: tuple[str, ...] = ("\n",)
    max_new_tokens: int = 64

    def __post_init__(self) -> None:
        if self.kind is not None and self.kind not in _FIELDS:
            raise InputError(f"kind is {self.kind!r}; there are {', '.join(_FIELDS)}.")
        if not self.until or self.max_new_tokens < 1:
            raise InputError("a reply needs at least one token and one string that ends it.")


def local_tasks(files: Iterable[LocalTask | str | os.PathLike[str]]) -> list[TaskFile]:
    """Tasks of some files; a folder stands for its .jsonl and .jsonl.gz files.

    Raises:
        InputError: no file, an unreadable one, a record of another kind, or two of one name.
    """
    found: list[TaskFile] = []
    for entry in files:
        given = entry if isinstance(entry, LocalTask) else LocalTask(entry)
        path = Path(given.path)
        if path.is_dir():
            inside = sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")])
            found += [_task(LocalTask(file)) for file in inside]
        else:
            found.append(_task(given))
    names = [task.name for task in found]
    if not names:
        raise InputError("there is no JSONL file to evaluate on. Give files, or a folder of them.")
    if len(set(names)) < len(names):
        raise InputError(f"two tasks have one name among {', '.join(names)}. Give LocalTask names.")
    return found


def _task(given: LocalTask) -> TaskFile:
    path = Path(given.path)
    name = given.name or path.name.removesuffix(".gz").removesuffix(".jsonl")
    rows = read_records(path)
    kind = given.kind or _kind_of(rows[0], path)
    for number, row in enumerate(rows, start=1):
        _check(row, kind, f"{path}, record {number}")
    if kind == "multiple_choice":
        return multiple_choice(name, [_with_suffix(row, "query", given) for row in rows])
    if kind == "schema":
        return schema(name, [_only(row, kind) for row in rows])
    if kind == "cloze":
        return cloze(name, [_with_suffix(row, "context", given) for row in rows])
    if kind == "generation":
        asked = [_with_suffix(row, "prompt", given) for row in rows]
        return generation(name, asked, given.until, given.max_new_tokens)
    return humaneval(rows, name) if kind == "humaneval" else mbpp(rows, name)


def humaneval(rows: Iterable[Record], name: str = "humaneval") -> TaskFile:
    """pass@1 of HumanEval, zero-shot, with the stops and length of the harness's own task."""
    kept = [_only(row, "humaneval") for row in rows]

    def program(record: Record, reply: str) -> str:
        check = f"check({record['entry_point']})"
        return f"{record['prompt']}{reply}\n{record['test']}\n{check}\n"

    return code(name, kept, program, _HUMANEVAL_STOPS, 1024)


def mbpp(rows: Iterable[Record], name: str = "mbpp") -> TaskFile:
    """pass@1 of MBPP with three examples between [BEGIN] and [DONE] (App. "Evaluation Protocol").

    Raises:
        InputError: the examples (tasks 2, 3, 4) or the test split (11 to 510) are not in the rows.
    """
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
    return code(name, asked, lambda row, reply: f"{reply}\n{row['test']}\n", ("[DONE]",), 256)


def _ask_mbpp(row: Record) -> str:
    tests = "\n".join(row["test_list"][:3])
    return (
        f"You are an expert Python programmer, and here is your task: {row['text']} Your code "
        f"should pass these tests:\n\n{tests}\n[BEGIN]\n"
    )


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """The JSON objects of a .jsonl or .jsonl.gz file.

    Raises:
        InputError: no such file, no record in it, or a line that is no JSON object.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
        content = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}). Give a JSONL file in UTF-8.") from None
    rows = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path}, line {number} is not JSON ({error}). Correct it.") from None
        if not isinstance(row, dict):
            raise InputError(f"{path}, line {number} is not a JSON object. Correct it.")
        rows.append(row)
    if not rows:
        raise InputError(f"{path} holds no record. Give a file with one JSON object per line.")
    return rows


def _kind_of(row: Record, path: Path) -> str:
    for kind, fields in _FIELDS.items():
        if fields.keys() <= row.keys():
            return kind
    known = "; ".join(f"{kind}: {', '.join(fields)}" for kind, fields in _FIELDS.items())
    raise InputError(f"{path} has fields {', '.join(row)}, of no known kind. Known are {known}.")


def _check(row: Record, kind: str, where: str) -> None:
    for field, wanted in _FIELDS[kind].items():
        value: Any = row.get(field)
        if not isinstance(value, wanted) or isinstance(value, bool):
            raise InputError(
                f"{where}: {field} is {value!r:.60}; {kind} needs a {wanted.__name__}."
            )
    options = row.get("choices" if kind == "multiple_choice" else "context_options")
    if kind in ("multiple_choice", "schema"):
        if not all(isinstance(option, str) and option for option in options or [""]):
            raise InputError(f"{where}: a choice is empty or no text; give strings.")
        if not 0 <= row["gold"] < len(options or []):
            raise InputError(f"{where}: gold is {row['gold']}, of {len(options or [])} choices.")


def _only(row: Record, kind: str) -> Record:
    return {field: row[field] for field in _FIELDS[kind]}


def _with_suffix(row: Record, field: str, given: LocalTask) -> Record:
    kinds = {"query": "multiple_choice", "context": "cloze", "prompt": "generation"}
    kept = _only(row, kinds[field])
    return kept | {field: kept[field] + given.suffix}
