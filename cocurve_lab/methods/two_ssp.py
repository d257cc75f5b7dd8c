"""2SSP (Sandri et al., 2025): FFN width first, then whole attention blocks by perplexity.

Stage 1, FFN channel j with X the input of W_down:  s_j = mean over rows of ||X_j||_2 (over tokens).
Stage 2 removes whole attention blocks one by one, each time the one without which the perplexity
of one sequence is lowest. At ratio rho of L blocks with P_ffn and P_attn parameters per layer,

    N_attn = round(L rho^(P_ffn / P_attn / alpha)),  alpha = 1.5,

blocks go, and FFN width makes up the rest, the same share of every layer.

Units: an FFN group scores sqrt(sum of s_j^2) over its channels (published: single channels). Stage
2 takes all attention units of a layer together.

Budget: if N_attn blocks cost more than the ratio asks for, fewer go. Later blocks follow only where
no FFN group is left (or none may be pruned); the last one may go in part. The published code rounds
FFN counts per layer, which misses the ratio.

Selection only: the method repairs nothing.

Differences: the sequence is the calibration's first row. The published stage 2 runs on the model
that stage 1 has narrowed, hence again for each ratio. Here it runs once for all ratios, on the
dense FFN. Guards other than the kinds do not bind, as published: a layer cap would forbid stage 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..base.errors import InputError
from ..calibration import CalibrationSet
from ..extensions.repairing.projection_inputs import present_blocks
from ..models.units import UnitSet
from ..solver.guards import FREE, Guards
from ..solver.selection import Selection
from ..solver.targets import require_ratio
from .base import Arrays, Evidence, Scored, Subject
from .block_pruner import least_missed
from .filling import take_in_order, uniform_order


@dataclass(frozen=True)
class TwoSsp(Scored):
    """2SSP; formula, units, budget and differences are in the module's docstring.

    Attributes:
        alpha: > 0; larger removes more attention blocks.
    """

    alpha: float = 1.5

    name = "2ssp"
    title = "2SSP"
    honours_guards = False

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise InputError(
                f"alpha is {self.alpha}. Give a finite number above 0 (published: 1.5)."
            )

    def scores(self, subject: Subject) -> Arrays:
        """Score FFN groups by their norms, and find the order in which attention blocks go.

        "scores" [M]: FFN groups their norm, attention units the step at which their block goes;
        "removal_order" [blocks] int64, layers; "nll" [blocks] of the row after each removal, nats
        per token. L blocks take L (L + 1) / 2 passes over one row.
        """
        model, units, calibration = subject.model, subject.units, subject.calibration
        scores = np.zeros(len(units))
        ffn = [block for block in present_blocks(subject.architecture) if block[1] == "ffn"]
        found = subject.statistics("FFN inputs", only=ffn)
        for index, unit in enumerate(units):
            if unit.kind == "ffn":
                norms = found.row_norms[unit.layer, unit.kind][unit.start : unit.stop] / found.rows
                scores[index] = np.sqrt((norms**2).sum())
        row = CalibrationSet(calibration.input_ids[:1], source="one sequence")
        layers = sorted({unit.layer for unit in units if unit.kind == "attention"})
        parts, title = [_attention(units, layer) for layer in layers], "Attention blocks"
        order, nll = least_missed(model, units, parts, row, subject.progress, title)
        for step, place in enumerate(order):
            scores[parts[place]] = step
        return {
            "scores": scores,
            "removal_order": np.array([layers[place] for place in order], dtype=np.int64),
            "nll": np.array(nll, dtype=np.float64),
        }

    def select(
        self, evidence: Evidence, units: UnitSet, ratio: float, guards: Guards = FREE
    ) -> Selection:
        """Take N_attn blocks, then FFN width evenly; of the guards only kinds bind."""
        self.require_own(evidence, units)
        ratio = require_ratio(ratio)
        kinds = Guards(kinds=guards.kinds)
        order = evidence.arrays["removal_order"].tolist()
        count = num_attention_blocks(units, ratio, kinds, self.alpha)
        whole = [_attention(units, layer) for layer in order]
        running = np.cumsum([units.costs[ids].sum() for ids in whole[:count]])
        # a block is large: of N_attn only those that fit in the budget go, and FFN width makes up
        # the rest, which overshoots by less than one FFN group
        budget = ratio * units.total_cost * (1 + 1e-12)  # rounding cannot exclude exact sums
        count = int((running <= budget).sum())
        ffn = _ffn_order(units, evidence.scores)
        # the blocks after `count` are reached only where all FFN together does not fill the budget
        turns = [*_joined(whole[:count]), *ffn, *_joined(whole[count:])]
        # N_attn grows with the ratio, so plans of smaller ratios are not prefixes of larger ones
        return take_in_order(units, turns, ratio, kinds, ordered=False, **evidence.source)


def num_attention_blocks(units: UnitSet, ratio: float, guards: Guards, alpha: float) -> int:
    """N_attn of the blocks that have attention units; 0 where attention may not be pruned."""
    ffn, attention = (
        int(units.costs[units.kinds == kind].sum()) if guards.allows(kind) else 0
        for kind in ("ffn", "attention")
    )
    if ratio == 0 or attention == 0:
        return 0
    layers = len(set(units.layers[units.kinds == "attention"].tolist()))
    return round(layers * ratio ** (ffn / attention / alpha))


def _ffn_order(units: UnitSet, scores: np.ndarray) -> list[int]:
    """FFN units alone, evenly over layers, lowest scores first."""
    return [u for u in uniform_order(units, scores) if units.kinds[u] == "ffn"]


def _attention(units: UnitSet, layer: int) -> np.ndarray:
    """Indices of a layer's attention units."""
    return np.flatnonzero((units.layers == layer) & (units.kinds == "attention"))


def _joined(parts: list[np.ndarray]) -> list[int]:
    return [int(u) for part in parts for u in part]
