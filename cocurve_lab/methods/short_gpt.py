"""ShortGPT: layers go in order of their block influence, which is how much they turn their input.

Men et al. 2024, "ShortGPT: Layers in Large Language Models are More Redundant Than You Expect".
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..estimator.inputs import TOKENS_PER_BATCH
from ..models.identity import model_device
from ..models.runtime import measuring, require_measurable
from ..models.units import UnitSet
from ..progress import Bar
from .base import Scored, Subject
from .filling import global_order


@dataclass(frozen=True)
class ShortGpt(Scored):
    """Block influence of a layer: 1 - mean cosine of the hidden states before and after it.

    The mean is over all tokens of all rows. Every unit has the score of its layer, so layers go one
    after the other, the least influential first.

    Difference from the published method: the last layer of a plan goes in part, its attention
    first, so that all methods remove the same cost.
    """

    name = "shortgpt"
    title = "ShortGPT"

    def scores(self, subject: Subject) -> np.ndarray:
        """Give every unit its layer's block influence [M], in [0, 2]."""
        return block_influence(subject)[subject.units.layers]

    def order(self, units: UnitSet, scores: np.ndarray) -> list[int]:
        """Rank all units together; those of a layer tie."""
        return global_order(units, scores)


def block_influence(subject: Subject) -> np.ndarray:
    """1 - mean cosine of the hidden states before and after each layer [layers] float64."""
    layers = subject.architecture.layers
    sums = [0.0] * len(layers)

    def observer(layer: int) -> Any:
        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
            before, after = args[0], output if isinstance(output, Tensor) else output[0]
            cosines = torch.cosine_similarity(before.double(), after.double(), dim=-1)
            sums[layer] += float(cosines.sum())

        return hook

    model, rows = subject.model, subject.calibration.input_ids
    require_measurable(model, rows)  # runs the model, so it comes before the hooks
    with measuring(model, torch.get_num_threads()), ExitStack() as stack:
        for index, layer in enumerate(layers):
            stack.callback(layer.register_forward_hook(observer(index)).remove)
        bar = Bar(total=len(rows), desc=ShortGpt.title, unit="row", disable=not subject.progress)
        stack.enter_context(bar)
        for ids in rows.split(max(1, TOKENS_PER_BATCH // subject.calibration.seq_len)):
            subject.architecture.decoder(input_ids=ids.to(model_device(model)), use_cache=False)
            bar.update(len(ids))
    return 1 - np.array(sums) / rows.numel()
