"""The report of an evaluation: task -> metric -> value, with the settings that gave them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from ..base.schema import (
    OBJECT,
    TEXT,
    Field,
    Schema,
    dict_of,
    is_count,
    is_text,
    optional,
    or_none,
    parse_json,
    reading,
    require_fields,
)
from ..base.storage import seal_json, unseal_json

FORMAT, VERSION = "cocurve-evaluation", 1
_SHOWN = ["task", "metric", "value", "value_error", "samples", "averaged"]


def _is_score(value: Any) -> bool:
    return type(value) in (int, float)  # a harness may give NaN


_FIELDS: Schema = {
    "format": Field(FORMAT, lambda value: value == FORMAT),
    "version": Field(f"{VERSION}, so another release wrote it", lambda value: value == VERSION),
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
        remedy = "Evaluate again, or read it with the release that wrote it."
        with reading("the text is not an evaluation report", remedy):
            content = parse_json(text)
            unseal_json(content, "Nothing of it was used")
            fields = require_fields(content, _FIELDS)
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})

    def __repr__(self) -> str:
        from pandas import DataFrame

        table = DataFrame(self.rows(), columns=_SHOWN)
        lines = [
            f"EvaluationReport, suite {self.suite!r}",
            table.to_string(index=False, float_format="{:.4f}".format, na_rep=""),
        ]
        if self.average is not None:
            lines.append(f"  average of {len(self.averaged)}: {self.average:.4f}")
        lines += [f"  {task} failed: {why}" for task, why in self.failed.items()]
        lines += [f"  {note}" for note in self.settings.get("notes", ())]
        return "\n".join(lines)
