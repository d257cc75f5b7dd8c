"""Is H still right half-way? Pruning in steps, with H rebuilt in between, against one shot.

Also what the studies that build and measure share: whole builds, settings, plans compared in pairs.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..architectures import describe
from ..build import BuildOptions
from ..calibration import CalibrationSet
from ..curvature import Curvature
from ..errors import InputError
from ..estimator import estimate_curvature, load_or_estimate
from ..figures import COLORS, finish, graph_objects
from ..guards import Guards
from ..loading import fingerprint_model, model_dtype
from ..masking import resolve
from ..risk import PlanTable, measure_plans
from ..selection import Selection
from ..solver import solve_greedy
from ..units import UnitSet, enumerate_units
from .tables import Folder, Row, Table, cached_table, column, pick, plans_file

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel

ONE_SHOT, ITERATIVE = "one shot", "iterative"


@dataclass(frozen=True)
class Recipe:
    """How a study builds H of a model, and where it looks for it first.

    Attributes:
        calibration: rows and scored positions.
        top_r: size of the support.
        groups: groups of rows whose Grams are kept apart; as many as rows, and H of any rows is a
            sum of them, in rows x M^2 x 8 bytes.
        cache: folder of the builds; None keeps nothing.
        progress: show a progress bar.
    """

    calibration: CalibrationSet
    top_r: int = 256
    groups: int = 16
    cache: Folder = None
    progress: bool = True

    def build(self, model: PreTrainedModel, units: UnitSet) -> Curvature:
        """H of a model, loaded where it lies in the cache.

        Raises:
            KeyboardInterrupt: the build was stopped; a study of half an H would be another study.
        """
        options = BuildOptions(groups=self.groups)
        rest: dict[str, Any] = {"progress": self.progress, "options": options}
        inputs = (model, units, self.calibration, self.top_r)
        if self.cache is None:
            curvature = estimate_curvature(*inputs, **rest)
        else:
            curvature = load_or_estimate(self.cache, *inputs, **rest)
        if not curvature.provenance["complete"]:
            raise KeyboardInterrupt("the build was stopped. Run the study again to go on.")
        return curvature

    @property
    def mark(self) -> list[Any]:
        """What decides the outcome, for `cached_table`."""
        return [self.calibration.fingerprint, self.top_r, self.groups]


@dataclass(frozen=True)
class IterativeOptions:
    """The plans `iterative_study` makes.

    Attributes:
        ratios: removable share of the finished plans, each in (0, 1).
        steps: H is built this often, the budget is cut into as many equal parts; at least 2.
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
    """Prune in steps with H rebuilt in between, against one shot at the same ratio (Limitations).

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
        The error bars are of the held-out text alone: both plans hang on one calibration draw.

    Raises:
        MismatchError: a held-out row is also a calibration row.
        InfeasibleError: a plan cannot be made under the guards.
    """
    held_out.require_disjoint(recipe.calibration)
    extra = {"recipe": recipe.mark, "options": asdict(options)}
    settings = study_settings(model, held_out) | extra
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
        shown = recipe.progress
        table = measure_plans(model, plans, held_out, checkpoint=checkpoint, progress=shown)
        return [_row(table, place, options.steps) for place in range(len(plans))]

    return cached_table(recipe.cache, "iterative", settings, compute)


def iterative_step(
    model: PreTrainedModel, done: Selection, ratio: float, recipe: Recipe
) -> Selection:
    """Go on from a plan: H of what it left of the model, and the plan of a larger ratio on it.

    The removed units are zeroed in a copy (`without`) rather than cut out: that is the same
    function, and its units are those of the dense model, whereas the FFN of a cut model would be
    divided anew, into groups that straddle the old ones. H of removed units is 0 to rounding, so as
    `include` they cost nothing and pull on nothing. H is the second-order risk of going on,
    measured from the pruned model: against the dense teacher a first-order term remains (the pruned
    model is not its minimum), which H leaves out.

    Args:
        model: the dense model.
        done: what is removed already; its lambda and guards stay in force.
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
    """A copy of the model whose removed units are zeroed; the same function as `prune` gives.

    Raises:
        MismatchError: the selection is for other units.
        InputError: it has gains, which a rebuilt H would not know of.
    """
    if selection.gains:
        raise InputError(f"the plan has {len(selection.gains)} gains. Give it without gains.")
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
        "ratio": plan.requested_ratio,
        "interaction_strength": plan.interaction_strength,
        "predicted_risk": plan.predicted_risk,
    }
    return head | compared(table, place, shot)


def plot_iterative(table: Table) -> Figure:
    """KL of the one-shot and the iterative plan, by ratio and lambda."""
    go = graph_objects()
    figure, colors = go.Figure(), list(COLORS.values())
    for number, (plan, symbol) in enumerate(((ONE_SHOT, "circle"), (ITERATIVE, "diamond"))):
        rows = pick(table, plan=plan)
        names = [f"{r['ratio']:.0%}, λ = {r['interaction_strength']:g}" for r in rows]
        figure.add_scatter(
            x=names,
            y=column(rows, "kl"),
            error_y={"type": "data", "array": column(rows, "kl_se")},
            mode="markers",
            name=plan,
            text=[f"paired: {r['difference']:+.4f} ± {r['difference_se']:.4f}" for r in rows],
            marker={"color": colors[number], "symbol": symbol, "size": 11},
            hovertemplate="%{x}: %{y:.4f} nats per token<br>%{text}<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(title_text="removed share of removable parameters, and λ")
    figure.update_yaxes(title_text="held-out KL, nats per token (± s.e.)", rangemode="tozero")
    return finish(figure, "Rebuilding H on the way, against one shot")


# Shared by the studies that build and measure ---------------------------------------------------


def study_settings(model: PreTrainedModel, held_out: CalibrationSet) -> dict[str, Any]:
    """Marks of a model and of the text it is measured on, for `cached_table`."""
    marks = (fingerprint_model(model), model_dtype(model), held_out.fingerprint)
    return dict(zip(("model", "dtype", "held_out"), marks, strict=True))


def compared(table: PlanTable, place: int, base: int) -> Row:
    """One measured plan against another of the same table, paired over sequences.

    Returns:
        `realized_ratio`, `pruned_units`, `overlap`; `kl` and `difference` (to the base) with their
        standard errors `kl_se` and `difference_se`, nats per token; `perplexity` of the plan and
        `dense_perplexity`.
    """
    plan, difference = table.selections[place], table.paired(place, base)
    assert table.dense_nll is not None  # measure_plans always has it
    return {
        "realized_ratio": plan.realized_ratio,
        "pruned_units": len(plan),
        "overlap": plan_overlap(plan, table.selections[base]),
        "kl": table.mean[place],
        "kl_se": table.standard_error[place],
        "difference": difference[0],
        "difference_se": difference[1],
        "perplexity": table.perplexity[place],
        "dense_perplexity": np.exp(table.dense_nll.mean()),
    }


def plan_overlap(plan: Selection, other: Selection) -> float | None:
    """Jaccard overlap of two pruned sets, [0, 1]; 1 if both are empty, None if units differ."""
    if plan.units != other.units:
        return None
    either = int((plan.indicator | other.indicator).sum())
    return int((plan.indicator & other.indicator).sum()) / either if either else 1.0
