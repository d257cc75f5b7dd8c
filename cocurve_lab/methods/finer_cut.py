"""FinerCut: attention and FFN blocks go one by one, each time the one that changes outputs least.

Zhang et al. 2024, "FinerCut: Finer-grained Interpretable Layer Pruning for Large Language Models"
(arXiv 2405.18218).
"""

from __future__ import annotations

from dataclasses import dataclass

from .block_pruner import BlockPruner


@dataclass(frozen=True)
class FinerCut(BlockPruner):
    """Remove the block without which KL(dense || pruned) is lowest; repeat with what is left.

    BlockPruner with another objective: how far the next-token distributions are from those of the
    dense model, not how well they predict the text.

    Differences from the published method: it compares logits by Jensen-Shannon divergence, angular
    distance or Euclidean norm, on 100 rows; the KL is what this library measures. It keeps the
    first 40 % of the layers for last; here guards do that. The last block of a plan goes in part.
    """

    name = "finercut"
    title = "FinerCut"
    column = "kl"
