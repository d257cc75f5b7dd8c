"""AMP: what a head adds to the residual stream, and how active an FFN channel is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..calibration import CalibrationSet
from ..estimator.replay import widen
from ..models.architectures import Architecture, describe
from ..models.units import UnitSet, require_units
from ..solver.guards import Guards
from ..solver.selection import Selection
from .base import Evidence, Method
from .filling import blocks, take_counts, take_in_order, uniform_order
from .inputs import Block, per_unit, provenance_of, watch_inputs, weight_columns

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Amp(Method):
    """Query head h: mean over tokens of ||W_O,h x_h||_1; FFN column j: mean of |X_j|.

    W_O,h are the head's columns of W_O and x_h its input to them; the FFN score has no weight in
    it. A KV group's score is the sum over its query heads, an FFN group's the sum over its columns.
    The same share of every block goes. The published fine-tuning (LoRA) is dropped: selection only.

    Differences from the published code: there rows are 50 instruction prompts, here the
    calibration; there k and v are sliced with the query heads' indices, which needs multi-head
    attention, here whole KV groups go; and there counts are rounded per layer: k = round(p n_kv)
    attention units, then round(p n_ffn + (p n_kv - k)) FFN units, so that what rounding leaves over
    of a head is made up for by as large a fraction of an FFN unit, whose cost is another. By
    default the budget is filled by cost instead.

    Attributes:
        as_published: take those counts per layer; the ratio that comes out drifts.
    """

    as_published: bool = False

    name = "amp"
    title = "AMP"

    def measure(
        self,
        model: PreTrainedModel,
        units: UnitSet,
        calibration: CalibrationSet,
        *,
        seed: int = 0,
        progress: bool = True,
    ) -> Evidence:
        """Sizes of outputs and activations over all tokens. See `Method.measure`."""
        require_units(model, units)
        architecture = describe(model)
        totals: dict[Block, Tensor] = {}

        def observe(block: Block, inputs: Tensor) -> None:
            if block[1] == "attention":
                part = _head_outputs(architecture, block, inputs)
            else:
                part = inputs.abs().sum(dim=(0, 1), dtype=torch.float64)
            totals[block] = totals[block] + part if block in totals else part

        watch_inputs(model, calibration, observe, progress=progress, title=self.title)
        tokens = calibration.input_ids.numel()
        columns = {block: (total / tokens).cpu().numpy() for block, total in totals.items()}
        provenance = provenance_of(self, model, calibration)
        return Evidence(self.name, units, {"scores": per_unit(units, columns)}, provenance)

    def select(
        self,
        evidence: Evidence,
        units: UnitSet,
        ratio: float,
        guards: Guards = Guards(),  # noqa: B008  (frozen, so sharing the default is safe)
    ) -> Selection:
        """The lowest scores of every block, evenly. See `Method.select`."""
        self.require_own(evidence, units)
        if self.as_published:
            counts = published_counts(units, ratio)
            return take_counts(units, evidence.scores, counts, ratio, guards)
        return take_in_order(units, uniform_order(units, evidence.scores), ratio, guards)


def published_counts(units: UnitSet, ratio: float) -> dict[Block, int]:
    """Units to take by (layer, kind), with the carry from heads to FFN units described above."""
    sizes: dict[Block, int] = {
        (int(units.layers[block[0]]), units[block[0]].kind): len(block) for block in blocks(units)
    }
    counts: dict[Block, int] = {}
    for layer in np.unique(units.layers).tolist():
        share = ratio * sizes.get((layer, "attention"), 0)
        counts[layer, "attention"] = round(share)
        carried = share - counts[layer, "attention"]
        counts[layer, "ffn"] = round(ratio * sizes.get((layer, "ffn"), 0) + carried)
    return counts


def _head_outputs(architecture: Architecture, block: Block, inputs: Tensor) -> Tensor:
    """Sum over tokens of ||W_O,h x_h||_1 of each head, spread evenly over its columns [W]."""
    size = architecture.head_dim(block[0])
    weight, x = weight_columns(architecture, block), widen(inputs)
    norms = [
        (part @ columns.T).abs().sum(dtype=torch.float64)
        for part, columns in zip(x.split(size, dim=-1), weight.split(size, dim=1), strict=True)
    ]
    return torch.stack(norms).repeat_interleave(size) / size
