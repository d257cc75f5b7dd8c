"""ShortGPT: layers go in order of their block influence, which is how much they turn their input.

Men et al. 2024, "ShortGPT: Layers in Large Language Models are More Redundant Than You Expect".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..extensions.repairing.projection_inputs import run_rows
from ..models.layer_calls import first_output
from ..models.runtime import in_double
from .base import Scored, Subject


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
    ranks_globally = True  # the units of a layer tie

    def scores(self, subject: Subject) -> np.ndarray:
        """Give every unit its layer's block influence [M], in [0, 2]."""
        return block_influence(subject)[subject.units.layers]


def block_influence(subject: Subject) -> np.ndarray:
    """1 - mean cosine of the hidden states before and after each layer [layers] float64."""
    layers = subject.architecture.layers
    sums = [0.0] * len(layers)

    def observe(layer: int, _: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        before, after = in_double(args[0]), in_double(first_output(output))
        sums[layer] += float(torch.cosine_similarity(before, after, dim=-1).sum())

    hooks = {module: partial(observe, layer) for layer, module in enumerate(layers)}
    rows = subject.calibration
    run_rows(subject.model, rows, hooks, progress=subject.progress, title=ShortGpt.title)
    return 1 - np.array(sums) / rows.input_ids.numel()
