"""Measure what the first screen shows of a model that ships, and write its file.

python -m cocurve_widgets.make_first_screen demo smollm2
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pandas import DataFrame

import cocurve_lab as cl
from cocurve_lab.base.atomic import write_atomically
from cocurve_lab.base.files import demo_folder
from cocurve_lab.base.schema import read_json
from cocurve_lab.extensions.judging.generation import own_questions
from cocurve_lab.extensions.judging.lockstep import next_token_probabilities
from cocurve_lab.extensions.pretrained.kept import kept_folder, read_plans
from cocurve_lab.measuring.risk import compare_models

from .first_screen import FILE, as_sentence, source_of
from .packing import plan_mark
from .page_measuring import plans_along

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LONGEST = 40  # characters of a sentence
SENTENCES, WORDS = 5, 5  # sentences to pick from, and likeliest next words of each model
CHANGED = 0.02  # share of the positions whose next word may change in an unchanged text
LOW = (0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15)  # ratios among which that share is crossed
NOISE, DRAWS = 0.2, 10  # share of the layers, or of units, removed at random, and how often
GAP_ROWS = 3  # of the text, on which predicted and measured KL are taken apart
OPENING, ENDS = 0.2, (0.0, 1.0)  # ratio of the first screen, and the ends of lambda


def make_demo() -> None:
    """Measure the embedded model: sentences, marks, and the gaps of some plans."""
    model, tokenizer = cl.load_model("demo")
    curvature = cl.Curvature.load(demo_folder() / "H_64_rows.npz")
    guards, ratios = cl.opening_guards(curvature.units), (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
    # the held-out text of the page, behind five draws of calibration text
    _, text = cl.default_calibration("demo", tokenizer, 320, 64)
    plans = plans_along(curvature, ratios)
    for ratio in ratios:  # the model is small enough for every plan of a ratio
        segments = cl.lambda_path(curvature, ratio, guards).segments
        plans += [segment.selection for segment in segments if segment.selection]
    sentences = next_words("demo", model, tokenizer, plans)
    marks = [mark(model, curvature, text.rows(0, 16)) for mark in (unchanged_mark, noise_mark)]
    some = plans_along(curvature, ratios, (0.5, *ENDS))
    measured = cl.measure_plans(model, some, text, progress=False).mean.tolist()
    gaps = {
        plan_mark(plan.pruned): gap_of(model, curvature, plan, kl, text.rows(0, GAP_ROWS))
        for plan, kl in zip(some, measured, strict=True)
    }
    _write(demo_folder(), curvature, {"marks": marks, "sentences": sentences, "gaps": gaps})


def make_smollm2() -> None:
    """Measure SmolLM2. Its file is written after each gap; a second run goes on where it stopped.

    Its plans were measured on C4, which does not ship: the mark of noise is of those. The expansion
    and the adding up are of rows of Python's manual. About a second a unit and row on a free core.
    """
    model, tokenizer = cl.load_model("smollm2")
    curvature = cl.Curvature.load(kept_folder() / "H.npz")
    rows: dict[str, Any] = {"seq_len": 256, "positions_per_sequence": 64}
    _, text = cl.default_calibration("smollm2", tokenizer, 1, GAP_ROWS, **rows)
    every = read_plans(kept_folder() / "plans.json", curvature).plans
    kept = [plan for plan in every if "c4" in plan.kl]
    kl = {plan_mark(plan.selection.pruned): plan.kl["c4"].mean() for plan in kept}
    file = kept_folder() / FILE
    if file.is_file():
        found = read_json(file)
    else:
        drawn = [
            plan.kl["c4"].mean()
            for plan in kept
            if plan.name.startswith("random ") and plan.selection.requested_ratio == NOISE
        ]
        noise = {
            "name": "noise",
            "risk": float(np.mean(drawn)),
            "how": f"{NOISE:.0%} of the units removed at random, the mean of {len(drawn)} plans",
        }
        plans = plans_along(curvature, (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4))
        found = {
            "marks": [unchanged_mark(model, curvature, text), noise],
            "sentences": next_words("smollm2", model, tokenizer, plans),
            "gaps": {},
        }
    for plan in plans_along(curvature, (OPENING, 0.1, 0.05, 0.3), (0.5, *ENDS)):
        mark = plan_mark(plan.pruned)
        if mark in kl and mark not in found["gaps"]:
            found["gaps"][mark] = gap_of(model, curvature, plan, kl[mark], text)
        _write(kept_folder(), curvature, found)
        print(plan, found["gaps"].get(mark), flush=True)


def next_words(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plans: Sequence[cl.Selection],
) -> list[dict[str, Any]]:
    """Choose sentences that the whole model ends rightly, and predict their next word.

    A candidate is a question of the model's own whose answer is the likeliest next word of the
    whole model. Chosen are those that it is surest of, in turn of the ratio at which a plan first
    says something else. They stand in the order of the questions, those first that a plan of 20 %
    at lambda 0 or 1 answers wrongly.

    Returns:
        For each sentence its `text`, the `answer`, the words as `tokens`, and by the mark of each
        plan (the whole model's is "") the likeliest ones: [[number of the token, probability]].
    """
    asked = [cl.Selection.from_pruned(plans[0].units, []), *plans]
    rows = []
    for question in own_questions(name, 40):
        text = as_sentence(question)
        if len(text) > LONGEST or set(text) & set(":?\n") or not question.answer:
            continue
        shares = next_token_probabilities(model, tokenizer, asked, text, chat=False)
        likeliest = np.argsort(-shares, axis=1, kind="stable")[:, :WORDS]
        ids = list(dict.fromkeys(likeliest.ravel().tolist()))
        tokens = [str(tokenizer.decode([k])) for k in ids]
        if tokens[0].strip() != question.answer:
            continue
        words: dict[str, list[list[Any]]] = {
            plan_mark(plan.pruned): [[ids.index(k), float(f"{row[k]:.4g}")] for k in best.tolist()]
            for plan, best, row in zip(asked, likeliest, shares, strict=True)
        }
        kept = {"text": text, "answer": question.answer, "tokens": tokens, "plans": words}
        wrong = (
            plan.requested_ratio
            for plan in plans
            if tokens[words[plan_mark(plan.pruned)][0][0]].strip() != question.answer
        )
        rows.append({"first": min(wrong, default=1.0), "sure": shares[0].max(), "kept": kept})
    found = DataFrame(rows)
    found["turn"] = found.sort_values("sure", ascending=False).groupby("first").cumcount()
    chosen = found.sort_values(["turn", "first"])[:SENTENCES].sort_index()
    ends = [p for p in plans if p.requested_ratio == OPENING and p.interaction_strength in ENDS]
    return sorted(chosen["kept"], key=lambda sentence: not _breaks(sentence, ends))


def _breaks(sentence: dict[str, Any], plans: Sequence[cl.Selection]) -> bool:
    """Whether one of some plans gives another word than the whole model."""
    return any(sentence["plans"][plan_mark(plan.pruned)][0][0] != 0 for plan in plans)


def unchanged_mark(
    model: PreTrainedModel, curvature: cl.Curvature, text: cl.CalibrationSet
) -> dict[str, Any]:
    """The KL at which the next word changes at 2 % of the positions, between two plans."""
    guards, changed, kl = cl.opening_guards(curvature.units), [0.0], [0.0]
    for ratio in LOW:
        plan = cl.solve_greedy(curvature, ratio, 0.5, guards)
        side = compare_models(model, cl.prune(model, plan), text)
        changed.append(max(changed[-1], 1 - float(side.kept)))
        kl.append(float(side.kl.mean()))
        if changed[-1] > CHANGED:
            break
    return {
        "name": "text unchanged",
        "risk": float(np.interp(CHANGED, changed, kl)),
        "how": f"below it the next word changes at fewer than {CHANGED:.0%} of positions",
    }


def noise_mark(
    model: PreTrainedModel, curvature: cl.Curvature, text: cl.CalibrationSet
) -> dict[str, Any]:
    """The mean KL of plans that remove 20 % of the layers at random."""
    units = curvature.units
    count = math.ceil(NOISE * units.num_layers)
    drawn = [random.Random(k).sample(range(units.num_layers), count) for k in range(DRAWS)]
    gone = [np.flatnonzero(np.isin(units.layers, layers)).tolist() for layers in drawn]
    layers = [cl.Selection.from_pruned(units, removed) for removed in gone]
    return {
        "name": "noise",
        "risk": float(cl.measure_plans(model, layers, text, progress=False).mean.mean()),
        "how": f"{count} whole layers removed at random, the mean of {DRAWS} draws",
    }


def gap_of(
    model: PreTrainedModel,
    curvature: cl.Curvature,
    plan: cl.Selection,
    kl: float,
    text: cl.CalibrationSet,
) -> dict[str, float]:
    """The factors from the KL that H predicts for a plan to the measured one, `kl`.

    predicted * text * parabola * adding = measured. `cl.split_risk` on a text gives the expansion
    of the KL and the adding up of shifts; `text` is what remains, because H and the measurement are
    of other texts.
    """
    split = cl.split_risk(model, plan, text, progress=False)
    own = curvature.risk(plan.pruned) * split.expansion * split.adding_up
    factors = {"text": kl / own, "parabola": split.expansion, "adding": split.adding_up}
    return {key: float(f"{x:.4g}") for key, x in factors.items()}


def _write(folder: Path, curvature: cl.Curvature, found: dict[str, Any]) -> None:
    held = source_of(curvature) | found
    write_atomically(folder / FILE, json.dumps(held, ensure_ascii=False).encode())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        {"demo": make_demo, "smollm2": make_smollm2}[name]()
