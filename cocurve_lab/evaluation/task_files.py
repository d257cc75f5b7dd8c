"""A task as the files the harness reads: a YAML beside a JSONL of records."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..storage import write_atomically

Record = dict[str, Any]
Program = Callable[[Record, str], str]  # (record, reply) -> Python source


@dataclass(frozen=True)
class TaskFile:
    """One task for the harness.

    Attributes:
        name: of the task, in the report and for the harness.
        config: the harness's settings for it; empty for a task the harness has itself.
        records: the samples, written beside the settings; empty for a task the harness has itself.
        average: the metric that enters the suite's average; None where it does not.
        program: for code, what is executed for a record and a reply; it replaces the harness's
            metric by pass@1.
    """

    name: str
    config: Record
    records: tuple[Record, ...] = ()
    average: str | None = None
    program: Program | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.-]+", self.name):
            raise InputError(f"a task is named {self.name!r}; use letters, digits, _, - and dots.")


def multiple_choice(name: str, records: Iterable[Record], delimiter: str = " ") -> TaskFile:
    """Records with query, choices and gold: which choice is likeliest after the query.

    acc compares log-likelihoods, acc_norm those divided by the choice's length in bytes.
    """
    config = {
        "output_type": "multiple_choice",
        "doc_to_text": "query",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": delimiter,
        "metric_list": _means("acc", "acc_norm"),
    }
    return TaskFile(name, config, tuple(records), "acc_norm")


def schema(name: str, records: Iterable[Record], delimiter: str = " ") -> TaskFile:
    """Records with context_options, continuation and gold: after which context it is likeliest."""
    config = {
        "output_type": "multiple_choice",
        "doc_to_text": "gold",
        "doc_to_choice": "context_options",
        "doc_to_target": "continuation",
        "target_delimiter": delimiter,
        "metric_list": _means("acc"),
    }
    return TaskFile(name, config, tuple(records), "acc")


def cloze(name: str, records: Iterable[Record], delimiter: str = " ") -> TaskFile:
    """Records with context and continuation: acc is the share that greedy decoding would write."""
    config = {
        "output_type": "loglikelihood",
        "doc_to_text": "context",
        "doc_to_target": "continuation",
        "metric_list": _means("acc"),
    }
    # the harness puts its delimiter before choices, but not before a single continuation
    asked = (row | {"continuation": delimiter + row["continuation"]} for row in records)
    return TaskFile(name, config, tuple(asked), "acc")


def generation(
    name: str, records: Iterable[Record], until: Sequence[str], max_new_tokens: int
) -> TaskFile:
    """Records with prompt and answer: the greedy reply, stripped, is the answer exactly."""
    config = _generate(until, max_new_tokens) | {
        "doc_to_target": "answer",
        "filter_list": [
            {
                "name": "none",
                "filter": [
                    {"function": "regex", "regex_pattern": r"(?s)^\s*(.*?)\s*$", "fallback": ""},
                    {"function": "take_first"},
                ],
            }
        ],
    }
    return TaskFile(name, config, tuple(records), "exact_match")


def code(
    name: str,
    records: Iterable[Record],
    program: Program,
    until: Sequence[str],
    max_new_tokens: int,
) -> TaskFile:
    """Records with prompt: greedy replies become programs; pass@1 is the share that runs."""
    config = _generate(until, max_new_tokens) | {"doc_to_target": ""}
    return TaskFile(name, config, tuple(records), "pass@1", program)


def rolling_text(name: str, records: Iterable[Record]) -> TaskFile:
    """Records with text: likelihood of whole documents, per word and per byte."""
    config = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [
            {"metric": name, "aggregation": how, "higher_is_better": False}
            for name, how in (
                ("word_perplexity", "weighted_perplexity"),
                ("byte_perplexity", "weighted_perplexity"),
                ("bits_per_byte", "bits_per_byte"),
            )
        ],
    }
    return TaskFile(name, config, tuple(records))


def write_task_files(tasks: Iterable[TaskFile], folder: str | os.PathLike[str]) -> list[Path]:
    """Write tasks as the harness reads them; `lm_eval --include_path FOLDER --tasks NAME` runs one.

    Code tasks are not scored there: the harness would execute code without our confinement.

    Args:
        tasks: as `demo_tasks()` or `local_tasks(files)` make them.
        folder: gets NAME.yaml and NAME.jsonl per task; paths in the YAML are absolute.

    Returns:
        The YAML files.
    """
    written = []
    folder = Path(folder).resolve()
    for task in tasks:
        if not task.config:
            continue  # the harness has it
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


def _generate(until: Sequence[str], max_new_tokens: int) -> Record:
    return {
        "output_type": "generate_until",
        "doc_to_text": "prompt",
        "target_delimiter": "",
        "generation_kwargs": {
            "until": list(until),
            "do_sample": False,
            "max_gen_toks": max_new_tokens,
        },
        "metric_list": _means("exact_match"),
    }


def _means(*metrics: str) -> list[Record]:
    return [
        {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in metrics
    ]
