"""Coupling-aware compensation: kept FFN groups take over what the pruned units wrote (eq. comp).

`solve_gains` is one small ridge system in blocks of H that are already there. Whether the gains
help is a question for text H has not seen, which is what `choose_gains` asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from .calibration import CalibrationSet
from .curvature import Curvature
from .errors import InputError, NumericalError
from .racing import TIE, ChoiceOptions, require_text
from .risk import PlanTable, measure_plans
from .selection import Selection

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RIDGES, CLIPS = (0.05, 0.2, 1.0), (1.0, 2.0)  # gamma / mean diagonal, and tau (app. "Protocol")


def solve_gains(
    curvature: Curvature, selection: Selection, ridge: float = 0.2, clip: float = 1.0
) -> dict[int, float]:
    """Output gains of the kept FFN groups that cancel the loss of the pruned units (eq. comp).

    Solves (H_KK + gamma I) alpha = H_KS 1_S, then gain_v = clip(1 + alpha_v, 1 - tau, 1 + tau). K
    is every kept FFN group, also in protected layers and of kinds that may not be pruned. H is the
    full signed H, whatever lambda or edge structure made the plan.

    Sign: delta z_u = z_0 - z_{-u} is what u contributes, so scaling a kept v by 1 + alpha_v adds
    alpha_v delta z_v, and a v that writes what the pruned units wrote gets a gain above 1.

    Where a norm follows the write of a block (Gemma 2 and 3, OLMo2), it divides out a gain common
    to all kept groups of a layer: there only differences between the gains of a layer act.

    Args:
        curvature: H [M, M], nats per token.
        selection: the plan; gains it already has play no part.
        ridge: gamma >= 0 in units of the mean diagonal of H_KK. At 0 the solution of least norm is
            taken, so directions in which H_KK vanishes get nothing.
        clip: tau > 0; inf leaves gains as solved. With tau > 1 a gain may be negative.

    Returns:
        {unit index: gain} for every unit of K, ascending: all 1 if nothing is pruned, empty if no
        FFN group is kept. `selection.with_gains` takes it.

    Raises:
        InputError: ridge or clip out of range.
        MismatchError: the curvature is of other units.
        NumericalError: H_KK + gamma I is not positive semidefinite, so there is no minimum.
    """
    if not 0 <= ridge < np.inf:
        raise InputError(f"ridge is {ridge}; it is finite and at least 0 (the paper: 0.05 to 1).")
    if not clip > 0:
        raise InputError(f"clip is {clip}; tau is above 0 (the paper: 1 or 2; inf: no clipping).")
    curvature.units.require_same(selection.units, mine="the curvature", theirs="the selection")
    kept = np.flatnonzero((selection.units.kinds == "ffn") & ~selection.indicator)
    block = curvature.matrix[np.ix_(kept, kept)]
    lost = curvature.matrix[np.ix_(kept, np.flatnonzero(selection.indicator))].sum(axis=1)
    alpha = _solve_ridge(block, lost, ridge)
    gains = np.clip(1 + alpha, 1 - clip, 1 + clip)
    return dict(zip(kept.tolist(), gains.tolist(), strict=True))


def compensated_risk(curvature: Curvature, selection: Selection) -> float:
    """What H predicts for a plan with its gains: 1/2 d^T H d, nats per token.

    d_u is the share of unit u's contribution that is gone: 1 for a pruned unit, 1 - gain = -alpha
    for a compensator, 0 elsewhere (eq. quadratic with real entries). Without gains this is
    `selection.predicted_risk`, which itself never counts them.

    Raises:
        MismatchError: the curvature is of other units.
    """
    curvature.units.require_same(selection.units, mine="the curvature", theirs="the selection")
    gone = selection.indicator.astype(np.float64)
    for unit, gain in selection.gains.items():
        gone[unit] = 1 - gain
    return 0.5 * float(gone @ curvature.matrix @ gone)


def _solve_ridge(block: np.ndarray, lost: np.ndarray, ridge: float) -> np.ndarray:
    """alpha [K] of (H_KK + gamma I) alpha = lost; of least norm where that is singular."""
    if not len(lost):
        return np.zeros(0)
    values, vectors = np.linalg.eigh(block)
    damped = values + ridge * np.diagonal(block).mean()
    rounding = 1e-12 * float(np.abs(damped).max())
    # float32 matrices have eigenvalues down to about -1e-7 of the largest: those count as zero
    if damped.min() < -1e-5 * float(np.abs(damped).max()):
        raise NumericalError(
            f"H_KK + gamma I has an eigenvalue of {damped.min():.3g} (largest {damped.max():.3g}), "
            "so the least squares of eq. (comp) has no minimum. Use the full H of a build, not an "
            "edge variant, or a larger ridge."
        )
    inverse = np.divide(1.0, damped, out=np.zeros_like(damped), where=damped > rounding)
    solution: np.ndarray = vectors @ (inverse * (vectors.T @ lost))
    return solution


# The choice ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class GainsChoice:
    """Whether gains help, and which; made by `choose_gains`.

    The rule, on the rows of `held_out`, with differences and standard errors paired over rows:
    1. the winner is the (ridge, clip) of lowest mean KL;
    2. gains are applied if the winner beats the plan without gains by more than `TIE` (one)
       standard error of that difference, else the plain plan stays;
    3. of the settings that pass 2 themselves and are not worse than the winner by more than one
       standard error, the most cautious is taken: the largest ridge, then the smallest clip.
    The winner is the lowest of several means, so its advantage here is too large; `report` is not.

    Attributes:
        settings: (ridge, clip) of each candidate, most cautious first.
        table: KL on `held_out` [1 + candidates, rows]; plan 0 is the plan without gains.
        predicted: 1/2 d^T H d of those plans [1 + candidates], nats per token.
        report: KL on `report_on` of the plain plan and the chosen one [2, rows] (the same plan
            twice where no gains are applied); None where that was not given.
    """

    settings: tuple[tuple[float, float], ...]
    table: PlanTable
    predicted: np.ndarray
    report: PlanTable | None = None

    @cached_property
    def chosen(self) -> int:
        """Place of the chosen plan in `table`: 0 is the plan without gains."""
        winner = 1 + int(self.table.mean[1:].argmin())
        if not _beats(self.table, winner, 0):
            return 0
        passed = (n for n in range(1, len(self.table)) if _beats(self.table, n, 0))
        return next(number for number in passed if not _beats(self.table, winner, number))

    @property
    def applied(self) -> bool:
        """Whether gains help on held-out text by the rule of the class."""
        return self.chosen > 0

    @property
    def best(self) -> Selection:
        """The plan to go on with: with the chosen gains, or without any."""
        return self.table.selections[self.chosen]

    @property
    def setting(self) -> tuple[float, float] | None:
        """(ridge, clip) of the chosen gains; None where none are applied."""
        return self.settings[self.chosen - 1] if self.applied else None

    def rows(self) -> list[dict[str, Any]]:
        """One dict per plan; `difference` is plan minus plain with its paired standard error."""
        rows = []
        for number, (ridge, clip) in enumerate([(None, None), *self.settings]):
            difference, error = self.table.paired(number, 0)
            rows.append(
                {
                    "ridge": ridge,
                    "clip": clip,
                    "kl": float(self.table.mean[number]),
                    "standard_error": float(self.table.standard_error[number]),
                    "difference": difference,
                    "difference_error": error,
                    "predicted_risk": float(self.predicted[number]),
                    "chosen": number == self.chosen,
                }
            )
        return rows

    def __repr__(self) -> str:
        what = "no gains" if self.setting is None else "ridge {:g}, clip {:g}".format(*self.setting)
        lines = [
            f"GainsChoice: {what} (applied only if better by more than {TIE:g} paired standard "
            f"error on {self.table.kl.shape[1]} rows; KL in nats per token)"
        ]
        for row in self.rows():
            name = "no gains" if row["ridge"] is None else f"{row['ridge']:g} / {row['clip']:g}"
            lines.append(
                f"  {name:>10}  KL {row['kl']:.5f}  against none {row['difference']:+.5f} +- "
                f"{row['difference_error']:.5f}  predicted {row['predicted_risk']:.5f}"
                f"{'  chosen' * row['chosen']}"
            )
        if self.report is not None:
            (plain, chosen), (gap, error) = self.report.mean, self.report.paired(1, 0)
            lines.append(
                f"  reported: without {plain:.5f}, chosen {chosen:.5f}, {gap:+.5f} +- {error:.5f}"
            )
        return "\n".join(lines)


def choose_gains(
    model: PreTrainedModel,
    curvature: Curvature,
    selection: Selection,
    held_out: CalibrationSet,
    ridges: Sequence[float] = RIDGES,
    clips: Sequence[float] = CLIPS,
    report_on: CalibrationSet | None = None,
    *,
    options: ChoiceOptions = ChoiceOptions(),  # noqa: B008  (frozen, so sharing it is safe)
) -> GainsChoice:
    """Measure every (ridge, clip) and the plan without gains; apply gains only if they help.

    Args:
        model: the dense model.
        curvature: its full signed H [M, M].
        selection: the plan; gains it already has are dropped.
        held_out: rows to choose on, at least two, none of them calibrated on.
        ridges, clips: gamma / mean diagonal and tau to try, every one with every other.
        report_on: rows to report the plain and the chosen plan on, disjoint from the others.
        options: `checkpoint`, `progress` and `plans_per_batch` as for `measure_plans`; its other
            fields play no part.

    Returns:
        A GainsChoice; its class says which rule decides.

    Raises:
        InputError: no ridge, no clip, one out of range, or fewer than two rows to choose on.
        MismatchError: the curvature is of other units, or rows are shared between calibration,
            `held_out` and `report_on` (as far as the curvature knows its rows).
        NumericalError: as for `solve_gains`, or NaN logits.
    """
    settings = tuple(product(sorted(set(ridges), reverse=True), sorted(set(clips))))
    if not settings:
        raise InputError(f"ridges {ridges!r} with clips {clips!r} gives nothing to try. Give both.")
    require_text(curvature, held_out, report_on)
    plain = selection.with_gains({})
    plans = [plain, *(plain.with_gains(solve_gains(curvature, plain, *pair)) for pair in settings)]
    table = _measure(model, plans, held_out, options, "held_out")
    predicted = np.array([compensated_risk(curvature, plan) for plan in plans])
    choice = GainsChoice(settings, table, predicted)
    if report_on is None:
        return choice
    report = _measure(model, [plain, choice.best], report_on, options, "report")
    return GainsChoice(settings, table, predicted, report)


def _beats(table: PlanTable, plan: int, other: int) -> bool:
    """Whether a plan's KL is lower by more than TIE paired standard errors."""
    difference, error = table.paired(plan, other)
    return difference < -TIE * error


def _measure(
    model: PreTrainedModel,
    plans: Sequence[Selection],
    text: CalibrationSet,
    options: ChoiceOptions,
    part: str,
) -> PlanTable:
    """`measure_plans` with a checkpoint of its own: a file belongs to one text."""
    return measure_plans(
        model,
        plans,
        text,
        checkpoint=None if options.checkpoint is None else f"{options.checkpoint}.{part}",
        progress=options.progress,
        plans_per_batch=options.plans_per_batch,
    )
