"""What the first screen shows of a model beside its plans, measured once and kept in a file.

Five sentences with the likeliest next words of the whole model and of each plan along lambda; marks
on the scale of KL, which say what a number of nats means for this model; and for a few plans the
factors between predicted and measured KL. The files that ship are made by

    python -m cocurve_widgets.first_screen demo 3  # the factors on 3 rows
    python -m cocurve_widgets.first_screen smollm2 0
"""

from __future__ import annotations

import json
import math
import random
import re
import sys
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import cocurve_lab as cl
from cocurve_lab.base.atomic import write_atomically
from cocurve_lab.extensions.judging.generation import own_questions
from cocurve_lab.extensions.judging.lockstep import next_token_probabilities
from cocurve_lab.extensions.pretrained.kept import kept_folder, read_plans
from cocurve_lab.measuring.risk import Meter
from cocurve_lab.models.identity import demo_folder

from .packing import plan_mark
from .page_measuring import plans_along

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from cocurve_lab.extensions.judging.generation import Question

FILE = "first_screen.json"
LONGEST = 40  # characters of a sentence
SENTENCES, WORDS = 5, 5  # sentences to pick from, and likeliest next words of each model
CHANGED = 0.02  # share of the positions whose next word may change in an unchanged text
LOW = (0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15)  # ratios among which that share is crossed
MOST_PATH = (
    200  # units, up to which every plan of a ratio is measured, not those of STRENGTHS alone
)
LAYERS, DRAWS = 0.2, 10  # share of the layers that are removed at random, and how often


def kept_first_screen(curvature: cl.Curvature) -> dict[str, Any]:
    """What ships for the model of this H; empty for any other model."""
    of = {
        "model_fingerprint": curvature.provenance.get("model_fingerprint"),
        "units_fingerprint": curvature.units.fingerprint,
    }
    for folder in (demo_folder(), kept_folder()):
        if (folder / FILE).is_file():
            found: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
            if of == {name: found.pop(name) for name in of}:
                return found
    return {}


def as_sentence(question: Question) -> str:
    """The beginning of a sentence that the answer ends; of a question "What is the ...?"."""
    return re.sub(r"^What is (the .*)\?$", lambda found: f"T{found[1][1:]} is", question.prompt)


def next_words(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plans: Sequence[cl.Selection],
    questions: Sequence[Question],
) -> list[dict[str, Any]]:
    """Choose sentences that the whole model ends rightly, and predict their next word.

    A candidate is a question whose answer is the likeliest next word of the whole model. Chosen are
    those that it is surest of, in turn of the ratio at which a plan first says something else; they
    stand in the order of the questions.

    Returns:
        For each sentence its `text`, the `answer`, the words as `tokens`, and by the mark of each
        plan (the whole model's is "") the likeliest ones: [[number of the token, probability]].
    """
    dense = cl.Selection.from_pruned(plans[0].units, [])
    asked = [dense, *plans]
    by_ratio: dict[float, list[tuple[float, str, str, np.ndarray]]] = {}
    for question in questions:
        text = as_sentence(question)
        if len(text) > LONGEST or set(text) & set(":?\n") or not question.answer:
            continue
        shares = next_token_probabilities(model, tokenizer, asked, text, chat=False)
        said = [str(tokenizer.decode([int(k)])).strip() for k in shares.argmax(axis=1)]
        if said[0] == question.answer:
            wrong = [
                p.requested_ratio for p, x in zip(plans, said[1:], strict=True) if x != said[0]
            ]
            found = by_ratio.setdefault(min(wrong, default=1.0), [])
            found.append((-float(shares[0].max()), text, question.answer, shares))
    turns = zip_longest(
        *(sorted(by_ratio[ratio], key=lambda x: x[:2]) for ratio in sorted(by_ratio))
    )
    chosen = [one for turn in turns for one in turn if one is not None][:SENTENCES]
    texts = [as_sentence(question) for question in questions]
    chosen.sort(key=lambda one: texts.index(one[1]))
    return [_written(tokenizer, asked, *one[1:]) for one in chosen]


def _written(
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[cl.Selection],
    text: str,
    answer: str,
    shares: np.ndarray,
) -> dict[str, Any]:
    likeliest = np.argsort(-shares, axis=1, kind="stable")[:, :WORDS]
    ids = list(dict.fromkeys(likeliest.ravel().tolist()))
    plans = {
        plan_mark(plan.pruned): [[ids.index(k), float(f"{row[k]:.4g}")] for k in best.tolist()]
        for plan, best, row in zip(asked, likeliest, shares, strict=True)
    }
    tokens = [str(tokenizer.decode([k])) for k in ids]
    return {"text": text, "answer": answer, "tokens": tokens, "plans": plans}


def changed_words(
    model: PreTrainedModel, plans: Sequence[cl.Selection], text: cl.CalibrationSet
) -> list[float]:
    """The share of a text's positions at which the likeliest next token of each plan is another."""

    def first(row: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(input_ids=row[None]).logits[0]
        return logits.argmax(dim=-1)

    with torch.no_grad():
        whole = torch.stack([first(row) for row in text.input_ids])
        found = []
        for plan in plans:
            with cl.ablate(model, plan):
                now = torch.stack([first(row) for row in text.input_ids])
            found.append(float((now != whole).double().mean()))
    return found


def marks_of(
    model: PreTrainedModel, curvature: cl.Curvature, text: cl.CalibrationSet
) -> list[dict[str, Any]]:
    """What a KL means on a text: where it is unchanged, and the noise of random layers.

    "text unchanged" is the KL at which the next word changes at 2 % of the positions, between two
    plans of lambda 1/2. "noise" is the mean KL of plans that remove 20 % of the layers at random.
    """
    units, guards = curvature.units, cl.opening_guards(curvature.units)
    small = [cl.solve_greedy(curvature, ratio, 0.5, guards) for ratio in LOW]
    count = math.ceil(LAYERS * units.num_layers)
    drawn = [random.Random(k).sample(range(units.num_layers), count) for k in range(DRAWS)]
    layers = [
        cl.Selection.from_pruned(units, np.flatnonzero(np.isin(units.layers, x)).tolist())
        for x in drawn
    ]
    meter = Meter(model, text)
    kl = [float(values[:, 0].mean()) for values in meter.measure([*small, *layers])]
    share = np.maximum.accumulate(changed_words(model, small, text))
    for ratio, k, changed in zip(LOW, kl, share, strict=False):
        print(f"{ratio:g}: {k:.4g} nats, {changed:.2%} of the next words change", flush=True)
    found = []
    if share[0] < CHANGED < share[-1]:
        risk = float(np.interp(CHANGED, share, kl[: len(small)]))
        how = f"below it the next word changes at fewer than {CHANGED:.0%} of positions"
        found.append({"name": "text unchanged", "risk": risk, "how": how})
    how = f"{count} whole layers removed at random, the mean of {DRAWS} draws"
    return [*found, {"name": "noise", "risk": float(np.mean(kl[len(small) :])), "how": how}]


def gap_of(
    model: PreTrainedModel,
    curvature: cl.Curvature,
    plan: cl.Selection,
    rows: cl.CalibrationSet,
    measured: float,
) -> dict[str, float]:
    """The factors from the KL that H predicts to a measured one; `cl.split_risk` of some rows.

    predicted * text * parabola * adding = measured: `text` is what remains when the expansion of
    the KL and the adding up of shifts are known. H and the measurement are of other texts.
    """
    split, predicted = cl.split_risk(model, plan, rows, progress=False), curvature.risk(plan.pruned)
    own = predicted * split.expansion * split.adding_up
    found = {"text": measured / own, "parabola": split.expansion, "adding": split.adding_up}
    return {name: float(f"{factor:.4g}") for name, factor in found.items()}


def make(name: str, gaps: int) -> None:
    """Measure what ships for "demo" or "smollm2", and write its file; `gaps`: rows of the gaps."""
    model, tokenizer = cl.load_model(name)
    found: dict[str, Any] = {}
    ratios: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
    if name == "demo":
        folder = demo_folder()
        curvature = cl.Curvature.load(folder / "H_64_rows.npz")
        # the held-out text of the page, behind five draws of calibration text
        options = {"positions_per_sequence": "all"}
        _, text = cl.default_calibration(name, tokenizer, 320, 64, **options)
        found["marks"] = marks_of(model, curvature, text.rows(0, 16))
    else:
        folder, ratios = kept_folder(), (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
        curvature = cl.Curvature.load(folder / "H.npz")
        kept = read_plans(folder / "plans.json", curvature).plans
        random_ = [
            plan.kl["c4"].mean()
            for plan in kept
            if plan.name.startswith("random ") and plan.selection.requested_ratio == LAYERS
        ]
        how = f"{LAYERS:.0%} of the units removed at random, the mean of {len(random_)} plans"
        found["marks"] = [{"name": "noise", "risk": float(np.mean(random_)), "how": how}]
    plans = plans_along(curvature, ratios)
    if name == "demo":  # it has few enough to measure every plan of a ratio
        paths = [cl.lambda_path(curvature, r, cl.opening_guards(curvature.units)) for r in ratios]
        plans += [
            segment.selection for path in paths for segment in path.segments if segment.selection
        ]
    found["sentences"] = next_words(model, tokenizer, plans, own_questions(name, 40))
    write = {
        "model_fingerprint": curvature.provenance["model_fingerprint"],
        "units_fingerprint": curvature.units.fingerprint,
        **found,
        "gaps": {},
    }
    for plan in plans_along(curvature, ratios, (0.5, 0.0, 1.0)) if gaps else ():
        kl = float(Meter(model, text).measure([plan])[0][:, 0].mean())
        gap = gap_of(model, curvature, plan, text.rows(0, gaps), kl)
        write["gaps"][plan_mark(plan.pruned)] = gap
        print(plan, kl, gap, flush=True)
        write_atomically(folder / FILE, json.dumps(write, ensure_ascii=False).encode())
    write_atomically(folder / FILE, json.dumps(write, ensure_ascii=False).encode())


if __name__ == "__main__":
    make(sys.argv[1], int(sys.argv[2]))
