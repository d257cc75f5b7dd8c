"""Errors over draws of H: plans are solved again on resampled groups of text, and measured.

Two plans made from H differ on a held-out row x by D(H, x), in KL or in another number. H is one
draw of calibration text and x one of held-out text, independent of each other, so by the law of
total variance the mean difference over R rows has the variance

    Var over H of (mean of D over text)  +  (mean over H of Var over x of D) / R.

The second term is the squared paired error over rows, as measured with the plans of the H at hand.
The first is what rows cannot show: other text makes another H, other plans and another difference.
It is estimated by a bootstrap. Each draw takes G of the G groups of H with replacement, solves
every plan again under the same settings, and measures it on the same rows. The variance of the row
means over draws, times G / (G - 1) because a bootstrap of G groups is too small by that factor, is
the variance of *one* H. It is not divided by the number of draws: the plans compared come from one
H, and the bootstrap draws share its text.

The draws are measured on the same R rows, so their variance also contains, divided by R, the part
of D that depends on draw and row together. The paired error has that part too. It is counted twice,
so the sum errs towards a longer bar (in simulations two errors covered at most 99.8 % where 95.4 %
were asked). An analysis of variance could subtract it, at the price of bars that are too short.

Few draws know a variance badly. A verdict therefore takes Student's t with the degrees of freedom
of Welch and Satterthwaite, nu = (a + b)^2 / (a^2 / nu_a + b^2 / nu_b), for the two variances a over
rows and b over draws: nu_a = R - 1, and 1 / nu_b = 1 / (B - 1) + 1 / (G - 1), because B draws from
G groups know b no better than the groups do (Satterthwaite 1946, Biometrics Bulletin 2, 110-114).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from cocurve_lab.base.errors import InputError
from cocurve_lab.base.storage import fingerprint
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.curvature.uncertainty import Sample
from cocurve_lab.solver.selection import Selection

from .lazy import CalibrationSet, PreTrainedModel
from .shared import resampled, solved
from .tables import Row

Plans = Mapping[Hashable, Selection | None]  # by any name; None where no plan reaches its ratio
Measure = Literal["kl", "nll", "perplexity"]


@dataclass(frozen=True, eq=False)
class Redrawn:
    """Plans of resampled H, measured; made by `redraw`.

    Attributes:
        asked: number of draws asked for; 0 where errors are over rows alone.
        kl: name of a plan -> its KL on each draw [draws], means over rows, nats per token; NaN
            where the draw has no such plan.
        nll: the same for the loss on the next tokens.
        rows: R, number of held-out rows.
        groups: G, the number of groups that are resampled.
    """

    asked: int = 0
    kl: Mapping[Hashable, np.ndarray] = field(default_factory=dict)
    nll: Mapping[Hashable, np.ndarray] = field(default_factory=dict)
    rows: int = 0
    groups: int = 0

    def columns(
        self,
        name: str,
        rows_error: float | None,
        plan: Hashable,
        other: Hashable,
        by: Measure = "kl",
    ) -> Row:
        """Return the error of the difference plan - other and its parts, as columns of a table.

        Args:
            name: the column of the difference.
            rows_error: its paired standard error over rows, in the unit of the difference.
            plan, other: names of two plans.
            by: the measure that is compared.

        Returns:
            `<name>_error` alone if no draws were asked for, that over rows. Otherwise the error
            over rows and draws together, with `<name>_rows_error`, `<name>_draws_error`,
            `<name>_degrees` (of freedom, for Student's t) and `<name>_draws` (draws in which both
            plans exist). With fewer than two such draws the error over draws and the degrees are
            None, and the error is that over rows.
        """
        row: Row = {f"{name}_error": rows_error}
        if not self.asked:
            return row
        both = self._values(plan, by) - self._values(other, by)
        both = both[np.isfinite(both)]
        row |= {f"{name}_rows_error": rows_error, f"{name}_draws": len(both)}
        row |= {f"{name}_draws_error": None, f"{name}_degrees": None}
        if len(both) < 2 or rows_error is None or not math.isfinite(rows_error):
            return row
        over_rows = rows_error**2
        over_draws = float(both.var(ddof=1)) * self.groups / (self.groups - 1)
        total = over_rows + over_draws
        # each share squared over its degrees: the variance of the estimate of the sum
        doubt = over_rows**2 / (self.rows - 1)
        doubt += over_draws**2 * (1 / (len(both) - 1) + 1 / (self.groups - 1))
        return row | {
            f"{name}_error": math.sqrt(total),
            f"{name}_draws_error": math.sqrt(over_draws),
            f"{name}_degrees": total**2 / doubt if doubt else math.inf,
        }

    def _values(self, plan: Hashable, by: Measure) -> np.ndarray:
        values = (self.kl if by == "kl" else self.nll).get(plan, np.full(1, np.nan))
        return np.exp(values) if by == "perplexity" else values


def redraw(
    model: PreTrainedModel,
    curvature: Curvature,
    solve: Callable[[Curvature], Plans],
    text: CalibrationSet,
    draws: int,
    **measuring: Any,
) -> Redrawn:
    """Solve all plans of a study on resampled H and measure each distinct plan once.

    Args:
        curvature: the H of the study.
        solve: from a resampled H to plans by name.
        text: the held-out rows of the study.
        draws: number of draws; 0 measures nothing.
        measuring: `checkpoint` and `progress` of `measure_plans`.
    """
    if not draws:
        return Redrawn()
    from cocurve_lab.measuring.risk import measure_plans

    drawn = [solve(h) for h in resampled(curvature, draws)]
    distinct = {p.fingerprint: p for plans in drawn for p in plans.values() if p is not None}
    # all draws in one call: the teacher runs once per row, and batches are full
    table = measure_plans(model, list(distinct.values()), text, **measuring)
    assert table.nll is not None  # measure_plans always has it
    places = {mark: place for place, mark in enumerate(distinct)}
    found: dict[Hashable, np.ndarray] = {}
    for name in dict.fromkeys(name for plans in drawn for name in plans):
        values = np.full((2, draws), np.nan)
        for number, plan in enumerate(plans.get(name) for plans in drawn):
            if plan is not None:
                place = places[plan.fingerprint]
                values[:, number] = table.kl[place].mean(), table.nll[place].mean()
        found[name] = values
    kl, nll = ({name: pair[column] for name, pair in found.items()} for column in (0, 1))
    return Redrawn(draws, kl, nll, len(text), len(Sample.of(curvature)))


def again(plan: Selection, curvature: Curvature) -> Selection | None:
    """The plan of another H under the ratio, lambda and guards of `plan`; None if greedy stalls."""
    assert plan.interaction_strength is not None  # solve_greedy fills it
    return solved(curvature, plan.requested_ratio, plan.interaction_strength, plan.guards)[0]


def draw_marks(settings: Mapping[str, Any], draws: int, curvature: Curvature) -> dict[str, Any]:
    """Return the settings of a table with errors over draws; without draws they stay as they are.

    Args:
        settings: as for `kept_table`.
        draws: the number of draws; 0 or at least 2.
        curvature: the H whose groups are resampled.
    """
    if not draws:
        return dict(settings)
    if draws < 2 or curvature.group_grams is None:
        groups = "groups" if curvature.group_grams is not None else "no groups"
        raise InputError(
            f"draws is {draws}, and H has {groups}. Give 0 for errors over rows alone, or at least "
            "2 and an H from estimate_curvature."
        )
    groups_mark = fingerprint(curvature.group_grams)
    return {**settings, "draws": {"count": draws, "groups": groups_mark}}
