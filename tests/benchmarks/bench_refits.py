"""Plans of SmolLM2-135M as cut and refitted; writes data/smollm2/refitted.json.

    python tests/benchmarks/bench_refits.py FOLDER              # two hours on two cores
    python tests/benchmarks/bench_refits.py FOLDER --ratios 0.2 --names searched --minutes 15

FOLDER holds c4_slice.txt (a document per line), wikitext2_valid.txt and wikitext2_test.txt, and
tinystories.txt. Their text is not in the repository; the numbers are. What is in the folder of
--work is not measured again.

A refit reads 32 rows of C4 and 32 of WikiText's valid split, 256 tokens each. SlimGPT's plan is
also refitted in SlimGPT's own way, on the same rows. With --minutes, each model is then trained on
them, from the plan as cut and from the refit; four further rows of each of the two texts choose the
state that is taken. Twelve rows of each of four texts judge: C4 and WikiText's test split, of the
mix, and stories and Python's manual, outside it. No refit, no search and no H has seen a judge.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import cocurve_lab as cl
from cocurve_lab.base.schema import read_json
from cocurve_lab.extensions.judging.agreement import random_plan
from cocurve_lab.extensions.pretrained.kept import (
    kept_curvature,
    kept_folder,
    kept_interactions,
    read_plans,
    write_plans,
)
from cocurve_lab.extensions.pretrained.smollm2 import NAME
from cocurve_lab.extensions.repairing.recovery import RecoverOptions
from cocurve_lab.measuring.risk import Meter
from cocurve_lab.methods.base import Evidence
from cocurve_lab.methods.slimgpt import SlimGpt
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.runtime import measuring
from data.make.measure_smollm2 import LENGTH, answers, c4_rows, paragraphs
from helpers.benchmarks import arguments, flag

LAYERS, RANDOM = "measured layers, lambda 0", "random 0"
NAMES = (LAYERS, "searched", "ShortGPT", "SlimLLM", "SlimGPT", RANDOM)
FIT, HELD_OUT, JUDGED = 32, 4, 12  # rows of a text
APART = 9  # rows between two judges of a text whose documents are longer than a row
# rows of the slice of C4: H read 0 to 23, search and choice 32 to 95
C4_FIT, C4_JUDGED = 96, (140, 284)


def texts(folder: Path, tokenizer: Any) -> dict[str, cl.CalibrationSet]:
    """The rows of the refit, under "fit", those held out, and those of the judges, by name."""
    c4 = c4_rows(folder / "c4_slice.txt", tokenizer, C4_JUDGED[1], **LENGTH)
    _, manual = cl.default_calibration(NAME, tokenizer, 1, APART * JUDGED, **LENGTH)

    def of(file: str, rows: int) -> cl.CalibrationSet:
        return paragraphs(folder / file, tokenizer, rows, file)

    apart, last = FIT + 2, FIT + 2 + HELD_OUT  # the text of a row may go on in the next two
    valid = of("wikitext2_valid.txt", last)

    def mix(first: int, end: int) -> cl.CalibrationSet:
        parts = [c4.rows(C4_FIT + first, C4_FIT + end), valid.rows(first, end)]
        ids = torch.cat([part.input_ids for part in parts])
        return cl.CalibrationSet(ids, source="C4 and WikiText-2 valid")

    # some documents of the slice are in it twice
    seen, unseen = c4.rows(0, C4_FIT + last), []
    for row in range(*C4_JUDGED):
        with suppress(cl.MismatchError):
            unseen.append(c4.rows(row, row + 1).require_disjoint(seen).input_ids)
    return {
        "fit": mix(0, FIT),
        "held_out": mix(apart, last),
        # few rows of one document: an error over rows takes them as independent
        "c4": cl.CalibrationSet(torch.cat(unseen[::APART][:JUDGED]), source="C4"),
        "wikitext": of("wikitext2_test.txt", JUDGED),
        "stories": of("tinystories.txt", JUDGED),
        "manual": cl.CalibrationSet(manual.input_ids[::APART], source="Python's manual"),
    }


def plans_of(
    options: argparse.Namespace, curvature: cl.Curvature
) -> Iterator[tuple[str, cl.Selection]]:
    """The plans that ship, and at ratios where none does, those of layers and at random."""
    kept = read_plans(kept_folder() / "plans.json", curvature).plans
    layers = kept_interactions(NAME, "layers")
    assert layers is not None  # it ships
    for ratio in options.ratios:
        found = {
            plan.name: plan.selection for plan in kept if plan.selection.requested_ratio == ratio
        }
        found.setdefault(LAYERS, layers.solve(ratio, 0.0))
        found.setdefault(RANDOM, random_plan(curvature.units, ratio, 0))
        yield from ((name, found[name]) for name in options.names if name in found)


def kept(file: Path, measure: Callable[[], Any]) -> Any:
    """What a file holds; it is measured and written first if it is not there."""
    if not file.exists():
        file.write_text(json.dumps(measure()))
    return json.loads(file.read_text())


def risks(meter: Meter, smaller: Any) -> list[list[float]]:
    """KL and loss of a model on each row of the judges."""
    threads = torch.get_num_threads()
    with measuring(meter.model, threads), measuring(smaller, threads):
        return [
            meter.engine.measure_student(row, describe(smaller))[:2].tolist()
            for row in range(len(meter.text))
        ]


def asked(tokenizer: Any, smaller: Any) -> dict[str, list[int]]:
    """[right, asked] of a model by ability."""
    (right,) = answers(
        smaller, tokenizer, [cl.Selection.from_pruned(cl.enumerate_units(smaller), [])]
    ).values()
    return right


def main() -> None:
    options = arguments(
        __doc__,
        texts=flag(positional=True, type=Path),
        ratios=[0.1, 0.2, 0.3, 0.4],
        names=NAMES,
        minutes=flag(None, "of training, from either start", type=float),
        work=flag(Path("build/refits"), "keeps each step", type=Path),
    )
    options.work.mkdir(parents=True, exist_ok=True)
    model, tokenizer = cl.load_model(NAME)
    curvature = kept_curvature(NAME)
    rows = texts(options.texts, tokenizer)
    fitted, held_out = rows.pop("fit"), rows.pop("held_out")
    for judge in rows.values():
        judge.require_disjoint(fitted)
    meter = Meter(
        model,
        cl.CalibrationSet(torch.cat([judge.input_ids for judge in rows.values()])),
        keep_teacher=True,
    )

    def measured(
        name: str, plan: cl.Selection, way: str, made: Callable[[], Any]
    ) -> dict[str, Any]:
        file = options.work / f"{plan.fingerprint[:12]}, {way}.json"
        found = np.array(kept(file, lambda: risks(meter, made())))
        right = kept(file.with_suffix(".answers"), lambda: asked(tokenizer, made()))
        by_text = dict(zip(rows, np.split(found, len(rows)), strict=True))
        means = {text: float(x[:, 0].mean()) for text, x in by_text.items()}
        print(name, plan.requested_ratio, way, means, right, flush=True)
        return {
            "name": f"{name} | {way}",
            "requested_ratio": plan.requested_ratio,
            "interaction_strength": plan.interaction_strength,
            "pruned": sorted(plan.pruned),
            "kl": {text: np.round(x[:, 0], 5).tolist() for text, x in by_text.items()},
            "nll": {text: np.round(x[:, 1], 5).tolist() for text, x in by_text.items()},
            "right": right,
        }

    def trained(made: Callable[[], Any]) -> Any:
        options_of = RecoverOptions(minutes=options.minutes, progress=False)
        return cl.recover(model, made(), fitted, held_out, options=options_of)

    @cache
    def second_moments() -> Evidence:
        return SlimGpt(reconstruct=True).measure(model, curvature.units, fitted)

    def slimgpt_refit(plan: cl.Selection) -> Any:
        return SlimGpt(reconstruct=True).repair(model, plan, second_moments())

    written = []
    for name, plan in plans_of(options, curvature):
        cut = partial(cl.prune, model, plan)
        refitted = cache(partial(cl.repair, model, plan, fitted))  # it takes minutes
        for way, made in (("as cut", cut), ("refitted", refitted)):
            written.append(measured(name, plan, way, made))
            if options.minutes:
                trained_from = cache(partial(trained, made))
                written.append(measured(name, plan, f"{way}, trained", trained_from))
        if name == SlimGpt.title:
            own = cache(partial(slimgpt_refit, plan))
            written.append(measured(name, plan, "refitted in its own way", own))
    about = {
        text: {"source": judge.source, "fingerprint": judge.fingerprint, "rows": len(judge)}
        for text, judge in rows.items()
    }
    file = kept_folder() / "refitted.json"
    before = read_json(file)
    if before["texts"] == about:
        written = [*before["plans"], *written]
    plans = {(plan["name"], plan["requested_ratio"]): plan for plan in written}
    write_plans(file, curvature.provenance["model_fingerprint"], about, list(plans.values()))


if __name__ == "__main__":
    main()
