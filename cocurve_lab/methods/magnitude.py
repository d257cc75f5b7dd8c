"""Magnitude: columns of the output projections with small weights go first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..extensions.repairing.projection_inputs import present_blocks
from .base import Scored, Subject
from .inputs import per_unit, weight_columns


@dataclass(frozen=True)
class Magnitude(Scored):
    """s_u = sum over the unit's columns j of ||W_:j||_2, W = W_O or W_down; uniform per block.

    The paper says "weight norm"; this is the form of FLAP's baseline, which looks at the output
    projection alone. LLM-Pruner's baseline sums |w|^p over every coupled matrix, which can rank
    differently. No text is read and no weight changes, so it is selection only as published.

    A unit's score is the sum over its columns, as the published score of a head is. The published
    code knows no FFN groups; they are summed alike. Published counts per block are int(ratio x n),
    which under-prunes at this granularity (17.5 % of an 8B at 20 %); here the budget is filled by
    cost.
    """

    name = "magnitude"
    title = "Magnitude"
    reads_text = False

    def scores(self, subject: Subject) -> np.ndarray:
        """Sum the column norms; the text is not read."""
        architecture = subject.architecture
        norms = {
            block: torch.linalg.vector_norm(
                weight_columns(architecture, block), dim=0, dtype=torch.float64
            )
            for block in present_blocks(architecture)
        }
        columns = {block: norm.cpu().numpy() for block, norm in norms.items()}
        return per_unit(subject.units, columns)
