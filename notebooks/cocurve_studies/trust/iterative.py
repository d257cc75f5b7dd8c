"""Pruning in steps, with the surrogate measured anew in between, against one shot."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from cocurve_lab.base.errors import InputError
from cocurve_lab.base.tables import Columns, Row, Table
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.extensions.surrogates.staged import staged_plan
from cocurve_lab.measuring.risk import PlanTable
from cocurve_lab.models.units import enumerate_units
from cocurve_lab.solver.guards import Guards
from cocurve_lab.solver.selection import Selection

from ..shared import Recipe, compared, marks
from ..study import Study

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ONE_SHOT, ITERATIVE = "one shot", "iterative"

# columns of `iterative_study` for reading, with `shown`
COLUMNS: Columns = {
    "plan": "",
    "surrogate": "solved on",
    "builds": "builds of H",
    "requested_ratio": "removed",
    "interaction_strength": "λ",
    "kl": "KL",
    "difference": "KL minus one shot's",
    "overlap": "",
}


@dataclass(frozen=True)
class IterativeOptions:
    """The plans that `iterative_study` makes.

    Attributes:
        ratios: removable share of the finished plans, each in (0, 1).
        steps: number of builds of H, and of equal parts of the budget; at least 2.
        interaction_strengths, guards: of all steps of a plan.
        ffn_groups: groups per FFN layer.
        surrogates: what plans are solved on: "H", "pair KL", "additive KL".
    """

    ratios: tuple[float, ...] = (0.4,)
    steps: int = 2
    interaction_strengths: tuple[float, ...] = (0.0, 1.0)
    guards: Guards = field(default_factory=Guards)
    ffn_groups: int = 16
    surrogates: tuple[str, ...] = ("H",)

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise InputError(f"steps is {self.steps}; one step is the one-shot plan. Give 2.")


def iterative_study(
    model: PreTrainedModel,
    recipe: Recipe,
    held_out: CalibrationSet,
    options: IterativeOptions = IterativeOptions(),
) -> Table:
    """Compare pruning in steps with one shot (conclusion, as an outlook); `staged_plan` makes both.

    Both plans stop at the first unit that reaches the ratio, so their realized ratios differ by
    less than one unit. Later builds take over the settings of `recipe`, whose `cache` is the
    study's.

    Returns:
        A row per surrogate, ratio, lambda and `plan` ("one shot", "iterative"): `builds` of H
        behind the plan; `kl` and `difference` to the one-shot plan; `perplexity`; `predicted_risk`
        by the dense model's H; `overlap` with the one-shot plan. Errors are over rows alone: both
        plans depend on one calibration draw.
    """
    held_out.require_disjoint(recipe.calibration)
    settings = marks(
        model, held_out=held_out.fingerprint, recipe=recipe.mark, options=asdict(options)
    )

    def compute(study: Study) -> Table:
        dense = recipe.build(model, enumerate_units(model, options.ffn_groups))
        plans: list[Selection] = []
        kinds = product(options.surrogates, options.ratios, options.interaction_strengths)
        for surrogate, ratio, strength in kinds:
            steps: list[float] = (np.arange(1, options.steps) / options.steps * ratio).tolist()
            plans += [
                staged_plan(
                    *(model, dense, recipe.calibration, ratio, stages, strength, options.guards),
                    surrogate=surrogate,
                    folder=recipe.cache,
                    progress=recipe.progress,
                )
                for stages in ([], steps)
            ]
        table = study.measure(plans)
        return [_row(table, place) for place in range(len(plans))]

    study = Study(model, held_out, cache=recipe.cache, progress=recipe.progress)
    return study.table("iterative", settings, compute)


def _row(table: PlanTable, place: int) -> Row:
    plan, shot = table.selections[place], place - place % 2
    head: Row = {
        "plan": ONE_SHOT if place == shot else ITERATIVE,
        "surrogate": plan.surrogate,
        "builds": 1 + len(plan.stages),
        "requested_ratio": plan.requested_ratio,
        "interaction_strength": plan.interaction_strength,
        "predicted_risk": plan.predicted_risk,
    }
    return head | compared(table, place, shot)
