"""Pruning in steps, with H rebuilt in between, against one shot."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...calibration import CalibrationSet
from ...curvature.matrix import Curvature
from ...errors import InputError
from ...measuring.plan_memory import plans_file
from ...measuring.risk import PlanTable, measure_plans
from ...models.architectures import describe
from ...models.masking import resolve
from ...models.units import enumerate_units
from ...solver.guards import Guards
from ...solver.selection import Selection
from ...solver.solve import solve_greedy
from ...tables import Columns, Row, Table, cached_table
from ..shared import Recipe, compared, marks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


ONE_SHOT, ITERATIVE = "one shot", "iterative"

# columns of `iterative_study` for reading, with `shown`
COLUMNS: Columns = {
    "plan": "",
    "builds": "builds of H",
    "requested_ratio": "removed",
    "interaction_strength": "λ",
    "kl": "KL",
    "difference": "KL minus one shot's",
    "overlap": "",
}


@dataclass(frozen=True)
class IterativeOptions:
    """The plans `iterative_study` makes.

    Attributes:
        ratios: removable share of the finished plans, each in (0, 1).
        steps: number of builds of H, and of equal parts of the budget; at least 2.
        interaction_strengths: lambda of all steps of a plan.
        guards: in force at every step; a `layer_cap_factor` is taken of the ratio reached by then.
        ffn_groups: groups per FFN layer.
    """

    ratios: tuple[float, ...] = (0.4,)
    steps: int = 2
    interaction_strengths: tuple[float, ...] = (0.0, 1.0)
    guards: Guards = field(default_factory=Guards)
    ffn_groups: int = 16

    def __post_init__(self) -> None:
        if self.steps < 2:
            raise InputError(f"steps is {self.steps}; one step is the one-shot plan. Give 2.")


def iterative_study(
    model: PreTrainedModel,
    recipe: Recipe,
    held_out: CalibrationSet,
    options: IterativeOptions = IterativeOptions(),
) -> Table:
    """Compare pruning in steps, H rebuilt in between, with one shot (conclusion, as an outlook).

    Both plans stop at the first unit that reaches the ratio, so their realised ratios differ by
    less than one unit. Both are plans over the dense model's units, so both are measured against
    the dense teacher. See `iterative_step` for how H is rebuilt.

    Args:
        model: the dense model; a second copy of it is held while H is rebuilt.
        recipe: of every build; its `cache` also keeps the table and the measurements.
        held_out: rows on which the plans are measured.
        options: ratios, steps, lambdas, guards.

    Returns:
        A row per ratio, lambda and `plan` ("one shot", "iterative"): `kl` and `difference` to the
        one-shot plan with standard errors over sequences, nats per token; `perplexity`;
        `predicted_risk` of the plan by the dense model's H; `overlap` with the one-shot plan.
        The error bars are of the held-out text alone: both plans depend on one calibration draw.

    Raises:
        MismatchError: a held-out row is also a calibration row.
        InfeasibleError: a plan cannot be made under the guards.
    """
    held_out.require_disjoint(recipe.calibration)
    settings = marks(
        model, held_out=held_out.fingerprint, recipe=recipe.mark, options=asdict(options)
    )
    checkpoint = plans_file(recipe.cache, model, held_out)

    def compute() -> Table:
        dense = recipe.build(model, enumerate_units(model, options.ffn_groups))
        plans: list[Selection] = []
        for ratio in options.ratios:
            for strength in options.interaction_strengths:
                shot = solve_greedy(dense, ratio, strength, options.guards)
                first, *rest = (np.arange(1, options.steps + 1) / options.steps * ratio).tolist()
                done = solve_greedy(dense, first, strength, options.guards)
                for reached in rest:
                    done = iterative_step(model, done, reached, recipe)
                plans += [shot, repriced(done, dense)]
        table = measure_plans(
            model, plans, held_out, checkpoint=checkpoint, progress=recipe.progress
        )
        return [_row(table, place, options.steps) for place in range(len(plans))]

    return cached_table(recipe.cache, "iterative", settings, compute)


def iterative_step(
    model: PreTrainedModel, done: Selection, ratio: float, recipe: Recipe
) -> Selection:
    """Rebuild H on the rest of a pruned model, and extend its plan to a larger ratio.

    The removed units are zeroed in a copy (`without`) rather than cut out. That is the same
    function, and its units stay those of the dense model; the FFN of a cut model would be divided
    anew, into groups that straddle the old ones. H of removed units is 0 up to rounding, so as
    `include` they cost nothing and have no edges. H is the second-order risk of the next step,
    measured from the pruned model. Against the dense teacher a first-order term remains, because
    the pruned model is not its minimum; H omits it.

    Args:
        model: the dense model.
        done: the units removed so far; its lambda and guards stay in force.
        ratio: the share of removable cost to reach, above that of `done`.
        recipe: of the build.

    Returns:
        A Selection over the dense model's units, `done` first. Its risk terms are of the rebuilt H
        (0 for `done`); see `repriced`.

    Raises: as `solve_greedy` and `without`.
    """
    curvature = recipe.build(without(model, done), done.units)
    strength = 1.0 if done.interaction_strength is None else done.interaction_strength
    return solve_greedy(curvature, ratio, strength, done.guards, include=done.pruned)


def without(model: PreTrainedModel, selection: Selection) -> PreTrainedModel:
    """Copy the model with the removed units zeroed; the same function as the model `prune` makes.

    Raises:
        MismatchError: the selection is for other units.
        InputError: it has gains, which a rebuilt H would not see.
    """
    if selection.gains:
        raise InputError(
            f"the plan has {len(selection.gains)} gains. Remove them: selection.with_gains({{}})."
        )
    units, _ = resolve(model, selection)
    rest = copy.deepcopy(model)
    architecture = describe(rest)
    with torch.no_grad():
        for unit in units:
            weight = architecture.output_weight(unit.layer, unit.kind)
            weight[:, unit.start : unit.stop] = 0
    return rest


def repriced(selection: Selection, curvature: Curvature) -> Selection:
    """The same plan with the risk terms of another H."""
    return Selection.from_pruned(
        selection.units,
        selection.pruned,
        curvature,
        requested_ratio=selection.requested_ratio,
        interaction_strength=selection.interaction_strength,
        ordered=selection.ordered,
        guards=selection.guards,
    )


def _row(table: PlanTable, place: int, steps: int) -> Row:
    plan, shot = table.selections[place], place - place % 2
    head: Row = {
        "plan": ONE_SHOT if place == shot else ITERATIVE,
        "builds": 1 if place == shot else steps,
        "requested_ratio": plan.requested_ratio,
        "interaction_strength": plan.interaction_strength,
        "predicted_risk": plan.predicted_risk,
    }
    return head | compared(table, place, shot)
