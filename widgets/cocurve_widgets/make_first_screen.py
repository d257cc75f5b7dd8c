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
    marks = marks_of(model, curvature, text.rows(0, 16))
    gaps = gaps_of(model, curvature, plans_along(curvature, ratios, (0.5, 0.0, 1.0)), text)
    _write(demo_folder(), curvature, {"marks": marks, "sentences": sentences, "gaps": gaps})


def make_smollm2() -> None:
    """Measure SmolLM2: sentences; its mark is of the plans that ship, and it has no gaps."""
    model, tokenizer = cl.load_model("smollm2")
    curvature = cl.Curvature.load(kept_folder() / "H.npz")
    plans = plans_along(curvature, (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4))
    kept = read_plans(kept_folder() / "plans.json", curvature).plans
    kl = [
        plan.kl["c4"].mean()
        for plan in kept
        if plan.name.startswith("random ") and plan.selection.requested_ratio == NOISE
    ]
    noise = {
        "name": "noise",
        "risk": float(np.mean(kl)),
        "how": f"{NOISE:.0%} of the units removed at random, the mean of {len(kl)} plans",
    }
    sentences = next_words("smollm2", model, tokenizer, plans)
    _write(kept_folder(), curvature, {"marks": [noise], "sentences": sentences, "gaps": {}})


def next_words(
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plans: Sequence[cl.Selection],
) -> list[dict[str, Any]]:
    """Choose sentences that the whole model ends rightly, and predict their next word.

    A candidate is a question of the model's own whose answer is the likeliest next word of the
    whole model. Chosen are those that it is surest of, in turn of the ratio at which a plan first
    says something else; they stand in the order of the questions.

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
    return list(chosen["kept"])


def marks_of(
    model: PreTrainedModel, curvature: cl.Curvature, text: cl.CalibrationSet
) -> list[dict[str, Any]]:
    """What a KL means on a text: where it is unchanged, and the noise of random layers.

    "text unchanged" is the KL at which the next word changes at 2 % of the positions, between two
    plans of lambda 1/2. "noise" is the mean KL of plans that remove 20 % of the layers at random.
    """
    units, guards = curvature.units, cl.opening_guards(curvature.units)
    small = [cl.solve_greedy(curvature, ratio, 0.5, guards) for ratio in LOW]
    sides = [compare_models(model, cl.prune(model, plan), text) for plan in small]
    changed = np.maximum.accumulate([1 - side.kept for side in sides])
    unchanged = float(np.interp(CHANGED, changed, [side.kl.mean() for side in sides]))
    count = math.ceil(NOISE * units.num_layers)
    drawn = [random.Random(k).sample(range(units.num_layers), count) for k in range(DRAWS)]
    gone = [np.flatnonzero(np.isin(units.layers, layers)).tolist() for layers in drawn]
    layers = [cl.Selection.from_pruned(units, removed) for removed in gone]
    noise = cl.measure_plans(model, layers, text, progress=False).mean.mean()
    return [
        {
            "name": "text unchanged",
            "risk": unchanged,
            "how": f"below it the next word changes at fewer than {CHANGED:.0%} of positions",
        },
        {
            "name": "noise",
            "risk": float(noise),
            "how": f"{count} whole layers removed at random, the mean of {DRAWS} draws",
        },
    ]


def gaps_of(
    model: PreTrainedModel,
    curvature: cl.Curvature,
    plans: Sequence[cl.Selection],
    text: cl.CalibrationSet,
) -> dict[str, dict[str, float]]:
    """By the mark of each plan the factors from the KL that H predicts to the measured one.

    predicted * text * parabola * adding = measured: `text` is what remains when the expansion of
    the KL and the adding up of shifts are known, from `cl.split_risk` of some rows. H and the
    measurement are of other texts.
    """
    found: dict[str, dict[str, float]] = {}
    measured = cl.measure_plans(model, plans, text, progress=False).mean
    for plan, kl in zip(plans, measured.tolist(), strict=True):
        split = cl.split_risk(model, plan, text.rows(0, GAP_ROWS), progress=False)
        own = curvature.risk(plan.pruned) * split.expansion * split.adding_up
        factors = {"text": kl / own, "parabola": split.expansion, "adding": split.adding_up}
        found[plan_mark(plan.pruned)] = {key: float(f"{x:.4g}") for key, x in factors.items()}
    return found


def _write(folder: Path, curvature: cl.Curvature, found: dict[str, Any]) -> None:
    held = source_of(curvature) | found
    write_atomically(folder / FILE, json.dumps(held, ensure_ascii=False).encode())


if __name__ == "__main__":
    for name in sys.argv[1:]:
        {"demo": make_demo, "smollm2": make_smollm2}[name]()
