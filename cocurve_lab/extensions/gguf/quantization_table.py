"""Pruning and quantization together: whether the damage of both is the sum of the two."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...base.errors import InputError
from ...base.progress import Progress
from ...base.tables import Columns, Row, Table
from ...calibration import CalibrationSet
from ...measuring.risk import model_risk, standard_error
from ...models.runtime import require_one_device
from .eight_bits import EIGHT_BITS, require_torchao, with_torchao_weights
from .quantizing import KINDS, require_kind, with_gguf_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Q8_0 = "Q8_0"
# columns of `quantization_table` for reading, with `shown`
QUANTIZED_COLUMNS: Columns = {
    "weights": "",
    "pruned": "KL pruned",
    "quantized": "KL quantized",
    "both": "KL of both",
    "sum": "sum of the two",
    "excess": "both minus sum",
    "is_sum": "is it the sum?",
}


def quantization_table(
    dense: PreTrainedModel,
    pruned: PreTrainedModel,
    text: CalibrationSet,
    kinds: Sequence[str] = (Q8_0,),
    *,
    progress: Progress = False,
) -> Table:
    """Measure KL from the dense model: pruned, quantized, and both; nats per token.

    Only weights are rounded; all models run in transformers, in the dtype of `dense`. llama.cpp
    also rounds the inputs of its matrix products, and this is not in the numbers.

    Args:
        dense: the model before pruning, in memory.
        pruned: what `prune` returned, in memory.
        text: held-out rows; at least two for the errors.
        kinds: "INT8" or "FP8" (rows with a scale each, by torchao), "Q8_0" (needs gguf), or one
            of `export.quantizing.KINDS` (needs llama.cpp's quantizer too).
        progress: show bars; "lines" writes lines for a log file instead.

    Returns:
        A row per kind: `weights` (the kind); `pruned`, `quantized` (the dense model with rounded
        weights) and `both`; `sum` of the first two; `excess` of `both` over `sum`. Each has its
        standard error over rows of text, `<column>_error`; those of `sum` and `excess` are of the
        values added or subtracted row by row. `is_sum` says whether the excess is within two
        standard errors of 0: "yes" (no difference was seen), "more", "less", or None without
        errors.

    Raises:
        ArchitectureError: GGUF cannot hold the model.
        InputError: a kind is unknown, what makes it is not installed, or weights are not in memory.
        MismatchError: the models have different vocabularies.
    """
    require_kinds(kinds)  # before anything is measured
    for model in (dense, pruned):  # all weights are rounded in memory
        require_one_device(model)
    alone = model_risk(dense, pruned, text, progress=progress)
    table = []
    for kind in kinds:
        rounded = model_risk(dense, _with_weights(dense, kind), text, progress=progress)
        both = model_risk(dense, _with_weights(pruned, kind), text, progress=progress)
        table.append(_row(kind, alone, rounded, both))
    return table


def require_kinds(kinds: Sequence[str]) -> None:
    """Raise InputError unless all kinds are known, and what makes them is installed."""
    for kind in kinds:
        if kind in EIGHT_BITS:
            require_torchao()
        elif kind not in (Q8_0, *KINDS):
            every = ", ".join((*EIGHT_BITS, Q8_0, *KINDS))
            raise InputError(f"kind is {kind!r}. Use one of {every}.")
        elif kind != Q8_0:
            require_kind(kind)


def _with_weights(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    make = with_torchao_weights if kind in EIGHT_BITS else with_gguf_weights
    return make(model, kind)


def _row(kind: str, pruned: np.ndarray, quantized: np.ndarray, both: np.ndarray) -> Row:
    """One row of the table, from KL by row of text, [rows] each."""
    total = pruned + quantized
    values = {
        "pruned": pruned,
        "quantized": quantized,
        "both": both,
        "sum": total,
        "excess": both - total,
    }
    row: Row = {"weights": kind}
    for name, found in values.items():
        row[name] = float(found.mean())
        error = float(standard_error(found[None])[0]) if len(found) > 1 else None
        row[f"{name}_error"] = error
    row["is_sum"] = _is_sum(row["excess"], row["excess_error"])
    return row


def _is_sum(excess: float, error: float | None) -> str | None:
    if error is None:
        return None
    if abs(excess) <= 2 * error:
        return "yes"
    return "more" if excess > 0 else "less"
