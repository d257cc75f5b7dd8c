"""Measure plans of SmolLM2-135M as cut, refitted and trained, and write data/smollm2/refitted.json.

    python -m data.make.measure_refits --texts FOLDER              # two hours on two cores
    python -m data.make.measure_refits --texts FOLDER --ratios 0.2 --names searched

    python -m data.make.measure_refits --texts FOLDER --ratios 0.2 --names searched --minutes 15

FOLDER holds c4_slice.txt (a document per line), wikitext2_valid.txt and wikitext2_test.txt, and
tinystories.txt. Their text is not in the repository; the numbers are. Each plan is measured once:
what is in the folder of --work is not measured again.

A refit reads 32 rows of C4 and 32 of WikiText's valid split, 256 tokens each. Twelve rows of each
of four texts judge: C4 and WikiText's test split, of the mix, and stories and Python's manual,
outside it. No refit, no search and no H has seen a judge. With --minutes, models are also trained
for this time on the rows of the refit, from the plan as cut and from its refit; eight other rows of
C4 choose the best state.
"""

import argparse
import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cocurve_lab as cl
from cocurve_lab.extensions.judging.agreement import random_plan
from cocurve_lab.extensions.judging.answers import AnswerOptions
from cocurve_lab.extensions.judging.generation import own_questions
from cocurve_lab.extensions.pretrained.kept import (
    KEPT_TEXTS,
    kept_folder,
    read_plans,
    write_plans,
)
from cocurve_lab.extensions.pretrained.smollm2 import END, NAME
from cocurve_lab.extensions.repairing.recovery import RecoverOptions
from cocurve_lab.extensions.texts.documents import default_rows
from cocurve_lab.measuring.risk import Meter
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.runtime import measuring

RATIOS = (0.1, 0.2, 0.3)
NAMES = ("searched", "measured layers, lambda 0", "ShortGPT", "SlimLLM", "H, lambda 0", "random 0")
LENGTH: dict[str, Any] = {"seq_len": 256, "positions_per_sequence": "all"}
FIT, JUDGED = 32, 12  # rows of a text
APART = 9  # rows between two judges of a text whose documents are longer than a row
THREADS = torch.get_num_threads()
# rows of the slice of C4: H read 0 to 23, judges of plans.json 26 to 31, search and choice 32 to 95
C4_FIT, C4_CHOSEN, C4_JUDGED = (96, 96 + FIT), (160, 168), (176, 176 + APART * JUDGED)
SOURCES = {
    "c4": "C4",
    "wikitext": "WikiText-2 test",
    "stories": "TinyStories",
    "manual": "Python's manual",
}


def texts(folder: Path, work: Path, tokenizer: Any) -> dict[str, cl.CalibrationSet]:
    """The rows of the refit, under "fit", those that choose a state, and the judges, by name."""
    documents = [line for line in (folder / "c4_slice.txt").read_text().splitlines() if line]
    lines = work / "c4.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    c4 = default_rows(NAME, tokenizer, C4_JUDGED[1], text_file=lines, **LENGTH)

    def paragraphs(file: str, rows: int) -> cl.CalibrationSet:
        long = [text for text in (folder / file).read_text().split("\n") if len(text) > 200]
        return cl.CalibrationSet.from_texts(
            long, tokenizer, rows, seed=3, source=file, eos=END, bos=END, **LENGTH
        )

    mix = [c4.rows(*C4_FIT).input_ids, paragraphs("wikitext2_valid.txt", FIT).input_ids]
    return {
        "fit": cl.CalibrationSet(torch.cat(mix), source="C4 and WikiText-2 valid"),
        "chosen": c4.rows(*C4_CHOSEN),
        "c4": apart(c4.rows(*C4_JUDGED)),
        "wikitext": paragraphs("wikitext2_test.txt", JUDGED),
        "stories": paragraphs("tinystories.txt", JUDGED),
        "manual": apart(cl.default_calibration(NAME, tokenizer, 1, APART * JUDGED, **LENGTH)[1]),
    }


def apart(rows: cl.CalibrationSet) -> cl.CalibrationSet:
    """Every ninth row, so that few are of one document: an error over rows takes them as apart."""
    return cl.CalibrationSet(rows.input_ids[::APART], source=rows.source)


def plan_of(name: str, ratio: float, curvature: cl.Curvature) -> cl.Selection:
    """A plan of plans.json, by name and ratio."""
    if name.startswith("random "):
        return random_plan(curvature.units, ratio, int(name.split()[1]))
    kept = read_plans(kept_folder() / "plans.json", curvature).plans
    (plan,) = (
        plan.selection
        for plan in kept
        if plan.name == name and plan.selection.requested_ratio == ratio
    )
    return plan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--ratios", nargs="+", type=float, default=RATIOS)
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--minutes", type=float, help="also train for this time")
    parser.add_argument("--work", type=Path, default=Path("build/refits"), help="keeps each step")
    parser.add_argument("--out", type=Path, default=kept_folder())
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    model, tokenizer = cl.load_model(NAME)
    judges = texts(options.texts, options.work, tokenizer)
    fitted, chosen = judges.pop("fit"), judges.pop("chosen")
    for judge in judges.values():
        judge.require_disjoint(fitted)
    curvature = cl.Curvature.load(kept_folder() / KEPT_TEXTS["c4"])

    together = cl.CalibrationSet(torch.cat([rows.input_ids for rows in judges.values()]))
    meter = Meter(model, together, keep_teacher=True)

    questions = own_questions(NAME, 100)
    training = RecoverOptions(minutes=options.minutes, progress="lines")

    def trained(made: Callable[[], Any]) -> Any:
        return cl.recover(model, made(), fitted, chosen, options=training)

    def measured(made: Callable[[], Any], file: Path) -> dict[str, np.ndarray]:
        """KL and loss [rows, 2] of a model by judge, kept in a file."""
        if not file.exists():
            smaller = made()
            with measuring(model, THREADS), measuring(smaller, THREADS):
                found = [
                    meter.engine.measure_student(row, describe(smaller))[:2].tolist()
                    for row in range(len(together))
                ]
            file.write_text(json.dumps(found))
        values = np.array(json.loads(file.read_text()))
        return dict(zip(judges, np.split(values, len(judges)), strict=True))

    def answered(made: Callable[[], Any], file: Path) -> dict[str, list[int]]:
        """[right, asked] of a model by ability, kept in a file."""
        if not file.exists():
            smaller = made()
            whole = cl.Selection.from_pruned(cl.enumerate_units(smaller), [])
            asked = cl.answer_accuracy(
                smaller, tokenizer, [whole], questions, options=AnswerOptions(max_new_tokens=24)
            )
            masks = {ability: asked.of(ability) for ability in asked.capabilities}
            right = {
                ability: [int(asked.right[0][mine].sum()), int(mine.sum())]
                for ability, mine in masks.items()
            }
            file.write_text(json.dumps(right))
        found: dict[str, list[int]] = json.loads(file.read_text())
        return found

    written: list[dict[str, Any]] = []
    for ratio in options.ratios:
        for name in options.names:
            plan = plan_of(name, ratio, curvature)
            mark = plan.fingerprint[:12]
            ways: dict[str, Callable[[], Any]] = {
                "as cut": partial(cl.prune, model, plan),
                "refitted": partial(cl.repair, model, plan, fitted),
            }
            if options.minutes is not None:
                ways |= {
                    f"{start}, trained": partial(trained, made) for start, made in ways.items()
                }
            for way, made in ways.items():
                once = cache(made)  # a refit takes minutes
                file = options.work / f"{mark}_{way.replace(', ', '_').replace(' ', '_')}.json"
                found = measured(once, file)
                right = answered(once, file.with_stem(f"{file.stem}_answers"))
                written.append(
                    {
                        "name": f"{name} | {way}",
                        "requested_ratio": ratio,
                        "interaction_strength": plan.interaction_strength,
                        "pruned": sorted(plan.pruned),
                        "kl": {text: np.round(x[:, 0], 5).tolist() for text, x in found.items()},
                        "nll": {text: np.round(x[:, 1], 5).tolist() for text, x in found.items()},
                        "right": right,
                        "replies": [],
                    }
                )
                cells = [f"{text} {x[:, 0].mean():.3f}" for text, x in found.items()]
                total = sum(count for count, _ in right.values())
                print(f"{ratio:.0%}, {name}, {way}: {', '.join(cells)}; {total} right", flush=True)
    about = {
        text: {"source": SOURCES[text], "fingerprint": rows.fingerprint, "rows": len(rows)}
        for text, rows in judges.items()
    }
    fingerprint = curvature.provenance["model_fingerprint"]
    write_plans(options.out / "refitted.json", fingerprint, about, [], written)


if __name__ == "__main__":
    main()
