"""Edges by activation correlation, which the paper argues against, beside those of H.

"One could add interactions heuristically, by activation correlation E_uv = corr(a_u, a_v)". The
paper measures no such edge, and a unit has many activations a token. Two readings are taken: the
norm of a unit's columns at the output projection, one number a token, and what the unit writes to
the residual stream, a vector a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import BLOCKS, Curvature
from cocurve_lab.extensions.repairing.projection_inputs import watch_inputs
from cocurve_lab.methods.filling import Block
from cocurve_lab.methods.inputs import weight_columns
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.units import Unit, UnitSet

from ..shared import resampled, spread_of
from ..tables import Columns, DataFrame, Row, Rows, table_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NORMS, WRITES = "activation norms", "activation outputs"
_TOKENS = 64  # whose outputs are in memory at once

# columns of `edge_agreement` for reading, with `shown`
COLUMNS: Columns = {
    "variant": "",
    "block": "",
    "pairs": "",
    "pearson": "r with ρ of H",
    "spearman": "of ranks",
    "mean_absolute": "mean |r|",
    "mean_absolute_h": "mean |ρ| of H",
}


def activation_correlations(
    model: PreTrainedModel, units: UnitSet, calibration: CalibrationSet, progress: bool = True
) -> dict[str, np.ndarray]:
    """Correlate the activations of all pairs of units over all tokens of the rows.

    Returns:
        `NORMS` and `WRITES` -> [M, M] float64 with 1 on the diagonal. For vectors it is the
        covariance summed over dimensions. A unit that never varies correlates 0 with all others.
    """
    architecture = describe(model)
    blocks: dict[Block, list[Unit]] = {}
    for unit in units:
        blocks.setdefault((unit.layer, unit.kind), []).append(unit)
    weights = {block: weight_columns(architecture, block) for block in blocks}
    seen: dict[Block, Tensor] = {}
    found = {NORMS: _Covariance(), WRITES: _Covariance()}

    def observe(block: Block, inputs: Tensor) -> None:
        seen[block] = inputs.flatten(0, 1).to(weights[block].dtype, copy=True)
        if len(seen) < len(blocks):
            return
        for start in range(0, len(seen[block]), _TOKENS):
            norms, writes = [], []
            for name, members in blocks.items():
                some = seen[name][start : start + _TOKENS]
                for unit in members:
                    columns = slice(unit.start, unit.stop)
                    norms.append(some[:, columns].norm(dim=1, keepdim=True))
                    writes.append(some[:, columns] @ weights[name][:, columns].T)
            found[NORMS].add(torch.stack(norms))
            found[WRITES].add(torch.stack(writes))
        seen.clear()

    watch_inputs(
        model, calibration, observe, only=set(blocks), progress=progress, title="Activations"
    )
    return {name: covariance.correlation() for name, covariance in found.items()}


class _Covariance:
    """Sums over tokens of the values of units, and of their products."""

    def __init__(self) -> None:
        self.tokens = 0
        self.sums: Any = 0.0
        self.products: Any = 0.0

    def add(self, values: Tensor) -> None:
        """Add values [M, tokens, dimensions]."""
        values = values.double()
        self.tokens += values.shape[1]
        self.sums += values.sum(dim=1)
        flat = values.flatten(1)
        self.products += flat @ flat.T

    def correlation(self) -> np.ndarray:
        """Return the correlation [M, M]."""
        mean = self.sums / self.tokens
        covariance = (self.products / self.tokens - mean @ mean.T).cpu().numpy()
        scale = np.sqrt(np.clip(np.diagonal(covariance), 0.0, None))
        bound = np.outer(scale, scale)
        found = np.divide(covariance, bound, out=np.zeros_like(covariance), where=bound > 0)
        np.fill_diagonal(found, 1.0)
        return found


def with_correlations(curvature: Curvature, correlation: np.ndarray) -> Curvature:
    """Replace the edges of H by correlation_uv sqrt(H_uu H_vv); the diagonal stays."""
    scale = np.sqrt(np.clip(curvature.saliency, 0.0, None))
    matrix = correlation * np.outer(scale, scale)
    np.fill_diagonal(matrix, curvature.saliency)
    return Curvature(matrix, curvature.units, curvature.provenance)


def edge_agreement(curvature: Curvature, correlations: Mapping[str, np.ndarray]) -> DataFrame:
    """Compare correlations of other origin with rho_uv of H, pair by pair.

    Returns:
        One row per name and block ("all", then `BLOCKS`): variant, block, pairs (u < v), pearson
        and spearman of the two over the pairs, and mean_absolute of either. Errors of the two
        correlations are over 100 bootstrap draws of the groups of H; the activations are taken as
        exact. They are None for an H without groups.
    """
    upper = np.triu(np.ones((len(curvature.units),) * 2, dtype=bool), 1)
    masks = {"all": upper} | {block: upper & curvature.pair_mask(block) for block in BLOCKS}
    drawn = [part.correlation() for part in resampled(curvature)]
    rows: Rows = []
    for name, other in correlations.items():
        for block, mask in masks.items():
            if mask.sum() < 3:
                continue
            row: Row = {"variant": name, "block": block, "pairs": int(mask.sum())}
            values = _alike(curvature.correlation()[mask], other[mask])
            spread = spread_of([_alike(rho[mask], other[mask]) for rho in drawn])
            for place, statistic in enumerate(("pearson", "spearman")):
                row[statistic] = values[place]
                row[f"{statistic}_error"] = None if spread is None else float(spread[place])
            row["mean_absolute"] = float(np.abs(other[mask]).mean())
            row["mean_absolute_h"] = float(np.abs(curvature.correlation()[mask]).mean())
            rows.append(row)
    return table_of(rows)


def _alike(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """Return the linear and the rank correlation of two arrays; NaN where one is constant."""
    if np.ptp(first) == 0 or np.ptp(second) == 0:
        return np.nan, np.nan
    pairs = ((first, second), (rankdata(first), rankdata(second)))
    return tuple(float(np.corrcoef(*pair)[0, 1]) for pair in pairs)  # type: ignore[return-value]
