"""What a page of any model shows as measured: plans along lambda, replies, and pairs of units."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import cocurve_lab as cl
from cocurve_lab.base.atomic import write_atomically
from cocurve_lab.base.progress import duration
from cocurve_lab.base.schema import read_json
from cocurve_lab.measuring.plan_memory import answers_file, plans_file

from .session import MeasuredPlan, Session, mean_and_error

if TYPE_CHECKING:
    from cocurve_lab.measuring.generation import Question

STRENGTHS = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 1.0)
RATIOS = (0.05, 0.1, 0.2, 0.3, 0.4)
PAIRS = 12  # strongest edges whose units are measured alone and together
REPLY = 12  # tokens


def plans_along(curvature: cl.Curvature, ratios: Sequence[float] = RATIOS) -> list[cl.Selection]:
    """Return the plans of STRENGTHS at the ratios under the opening guards that greedy can make."""
    guards, found = cl.opening_guards(curvature.units), []
    for ratio in ratios:
        for strength in STRENGTHS:
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
    prompts: Sequence[str] | None = None,
    reply: int = REPLY,
    cache: str | os.PathLike[str] | None = "kept",
) -> None:
    """Measure what a page shows, and add it to the session; the cost is printed first.

    Args:
        session: with the model and, for questions and prompts, its tokenizer.
        held_out: text for the KL, none of which H has seen.
        questions: with known answers, for the right answers by ability.
        plans: by default those of `plans_along`.
        pairs: number of strongest edges whose units are measured alone and together.
        prompts: texts whose replies are shown; by default those of the first three questions.
        reply: tokens of a reply.
        cache: folder of the tables; a second run measures nothing again. None keeps nothing.
    """
    from cocurve_lab.measuring.answers import AnswerOptions, Asker

    curvature, model = session.curvature, session.require_model()
    dense = cl.Selection.from_pruned(curvature.units, [])
    wanted = [dense, *(plans_along(curvature) if plans is None else plans)]
    shown = list({plan.fingerprint: plan for plan in wanted}.values())
    parts = _pairs(curvature, pairs)
    measured = [*shown, *(cl.Selection.from_pruned(curvature.units, p, curvature) for p in parts)]
    judge: Any = {"checkpoint": plans_file(cache, model, held_out), "calibrated_on": curvature}
    asker, place = None, answers_file(cache, model, questions)
    if prompts is None:
        prompts = [question.prompt for question in questions[:3]]
    if questions:
        options = AnswerOptions(checkpoint=place)
        asker = Asker(model, session.require_tokenizer(), questions, options)
    begun = time.monotonic()
    cl.measure_plans(model, shown[1:2], held_out.rows(0, 1), progress=False)
    kl = (time.monotonic() - begun) * len(held_out) * len(measured)
    begun = time.monotonic()
    if asker is not None:
        asker.ask([dense], [0])
    answers = (time.monotonic() - begun) * len(shown) * (len(questions) + len(prompts))
    print(
        f"{len(measured)} plans on {len(held_out)} rows, {len(questions)} questions and "
        f"{len(prompts)} prompts to {len(shown)} of them: at most {duration(kl + answers)}, less "
        f"what {'is kept' if cache is None else f'{cache} keeps'}.",
        flush=True,
    )
    table = cl.measure_plans(model, measured, held_out, **judge)
    by_part = dict(zip(map(tuple, parts), table.kl[len(shown) :], strict=True))
    right = np.zeros((len(shown), 0)) if asker is None else asker.ask(shown, progress=True)[..., 0]
    names = [] if asker is None else [question.capability for question in asker.questions]
    said = _replies(session, shown, prompts, reply, place and place.with_suffix(".json"))
    session.prompts = tuple(prompts)
    found = []
    means = zip(table.mean.tolist(), table.standard_error.tolist(), strict=True)
    for k, (plan, rows, mean) in enumerate(zip(measured, table.kl, means, strict=True)):
        facts: dict[str, Any] = {"rows": len(rows)}
        if k < len(shown):
            counts = {name: [x == name for x in names] for name in dict.fromkeys(names)}
            facts["abilities"] = {n: (int(right[k][m].sum()), sum(m)) for n, m in counts.items()}
            facts |= {"by_row": tuple(rows.tolist()), "replies": said[k]}
        elif len(part := parts[k - len(shown)]) == 2:
            edge = rows - by_part[part[0],] - by_part[part[1],]
            facts["edge"] = mean_and_error(edge)
        found.append(MeasuredPlan(plan, *mean, table.source, **facts))
    session.add_measured(*found)


def _pairs(curvature: cl.Curvature, count: int) -> list[list[int]]:
    """The units of the strongest edges |H_uv| alone, then the pairs, strongest first."""
    us, vs = np.triu_indices(len(curvature.units), 1)
    strongest = np.argsort(-np.abs(curvature.matrix[us, vs]), kind="stable")[:count]
    alone = np.unique([us[strongest], vs[strongest]]).tolist()
    return [*([unit] for unit in alone), *([int(us[k]), int(vs[k])] for k in strongest)]


def _replies(
    session: Session,
    plans: Sequence[cl.Selection],
    prompts: Sequence[str],
    reply: int,
    file: Path | None,
) -> list[tuple[str, ...]]:
    """The first words of every plan after each prompt; in a file of the cache after each plan."""
    kept: dict[str, str] = {}
    if file is not None and file.exists():
        kept = read_json(file)
    for plan in plans if prompts else ():
        lacking = [p for p in prompts if f"{plan.fingerprint} {reply} {p}" not in kept]
        if lacking:
            with cl.ablate(session.require_model(), plan):
                for prompt in lacking:
                    kept[f"{plan.fingerprint} {reply} {prompt}"] = cl.continue_text(
                        session.require_model(), session.require_tokenizer(), prompt, reply
                    )
            if file is not None:
                write_atomically(file, json.dumps(kept).encode())
    return [tuple(kept[f"{plan.fingerprint} {reply} {p}"] for p in prompts) for plan in plans]
