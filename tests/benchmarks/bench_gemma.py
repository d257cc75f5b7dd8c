"""Measure plans of Gemma 3 270M, and put the tables into GEMMA.md.

    python tests/benchmarks/bench_gemma.py --model FOLDER --c4 C4 --wikitext TEXT   # an hour
    python tests/benchmarks/bench_gemma.py --write                                  # no model

FOLDER is what `save_pretrained` wrote after transformers read the GGUF file, as GEMMA.md says. C4
and TEXT are files with one document per line: a slice of C4 in English, and the valid split of
WikiText-2. The first command resumes from the folder of --work, and writes gemma.json after each
step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.extensions.analysis.variants import measured_diagonal
from cocurve_lab.measuring.risk import Meter, model_risk, standard_error
from helpers.benchmarks import RESULTS, arguments, error_bar, filled, flag, table

NUMBERS = RESULTS / "gemma.json"
PAGE = RESULTS / "GEMMA.md"
ROWS, PAIRED, POOL = 8, 4, 8  # of H; of the measured layers; layers whose pairs are measured
JUDGED = (10, 16)  # rows of C4 that no plan has seen
LENGTH: dict[str, Any] = {"seq_len": 128, "positions_per_sequence": 64}
FIT = 64  # rows of each text that a refit reads
REFITTED = ("H, lambda 0", "ShortGPT", "measured layers, lambda 0")
RATIOS, STRENGTHS, METHODS = (0.1, 0.2, 0.3), (0.0, 0.5, 1.0), ("magnitude", "slimllm", "shortgpt")
TEXTS = {"c4": "C4", "wikitext": "WikiText"}
Named = tuple[str, float, cl.Selection]


# Measuring ----------------------------------------------------------------------------------------


def rows_of(options: argparse.Namespace, tokenizer: Any) -> dict[str, cl.CalibrationSet]:
    """The rows of H, of the judges and of the refits, by name."""
    documents = [line for line in options.c4.read_text().splitlines() if line.strip()]
    c4_end = JUDGED[1] + 2 + FIT  # the text of a judge may go on in the next two rows
    c4 = cl.CalibrationSet.from_texts(documents, tokenizer, c4_end, source="C4", **LENGTH)
    paragraphs = [x for x in options.wikitext.read_text().split("\n") if len(x) > 200]
    judged = JUDGED[1] - JUDGED[0]
    wikitext = cl.CalibrationSet.from_texts(
        paragraphs, tokenizer, judged + 2 + FIT, seed=3, source="WikiText-2 valid", **LENGTH
    )
    mix = [c4.rows(c4_end - FIT, c4_end), wikitext.rows(judged + 2, judged + 2 + FIT)]
    found = {"H": c4.rows(0, ROWS), "c4": c4.rows(*JUDGED), "wikitext": wikitext.rows(0, judged)}
    found["refit"] = cl.CalibrationSet(torch.cat([part.input_ids for part in mix]))
    for name in TEXTS:
        found[name].require_disjoint(found["refit"])
    return found


def without_bos(model: Any, rows: cl.CalibrationSet) -> dict[str, list[float]]:
    """Dense nats per token of each row with and without its BOS, and the KL between the two."""
    found: dict[str, list[float]] = {"with": [], "without": [], "kl": []}
    for row, positions in zip(rows.input_ids, rows.positions, strict=True):
        at = positions[positions > 0]
        with torch.inference_mode():
            logits = [model(row[None, n:]).logits[0, at - n] for n in (0, 1)]
        p, q = (x.double().log_softmax(-1) for x in logits)
        for name, value in (("with", p), ("without", q)):
            found[name].append(-value.gather(-1, row[at + 1, None]).mean().item())
        found["kl"].append((p.exp() * (p - q)).sum(-1).mean().item())
    return found


def of_curvature(options: argparse.Namespace, model: Any, rows: cl.CalibrationSet) -> cl.Curvature:
    """H of the first rows of C4."""
    how = cl.BuildOptions(groups=ROWS)
    return cl.load_or_estimate(
        options.work, model, cl.enumerate_units(model), rows, options=how, progress="lines"
    )


def plans_of(curvature: cl.Curvature) -> Iterator[Named]:
    """Plans of H, and of the KL of each unit alone."""
    for ratio in RATIOS:
        for strength in STRENGTHS:
            yield f"H, lambda {strength:g}", ratio, cl.solve_greedy(curvature, ratio, strength)
        alone = cl.solve_greedy(measured_diagonal(curvature), ratio, 0.0)
        yield "units by their own KL", ratio, alone


def of_methods(options: argparse.Namespace, model: Any, rows: cl.CalibrationSet) -> Iterator[Named]:
    """Plans of other methods, measured on the rows of H."""
    units = cl.enumerate_units(model)
    for name in METHODS:
        method, file = cl.get_method(name), options.work / f"{name}.json"
        if not file.exists():
            evidence = method.measure(model, units, rows)
            found = [method.select(evidence, units, ratio).to_json() for ratio in RATIOS]
            file.write_text(json.dumps(found))
        for ratio, plan in zip(RATIOS, json.loads(file.read_text()), strict=True):
            yield method.title, ratio, cl.Selection.from_json(plan)


def of_layers(options: argparse.Namespace, model: Any, rows: cl.CalibrationSet) -> Iterator[Named]:
    """Plans of whole layers, removed alone and in pairs, on the first rows of H."""
    keep = options.work / "layers.ckpt"
    with torch.autocast("cpu", torch.bfloat16):
        found = cl.measure_interactions(
            model, "layers", rows.rows(0, PAIRED), pool=POOL, checkpoint=keep, progress="lines"
        )
    for ratio in RATIOS:
        for strength in STRENGTHS:
            yield f"measured layers, lambda {strength:g}", ratio, found.solve(ratio, strength)


def refitted(
    options: argparse.Namespace, model: Any, rows: dict[str, cl.CalibrationSet], named: list[Named]
) -> Iterator[dict[str, Any]]:
    """KL of plans after a refit, on each row of the judges."""
    for name, ratio, plan in named:
        if name not in REFITTED:
            continue
        file = options.work / f"refit_{name}_{ratio:g}.json"
        if not file.exists():
            smaller = cl.repair(model, plan, rows["refit"])
            with torch.autocast("cpu", torch.bfloat16):
                risks = {text: model_risk(model, smaller, rows[text]) for text in TEXTS}
            found = {text: np.round(risk, 5).tolist() for text, risk in risks.items()}
            file.write_text(json.dumps({"name": name, "ratio": ratio} | found))
        yield json.loads(file.read_text())


def measure(options: argparse.Namespace) -> None:
    """Measure all, and write gemma.json after each step."""
    options.work.mkdir(parents=True, exist_ok=True)
    model, tokenizer = cl.load_model(options.model)
    rows = rows_of(options, tokenizer)
    meters = {
        name: Meter(model, rows[name], checkpoint=options.work / name, replay=True)
        for name in TEXTS
    }
    curvature = of_curvature(options, model, rows["H"])
    correlation = np.abs(curvature.correlation()[np.triu_indices(len(curvature.units), 1)])
    content = {
        "units": len(curvature.units),
        "removable": int(curvature.units.total_cost),
        "correlation": round(float(correlation.mean()), 4),
        "bos": {name: without_bos(model, rows[name]) for name in TEXTS},
        "plans": [],
        "refits": [],
    }
    steps: tuple[Callable[[], Iterator[Named]], ...] = (
        lambda: plans_of(curvature),
        lambda: of_methods(options, model, rows["H"]),
        lambda: of_layers(options, model, rows["H"]),
    )
    for step in steps:
        named = list(step())
        with torch.autocast("cpu", torch.bfloat16):
            measured = {
                name: meter.measure([plan for *_, plan in named], progress="lines")
                for name, meter in meters.items()
            }
        for n, (name, ratio, plan) in enumerate(named):
            content["plans"].append(
                {"name": name, "ratio": ratio, "by_h": round(curvature.risk(plan.pruned), 4)}
                | {text: np.round(kl[n, :, 0], 5).tolist() for text, kl in measured.items()}
            )
        content["refits"] += refitted(options, model, rows, named)
        NUMBERS.write_text(json.dumps(content).replace('{"name"', '\n{"name"') + "\n")


# Tables -------------------------------------------------------------------------------------------


def bar(values: list[float], sign: str = "") -> str:
    rows = np.array(values)
    return error_bar(float(rows.mean()), float(standard_error(rows)), 3, sign)


def tables(content: dict[str, Any]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """The heads and cells of each table of the page."""
    plans = {(plan["name"], plan["ratio"]): plan for plan in content["plans"]}
    refits = {(plan["name"], plan["ratio"]): plan for plan in content["refits"]}
    names = list(dict.fromkeys(name for name, _ in plans))
    columns = [(ratio, text) for ratio in RATIOS for text in TEXTS]

    def predicted(name: str) -> str:
        return f"{plans[name, 0.2]['by_h']:.2f}"

    yield (
        ["plan", *(f"{ratio:.0%}, {TEXTS[text]}" for ratio, text in columns), "by H, 20%"],
        [
            [name, *(bar(plans[name, r][text]) for r, text in columns), predicted(name)]
            for name in names
        ],
    )

    def beyond_diagonal(strength: float, ratio: float, text: str) -> str:
        with_, without = (plans[f"H, lambda {s:g}", ratio][text] for s in (strength, 0))
        return bar(np.subtract(with_, without).tolist(), "+")

    yield (
        ["difference", *(f"{ratio:.0%}, {TEXTS[text]}" for ratio, text in columns)],
        [
            [f"H, lambda {strength:g} minus 0", *(beyond_diagonal(strength, *at) for at in columns)]
            for strength in STRENGTHS[1:]
        ],
    )
    cells = []
    for text, title in TEXTS.items():
        nats = content["bos"][text]
        seen = [f"{np.exp(np.mean(nats[name])):.1f}" for name in ("with", "without")]
        cells.append([title, *seen, bar(nats["kl"])])
    yield ["text", "perplexity after BOS", "without BOS", "KL between the two"], cells
    yield (
        ["plan", *(f"{ratio:.0%}, {TEXTS[text]}" for ratio, text in columns)],
        [
            [f"{name}, {way}", *(bar(found[name, r][text]) for r, text in columns)]
            for name in REFITTED
            for way, found in (("as cut", plans), ("refitted", refits))
        ],
    )


def pages() -> dict[Path, str]:
    """The text of the page with the tables of today."""
    made = enumerate(tables(json.loads(NUMBERS.read_text())))
    return {PAGE: filled(PAGE, {f"table {n}": table(heads, cells) for n, (heads, cells) in made})}


def main() -> None:
    options = arguments(
        __doc__,
        model=flag(help="measure this model first", type=Path),
        c4=flag(type=Path),
        wikitext=flag(type=Path),
        work=flag(Path("build/gemma"), "keeps each step", type=Path),
        write=flag(False, "put the tables into the page"),
    )
    if options.model:
        measure(options)
    if options.write:
        for page, text in pages().items():
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
