"""SlimGPT (Ling et al., 2024): optimal brain surgeon, block by block, on output projections.

With X [tokens, W] the input of an output projection, W_out [d, W] its weight, percdamp the damping,

    H = X^T X / tokens + percdamp mean(diag) I
    e_S = sum over columns p of S of ||W_out[:, p]||^2 / d_p,

d_p the squared diagonal of the Cholesky factor of the block (H^-1)_SS ("grouped Cholesky"): d_p is
(H^-1)_pp once the columns of S before p are gone. (The published H is twice this one; orders and
updates are the same.)

Units: S holds all columns of a unit, so KV groups and FFN groups need no sum over their channels.
The published code takes query heads, and FFN columns in shrinking batches (1024 to 8).

Selection only. The published method updates W_out after every removal. Two reductions leave the
weights alone:
- `downdate=True` (default): after each removal H^-1 becomes that of the columns left, so the units
  left are scored as if the removed ones had been compensated for; only W_out stays as it was.
- `downdate=False`: every unit is scored once, on the full H^-1.

Recovery: `reconstruct=True` refits the surviving columns when pruning (`repair`), in one step for
all pruned units of a block:

    W_R -= W_S ((H^-1)_SS)^-1 (H^-1)_SR,   the same as   W_R += W_S H_SR (H_RR)^-1

At damping 0 that is the least squares fit of X W_out^T by the columns left. The plan is the same
with and without it, so two rows of a table differ by the repair alone. In the published method
each removal is chosen on weights that earlier removals have already updated.

Allocation: a layer's share grows with the logarithm of its depth, from `first` to `last`, for both
kinds alike; only their quotient matters. The published ends are tuned by hand for each ratio.

Differences: every layer's inputs are those of the dense model (published: of the model with all
earlier layers pruned). `repairing/repair.py` refits any plan with the inputs of the pruned model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..base.errors import InputError, MismatchError
from ..extensions.repairing.least_squares import cholesky, ridge_of, ridge_update
from ..models.architectures import describe
from ..models.unit import Kind
from ..models.units import Unit, UnitSet
from ..pruner.cutting import prune
from ..pruner.slicing import kept_columns
from ..solver.selection import Selection
from .base import Arrays, Evidence, Scored, Subject
from .filling import blocks, uniform_order
from .inputs import layer_passes, require_passes, weight_columns

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class SlimGpt(Scored):
    """SlimGPT; formula, units, reductions and differences are in the module's docstring.

    Attributes:
        damping: percdamp, >= 0.
        downdate: rescore after every removal (else once).
        first, last: relative share that the first and the last layer lose, both > 0.
        reconstruct: refit the surviving columns in `repair`. The evidence then holds X^T X of every
            block in float32, 26 GB for an 8B.
        layers_per_pass: layers whose X^T X are held at a time (4 of an 8B: 7 GB); each pass runs
            all rows. The scores do not depend on it.
    """

    damping: float = 0.01
    downdate: bool = True
    first: float = 0.5
    last: float = 1.0
    reconstruct: bool = False
    layers_per_pass: int = 4

    name = "slimgpt"
    title = "SlimGPT"

    def __post_init__(self) -> None:
        if not 0 <= self.damping < math.inf:
            raise InputError(f"damping is {self.damping}. Give a finite number of at least 0.")
        if not (0 < self.first < math.inf and 0 < self.last < math.inf):
            raise InputError(
                f"first and last are {self.first} and {self.last}. Give finite shares above 0."
            )
        require_passes(self.layers_per_pass)
        # an option decides it, so the instance says it, not the class
        object.__setattr__(self, "repairs", self.reconstruct)

    def scores(self, subject: Subject) -> Arrays:
        """Score all units at the moment of their removal.

        "scores" rise along the removal order of a block. With `reconstruct` there is also one
        "moments/<layer>/<kind>" [W, W] float32 per block, X^T X / tokens.
        """
        units, architecture = subject.units, subject.architecture
        scores = np.zeros(len(units))
        arrays = {"scores": scores}
        members = blocks(units)
        for layers in layer_passes(architecture, self.layers_per_pass):
            mine = {block: ids for block, ids in members.items() if block[0] in layers}
            if not mine:
                continue
            title = f"Second moments, layers {layers[0]}-{layers[-1]}"
            found = subject.statistics(title, moments=True, only=mine.keys())
            for block, ids in mine.items():
                moments = found.moments.pop(block) / found.tokens
                weight = weight_columns(architecture, block).double()
                scores[ids] = self._removal_scores(weight, moments, [units[u] for u in ids])
                if self.reconstruct:
                    arrays[_moments_name(*block)] = moments.astype(np.float32)
        return arrays

    def order(self, units: UnitSet, scores: np.ndarray) -> list[int]:
        """Take more of later layers than of earlier ones."""
        return uniform_order(units, scores, incremental_weights(units, self.first, self.last))

    def repair(
        self, model: PreTrainedModel, selection: Selection, evidence: Evidence
    ) -> PreTrainedModel:
        """Prune the model, and refit its surviving columns where `reconstruct` is set.

        Any plan over the evidence's units can be repaired, whichever method made it.

        Raises:
            MismatchError: the evidence is another method's, of other units or without moments.
            InputError: the plan has gains, which are a repair already.
            NumericalError: H_RR is singular (see `measure`).
        """
        if not self.reconstruct:
            return prune(model, selection)
        self.require_own(evidence, selection.units)
        if selection.gains:
            raise InputError(
                f"the plan has {len(selection.gains)} gains, a repair. Pass with_gains({{}})."
            )
        pruned = prune(model, selection)
        before, after = describe(model), describe(pruned)
        for block in blocks(selection.units):
            kept, _ = kept_columns(before, selection, *block)
            if not 0 < len(kept) < before.width(*block):
                continue
            name = _moments_name(*block)
            if name not in evidence.arrays:
                raise MismatchError(
                    f"the evidence lacks {name}. Measure with SlimGpt(reconstruct=True)."
                )
            weight = weight_columns(before, block).double()
            moments = torch.from_numpy(evidence.arrays[name]).to(weight)
            updated = refit(weight, moments, kept.to(weight.device), self.damping)
            with torch.no_grad():
                target = after.output_weight(*block)
                target.copy_(updated.to(target.dtype))
        return pruned

    def _removal_scores(
        self, weight: Tensor, moments: np.ndarray, units: Sequence[Unit]
    ) -> np.ndarray:
        """Scores of one block's units [len(units)], from its weight [d, W] and moments [W, W]."""
        wide = torch.from_numpy(moments).to(weight)
        damped = wide.diagonal_scatter(wide.diagonal() + ridge_of(wide, self.damping))
        inverse = torch.cholesky_inverse(cholesky(damped))
        columns = [slice(unit.start, unit.stop) for unit in units]
        return removal_scores(inverse, weight.square().sum(dim=0), columns, self.downdate)


def removal_scores(
    inverse: Tensor, norms: Tensor, columns: list[slice], downdate: bool
) -> np.ndarray:
    """Compute e_S of each group of columns at its turn in greedy removal, lowest first.

    Args:
        inverse: H^-1 [W, W] float64; overwritten where `downdate`.
        norms: ||W_out[:, p]||^2 [W].
        downdate: rescore the groups left after each removal.

    Returns:
        [groups] float64. Removing columns only lowers (H^-1)_pp, so scores rise along the removal
        order: sorting by them gives that order.
    """
    scores, left, reached = np.zeros(len(columns)), list(range(len(columns))), 0.0
    if not downdate:
        return np.array([_group_score(inverse, norms, group) for group in columns])
    while left:
        errors = [_group_score(inverse, norms, columns[g]) for g in left]
        chosen = left.pop(int(np.argmin(errors)))
        reached = max(reached, min(errors))  # rounding must not swap two removals
        scores[chosen] = reached
        gone = columns[chosen]
        # the Schur complement of the removed block: H^-1 of the columns left stands where it stood.
        # Rows and columns of `gone` become zero, and no group left reads them
        inverse -= inverse[:, gone] @ torch.cholesky_solve(
            inverse[gone], cholesky(inverse[gone, gone])
        )
    return scores


def _group_score(inverse: Tensor, norms: Tensor, group: slice) -> float:
    """Sum of ||W_out[:, p]||^2 / d_p over the columns of a group (grouped Cholesky)."""
    # the factor does the removals within the group: its p-th diagonal entry is (H^-1)_pp after the
    # columns before p are gone, so no column needs a downdate of its own
    d = cholesky(inverse[group, group]).diagonal().square()
    return float((norms[group] / d).sum())


def refit(weight: Tensor, moments: Tensor, kept: Tensor, damping: float) -> Tensor:
    """Surviving columns R after the OBS update, W_R + W_S H_SR (H_RR)^-1 [d, R].

    `moments` are X^T X / tokens [W, W], in the dtype of the weight W_out [d, W].
    """
    mask = torch.ones(weight.shape[1], dtype=torch.bool, device=weight.device)
    mask[kept] = False
    gone = mask.nonzero().flatten()
    # solved on the kept columns: H_RR alone is factored, and H^-1 is never formed
    update = ridge_update(
        moments[kept][:, kept],
        weight[:, gone] @ moments[gone][:, kept],
        ridge_of(moments, damping)[kept],
    )
    return weight[:, kept] + update


def incremental_weights(units: UnitSet, first: float, last: float) -> np.ndarray:
    """first + (last - first) log(i + 1) / log(n) [M] for a unit of layer i of n."""
    depth = np.log(units.layers + 1) / math.log(max(units.num_layers, 2))
    weights: np.ndarray = first + (last - first) * depth
    return weights


def _moments_name(layer: int, kind: Kind) -> str:
    return f"moments/{layer}/{kind}"
