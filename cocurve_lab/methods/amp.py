"""AMP: the size of a head's output, and the mean activation of an FFN channel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..estimator.support import widen
from ..extensions.repairing.projection_inputs import watch_inputs
from ..models.architectures import Architecture
from .base import Scored, Subject
from .filling import Block
from .inputs import per_unit, weight_columns


@dataclass(frozen=True)
class Amp(Scored):
    """Query head h: mean over tokens of ||W_O,h x_h||_1; FFN column j: mean of |X_j|.

    W_O,h are the head's columns of W_O and x_h its input to them; the FFN score has no weight in
    it. A KV group's score is the sum over its query heads, an FFN group's the sum over its columns.
    The same share of every block goes. Selection only: the published fine-tuning (LoRA) is omitted.

    Differences from the published code:
    - rows are the calibration's, not 50 instruction prompts;
    - whole KV groups go; there k and v are sliced with the query heads' indices, which works for
      multi-head attention only;
    - there counts are rounded per layer: k = round(p n_kv) attention units, then
      round(p n_ffn + (p n_kv - k)) FFN units. The fraction of a head lost to rounding becomes the
      same fraction of an FFN unit, which has another cost. Here the budget is filled by cost.
    """

    name = "amp"
    title = "AMP"

    def scores(self, subject: Subject) -> np.ndarray:
        """Average sizes of outputs and activations over all tokens."""
        totals: dict[Block, Tensor] = {}

        def observe(block: Block, inputs: Tensor) -> None:
            if block[1] == "attention":
                part = _head_outputs(subject.architecture, block, inputs)
            else:
                part = inputs.abs().sum(dim=(0, 1), dtype=torch.float64)
            totals[block] = totals[block] + part if block in totals else part

        calibration = subject.calibration
        watch_inputs(
            subject.model, calibration, observe, progress=subject.progress, title=self.title
        )
        tokens = calibration.input_ids.numel()
        columns = {block: (total / tokens).cpu().numpy() for block, total in totals.items()}
        return per_unit(subject.units, columns)


def _head_outputs(architecture: Architecture, block: Block, inputs: Tensor) -> Tensor:
    """Sum over tokens of ||W_O,h x_h||_1 of each head, spread evenly over its columns [W]."""
    size = architecture.head_dim(block[0])
    weight, x = weight_columns(architecture, block), widen(inputs)
    norms = [
        (part @ columns.T).abs().sum(dtype=torch.float64)
        for part, columns in zip(x.split(size, dim=-1), weight.split(size, dim=1), strict=True)
    ]
    return torch.stack(norms).repeat_interleave(size) / size
