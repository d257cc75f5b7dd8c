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
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cocurve_lab.base.errors import InputError
from cocurve_lab.base.storage import fingerprint
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.solver.selection import Selection

from .shared import resampled, solved
from .tables import Folder, Row, is_kept

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from cocurve_lab.calibration import CalibrationSet

MOST = 8  # draws that a study is worth; a kept table of more draws is not looked for
Plans = Mapping[Hashable, Selection | None]  # by any name; None where no plan reaches its ratio
Measure = Literal["kl", "nll", "perplexity"]

# what a column of differences carries beside it, see `Redrawn.columns`
PARTS = ("_error", "_rows_error", "_draws_error", "_degrees", "_draws", "_note")


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
        note: the reason why there are no draws; empty where there are.
    """

    asked: int = 0
    kl: Mapping[Hashable, np.ndarray] = field(default_factory=dict)
    nll: Mapping[Hashable, np.ndarray] = field(default_factory=dict)
    rows: int = 0
    groups: int = 0
    note: str = ""

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
            `<name>_degrees` (of freedom, for Student's t), `<name>_draws` (draws in which both
            plans exist) and an empty `<name>_note`. With fewer than two such draws, or for a plan
            that was not drawn again (a race stopped it early), the error over draws and the degrees
            are None, the error is that over rows, and the note says why.
        """
        if not self.asked:
            return {f"{name}_error": rows_error}
        both = self._values(plan, by) - self._values(other, by)
        both = both[np.isfinite(both)]
        drawn = {plan, other} <= self.kl.keys()
        lacking = "fewer than two draws have both plans" if drawn else "not solved again on draws"
        note = self.note or lacking
        parts: list[Any] = [rows_error, rows_error, None, None, len(both), note]
        if len(both) > 1 and rows_error is not None and math.isfinite(rows_error):
            over_draws = float(both.var(ddof=1)) * self.groups / (self.groups - 1)
            total, degrees = self._sum(rows_error**2, over_draws, len(both))
            parts = [math.sqrt(total), rows_error, math.sqrt(over_draws), degrees, len(both), ""]
        return {f"{name}{end}": value for end, value in zip(PARTS, parts, strict=True)}

    def _values(self, plan: Hashable, by: Measure) -> np.ndarray:
        values = (self.kl if by == "kl" else self.nll).get(plan, np.full(1, np.nan))
        return np.exp(values) if by == "perplexity" else values

    def _sum(self, rows: float, draws: float, count: int) -> tuple[float, float]:
        """Return the sum of two variances and its degrees of freedom."""
        total = rows + draws
        # each share squared over its degrees: the variance of the estimate of the sum
        doubt = rows**2 / (self.rows - 1)
        doubt += draws**2 * (1 / (count - 1) + 1 / (self.groups - 1))
        return total, total**2 / doubt if doubt else math.inf


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
    note, groups = _lacking(curvature), _groups(curvature)
    if not draws or note:
        return Redrawn(draws, rows=len(text), groups=groups, note=note)
    from cocurve_lab.measuring.risk import measure_plans

    solved = [solve(drawn) for drawn in resampled(curvature, draws)]
    names = list(dict.fromkeys(name for plans in solved for name in plans))
    distinct = {
        plan.fingerprint: plan for plans in solved for plan in plans.values() if plan is not None
    }
    values = {"": np.full(2, np.nan)}  # of a plan that does not exist
    if distinct:
        # all draws in one call: the teacher runs once per row, and batches are full
        table = measure_plans(model, list(distinct.values()), text, **measuring)
        assert table.nll is not None  # measure_plans always has it
        means = np.stack([table.kl.mean(axis=1), table.nll.mean(axis=1)], axis=1)
        values |= dict(zip(distinct, means, strict=True))
    found = {name: np.array([values[_mark(plans.get(name))] for plans in solved]) for name in names}
    kl, nll = ({name: pair[:, column] for name, pair in found.items()} for column in (0, 1))
    return Redrawn(draws, kl, nll, len(text), groups)


def again(plan: Selection, curvature: Curvature) -> Selection | None:
    """The plan of another H under the ratio, lambda and guards of `plan`; None if greedy stalls."""
    assert plan.interaction_strength is not None  # solve_greedy fills it
    return solved(curvature, plan.requested_ratio, plan.interaction_strength, plan.guards)[0]


def draw_marks(
    folder: Folder,
    name: str,
    settings: Mapping[str, Any],
    draws: int,
    curvature: Curvature | None = None,
) -> tuple[dict[str, Any], int]:
    """Return the settings of a table with errors over draws, and its number of draws.

    A kept table of the same study with more draws, up to `MOST`, is preferred: it is what a longer
    run left there. Without draws the settings stay as they are.

    Args:
        folder, name, settings: as for `kept_table`.
        draws: the number of draws wanted; 0 or at least 2.
        curvature: the H of the study, whose groups are resampled; None where the study builds it.
    """
    if draws < 0 or draws == 1:
        raise InputError(
            f"draws is {draws}. Give 0 for errors over rows alone, or at least 2 (up to {MOST})."
        )
    if not draws:
        return dict(settings), 0
    groups = []
    if curvature is not None:
        grams = curvature.group_grams
        groups = [None if grams is None else fingerprint(grams)]
    for count in range(max(MOST, draws), draws - 1, -1):
        marked = {**settings, "draws": {"count": count, "groups": groups}}
        if count == draws or is_kept(folder, name, marked):
            return marked, count
    raise AssertionError("the loop ends at `draws`")


def carried(row: Row, name: str, into: str) -> Row:
    """Return a column of differences under another name, with its error and the parts of that."""
    ends = ("", *PARTS)
    return {f"{into}{end}": row[f"{name}{end}"] for end in ends if f"{name}{end}" in row}


# Draws --------------------------------------------------------------------------------------------
def _groups(curvature: Curvature) -> int:
    positions = curvature.group_positions
    return 0 if positions is None else int(np.count_nonzero(positions))


def _lacking(curvature: Curvature) -> str:
    """Return the reason why an H cannot be drawn again; empty where it can."""
    if curvature.group_grams is None:
        return "H has no group Grams"
    return "" if _groups(curvature) > 1 else "H has a single group of text"


def _mark(plan: Selection | None) -> str:
    return "" if plan is None else plan.fingerprint
