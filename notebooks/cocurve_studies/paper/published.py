"""The paper's numbers and those of the authors' release, to compare with measured ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cocurve_lab.base.errors import InputError
from cocurve_lab.base.schema import is_number, read_json, reading
from cocurve_lab.evaluation.suites import PAPER_METRICS
from cocurve_lab.extensions.choosing.settings import RELEASE_GUARDS
from cocurve_lab.models.identity import demo_folder
from cocurve_lab.solver.guards import FREE, Guards

from ..lazy import PreTrainedTokenizerBase
from ..tables import Row, Rows, pick

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

METRICS = "reference_metrics.json"
# the release's name of a task, and of a metric
_TASKS = {"wikitext": "wikitext2"}
_METRICS = {"perplexity": "ppl", "acc": "accuracy_raw", "acc_norm": "accuracy_norm"}
_METRICS["exact_match"] = "accuracy"
_GUARDS = ("layer_cap", "protect_first", "protect_last")
_KEYS = {"model": "", "method": "", "ratio": 0.0, "interaction_strength": None, "variant": ""}
_SIZES = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


class Published(NamedTuple):
    """What the paper says of one model.

    Attributes:
        name: the model's name in the paper; "" for a model that is not in it.
        rows: its results: table (the label), method, ratio (0 for the dense model),
            interaction_strength (None where it is not stated), variant ("" for the method as it
            is) and values (task -> number; the gate's verdict is words). Accuracies are shares;
            sizes and speeds are relative to the dense model.
        note: what a reader must know, such as where the paper contradicts itself.
    """

    name: str
    rows: Rows
    note: str = ""

    def guards_at(self, ratio: float) -> Guards:
        """Return the guards of a plan: the paper's at 20 %, the release's at other ratios.

        The paper states its caps for 20 % and four models only, and some allow no more than 26 %.
        A model that is not in the paper has no guards.
        """
        if not self.name:
            return FREE
        for row in pick(self.rows, variant="configuration", ratio=ratio):
            return Guards(**{name: row["values"][name] for name in _GUARDS})
        return RELEASE_GUARDS


def paper_names() -> list[str]:
    """Return the names of the paper's eleven models."""
    return list(_stored()["models"])


def published(name: str) -> Published:
    """Return what the paper says of one of its models; nothing for the name "".

    Source: data/paper_results.json, every numeric table of the paper.
    """
    rows = []
    for label, table in _stored()["tables"].items():
        for cells in table["rows"]:
            values = table.get("all", {}) | dict(zip(table["columns"], cells, strict=True))
            row = {"table": label} | {key: values.pop(key, none) for key, none in _KEYS.items()}
            row["ratio"] = 0.0 if row["method"] == "Dense" else float(row["ratio"])
            row["values"] = {task: value for task, value in values.items() if value is not None}
            if row["model"] == name and row["values"]:
                rows.append(row)
    note = _stored()["models"][name].get("note", "") if name else ""
    return Published(name, rows, note)


def recognized(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return which of the paper's models has this shape and tokenizer; "" if none has.

    A fine-tuned model has the shape of its base model. Only Llama's base and instruction-tuned
    models are told apart, by the chat template.
    """
    stored = read_data("paper_models.json")
    for name, facts in _stored()["models"].items():
        for checkpoint in facts["checkpoints"]:
            shape = _shape(stored[checkpoint])
            if shape != _shape(config.to_dict()) or not 0.98 <= len(tokenizer) / shape[-1] <= 1:
                continue
            if facts.get("chat") in (None, tokenizer.chat_template is not None):
                return str(name)
    return ""


def _shape(values: Mapping[str, Any]) -> tuple[Any, ...]:
    """The kind and sizes of a decoder, and its vocabulary."""
    head = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    return (*map(values.get, _SIZES), head, values.get("vocab_size"))


def _stored() -> dict[str, Any]:
    return read_data("paper_results.json")


def read_data(name: str) -> dict[str, Any]:
    """Read one of the JSON files in data/."""
    content: dict[str, Any] = read_json(demo_folder().parent / name)
    return content


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
        content = read_json(path)
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
            if not is_number(value) or value < 0 or (value == 0 and metric == "ppl"):
                raise ValueError(f"{name} is {given!r:.80}, not metrics or a number in its range")
            found[task] = float(value)
    return found
