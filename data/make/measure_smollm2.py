"""Measure SmolLM2-135M once, for what ships with it: data/smollm2/ and explore_smollm2.html.

    make smollm2
    python -m data.make.measure_smollm2 H --c4 C4 --wikitext TEXT      # 75 minutes on two cores
    python -m data.make.measure_smollm2 best --c4 C4                   # 70 minutes
    python -m data.make.measure_smollm2 methods --c4 C4                # an hour
    python -m data.make.measure_smollm2 plans --c4 C4 --wikitext TEXT  # hours
    python -m data.make.measure_smollm2 page --c4 C4                   # seconds

C4 and TEXT are files with one document per line: a slice of C4 in English, and the valid split of
WikiText-2. Their text is not in the repository; the numbers are. Every step resumes: what is in the
folder of --work, or in plans.json, is not measured again.

H is of the first 24 rows of C4, 256 tokens each, every position scored. Plans are judged on rows 26
to 31 of C4, on six rows of WikiText (paragraphs of over 200 characters), and on six of Python's
manual, some on six further rows of each. Plans of small H of other texts are also judged on six
rows of what the model wrote when it was asked (`write_smollm2.py`). All rows begin with and are
joined by <|endoftext|>.
"""

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cocurve_lab as cl
from cocurve_lab.base.schema import read_json
from cocurve_lab.curvature.groups import Groups
from cocurve_lab.extensions.choosing.racing import ChoiceOptions
from cocurve_lab.extensions.choosing.search import SearchOptions
from cocurve_lab.extensions.choosing.settings import choose_guards
from cocurve_lab.extensions.interactions.measured import Interactions
from cocurve_lab.extensions.judging.agreement import random_plan
from cocurve_lab.extensions.judging.answers import AnswerOptions
from cocurve_lab.extensions.judging.generation import own_questions
from cocurve_lab.extensions.pretrained.kept import (
    GUARDED,
    KEPT_TEXTS,
    kept_folder,
    write_curvature,
    write_plans,
)
from cocurve_lab.extensions.pretrained.smollm2 import END, NAME
from cocurve_lab.extensions.texts.documents import default_rows, read_documents
from cocurve_lab.measuring.risk import Meter, standard_error
from cocurve_lab.methods.base import Evidence, Method
from cocurve_lab.solver.guards import Guards
from cocurve_studies.bake_off.costs import COSTS, other_costs
from cocurve_studies.trust import reach
from cocurve_studies.trust.scales import plans_by_scale

ROWS, JUDGED, MORE = 24, (26, 32), (170, 176)
LENGTH: dict[str, Any] = {"seq_len": 256, "positions_per_sequence": "all"}
BEST = (0.1, 0.2, 0.3)
RATIOS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
DRAWN = (0.05, 0.1, 0.2, 0.3, 0.4)  # of H of rows drawn again
STRENGTHS = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 1.0)
QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of measured layers and blocks
GUARDS = {"": Guards(), **GUARDED}
SOURCES = {
    "c4": "C4",
    "wikitext": "WikiText-2 valid",
    "manual": "Python's manual",
    "chat": "chat text of SmolLM2",
}
FEW, DRAWS = 3, 8  # rows of each kind of text; H of rows drawn again
RANDOM = 10
# draws guided by H, then by marginals at the plan
GUIDES = (SearchOptions(), SearchOptions(seed=1, swaps=8, random_share=0.2))
BLOCKWISE = ("finercut", "blockpruner")  # removals measured anew: half an hour each
OWN = ", own guards"  # the end of a name
ASKED = ("H, lambda 0", "H, lambda 0.1", "H, lambda 1", "SlimLLM", "ShortGPT")  # at every ratio
AGAIN = ("H, lambda 0", "H, lambda 1")  # judged on further rows, too, at every ratio
COMPARED = {"H, lambda 0", "H, lambda 1", "searched", "measured layers, lambda 0"}
METHODS = (
    *("magnitude", "wanda-sp", "flap", "amp", "llm-pruner", "slimllm", "2ssp", "slimgpt"),
    *("shortgpt", "cbo"),
    *BLOCKWISE,
)
COMPARED |= {"random 0", *(cl.get_method(name).title for name in METHODS)}
PAGE = Path(__file__).resolve().parents[2] / "notebooks" / "explore_smollm2.html"
ANSWER = 24  # tokens of a reply that is judged


Named = tuple[str, cl.Selection]


def c4_rows(file: Path, tokenizer: Any, count: int, **length: Any) -> cl.CalibrationSet:
    """The first rows of the slice of C4, in one order for every step.

    A stream keeps its order, and a document that is in the slice twice is in the rows twice.
    `default_rows` takes it once, which gives another order: then a judge may hold text that H or
    the search has read.
    """
    documents = [line for line in file.read_text().splitlines() if line.strip()]
    random.Random(0).shuffle(documents)
    return cl.CalibrationSet.from_texts(
        iter(documents), tokenizer, count, source="C4", eos=END, bos=END, **length
    )


def paragraphs(file: Path, tokenizer: Any, count: int, source: str) -> cl.CalibrationSet:
    """Rows of the paragraphs of over 200 characters of a file with one per line."""
    long = [text for text in file.read_text().split("\n") if len(text) > 200]
    return cl.CalibrationSet.from_texts(
        long, tokenizer, count, seed=3, source=source, eos=END, bos=END, **LENGTH
    )


def texts(options: argparse.Namespace, tokenizer: Any) -> dict[str, cl.CalibrationSet]:
    """The calibration rows and those of the judges, by name."""
    rows = c4_rows(options.c4, tokenizer, JUDGED[1], **LENGTH)
    found = {"calibration": rows.rows(0, ROWS), "c4": rows.rows(*JUDGED)}
    if options.wikitext:
        found["wikitext"] = paragraphs(options.wikitext, tokenizer, 6, SOURCES["wikitext"])
    found["manual"] = cl.default_calibration(NAME, tokenizer, 1, 6, **LENGTH)[1]
    return found


def more_texts(options: argparse.Namespace, tokenizer: Any) -> dict[str, cl.CalibrationSet]:
    """Six further rows of each judge: no window of them is in rows of H, of search or of choice."""
    c4 = c4_rows(options.c4, tokenizer, MORE[1], **LENGTH)
    wikitext = paragraphs(options.wikitext, tokenizer, 15, SOURCES["wikitext"])
    manual = cl.default_calibration(NAME, tokenizer, 1, 12, **LENGTH)[1]
    c4.rows(*MORE).require_disjoint(c4.rows(0, 160))
    wikitext.rows(9, 15).require_disjoint(wikitext.rows(0, 9))
    return {"c4": c4.rows(*MORE), "wikitext": wikitext.rows(9, 15), "manual": manual.rows(6, 12)}


def build(options: argparse.Namespace) -> None:
    """Build H of the rows of C4, and of as many of the default text, and write their short forms.

    Each row of C4 is a group of its own. Rows of the default text are eight groups.
    """
    model, tokenizer = cl.load_model(NAME)
    own = default_rows(NAME, tokenizer, ROWS, **LENGTH)
    texts_of = (("c4", texts(options, tokenizer)["calibration"], ROWS), ("manual", own, 8))
    for name, rows, groups in texts_of:
        if name not in options.texts:
            continue
        file = options.out / KEPT_TEXTS[name]
        built = cl.load_or_estimate(
            options.work,
            model,
            cl.enumerate_units(model),
            rows,
            options=cl.BuildOptions(groups=groups),
        )
        write_curvature(built.with_provenance(model_name=f"{NAME} (ships with the library)"), file)
        short = cl.Curvature.load(file)
        errors = [cl.jackknife(h, "edges").standard_error for h in (short, built)]
        print(f"{short}\n{file.stat().st_size:,} bytes")
        print(f"largest change of an entry {np.abs(short.matrix - built.matrix).max():.3g}")
        print(f"median change of an error {np.median(np.abs(errors[0] / errors[1] - 1)):.3g}")


# The best plans ---------------------------------------------------------------------------------


def best(options: argparse.Namespace) -> None:
    """Find the best plan of each size: candidates of every scale, then a search by measured KL.

    Layers and blocks are measured on the first rows of C4, candidates and search on rows 32 to 63,
    and the plan is chosen on rows 64 to 95. No judge has been read. 96 positions of a row are
    scored, and on a CPU products are in bfloat16: plans.json has the float32 values at every
    position.
    """
    model, tokenizer = cl.load_model(NAME, device=options.device, dtype="float32")
    few = LENGTH | {"positions_per_sequence": 96}
    rows = c4_rows(options.c4, tokenizer, 96, **few)
    curvature = cl.Curvature.load(options.out / KEPT_TEXTS["c4"])
    searched, chosen_on = rows.rows(32, 64), rows.rows(64, 96)
    with torch.autocast("cpu", torch.bfloat16):  # without effect on a GPU
        scales = {
            parts: measured_parts(options, model, parts, rows.rows(0, count), pool)
            for parts, count, pool in (("layers", 8, 24), ("blocks", 6, 40))
        }
        for ratio in options.ratios:
            named = plans_by_scale(curvature, scales, ratio, scale_strengths=QUARTERS)
            keep = options.work / f"search_{ratio:g}"
            meter = Meter(model, searched, checkpoint=keep, replay=True)
            table = meter.measure(list(named.values()), progress="lines")[..., 0]
            mean, error = table.mean(axis=1), standard_error(table)
            for at in mean.argsort():
                print(f"{ratio:.0%} {list(named)[at]}: {mean[at]:.4f} ± {error[at]:.4f}")
            # what measured layers and blocks have seen is among the rows of H
            plan = list(named.values())[mean.argmin()].predicted_by(curvature)
            for guide in GUIDES:
                found = cl.search_plan(
                    model,
                    plan,
                    searched,
                    held_out=chosen_on,
                    evaluations=options.evaluations,
                    surrogate=curvature,
                    scales=tuple(scales.values()),
                    checkpoint=keep,
                    progress="lines",
                    options=guide,
                )
                plan = found.selection
                print(f"{ratio:.0%} from {list(named)[mean.argmin()]}: {found}", flush=True)
            plan = plan.predicted_by(curvature)
            (options.out / f"best_{ratio * 100:.0f}.json").write_text(plan.to_json() + "\n")


def measured_parts(
    options: argparse.Namespace, model: Any, parts: str, rows: cl.CalibrationSet, pool: int
) -> Interactions:
    """Measured interactions of layers or blocks, which ship."""
    file = options.out / f"{parts}.npz"
    if not file.exists():
        keep = options.work / f"{parts}.ckpt"
        found = cl.measure_interactions(
            model, parts, rows, pool=pool, checkpoint=keep, progress="lines"
        )
        found.save(file)
    kept = Interactions.load(file)
    print(kept, flush=True)
    return kept


# Kinds of text ----------------------------------------------------------------------------------


def kinds(
    options: argparse.Namespace, tokenizer: Any, judges: dict[str, cl.CalibrationSet]
) -> dict[str, tuple[cl.CalibrationSet, cl.CalibrationSet]]:
    """Rows to calibrate on and rows to judge on, by kind of text; no document is in both."""

    def parts(rows: cl.CalibrationSet) -> tuple[cl.CalibrationSet, cl.CalibrationSet]:
        return rows.rows(6, 6 + FEW), rows.rows(0, 6)

    wikitext = paragraphs(options.wikitext, tokenizer, 6 + FEW, SOURCES["wikitext"])
    chat = read_documents(kept_folder() / "texts" / "chat.jsonl")
    source = "chat.jsonl of SmolLM2"
    replies = cl.CalibrationSet.from_texts(
        chat, tokenizer, 6 + FEW, seed=3, source=source, eos=END, bos=END, **LENGTH
    )
    return {
        "C4": (judges["calibration"].rows(0, FEW), judges["c4"]),
        "WikiText": parts(wikitext),
        "the manual": (default_rows(NAME, tokenizer, FEW, **LENGTH), judges["manual"]),
        "chat text": parts(replies),
    }


def of_kinds(
    options: argparse.Namespace,
    model: Any,
    by_kind: dict[str, tuple[cl.CalibrationSet, cl.CalibrationSet]],
    curvature: cl.Curvature,
) -> Iterator[Named]:
    """Plans of an H of a few rows of each kind of text, and of mixes; H stays in the work folder.

    H of C4 is that of the first groups of the kept one.
    """
    found = {}
    for kind, (rows, _) in by_kind.items():
        found[kind] = curvature if kind == "C4" else few_rows(options, model, rows)
    few = list(range(FEW))
    groups = {kind: [(kind, few)] for kind in found}
    groups["chat text and the manual"] = [("chat text", few), ("the manual", few)]
    for name, parts in groups.items():
        mixed = of_groups([(found[kind], chosen) for kind, chosen in parts])
        for ratio in BEST[:2]:
            for strength in (0.0, 1.0):
                plan = cl.solve_greedy(mixed, ratio, strength)
                yield f"H of {name}, lambda {strength:g}", plan
    if (file := options.out / KEPT_TEXTS["manual"]).exists():
        whole = cl.Curvature.load(file)
        for ratio in BEST:
            for strength in (0.0, 1.0):
                plan = cl.solve_greedy(whole, ratio, strength)
                yield f"H of {ROWS} rows of the manual, lambda {strength:g}", plan


def few_rows(options: argparse.Namespace, model: Any, rows: cl.CalibrationSet) -> cl.Curvature:
    """H of these rows, each a group; kept in the work folder."""
    return cl.load_or_estimate(
        options.work,
        model,
        cl.enumerate_units(model),
        rows,
        options=cl.BuildOptions(groups=len(rows)),
    )


def of_groups(parts: Sequence[tuple[cl.Curvature, list[int]]]) -> cl.Curvature:
    """H of some groups of rows of several H."""
    grams, positions, risks = (
        np.concatenate([found.grouped[f"group_{name}"][chosen] for found, chosen in parts])
        for name in ("grams", "positions", "risks")
    )
    return cl.Curvature.from_groups(parts[0][0].units, Groups(grams, positions, risks), {})


# Plans ------------------------------------------------------------------------------------------


def from_curvature(curvature: cl.Curvature) -> Iterator[Named]:
    """Plans of H at several lambdas and ratios, with and without guards, and random ones."""
    yield "dense", cl.Selection.from_pruned(curvature.units, [])
    for ratio in RATIOS:
        for words, guards in GUARDS.items():
            for strength in STRENGTHS:
                plan = cl.solve_greedy(curvature, ratio, strength, guards=guards)
                yield f"H, lambda {strength:g}{words}", plan
    for words, costs in other_costs(curvature.units).items():
        for ratio, strength in product(BEST, (0.0, 1.0)):
            plan = cl.solve_greedy(curvature, cl.Target(ratio=ratio, costs=costs), strength)
            yield f"{words} {ratio:.0%}, lambda {strength:g}", plan
    rng = np.random.default_rng(0)
    groups = list(range(ROWS))
    for draw in range(DRAWS):
        drawn = of_groups([(curvature, sorted(rng.choice(groups, ROWS).tolist()))])
        for ratio in DRAWN:
            for strength in (0.0, 1.0):
                yield (
                    f"draw {draw} of H, lambda {strength:g}",
                    cl.solve_greedy(drawn, ratio, strength),
                )
    for ratio in BEST:
        for seed in range(RANDOM):
            yield f"random {seed}", random_plan(curvature.units, ratio, seed)


def guarded(
    options: argparse.Namespace,
    model: Any,
    curvature: cl.Curvature,
    tokenizer: Any,
    known: set[tuple[str, float]],
) -> Iterator[Named]:
    """Plans of the paper's protocol: guards chosen by the loss on rows 32 to 39 of C4.

    H at lambda 0 and 1, and each method that `methods` has measured, on the one grid of guards;
    but for the plans that are `known`.
    """
    few = LENGTH | {"positions_per_sequence": 96}
    rows = c4_rows(options.c4, tokenizer, 40, **few)
    for ratio in options.ratios:
        makers: dict[str, Any] = {
            f"H, lambda {s:g}": partial(cl.solve_greedy, curvature, ratio, s) for s in (0.0, 1.0)
        }
        for method, evidence in evidence_of(options):
            makers[method.title] = partial(method.select, evidence, curvature.units, ratio)
        for name, make in makers.items():
            if (name + OWN, ratio) in known:
                continue
            keep = options.work / f"guards_{ratio:g}_{name}"
            choice = choose_guards(
                *(model, curvature, ratio, rows.rows(32, 40)),
                make=make,
                options=ChoiceOptions(first_rows=4, judge="nll", checkpoint=keep),
            )
            print(f"{ratio:.0%}, {name}: {choice.guards}", flush=True)
            yield name + OWN, choice.best


def together(curvature: cl.Curvature) -> Iterator[Named]:
    """Pairs and sets of units, and each of their units alone: how far an edge is true."""
    drawn = reach.drawn_parts(curvature, reach.ReachOptions())
    cases = [(scale, [unit for (unit,) in parts]) for scale, parts in drawn]
    alone = sorted({unit for _, chosen in cases for unit in chosen})
    for name, chosen in [*(("unit", [unit]) for unit in alone), *cases]:
        yield name, cl.Selection.from_pruned(curvature.units, chosen)


def of_parts(options: argparse.Namespace, curvature: cl.Curvature) -> Iterator[Named]:
    """Plans of measured layers and blocks, and of the KL of each unit alone."""
    scales = {p: Interactions.load(options.out / f"{p}.npz") for p in ("layers", "blocks")}
    for ratio in BEST:
        yield from plans_by_scale(curvature, scales, ratio, (), QUARTERS).items()


def methods(options: argparse.Namespace) -> None:
    """Measure the other methods on the rows of H; their evidence stays in the work folder.

    FinerCut and BlockPruner measure their blocks in bfloat16.
    """
    model, tokenizer = cl.load_model(NAME)
    units, rows = cl.enumerate_units(model), texts(options, tokenizer)["calibration"]
    for name in options.methods:
        file = options.work / f"{name}.evidence"
        if not file.exists():
            with torch.autocast("cpu", torch.bfloat16, enabled=name in BLOCKWISE):
                cl.get_method(name).measure(model, units, rows).save(file)


def evidence_of(options: argparse.Namespace) -> Iterator[tuple[Method, Evidence]]:
    """The methods that `methods` has measured, and what it found."""
    for name in options.methods:
        if (file := options.work / f"{name}.evidence").exists():
            yield cl.get_method(name), Evidence.load(file)


def of_methods(options: argparse.Namespace, units: cl.UnitSet) -> Iterator[Named]:
    """Their plans without guards."""
    for method, evidence in evidence_of(options):
        for ratio in RATIOS[1:]:
            yield method.title, method.select(evidence, units, ratio)


def apart_of(name: str) -> bool:
    """Whether a plan is only there to compare with others."""
    return name == "unit" or " units" in name or name.startswith(("random ", "draw ", *COSTS))


def judges(text: str, name: str, ratio: float) -> bool:
    """Whether a text judges a plan."""
    if text == "chat":
        return name.startswith("H of")
    if text == "wikitext":
        return not (name == "unit" or " units" in name)
    if text == "manual":
        drawn = name.startswith("draw ")
        return ratio in BEST and (drawn or not apart_of(name)) and "ends" not in name
    return True


def judges_further(name: str, ratio: float) -> bool:
    """Whether the further rows of a text judge a plan, too: those that the paper compares."""
    again = name in AGAIN or name.startswith(COSTS)
    return again or (ratio in BEST and name.removesuffix(OWN) in COMPARED)


def is_asked(name: str, ratio: float) -> bool:
    """Whether a plan is asked questions."""
    if apart_of(name) or name.startswith("H of"):
        return False
    at_best = not name.endswith(OWN) or name.startswith("H, ")
    return name in ("dense", *ASKED) or (ratio in BEST and at_best)


def measure(options: argparse.Namespace) -> None:
    """Measure what plans.json lacks: plans, texts that judge them, further rows, and answers."""
    model, tokenizer = cl.load_model(NAME)
    rows, further = texts(options, tokenizer), more_texts(options, tokenizer)
    by_kind = kinds(options, tokenizer, rows)
    del rows["calibration"]
    rows["chat"] = by_kind["chat text"][1]
    curvature, file = cl.Curvature.load(options.out / KEPT_TEXTS["c4"]), options.out / "plans.json"
    kept = read_json(file)["plans"] if file.exists() else []
    plans = {mark(plan): plan for plan in kept}
    named = [*from_curvature(curvature), *together(curvature), *of_parts(options, curvature)]
    known = {(plan["name"], plan["requested_ratio"]) for plan in kept}
    named += guarded(options, model, curvature, tokenizer, known)
    named += of_methods(options, curvature.units)
    for best_file in sorted(options.out.glob("best_*.json")):
        named.append(("searched", cl.Selection.from_json(best_file.read_text())))
    if not kept:  # small H of other texts take a quarter of an hour each
        named += of_kinds(options, model, by_kind, curvature)
    for written in (as_written(name, plan) for name, plan in named):
        plans.setdefault(mark(written), written)

    def under(rule: Callable[[str, float], bool]) -> list[dict[str, Any]]:
        return [p for p in plans.values() if rule(p["name"], p["requested_ratio"])]

    about = {}
    for text, judge in rows.items():
        missing = [plan for plan in under(partial(judges, text)) if text not in plan["kl"]]
        add_rows(options.work / f"kl_{text}", model, curvature.units, judge, text, missing)
        source = judge.source if text == "manual" else SOURCES[text]
        about[text] = {"source": source, "fingerprint": judge.fingerprint, "rows": len(judge)}
    for text, judge in further.items():
        first = about[text]["rows"]
        missing = [p for p in under(judges_further) if len(p["kl"].get(text, ())) == first]
        add_rows(options.work / f"kl_{text}_more", model, curvature.units, judge, text, missing)
        about[text]["further"] = {"rows": len(judge), "fingerprint": judge.fingerprint}
    missing = [plan for plan in under(is_asked) if not plan["right"]]
    sets = [cl.Selection.from_pruned(curvature.units, plan["pruned"]) for plan in missing]
    if missing:
        right = answers(model, tokenizer, sets, options.work / "answers")
        for plan, selection in zip(missing, sets, strict=True):
            plan["right"] = right[selection.fingerprint]
    write_plans(file, curvature.provenance["model_fingerprint"], about, list(plans.values()))


def mark(plan: dict[str, Any]) -> tuple[str, float, tuple[int, ...]]:
    """What tells a written plan from the others; plans of single units share a name."""
    return plan["name"], plan["requested_ratio"], tuple(plan["pruned"])


def add_rows(
    checkpoint: Path,
    model: Any,
    units: cl.UnitSet,
    judge: cl.CalibrationSet,
    text: str,
    plans: Sequence[dict[str, Any]],
) -> None:
    """Add KL and loss on the rows of a judge to plans as `write_plans` takes them."""
    meter = Meter(model, judge, checkpoint=checkpoint, plans_per_batch=4, replay=True)
    sets = [cl.Selection.from_pruned(units, plan["pruned"]) for plan in plans]
    for plan, values in zip(plans, meter.measure(sets, progress="lines"), strict=True):
        for at, name in enumerate(("kl", "nll")):
            plan[name].setdefault(text, []).extend(np.round(values[:, at], 5).tolist())


def as_written(name: str, plan: cl.Selection) -> dict[str, Any]:
    """A plan that was not measured yet, as `write_plans` takes it."""
    return {
        "name": name,
        "requested_ratio": plan.requested_ratio,
        # plans of other budgets are no stops of a slider over shares of parameters
        "interaction_strength": None if name.startswith(COSTS) else plan.interaction_strength,
        "pruned": sorted(plan.pruned),
        "kl": {},
        "nll": {},
        "right": {},
    }


def page(options: argparse.Namespace) -> None:
    """Write the explorers with H and these measurements as one offline page."""
    from cocurve_widgets import Session, export_html

    curvature = cl.Curvature.load(options.out / KEPT_TEXTS["c4"])
    title = "Co-pruning curvature of SmolLM2-135M"
    scales = {
        parts: Interactions.load(options.out / f"{parts}.npz") for parts in ("layers", "blocks")
    }
    export_html(curvature, PAGE, title=title, session=Session(curvature), scales=scales)


def answers(
    model: Any, tokenizer: Any, plans: Sequence[cl.Selection], checkpoint: Path | None = None
) -> dict[str, dict[str, list[int]]]:
    """[right, asked] of every plan, by ability."""
    asked = cl.answer_accuracy(
        model,
        tokenizer,
        plans,
        own_questions(NAME, 100),
        options=AnswerOptions(max_new_tokens=ANSWER, checkpoint=checkpoint),
    )
    masks = {ability: asked.of(ability) for ability in asked.capabilities}
    return {
        plan.fingerprint: {
            ability: [int(right[mine].sum()), int(mine.sum())] for ability, mine in masks.items()
        }
        for plan, right in zip(plans, asked.right, strict=True)
    }


STEPS = {
    "H": build,
    "best": best,
    "methods": methods,
    "plans": measure,
    "page": page,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=[*STEPS])
    parser.add_argument("--c4", type=Path, required=True, help="a slice of C4, a document per line")
    parser.add_argument("--wikitext", type=Path, help="the valid split of WikiText-2")
    parser.add_argument(
        "--evaluations", type=int, default=2500, help="of each of two searches, in rows"
    )
    parser.add_argument("--ratios", nargs="+", type=float, choices=BEST, default=BEST)
    parser.add_argument("--device", help="of the search: a GPU if there is one")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument(
        "--texts", nargs="+", choices=KEPT_TEXTS, default=[*KEPT_TEXTS], help="of H"
    )
    parser.add_argument("--work", type=Path, default=Path("build/smollm2"), help="keeps each step")
    parser.add_argument("--out", type=Path, default=kept_folder())
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    STEPS[options.step](options)


if __name__ == "__main__":
    main()
