"""What a page of any model shows as measured: plans along lambda, and pairs of units."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

import cocurve_lab as cl
from cocurve_lab.extensions.judging.kept import answers_file, plans_file
from cocurve_lab.extensions.writing import duration

from .session import MeasuredPlan, Session, count_right, edge_of

if TYPE_CHECKING:
    from cocurve_lab.extensions.judging.generation import Question

STRENGTHS = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 1.0)
RATIOS = (0.05, 0.1, 0.2, 0.3, 0.4)
PAIRS = 12  # strongest edges whose units are measured alone and together


def plans_along(
    curvature: cl.Curvature,
    ratios: Sequence[float] = RATIOS,
    strengths: Sequence[float] = STRENGTHS,
) -> list[cl.Selection]:
    """Return the plans of some lambdas and ratios under the opening guards that greedy can make."""
    guards, found = cl.opening_guards(curvature.units), []
    for strength in strengths:
        for ratio in ratios:
            with suppress(cl.InfeasibleError):
                found.append(cl.solve_greedy(curvature, ratio, strength, guards))
    return found


def measure_for_page(
    session: Session,
    held_out: cl.CalibrationSet,
    questions: Sequence[Question] = (),
    *,
    plans: Sequence[cl.Selection] | None = None,
    pairs: int = PAIRS,
    cache: str | os.PathLike[str] | None = "kept",
) -> None:
    """Measure what a page shows, and add it to the session; the cost is printed first.

    Args:
        session: with the model and, for questions, its tokenizer.
        held_out: text for the KL, none of which H has seen.
        questions: with known answers, for the right answers by ability.
        plans: by default those of `plans_along`.
        pairs: number of strongest edges whose units are measured alone and together.
        cache: folder of the tables; a second run measures nothing again. None keeps nothing.
    """
    from cocurve_lab.extensions.judging.answers import AnswerOptions, Asker

    curvature, model = session.curvature, session.require_model()
    dense = cl.Selection.from_pruned(curvature.units, [])
    wanted = [dense, *(plans_along(curvature) if plans is None else plans)]
    shown = list({plan.fingerprint: plan for plan in wanted}.values())
    measured = [*shown, *_pairs(curvature, pairs)]
    asker, place = None, answers_file(cache, model, questions)
    if questions:
        options = AnswerOptions(checkpoint=place)
        asker = Asker(model, session.require_tokenizer(), questions, options)
    begun = time.monotonic()
    cl.measure_plans(model, shown[1:2], held_out.rows(0, 1), progress=False)
    kl = (time.monotonic() - begun) * len(held_out) * len(measured)
    begun = time.monotonic()
    if asker is not None:
        asker.ask([dense], [0])
    answers = (time.monotonic() - begun) * len(shown) * len(questions)
    print(
        f"{len(measured)} plans on {len(held_out)} rows, and {len(questions)} questions to "
        f"{len(shown)} of them: at most {duration(kl + answers)}, less "
        f"what {'is kept' if cache is None else f'{cache} keeps'}.",
        flush=True,
    )
    kept = plans_file(cache, model, held_out)
    table = cl.measure_plans(model, measured, held_out, checkpoint=kept, calibrated_on=curvature)
    by_units = dict(zip((frozenset(p.pruned) for p in measured), table.kl, strict=True))
    names = [] if asker is None else [question.capability for question in asker.questions]
    right = np.zeros((len(shown), 0)) if asker is None else asker.ask(shown, progress=True)[..., 0]
    found = []
    for k, (plan, rows) in enumerate(zip(measured, table.kl, strict=True)):
        if k < len(shown):
            facts: dict[str, Any] = {"abilities": count_right(names, right[k])}
        else:
            facts = {"edge": edge_of(plan, by_units), "by_row": ()}
        found.append(MeasuredPlan.of_rows(plan, rows, table.source, **facts))
    session.add_measured(*found)


def _pairs(curvature: cl.Curvature, count: int) -> list[cl.Selection]:
    """The units of the strongest edges |H_uv| alone, then the pairs, strongest first."""
    us, vs = np.triu_indices(len(curvature.units), 1)
    strongest = np.argsort(-np.abs(curvature.matrix[us, vs]), kind="stable")[:count]
    pairs = np.stack([us, vs], axis=1)[strongest]
    parts = [*np.unique(pairs)[:, None].tolist(), *pairs.tolist()]
    return [cl.Selection.from_pruned(curvature.units, part, curvature) for part in parts]
