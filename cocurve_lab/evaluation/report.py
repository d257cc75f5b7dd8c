"""The report of an evaluation: task -> metric -> value, with the settings that gave them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from ..base.errors import FileFormatError
from ..base.schema import (
    COUNT,
    OBJECT,
    TEXT,
    Field,
    Schema,
    dict_of,
    is_count,
    is_object,
    is_text,
    optional,
    or_none,
    parse_json,
    require_fields,
    told,
)
from ..base.storage import seal_json, unseal_json

FORMAT, VERSION = "cocurve-evaluation", 1


def _is_score(value: Any) -> bool:
    return type(value) in (int, float)  # a harness may give NaN


_FIELDS: Schema = {
    "format": TEXT,
    "version": COUNT,
    "suite": TEXT,
    "values": Field("numbers by task and metric", dict_of(dict_of(_is_score))),
    **optional(
        {
            "errors": Field(
                "numbers or nulls by task and metric", dict_of(dict_of(or_none(_is_score)))
            ),
            "samples": Field("whole numbers by task", dict_of(is_count)),
            "averaged": Field("metrics by task", dict_of(is_text)),
            "settings": OBJECT,
            "failed": Field("texts by task", dict_of(is_text)),
            "versions": Field("texts by name", dict_of(lambda v: isinstance(v, (str, int, float)))),
        }
    ),
}


@dataclass(frozen=True)
class EvaluationReport:
    """Scores of one model on one suite.

    Attributes:
        suite: its name, "demo", "paper" or "local".
        values: task -> metric -> value. Accuracies and matches lie in [0, 1]; perplexities do not.
        errors: task -> metric -> standard error over samples; None where the harness gives none.
        samples: task -> number of scored samples (for perplexity: tokens).
        averaged: task -> the metric of it that enters `average`; fixed per suite, before any run.
        settings: limit, batch size, context, few-shot counts, protocols, truncated prompts, and
            the isolation of executed code.
        versions: of lm_eval, torch, transformers, and of each task where the harness states one.
        failed: task -> why it could not be run; `average` is None if one of them enters it.
    """

    suite: str
    values: dict[str, dict[str, float]]
    errors: dict[str, dict[str, float | None]] = field(default_factory=dict)
    samples: dict[str, int] = field(default_factory=dict)
    averaged: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __getitem__(self, task: str) -> dict[str, float]:
        """metric -> value of one task."""
        return self.values[task]

    @property
    def average(self) -> float | None:
        """Unweighted mean of the metrics in `averaged`; None where one of them is missing."""
        try:
            found = [self.values[task][metric] for task, metric in self.averaged.items()]
        except KeyError:
            return None
        return sum(found) / len(found) if found else None

    def rows(self) -> list[dict[str, Any]]:
        """List one flat dict per task and metric.

        Columns: suite, task, metric, value, value_error (its standard error), samples, averaged.
        """
        return [
            {
                "suite": self.suite,
                "task": task,
                "metric": metric,
                "value": value,
                "value_error": self.errors.get(task, {}).get(metric),
                "samples": self.samples.get(task),
                "averaged": self.averaged.get(task) == metric,
            }
            for task, metrics in self.values.items()
            for metric, value in metrics.items()
        ]

    def to_json(self) -> str:
        """Write the whole report as JSON text."""
        content = {"format": FORMAT, "version": VERSION} | asdict(self)
        return json.dumps(seal_json(content), indent=1)

    @classmethod
    def from_json(cls, text: str) -> EvaluationReport:
        """Read a report that `to_json` wrote."""
        try:
            content = parse_json(text)
            unseal_json(content, "Nothing of it was used")
            found = (content.get("format"), content.get("version")) if is_object(content) else None
            if found != (FORMAT, VERSION):
                raise FileFormatError(f"its format and version are {told(found)}")
            fields = require_fields(content, _FIELDS)
        except FileFormatError as error:
            raise FileFormatError(
                f"the text is not an evaluation report: {error}. Evaluate again, or read it with "
                "the release that wrote it."
            ) from None
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})

    def __repr__(self) -> str:
        lines = [f"EvaluationReport, suite {self.suite!r} (* enters the average)"]
        for row in self.rows():
            error = row["value_error"]
            spread = "" if error is None else f" ± {error:.4f}"
            count = "" if row["samples"] is None else f"  n = {row['samples']}"
            star = "*" if row["averaged"] else " "
            value = f"{row['value']:.4f}{spread}"
            lines.append(f"{star} {row['task']:<22} {row['metric']:<16} {value:<18}{count}")
        if self.average is not None:
            lines.append(f"  average of {len(self.averaged)}: {self.average:.4f}")
        lines += [f"  {task} failed: {why}" for task, why in self.failed.items()]
        lines += [f"  {note}" for note in self.settings.get("notes", ())]
        return "\n".join(lines)
