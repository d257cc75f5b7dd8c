"""The paper's numbers and those of the authors' release, to compare with measured ones."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from cocurve_lab.base.errors import InputError
from cocurve_lab.base.schema import parse_json, reading
from cocurve_lab.base.tables import Row, Table
from cocurve_lab.evaluation.suites import PAPER_METRICS
from cocurve_lab.extensions.choosing.settings import RELEASE_GUARDS
from cocurve_lab.models.identity import demo_folder
from cocurve_lab.solver.guards import FREE, Guards

METRICS = "reference_metrics.json"
# the release's name of a task, and of a metric
_TASKS = {"wikitext": "wikitext2"}
_METRICS = {"perplexity": "ppl", "acc": "accuracy_raw", "acc_norm": "accuracy_norm"}
_METRICS["exact_match"] = "accuracy"


class Published(NamedTuple):
    """What the paper says of one model.

    Attributes:
        name: the model's name in the paper; "" for a model that is not in it.
        guards: the guards of its table of configurations, for 20 %; None where it states none.
        rows: its results: table (the label), method, ratio (0 for the dense model),
            interaction_strength (None where it is not stated) and values (task -> number).
            Accuracies are shares; sizes and speeds are relative to the dense model.
    """

    name: str
    guards: Guards | None
    rows: Table

    def guards_at(self, ratio: float) -> Guards:
        """Return the guards of a plan: the paper's at 20 %, the release's at other ratios.

        The paper states its caps for 20 % only, and some allow no more than 26 %. A model that is
        not in the paper has no guards.
        """
        if not self.name:
            return FREE
        return self.guards if self.guards is not None and ratio == 0.2 else RELEASE_GUARDS


def published(model: str) -> Published:
    """Find what the paper says of a model, by the last part of its hub id or folder.

    Source: data/paper_results.json, copied from the paper's tables.

    Args:
        model: as for `load_model`; a folder must have the checkpoint's name.
    """
    content = json.loads((demo_folder().parent / "paper_results.json").read_text(encoding="utf-8"))
    last = Path(model).name.lower()
    for name, facts in content["models"].items():
        if last in (checkpoint.lower() for checkpoint in facts["checkpoints"]):
            guards = None if facts["guards"] is None else Guards(**facts["guards"])
            return Published(name, guards, [r for r in content["rows"] if r["model"] == name])
    return Published("", None, [])


def reference_metrics(folder: str | os.PathLike[str], ratio: float) -> Row:
    """Read the release's results at a ratio: task -> the metric that the paper's tables show.

    Args:
        folder: the release's folder of one model, with rXX/reference_metrics.json.
        ratio: 0.2 reads r20.

    Returns:
        Only tasks of the paper's suite; a task without its metric is left out.
    """
    path = Path(folder) / f"r{round(100 * ratio):02d}" / METRICS
    if not path.is_file():
        raise InputError(
            f"there is no {path}. Give the release's folder of one model, and ratios it has."
        )
    found: Row = {}
    with reading(path, "Download it again."):
        content = parse_json(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            kind = type(content).__name__
            raise ValueError(f"it holds a {kind}, not task -> metrics")
        for name, given in content.items():
            task = _TASKS.get(name, name)
            if task not in PAPER_METRICS:
                continue
            metric = _METRICS.get(PAPER_METRICS[task], "")
            value = given.get(metric) if isinstance(given, dict) else given
            if value is None:
                continue
            if type(value) not in (int, float):  # true and false are int, but no numbers
                raise ValueError(f"{name} is {given!r:.80}, not a number or metrics")
            found[task] = float(value)
    return found
