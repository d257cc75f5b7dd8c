"""The redundancy gate: a default lambda from H alone, before any evaluation (Section "Scope")."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...base.arguments import require_type
from ...curvature.groups import Saturation
from ...curvature.matrix import Curvature, correlate
from ...curvature.uncertainty import Sample, jackknife
from ...models.kinds import KINDS
from ...solver.solve import solve_greedy

GRAY, HIGH = 0.10, 0.12  # the mean |rho| at which the two upper bands begin
_DRAWS = 100  # bootstrap draws behind the error of the balance

Band = Literal["low", "gray", "high", "unknown"]
Doubt = Literal["border", "balance"]
_BOUNDS: dict[Band, str] = {
    "low": f"below {GRAY:.2f}",
    "gray": f"in {GRAY:.2f} to {HIGH:.2f}",
    "high": f"at least {HIGH:.2f}",
}
_DOUBTS: dict[Doubt, str] = {
    "border": "The redundancy may lie anywhere in {low:.3f} to {high:.3f}.",
    "balance": "The edges are not clearly larger than the diagonal.",
}
_NO_PAIRS = "The FFN redundancy is NaN because there is no pair of FFN units."
_RULE = (
    "H cannot see saturation: it adds up the logit shifts of single units, and these level off "
    "where much is removed. Let measured KL decide: choose_interaction_strength, or measure_plans, "
    "compares a few plans in a small part of the time of H."
)


@dataclass(frozen=True)
class Gate:
    """A recommendation for lambda from the curvature alone; made by `redundancy_gate`.

    Attributes:
        redundancy: mean |rho_uv| over FFN pairs; NaN without such pairs.
        noise_floor: the part of `redundancy` that is sampling noise alone; None without groups.
        corrected: `redundancy` without its upward bias; None without groups.
        diagonal_cv: kind -> std / mean of the saliency H_uu (population std); NaN where undefined.
        edge_to_diagonal: 2 |S| |rho_bar| of Proposition "Edge-to-diagonal balance".
        edge_to_diagonal_measured: the left-hand side of that proposition, measured on S.
        band: "low", "gray" or "high"; "unknown" without FFN pairs.
        recommended: the lambda of the band, also where undecided; None where unknown.
        ratio: the ratio of S.
        redundancy_error: standard error of `redundancy` over groups; None without groups.
        edge_to_diagonal_error: standard error of `edge_to_diagonal_measured`; None without groups.
        saturation: how sure the teacher is on the calibration text; None if unknown.
    """

    redundancy: float
    noise_floor: float | None
    corrected: float | None
    diagonal_cv: dict[str, float]
    edge_to_diagonal: float
    edge_to_diagonal_measured: float
    band: Band
    recommended: float | None
    ratio: float
    redundancy_error: float | None = None
    edge_to_diagonal_error: float | None = None
    saturation: Saturation | None = None

    @property
    def interval(self) -> tuple[float, float]:
        """The redundancy's range within noise and two standard errors; NaN without groups.

        Noise lifts the plain mean of |rho|; the mean of two halves is too low where rho is small.
        So the truth lies between: from the lower of both less two errors to `redundancy` plus two.
        Of calibrations of 16 (32) rows, drawn 100 times from 64 rows of the embedded model, 97 %
        (92 %) of these intervals held it, and 68 % (78 %) of the jackknife's.
        """
        error = math.nan if self.redundancy_error is None else self.redundancy_error
        lowest = self.redundancy if self.corrected is None else min(self.redundancy, self.corrected)
        return lowest - 2 * error, self.redundancy + 2 * error

    @property
    def doubts(self) -> tuple[Doubt, ...]:
        """The cases of `redundancy_gate` that leave the recommendation undecided."""
        error = self.edge_to_diagonal_error
        if self.recommended is None or error is None:
            return ()
        doubts: list[Doubt] = []
        low, high = self.interval
        if low < GRAY < high:
            doubts.append("border")
        if self.recommended > 0 and self.edge_to_diagonal_measured - 2 * error <= 1:
            doubts.append("balance")
        return tuple(doubts)

    @property
    def decided(self) -> bool:
        """Whether the recommendation stands within the errors; see `redundancy_gate`."""
        return self.recommended is not None and not self.doubts

    @property
    def verdict(self) -> float | None:
        """The lambda that the data support: `recommended` where `decided`, else None."""
        return self.recommended if self.decided else None

    @property
    def reason(self) -> str:
        """The verdict and the numbers in words, what H cannot see, and the rule that can."""
        if self.recommended is None:
            parts = [_NO_PAIRS]
        else:
            floor, doubts, (low, high) = self.noise_floor, self.doubts, self.interval
            noise = "" if floor is None else f" (noise alone would give {floor:.3f})"
            parts = [
                f"{'Undecided: the' if doubts else 'The'} FFN redundancy is {self.redundancy:.3f}"
                f"{_spread(self.redundancy_error, 3)}{noise}, {_BOUNDS[self.band]}, the "
                f"{self.band} band: lambda = {self.recommended:g}.",
                *(_DOUBTS[doubt].format(low=max(0.0, low), high=high) for doubt in doubts),
            ]
        balance = (
            f"On the plan of {self.ratio:.0%} the edges come to "
            f"{self.edge_to_diagonal_measured:.2f}{_spread(self.edge_to_diagonal_error, 2)} "
            f"times the diagonal (2 |S| |rho| = {self.edge_to_diagonal:.2f})."
        )
        warning = "" if self.saturation is None else self.saturation.warning
        return " ".join(part for part in (*parts, balance, _RULE, warning) if part)


def _spread(error: float | None, places: int) -> str:
    """A standard error after its value; nothing where it is unknown."""
    return "" if error is None else f" ± {error:.{places}f}"


def redundancy_gate(curvature: Curvature, ratio: float = 0.2) -> Gate:
    """Recommend lambda from the FFN redundancy, before any evaluation (Section "Scope").

    The paper's thresholds conflict: its table calls < 0.10 favorable, about 0.11 gray and > 0.15
    high; its text damps from about 0.12, yet also damps Mistral-Nemo at 0.111. Here the bands are
    low below 0.10, gray from 0.10 and high from 0.12. The recommendation follows the paper: 1 when
    low, 0 otherwise.

    The recommendation is a default to start from. H adds up logit shifts where true ones saturate:
    edges that are right of two units may mislead a plan, and more so as the ratio rises. The rule
    is to measure a few plans, lambda 0 among them (`choose_interaction_strength`, `measure_plans`).

    The gate is undecided in two cases. Both need the errors, hence the groups of H; without groups
    the paper's rule stands as it is.

    - "border": 0.10 lies within the errors of the redundancy: between `corrected` (or `redundancy`,
      if lower) less two standard errors, and `redundancy` plus two.
    - "balance": the gate would recommend 1, but the measured balance is not above 1 by two standard
      errors. The edges then only refine the order of the diagonal (Section "When Do Cross-Module
      Edges Help?"), and H alone cannot show whether for better or worse.

    The edge-to-diagonal balance is taken on S, the plan of `ratio` at lambda = 0 without guards.
    Predicted: 2 |S| |rho_bar|, rho_bar = mean signed rho_uv over ordered pairs u != v of S.
    Measured: median over u in S with H_uu > 0 of |sum over v in S, v != u of H_uv| / (1/2 H_uu).
    The error of the redundancy comes from the jackknife, that of the balance from a bootstrap over
    groups (100 draws, S fixed).
    """
    require_type(curvature, Curvature, "curvature")
    curvature.require_gram("the redundancy gate")
    redundancy = curvature.ffn_redundancy
    chosen = list(solve_greedy(curvature, ratio, 0.0).pruned)
    predicted, measured = _edge_to_diagonal(curvature, chosen)
    floor, corrected = noise_of(curvature, curvature.pair_mask("ffn"))
    error, balance_error = _errors(curvature, chosen)
    band, recommended = _band(redundancy)
    return Gate(
        redundancy=redundancy,
        noise_floor=floor,
        corrected=corrected,
        diagonal_cv=_variation(curvature),
        edge_to_diagonal=predicted,
        edge_to_diagonal_measured=measured,
        band=band,
        recommended=recommended,
        ratio=ratio,
        redundancy_error=error,
        edge_to_diagonal_error=balance_error,
        saturation=curvature.saturation,
    )


def noise_of(curvature: Curvature, mask: np.ndarray) -> tuple[float, float] | tuple[None, None]:
    """Estimate the noise in the mean |rho| over pairs of units, a mask [M, M] bool.

    Returns:
        Its noise floor: what the mean would be if every true rho were 0; for n independent
        positions sqrt(2 / (pi n)). As |rho| grows the noise falls, by about 1 - rho^2. And the mean
        without its upward bias: unbiased where the true rho is 0, elsewhere too low by at most the
        chance that noise turns a sign. None without at least two groups.
    """
    groups = curvature.groups
    filled = np.flatnonzero(() if groups is None else groups.positions)
    if groups is None or len(filled) < 2:
        return None, None
    # every other group, so that the halves are alike even where the text is sorted
    halves = (groups.grams[part].sum(axis=0) for part in (filled[::2], filled[1::2]))
    a, b = (correlate(half)[mask] for half in halves)
    if not len(a):
        return math.nan, math.nan
    # half the difference of two halves has the sampling error of the whole, if they are equally
    # long (otherwise it is too large); it needs no assumption that positions are independent.
    # |.| makes noise of either sign positive. But the sign of one half is independent of the noise
    # of the other, so noise cancels in the mean of sign(a) b
    unbiased = (np.sign(a) * b + np.sign(b) * a).mean() / 2
    return float(np.abs(a - b).mean() / 2), float(unbiased)


def _band(redundancy: float) -> tuple[Band, float | None]:
    """The band of a redundancy and the lambda it recommends."""
    if math.isnan(redundancy):
        return "unknown", None
    if redundancy < GRAY:
        return "low", 1.0
    return ("gray" if redundancy < HIGH else "high"), 0.0


def _variation(curvature: Curvature) -> dict[str, float]:
    """Coefficient of variation of the saliency per kind; NaN for no unit or no saliency."""
    parts = {kind: curvature.saliency[curvature.units.kinds == kind] for kind in KINDS}
    return {k: float(s.std() / s.mean()) if s.any() else math.nan for k, s in parts.items()}


def _edge_to_diagonal(curvature: Curvature, chosen: list[int]) -> tuple[float, float]:
    """Both sides of Proposition "Edge-to-diagonal balance" on S; (0, 0) below two units."""
    size = len(chosen)
    if size < 2:
        return 0.0, 0.0
    block = np.ix_(chosen, chosen)
    mean_correlation = (curvature.correlation()[block].sum() - size) / (size * (size - 1))
    return float(2 * size * abs(mean_correlation)), _balance(curvature.matrix[block])


def _balance(curve: np.ndarray) -> float:
    """Median over u of |edges of u| / (1/2 H_uu) in a block of H; 0 without any saliency."""
    diagonal = np.diagonal(curve)
    edges = np.abs(curve.sum(axis=1) - diagonal)
    live = diagonal > 0
    return float(np.median(edges[live] / (diagonal[live] / 2))) if live.any() else 0.0


def _errors(curvature: Curvature, chosen: list[int]) -> tuple[float | None, float | None]:
    """Standard errors of the redundancy and of the measured balance; None without groups."""
    if curvature.groups is None or len(groups := Sample.of(curvature)) < 2:
        return None, None
    redundancy = float(jackknife(curvature, "ffn_redundancy").standard_error)
    if len(chosen) < 2:
        return redundancy, 0.0
    # a median has no jackknife error, so whole groups are drawn again
    grams = groups.grams[:, chosen][:, :, chosen]
    even = np.full(len(groups), 1 / len(groups))
    draws = np.random.default_rng(0).multinomial(len(groups), even, size=_DRAWS)
    drawn = [_balance(np.tensordot(counts.astype(float), grams, axes=1)) for counts in draws]
    return redundancy, float(np.std(drawn, ddof=1))
