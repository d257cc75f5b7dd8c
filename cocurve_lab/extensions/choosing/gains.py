"""Choice of the gains (eq. comp) by KL on held-out text, or of none if they do not help.

`solve_gains` gives gains for any ridge and clip. The paper selects both on held-out calibration
(Section "Edge-derived coupling-aware compensation"); so does `choose_gains`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from ...base.errors import InputError
from ...calibration import CalibrationSet
from ...curvature.matrix import Curvature
from ...measuring.results import Tabular
from ...measuring.risk import PlanTable
from ...models.identity import require_source
from ...solver.selection import Selection
from ..analysis.gains import CLIPS, RIDGES, compensated_risk, solve_gains
from .racing import TIE, ChoiceOptions, measure_stage, require_text

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False, repr=False)
class GainsChoice(Tabular):
    """The gains that help most, or none; made by `choose_gains`.

    The rule uses the rows of `held_out`. Differences and standard errors are paired over rows.
    1. The winner is the (ridge, clip) of lowest mean KL.
    2. Gains are applied if the winner beats the plan without gains by more than `TIE` (one)
       standard error of that difference. Otherwise the plan stays without gains.
    3. Some settings may pass step 2 and not be worse than the winner by more than one standard
       error. The most cautious of them is chosen: the largest ridge, then the smallest clip.

    The winner is the lowest of several means, so its advantage on these rows is biased. In `report`
    it is not.

    Attributes:
        settings: (ridge, clip) of each candidate, most cautious first.
        measured: KL on `held_out` [1 + candidates, rows]; plan 0 is the plan without gains.
        predicted: 1/2 d^T H d of those plans [1 + candidates], nats per token.
        report: KL on `report_on` of the plan without gains and the chosen one [2, rows] (the same
            plan twice if no gains are applied); None without `report_on`.
    """

    settings: tuple[tuple[float, float], ...]
    measured: PlanTable
    predicted: np.ndarray
    report: PlanTable | None = None

    @cached_property
    def chosen(self) -> int:
        """Index of the chosen plan in `measured`; 0 is the plan without gains."""
        winner = 1 + int(self.measured.mean[1:].argmin())
        if not _beats(self.measured, winner, 0):
            return 0
        # the most cautious settings come first, so the first that is not worse is chosen
        passed = (n for n in range(1, len(self.measured)) if _beats(self.measured, n, 0))
        return next(number for number in passed if not _beats(self.measured, winner, number))

    @property
    def applied(self) -> bool:
        """Whether gains help on held-out text, by the rule above."""
        return self.chosen > 0

    @property
    def best(self) -> Selection:
        """The chosen plan, with gains or without."""
        return self.measured.selections[self.chosen]

    @property
    def setting(self) -> tuple[float, float] | None:
        """(ridge, clip) of the chosen gains; None if none are applied."""
        return self.settings[self.chosen - 1] if self.applied else None

    @property
    def curve(self) -> DataFrame:
        """One row per plan; `difference` is to the plan without gains, paired by rows of text."""
        from pandas import DataFrame

        rows = []
        for number, (ridge, clip) in enumerate([(None, None), *self.settings]):
            difference, error = self.measured.paired(number, 0)
            row = {
                "ridge": ridge,
                "clip": clip,
                "kl": self.measured.mean[number],
                "kl_error": self.measured.standard_error[number],
                "difference": difference,
                "difference_error": error,
                "predicted_risk": self.predicted[number],
                "chosen": number == self.chosen,
            }
            rows.append(row)
        return DataFrame(rows)

    table = curve


def choose_gains(
    model: PreTrainedModel,
    curvature: Curvature,
    selection: Selection,
    held_out: CalibrationSet,
    ridges: Sequence[float] = RIDGES,
    clips: Sequence[float] = CLIPS,
    report_on: CalibrationSet | None = None,
    *,
    options: ChoiceOptions = ChoiceOptions(),
) -> GainsChoice:
    """Measure every (ridge, clip) and the plan without gains; apply gains only if they help.

    Args:
        model: the dense model.
        curvature: its full signed H [M, M].
        selection: the plan; gains it already has are dropped.
        held_out: rows to choose on, at least two, none of them calibrated on.
        ridges, clips: the gamma / mean diagonal and the tau to try, in all combinations.
        report_on: rows for `report`, disjoint from the others.
        options: `checkpoint` and `progress` as for `measure_plans`; its other fields are ignored.

    Returns:
        A GainsChoice: `.best` is the plan. The rule is stated in its class.
    """
    settings = tuple(product(sorted(set(ridges), reverse=True), sorted(set(clips))))
    if not settings:
        raise InputError(
            f"ridges {ridges!r} with clips {clips!r} gives nothing to try. Give at least one each."
        )
    held_out, report_on = require_text(curvature, held_out, report_on)
    require_source(model, curvature, what="H")
    require_source(model, selection)
    plain = selection.with_gains({})
    found = (solve_gains(curvature, plain, *pair) for pair in settings)
    plans = [plain, *map(plain.with_gains, found)]
    table = measure_stage(model, plans, held_out, options, "held_out")
    predicted = np.array([compensated_risk(curvature, plan) for plan in plans])
    choice = GainsChoice(settings, table, predicted)
    if report_on is None:
        return choice
    plans = [plain, choice.best]
    return replace(choice, report=measure_stage(model, plans, report_on, options, "report"))


def _beats(table: PlanTable, plan: int, other: int) -> bool:
    """Whether a plan's KL is lower by more than TIE paired standard errors."""
    difference, error = table.paired(plan, other)
    return difference < -TIE * error
