"""The checks of the exercises of notebooks 01 to 05: a reader's function against the right one.

A check tries the function on cases drawn at random and says how many agree; it never shows an
answer. Cases whose answers are all alike would accept a constant, so they check nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.judging.agreement import agreement
from cocurve_lab.solver.solve import solve_greedy

from .lazy import PreTrainedModel, PreTrainedTokenizerBase
from .tables import fold

if TYPE_CHECKING:
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


def rank_correlation(mine: Callable[..., Any]) -> str:
    """Notebook 04: mine(predicted, measured), Spearman's correlation of two arrays [n]."""
    rng = np.random.default_rng(SEED)
    cases: list[Case] = [tuple(np.exp(rng.normal(size=(2, n)))) for n in (4, 5, 8, 12, 30)]
    hint = "Ranks first, then Pearson's correlation of the ranks."
    return check(mine, cases, [agreement(*case).spearman for case in cases], hint)


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
