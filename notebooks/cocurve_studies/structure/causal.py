"""The matched-pair causal test: does connectivity carry the damage, saliency held fixed?

Table bridge-causal, appendix "Mechanism Analysis". Bridges and controls of the same kind, cost and
saliency are forced out in two arms, and one and the same greedy list of further units completes
both. So the arms differ in connectivity only; every difference is paired over sequences or
questions. The paper has one threshold; here it varies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from cocurve_lab.base.errors import InfeasibleError, InputError
from cocurve_lab.base.storage import fingerprint
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.graph import bridge_units
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.judging.answers import ALL, AnswerOptions, answer_accuracy
from cocurve_lab.extensions.judging.generation import Question
from cocurve_lab.extensions.judging.kept import answers_file
from cocurve_lab.measuring.risk import standard_error
from cocurve_lab.solver.guards import UnitsLike
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy

from ..lazy import DataFrame, PreTrainedModel, PreTrainedTokenizerBase
from ..shared import known, marks
from ..study import Study
from ..tables import Columns, Folder, Row, Rows, table_of

# columns of the two tables for reading, with `shown`
PAIR_COLUMNS: Columns = {
    "bridge": "",
    "control": "",
    "bridge_saliency": "its saliency",
    "control_saliency": "of the control",
    "distance": "",
    "contrast": "connectivity, bridge / control",
}
COLUMNS: Columns = {
    "outcome": "",
    "family": "",
    "connectivity_quantile": "connectivity ≥",
    "pairs": "",
    "dense": "",
    "bridge": "",
    "control": "",
    "difference": "bridge − control",
}


@dataclass(frozen=True)
class CausalOptions:
    """The choices behind the arms.

    Attributes:
        ratio: share of removable cost of each arm, (0, 1).
        thresholds: (saliency quantile, connectivity quantile) pairs for `bridge_units`. Looser
            ones give more pairs where the default finds few bridges.
        caliper: of `match_controls`: the largest |log saliency| difference of a pair.
    """

    ratio: float = 0.2
    thresholds: tuple[tuple[float, float], ...] = ((0.5, 0.5), (0.5, 0.3))
    caliper: float = 0.2


# Pairs and arms -----------------------------------------------------------------------------------
@dataclass(frozen=True)
class Matching:
    """Bridges paired with controls: unit indices, closest pair first; and bridges without one."""

    pairs: tuple[tuple[int, int], ...]
    unmatched: tuple[int, ...] = ()


def match_controls(curvature: Curvature, bridges: UnitsLike, caliper: float = 0.2) -> Matching:
    """Pair bridges one to one with controls equal in kind and cost, close in saliency.

    The paper matches "unit-for-unit on saliency, type and cost" without a rule. Ours: a pair may
    form if kind and cost are equal, |log H_bb - log H_cc| is at most the caliper, and the control
    is the less connected of the two (else the pair would test nothing). Among all assignments it is
    one with the most pairs, and of those one of smallest total distance: fewer pairs rather than
    bad ones. A control is never a bridge, matched or not.

    Args:
        curvature: H [M, M], nats per token.
        bridges: units, names or indices, such as `bridge_units(curvature)`.
        caliper: largest |log saliency| difference, finite and >= 0; 0.2 is about 20 %.
    """
    units, rows = curvature.units, list(curvature.units.indices(bridges))
    live = curvature.saliency > 0
    logs = np.log(curvature.saliency, out=np.full(len(units), np.nan), where=live)
    distance = np.abs(logs[rows, None] - logs)  # [bridges, M], NaN without saliency
    may = (units.kinds[rows, None] == units.kinds) & (units.costs[rows, None] == units.costs)
    may &= (distance <= caliper) & (curvature.connectivity < curvature.connectivity[rows, None])
    may[:, rows] = False
    # above the distance of all pairs together, so no pair is given up to bring others closer
    prohibitive = 1.0 + caliper * len(rows)
    found = linear_sum_assignment(np.where(may, distance, prohibitive))
    formed = [(i, j) for i, j in zip(*found, strict=True) if may[i, j]]
    formed.sort(key=lambda pair: float(distance[pair]))
    left = set(range(len(rows))) - {i for i, _ in formed}
    pairs = tuple((rows[i], int(j)) for i, j in formed)
    return Matching(pairs, tuple(rows[i] for i in sorted(left)))


def pair_table(curvature: Curvature, matching: Matching) -> DataFrame:
    """Return one row per pair: its units, their saliency, its distance and the contrast."""
    saliency, degree = curvature.saliency, curvature.connectivity
    return table_of(
        {
            "bridge": curvature.units[bridge].name,
            "control": curvature.units[control].name,
            "bridge_saliency": saliency[bridge],
            "control_saliency": saliency[control],
            "distance": abs(math.log(saliency[bridge] / saliency[control])),
            "contrast": degree[bridge] / degree[control] if degree[control] else None,
        }
        for bridge, control in matching.pairs
    )


def causal_arms(
    curvature: Curvature, matching: Matching, ratio: float
) -> tuple[Selection, Selection]:
    """Two plans of equal cost: one forces the bridges out, one the controls; the rest is the same.

    The rest is one greedy list of lambda 1, made with neither set in it and without an edge to
    either, of units that are no bridge and no control. Where the forced units alone exceed the
    ratio, or the rest does not reach it, the closest pairs that fit are taken.

    Raises:
        InputError: not even one pair fits.
    """
    units = curvature.units
    for count in range(len(matching.pairs), 0, -1):
        forced = list(zip(*matching.pairs[:count], strict=True))
        share = ratio - units.costs[list(forced[0])].sum() / units.total_cost
        everyone = {unit for pair in matching.pairs for unit in pair} | set(matching.unmatched)
        if share < 0:
            continue
        try:
            rest = solve_greedy(curvature, share, exclude=sorted(everyone)).pruned
        except InfeasibleError:
            continue
        bridge, control = (
            Selection.from_pruned(
                units,
                [*mine, *rest],
                curvature,
                requested_ratio=float(ratio),
                ordered=True,
                forced=count,
            )
            for mine in forced
        )
        return bridge, control
    raise InputError(
        f"of {len(matching.pairs)} pairs none fits into a ratio of {ratio:g}. Raise the ratio, or "
        "loosen the thresholds or the caliper."
    )


# The study ----------------------------------------------------------------------------------------
def causal_study(
    model: PreTrainedModel,
    curvature: Curvature,
    held_out: CalibrationSet,
    options: CausalOptions = CausalOptions(),
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    questions: Sequence[Question] = (),
    cache: Folder = None,
    progress: bool = True,
) -> DataFrame:
    """Test with matched pairs that connectivity carries the damage (table bridge-causal).

    Args:
        held_out: text for KL and perplexity.
        tokenizer, questions: for right answers by capability; none measures none.

    Returns:
        One row per thresholds and outcome ("kl", "perplexity", "accuracy") and family ("all" or a
        capability): bridges, pairs, realized_ratio, predicted_difference (by H); the values of the
        dense model and of the two arms; `difference`, bridge - control, with its error paired over
        sequences or questions. Thresholds without a pair have no row.
    """
    asked = fingerprint([[q.capability, q.prompt, q.answer] for q in questions])
    settings = marks(model, curvature, held_out, questions=asked, options=asdict(options))

    def compute(study: Study) -> Rows:
        heads: Rows = []
        plans = [Selection.from_pruned(curvature.units, [], curvature)]
        for thresholds in options.thresholds:
            bridges = bridge_units(curvature, *thresholds)
            matching = match_controls(curvature, bridges, options.caliper)
            if not matching.pairs:
                continue
            arms = causal_arms(curvature, matching, options.ratio)
            plans += arms
            predicted = [arm.predicted_risk or 0.0 for arm in arms]
            heads.append(
                {
                    "requested_ratio": options.ratio,
                    "saliency_quantile": thresholds[0],
                    "connectivity_quantile": thresholds[1],
                    "bridges": len(bridges),
                    "pairs": arms[0].forced,
                    "realized_ratio": arms[0].realized_ratio,
                    "predicted_difference": predicted[0] - predicted[1],
                }
            )
        if not heads:
            return []
        table = study.measure(plans)
        assert table.nll is not None  # measure_plans always has it
        # the first-order expansion of exp about the mean nll, exact in the mean
        offset = 1 + table.nll - table.nll.mean(axis=1, keepdims=True)
        values = {
            ("kl", ALL): table.kl,
            ("perplexity", ALL): table.perplexity[:, None] * offset,
        }
        if questions and tokenizer is not None:
            kept = AnswerOptions(checkpoint=answers_file(cache, model, questions))
            answers = answer_accuracy(
                model, tokenizer, plans, questions, options=kept, progress=progress
            )
            for family in (*answers.capabilities, ALL):
                right = answers.right[:, answers.of(family)].astype(float)
                values["accuracy", family] = right
        return [
            head | {"outcome": outcome, "family": family} | _difference(found, 2 * number + 1)
            for (outcome, family), found in values.items()
            for number, head in enumerate(heads)
        ]

    study = Study(model, held_out, curvature, cache=cache, progress=progress)
    return study.table("causal", settings, compute)


def _difference(values: np.ndarray, place: int) -> Row:
    """Compare two neighboring rows of values [plans, observations]; the first is the dense one."""
    bridge, control = values[place], values[place + 1]
    row: dict[str, Any] = {"dense": float(values[0].mean())}
    return row | {
        "bridge": float(bridge.mean()),
        "control": float(control.mean()),
        "difference": float((bridge - control).mean()),
        "difference_error": known(standard_error(bridge - control)),
        "observations": len(bridge),
    }
