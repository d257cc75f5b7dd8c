"""The checks of the notebooks' exercises: a reader's function against the right one.

A check tries the function on cases drawn at random and says how many agree; it never shows an
answer. Cases whose answers are all alike would accept a constant, so they check nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cocurve_lab.base.errors import CocurveError
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.curvature.uncertainty import jackknife
from cocurve_lab.extensions.analysis.variants import measured_diagonal
from cocurve_lab.extensions.judging.agreement import agreement
from cocurve_lab.measuring.risk import measure_plans
from cocurve_lab.methods.filling import take_in_order
from cocurve_lab.models.units import UnitSet
from cocurve_lab.solver.guards import FREE
from cocurve_lab.solver.solve import solve_greedy

from .best_plan import swapped
from .certainty.resampling import of_groups
from .tables import Table, fold, pick

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from cocurve_lab.solver.selection import Selection

RIGHT, NOT_YET = "right", "not yet"
SEED = 0  # of the cases
STRENGTHS = tuple(n / 20 for n in range(21))  # the lambdas that notebook 02 asks about

Case = tuple[Any, ...]  # the arguments of one call


def check(
    mine: Callable[..., Any],
    cases: Sequence[Case],
    answers: Sequence[Any],
    hint: str,
    rtol: float = 1e-6,
) -> str:
    """Try a reader's function on every case.

    Args:
        mine: the function.
        cases: the arguments of each call.
        answers: what it should return: numbers, arrays or None.
        hint: what to look at if it does not; a sentence without an answer.
        rtol: relative difference that counts as equal.

    Returns:
        "right" if all agree; otherwise "not yet: ...", with the number that do, or the error.
    """
    if all(_same(answer, answers[0], rtol) for answer in answers):
        return f"{NOT_YET}: all {len(cases)} cases have the same answer here. Use more text for H."
    agree = 0
    for case, answer in zip(cases, answers, strict=True):
        try:
            agree += _same(mine(*case), answer, rtol)
        except Exception as error:  # a reader's half-finished code may raise anything
            return fold(f"{NOT_YET}: {type(error).__name__}: {error}")
    if agree == len(cases):
        return RIGHT
    return fold(f"{NOT_YET}: {agree} of {len(cases)} cases are right. {hint}")


def _same(value: Any, answer: Any, rtol: float) -> bool:
    """Tell whether two values are equal: None only to None, numbers and arrays up to rounding."""
    if value is None or answer is None:
        return value is answer
    try:
        mine, right = np.asarray(value), np.asarray(answer)
        if mine.dtype.kind not in "iuf" or mine.shape != right.shape:  # True is no number here
            return False
        return bool(np.allclose(mine, right, rtol=rtol, atol=0))
    except (TypeError, ValueError):  # ragged lists and the like
        return False


# One check per notebook ---------------------------------------------------------------------------
def set_risk(mine: Callable[..., Any], curvature: Curvature) -> str:
    """Notebook 01: mine(H, removed), the predicted risk 1/2 s^T H s of random sets."""
    rng, size = np.random.default_rng(SEED), len(curvature.units)
    sets = [rng.choice(size, count, replace=False).tolist() for count in range(1, 9)]
    cases = [(np.array(curvature.matrix), chosen) for chosen in sets]
    hint = "Half of each diagonal entry, and every pair once."
    return check(mine, cases, [curvature.risk(chosen) for chosen in sets], hint)


def first_difference(mine: Callable[..., Any], curvature: Curvature) -> str:
    """Notebook 02: mine(ratio, count), the smallest lambda of STRENGTHS that changes so many units.

    None where none does; a unit counts if one of the two plans alone removes it.
    """
    cases: list[Case] = []
    answers: list[float | None] = []
    for ratio in np.random.default_rng(SEED).uniform(0.15, 0.6, 3).round(2).tolist():
        plans = [set(solve_greedy(curvature, ratio, s).pruned) for s in STRENGTHS]
        far = [len(plan ^ plans[0]) for plan in plans]
        for count in (1, 4, max(1, *far)):  # the largest tells "at least" from "more than"
            cases.append((ratio, count))
            changed = (s for s, units in zip(STRENGTHS, far, strict=True) if units >= count)
            answers.append(next(changed, None))
    hint = "Compare the plan of each λ, from the smallest on, with the diagonal plan."
    return check(mine, cases, answers, hint)


def strongest_partner(mine: Callable[..., Any], curvature: Curvature) -> str:
    """Notebook 03: mine(unit), the index (or name) v of the largest |H_uv| with v != u."""
    size = len(curvature.units)
    units = np.random.default_rng(SEED).choice(size, min(size, 20), replace=False)
    edges = np.abs(curvature.matrix)
    np.fill_diagonal(edges, -1.0)
    hint = "Edges have two signs, and a unit is no partner of its own."
    return check(
        lambda unit: curvature.units.index(mine(unit)),
        [(unit,) for unit in units.tolist()],
        edges[units].argmax(axis=1).tolist(),
        hint,
    )


def rank_correlation(mine: Callable[..., Any], points: Table) -> str:
    """Notebook 04: mine(predicted, measured), Spearman's correlation of two arrays [n].

    The plans of a `FidelityScatter` (`points`) are one case beside five random ones.
    """
    rng = np.random.default_rng(SEED)
    cases: list[Case] = [tuple(np.exp(rng.normal(size=(2, n)))) for n in (4, 5, 8, 12, 30)]
    names = ("predicted_risk", "measured_risk")
    plans = [p for p in pick(points, kind="plan") if min(p[name] for name in names) > 0]
    if len(plans) > 2:
        cases.append(tuple(np.array([p[name] for p in plans]) for name in names))
    answers = [agreement(*case).spearman for case in cases]
    known = [n for n, answer in enumerate(answers) if math.isfinite(answer)]
    return check(
        mine,
        [cases[n] for n in known],
        [answers[n] for n in known],
        "Ranks first, then Pearson's correlation of the ranks.",
    )


def first_divergence(
    mine: Callable[..., Any],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    plans: Sequence[Selection],
) -> str:
    """Notebook 05: mine(plan, prompt_ids, dense_ids), the first token at which the texts will part.

    The model writes 16 tokens after every prompt under every plan. Plans of several sizes make
    some texts part early and others never.
    """
    from cocurve_lab.extensions.judging.lockstep import Sampling, compare_text

    cases: list[Case] = []
    answers: list[int | None] = []
    for plan in plans:
        for prompt in prompts:
            pair = compare_text(model, tokenizer, prompt, plan, Sampling(16))
            cases.append((plan, list(pair.prompt_ids), list(pair.dense_ids)))
            answers.append(pair.divergence)
    hint = "The logits at the last token of the prompt are about the first new token."
    return check(mine, cases, answers, hint)


def fitting_strength(mine: Callable[..., Any], summary: Table) -> str:
    """Notebook 06: mine(node_risk, edge_mass, measured), the lambda that makes R_lambda right.

    The plans of lambda 1 of a `strength_summary` are cases beside six random ones.
    """
    rng = np.random.default_rng(SEED)
    numbers = rng.uniform(0.1, 2, (6, 3))
    numbers[:, 1] *= rng.choice([-1, 1], 6)  # an edge mass may be negative
    cases: list[Case] = [tuple(row) for row in numbers.tolist()]
    for row in pick(summary):
        if row["edge_mass"] and row["kl_lambda_1"] is not None:
            node = row["kl_lambda_1"] - row["remainder"] - row["edge_mass"]
            cases.append((node, row["edge_mass"], row["kl_lambda_1"]))
    answers = [(measured - node) / edges for node, edges, measured in cases]
    return check(mine, cases, answers, "Solve node_risk + λ · edge_mass = measured for λ.")


def control_of(
    mine: Callable[..., Any],
    curvature: Curvature,
    bridges: Iterable[int],
    match: Callable[..., Any],
) -> str:
    """Notebook 07: mine(unit), the control of a unit without a limit on the distance.

    `bridges` are the units that are no controls; `match` is `match_controls`, which knows the
    answers.
    """
    cases: list[Case] = []
    answers: list[int] = []
    kept = list(bridges)
    order = [*kept, *np.random.default_rng(SEED).permutation(len(curvature.units)).tolist()]
    for unit in dict.fromkeys(order):
        others = [other for other in kept if other != unit]
        try:
            found = match(curvature, [unit], caliper=1e9, exclude=others).controls
        except CocurveError:  # a unit without saliency has no logarithm
            continue
        if found and len(cases) < 24:
            cases.append((unit,))
            answers.append(int(found[0]))
    hint = "Which units are allowed at all? Kind, cost, connectivity, and no bridge."
    return check(mine, cases, answers, hint)


def jackknife_error(mine: Callable[..., Any], curvature: Curvature) -> str:
    """Notebook 08: mine(sums, positions), the jackknife error of every saliency, [units].

    The cases are H and H on some of its groups.
    """
    grams, positions = curvature.group_grams, curvature.group_positions
    assert grams is not None
    assert positions is not None
    rng, cases, answers = np.random.default_rng(SEED), [], []
    filled = np.flatnonzero(positions)
    for count in sorted({len(filled), max(2, len(filled) - 1), max(2, len(filled) // 2)}):
        part = np.sort(rng.choice(filled, count, replace=False))
        some = of_groups(curvature, part)
        cases.append((np.diagonal(grams[part], axis1=1, axis2=2).copy(), positions[part]))
        answers.append(jackknife(some, "saliency").standard_error)
    hint = "Leave one group out at a time; the scatter counts (G - 1) / G, not 1 / (G - 1)."
    # where groups differ in size, the library weighs them and the formula of the text does not
    return check(mine, cases, answers, hint, rtol=0.1)


def measured_order(mine: Callable[..., Any], curvature: Curvature, ratio: float) -> str:
    """Notebook 09: mine(units, curvature), the order by measured risk alone per parameter.

    The cases are H and H on halves of its groups; the answer is the order of the units at the
    budget, as greedy on the measured diagonal takes them at lambda 0.
    """
    assert curvature.group_positions is not None
    filled = np.flatnonzero(curvature.group_positions)
    halves = [of_groups(curvature, filled[start::2]) for start in (0, 1) if len(filled) > 1]
    cases: list[Case] = [(curvature.units, some) for some in (curvature, *halves)]
    answers = [solve_greedy(measured_diagonal(some), ratio, 0.0).pruned for _, some in cases]
    lengths = [len(answer) for answer in answers]

    def start_of(units: UnitSet, some: Curvature) -> list[int]:
        order = [int(unit) for unit in mine(units, some)]
        if sorted(order) != list(range(len(units))):
            raise ValueError("the order must have every unit once")
        place = next(n for n, case in enumerate(cases) if case[1] is some)
        return order[: lengths[place]]

    hint = "curvature.single_unit_risk is per unit; the budget is in parameters."
    return check(start_of, cases, answers, hint)


def smallest_size(
    mine: Callable[..., Any], sizes: Sequence[int], risk: Callable[[int], float]
) -> str:
    """Notebook 10: mine(limit), the smallest size in bytes whose plan is predicted to cost less.

    `risk` predicts the risk of the plan of a size, nats per token.
    """
    risks = {size: risk(size) for size in sizes}
    levels = np.unique([value for value in risks.values() if value > 0])
    rng, limits = np.random.default_rng(SEED), []
    for place in rng.choice(max(len(levels) - 1, 0), min(len(levels) - 1, 6), replace=False):
        limits.append(float(np.sqrt(levels[place] * levels[place + 1])))  # between two plans
    answers = [min(size for size in sizes if risks[size] < limit) for limit in limits]
    hint = "Of all sizes below the limit, take the smallest."
    return check(mine, [(limit,) for limit in limits], answers, hint)


def better_swap(
    mine: Callable[..., Any],
    model: PreTrainedModel,
    units: UnitSet,
    ratio: float,
    text: CalibrationSet,
) -> str:
    """Notebook 11: mine(plan), the units to swap in a random plan so that it costs less.

    The reader's function returns two lists of units, names or indices. Plans remove `ratio`, and
    are measured on `text`.
    """
    rng = np.random.default_rng(SEED)
    orders = [rng.permutation(len(units)).tolist() for _ in range(4)]
    plans = [take_in_order(units, order, ratio, FREE) for order in orders]

    def number_if_lower(number: int) -> int:
        """Return the number of the plan where the swap lowers its measured KL, else 0."""
        plan = plans[number - 1]
        pair = [swapped(plan, *mine(plan)), plan]
        kl = measure_plans(model, pair, text, progress=False).mean
        return number if kl[0] < kl[1] else 0

    numbers = range(1, len(plans) + 1)
    hint = "Take out what costs much alone, and put in what costs little and is as large."
    return check(number_if_lower, [(number,) for number in numbers], numbers, hint)
