"""The tables of SMOLLM2.md and of the two pages after it, from what ships. No model is needed.

    python tests/benchmarks/bench_smollm2.py            # all tables
    python tests/benchmarks/bench_smollm2.py edges      # one of them
    python tests/benchmarks/bench_smollm2.py --write    # put them into the pages

`python -m data.make.measure_smollm2` makes the measurements.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.pretrained.kept import (
    KeptPlan,
    KeptPlans,
    kept_curvature,
    kept_interactions,
    kept_plans,
)
from cocurve_lab.extensions.writing import plus_minus, typeset
from cocurve_lab.measuring.risk import standard_error
from cocurve_lab.solver.solve import solve_greedy
from cocurve_studies.bake_off.costs import COSTS, SAVINGS, kept_savings
from cocurve_studies.bake_off.refits import REFITS, kept_refits, level_after_refit
from cocurve_studies.certainty import purposes
from cocurve_studies.paper import shipped
from cocurve_studies.tables import pick, shown
from cocurve_studies.trust import reach
from helpers.benchmarks import RESULTS, arguments, error_bar, filled, flag, table

Table = tuple[str, list[str], list[list[str]]]  # title, heads, cells
RATIOS = (0.05, 0.1, 0.2, 0.3, 0.4)
TEXTS = {"c4": "C4", "wikitext": "WikiText", "manual": "the manual"}
STRENGTHS = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 1.0)
COMPARED = [
    *(f"H, lambda {s:g}{words}" for words in ("", ", ends kept") for s in (0.0, 0.5, 1.0)),
    *(f"H, lambda {s:g}, own guards" for s in (0.0, 1.0)),
    "units by their own KL",
    *(f"measured {x}, lambda {s:g}" for x in ("layers", "blocks") for s in (0.0, 0.5, 1.0)),
]
COLUMNS = [(ratio, text) for ratio in (0.1, 0.2, 0.3) for text in TEXTS]
HEADS = [f"{ratio:.0%}, {TEXTS[text]}" for ratio, text in COLUMNS]
REFIT_TEXTS = ("C4", "WikiText", "the manual")
IN_README = (0, 2, 3, 5, 6, 7, 9, 11, 13, 16)  # places of findings, ten at most
PAGES = [RESULTS.parents[1] / "README.md"] + [
    RESULTS / f"SMOLLM2{part}.md" for part in ("", "_SCALES", "_FINDINGS")
]
CURVATURE = kept_curvature("smollm2")
SHIPPED = shipped.shipped()


def bar(values: np.ndarray, sign: str = "") -> str:
    """The mean of values by row and its standard error."""
    return error_bar(float(values.mean()), float(standard_error(values)), 3, sign)


class Plans:
    """The kept plans by name and ratio."""

    def __init__(self, kept: KeptPlans) -> None:
        self.by_name: dict[str, dict[float, KeptPlan]] = defaultdict(dict)
        self.all: dict[str, list[KeptPlan]] = defaultdict(list)
        for plan in kept.plans:
            self.all[plan.name].append(plan)
            self.by_name[plan.name][plan.selection.requested_ratio or 0.0] = plan

    def kl(self, name: str, ratio: float, text: str) -> np.ndarray | None:
        plan = self.by_name[name].get(ratio)
        return None if plan is None else plan.kl.get(text)

    def bar(self, name: str, ratio: float, text: str) -> str:
        """The KL of a plan on a text, empty where it was not measured."""
        values = self.kl(name, ratio, text)
        return "" if values is None else bar(values)

    def named(self, begin: str) -> list[str]:
        return [name for name in self.by_name if name.startswith(begin)]

    @property
    def methods(self) -> list[str]:
        """Names of plans that are of no H, nor random, nor parts of other plans."""
        other = ("H", "random", "draw", "unit", "dense", "measured", "searched", *COSTS)
        return [x for x in self.by_name if not (x.startswith(other) or " units" in x)]


def methods(plans: Plans) -> Iterable[Table]:
    """Every method on every text."""
    names = [*COMPARED, "searched", *plans.methods]
    cells = [[name, *(plans.bar(name, *at) for at in COLUMNS)] for name in names]
    cells.append(["random: mean, range of ten", *(_random(plans, *at) for at in COLUMNS)])
    yield "KL", ["plan", *HEADS], cells


def _random(plans: Plans, ratio: float, text: str) -> str:
    found = [plans.kl(name, ratio, text) for name in plans.named("random")]
    means = [values.mean() for values in found if values is not None]
    return f"{np.mean(means):.2f} ({min(means):.2f} to {max(means):.2f})" if means else ""


def paired(plans: Plans) -> Iterable[Table]:
    """The searched plan against every other, row by row."""

    def less(name: str, ratio: float, text: str) -> str:
        mine, other = plans.kl("searched", ratio, text), plans.kl(name, ratio, text)
        return "" if mine is None or other is None else bar(mine - other, "+")

    cells = [[name, *(less(name, *at) for at in COLUMNS)] for name in COMPARED + plans.methods]
    yield "KL of the searched plan minus that of another", ["plan", *HEADS], cells


def edges(_: Plans) -> Iterable[Table]:
    """Lambda 1 against lambda 0: errors are over rows and draws of H where draws were measured."""
    for words in ("", shipped.ENDS, shipped.OWN):
        cells = []
        for ratio in RATIOS:
            pair, judged = (shipped.ONE + words, shipped.ZERO + words), [*TEXTS]
            found = [SHIPPED.less(*pair, ratio, text) for text in judged]
            if any(found):
                cells.append([f"{ratio:.0%}", *("" if x is None else str(x) for x in found)])
        yield f"KL at lambda 1 minus that at lambda 0{words}", ["removed", *TEXTS.values()], cells


def paper(_: Plans) -> Iterable[Table]:
    """The central sentences of the paper, each with a verdict."""
    cells = [
        [found.study, typeset(found.claim), found.where, typeset(found.ours), found.said]
        for found in shipped.paper_findings(SHIPPED)
    ]
    yield "The paper on SmolLM2", ["about", "the paper", "where", "SmolLM2", "verdict"], cells


def readme(_: Plans) -> Iterable[Table]:
    """Some of these sentences, each with its first numbers."""
    cells = [
        [found.study, typeset(found.claim), typeset(found.ours.split(";")[0]), found.said]
        for found in map(shipped.paper_findings(SHIPPED).__getitem__, IN_README)
    ]
    yield "SmolLM2-135M", ["about", "the paper", "here", "verdict"], cells
    found = defaultdict(list)
    for row in pick(kept_refits(), removed="20%"):
        found[row["plan"]].append(row)
    cells = [[name, *(_steps(rows, text) for text in REFIT_TEXTS)] for name, rows in found.items()]
    yield "SmolLM2 at 20%: KL as cut and refitted", ["plan", *REFIT_TEXTS], cells


def _steps(rows: list[dict[str, Any]], text: str) -> str:
    by_way = {row["way"]: plus_minus(row[text], row[f"{text}_error"]) for row in rows}
    return " → ".join(by_way[way] for way in ("as cut", "refitted"))


def strengths(plans: Plans) -> Iterable[Table]:
    """KL and the risk that H predicts, along lambda."""
    for words in ("", ", ends kept"):
        cells = []
        for strength in STRENGTHS:
            line = [f"{strength:g}"]
            name = f"H, lambda {strength:g}{words}"
            for ratio in (0.1, 0.2, 0.3):
                plan = plans.by_name[name].get(ratio)
                risk = "" if plan is None else f"{CURVATURE.risk(plan.selection.pruned):.2f}"
                line += [plans.bar(name, ratio, "c4"), risk]
            cells.append(line)
        heads = ["lambda", *(x for r in (0.1, 0.2, 0.3) for x in (f"C4, {r:.0%}", "by H"))]
        yield f"KL along lambda{words}", heads, cells


def abilities(plans: Plans) -> Iterable[Table]:
    """Right answers and perplexity."""
    names = ["dense", *(f"H, lambda {s}" for s in (0, 0.5, 1)), "units by their own KL"]
    names += ["measured layers, lambda 0.5", "searched", *plans.methods]
    cells = []
    for name in names:
        line = [name]
        for ratio in (0.1, 0.2, 0.3):
            plan = plans.by_name[name].get(0.0 if name == "dense" else ratio)
            if plan is None:
                line += ["", ""]
                continue
            right, asked = (sum(x[n] for x in plan.right.values()) for n in (0, 1))
            nll = plan.nll.get("wikitext")
            line.append(f"{right} of {asked}" if asked else "")
            line.append("" if nll is None else f"{np.exp(nll.mean()):.1f}")
        cells.append(line)
    heads = ["plan", *(x for r in (0.1, 0.2, 0.3) for x in (f"right, {r:.0%}", "perplexity"))]
    yield "Right answers, and perplexity on WikiText", heads, cells


def refitted(_: Plans) -> Iterable[Table]:
    """Plans as cut and refitted, on texts of the mix and outside it."""
    table = shown(kept_refits(), REFITS).data
    yield "KL as cut and refitted", list(table), table.astype(str).values.tolist()
    yield "After the refit", ["what is level"], [[line] for line in level_after_refit()]


def costs(_: Plans) -> Iterable[Table]:
    """What plans save, by what their budget counts."""
    table = shown(kept_savings(), SAVINGS).data
    yield "What a budget counts", list(table), table.astype(str).values.tolist()


def texts(plans: Plans) -> Iterable[Table]:
    """What a plan is for."""
    judged = purposes.kept_purposes(SHIPPED, 0.2)
    for strength in purposes.STRENGTHS:
        cells = []
        for name in purposes.KEPT:
            rows = pick(judged, calibrated_on=name, interaction_strength=strength)
            by = {row["judged_on"]: error_bar(row["kl"], row["kl_error"], 3) for row in rows}
            cells.append([name, *(by.get(judge, "") for judge in purposes.KEPT)])
        title = f"20%, lambda {strength:g}: H of 3 rows of a text, judged on four texts"
        yield title, ["H of", *purposes.KEPT], cells
    yield "H of 24 rows of C4 beside that of the manual", *likeness(CURVATURE)


def likeness(of_c4: Curvature) -> tuple[list[str], list[list[str]]]:
    """Rank correlations of the two H that ship, and what part of their units plans share."""
    of_manual = kept_curvature("smollm2", "manual")
    pair, above = (of_c4, of_manual), np.triu_indices(len(of_c4.units), 1)
    ranks = {
        "saliency, rank correlation": spearmanr(*(h.saliency for h in pair)),
        "edges, rank correlation": spearmanr(*(h.matrix[above] for h in pair)),
    }
    cells = {name: f"{found.statistic:.2f}" for name, found in ranks.items()}
    for strength in (0.0, 1.0):
        one, other = (set(solve_greedy(h, 0.2, strength).pruned) for h in pair)
        share = len(one & other) / len(one | other)
        cells[f"plans share, 20%, lambda {strength:g}"] = f"{share:.0%}"
    return [*cells], [[*cells.values()]]


def kinds(plans: Plans) -> Iterable[Table]:
    """Texts that everyone has, as calibration."""
    names = [name.removesuffix(", lambda 0") for name in plans.named("H of") if "lambda 0" in name]
    for strength in purposes.STRENGTHS:
        columns = [(ratio, text) for ratio in (0.1, 0.2) for text in TEXTS]
        cells = [
            [
                name.removeprefix("H of "),
                *(plans.bar(f"{name}, lambda {strength:g}", *at) for at in columns),
            ]
            for name in names
        ]
        heads = ["H of", *(f"{ratio:.0%}, {TEXTS[text]}" for ratio, text in columns)]
        yield f"H of texts that everyone has, lambda {strength:g}", heads, cells


def scales(plans: Plans) -> Iterable[Table]:
    """Whether a sum of KLs and of pairs ranks plans of all scales; predictions beside the KL."""
    own = CURVATURE.single_unit_risk
    names = [f"H, lambda {strength:g}" for strength in (0.0, 0.5, 1.0)]
    names += ["units by their own KL", *plans.named("measured"), "searched"]
    heads = ["KL on C4", "units, summed", "H", "blocks", "and pairs", "layers", "and pairs"]
    ranked = []
    for ratio in (0.1, 0.2, 0.3):
        found = {}  # of equal plans the first
        for name in names:
            if (plan := plans.by_name[name].get(ratio)) is not None:
                found.setdefault(plan.selection.fingerprint, (name, plan))
        numbers = []
        for _, plan in found.values():
            chosen = list(plan.selection.pruned)
            whole = [plan.kl["c4"].mean(), own[chosen].sum(), CURVATURE.risk(chosen)]
            for parts in ("blocks", "layers"):
                measured = kept_interactions("smollm2", parts)
                share = np.array(
                    [own[sorted({*p} & {*chosen})].sum() / own[[*p]].sum() for p in measured.parts]
                )
                inside = share[list(measured.pool)]
                alone = float(measured.alone.mean(axis=0) @ share)
                whole += [alone, alone + float(inside @ measured.interaction @ inside) / 2]
            numbers.append(whole)
        sums = np.array(numbers)
        ranks = [float(spearmanr(sums[:, 0], column).statistic) for column in sums.T[1:]]
        ranked.append([f"{ratio:.0%}", str(len(sums)), *(f"{rank:+.2f}" for rank in ranks)])
        if ratio == 0.2:
            cells = [
                [name, *(f"{value:.2f}" for value in line)]
                for (name, _), line in zip(found.values(), sums, strict=True)
            ]
            yield "20%: what each sum predicts", ["plan", *heads], cells
    yield "Rank correlation with the KL on C4", ["removed", "plans", *heads[1:]], ranked


def reached(plans: Plans) -> Iterable[Table]:
    """How far an edge is true: measured interactions of units, blocks and layers against H's."""
    summary = []
    alone = {plan.selection.pruned: plan.kl["c4"] for plan in plans.all["unit"]}
    cases = []
    for name in plans.all:
        for plan in plans.all[name] if " units" in name else []:
            parts = tuple((unit,) for unit in plan.selection.pruned)
            cases.append((name, parts, plan.kl["c4"], sum(alone[part] for part in parts)))
    for kind in ("blocks", "layers"):
        measured = kept_interactions("smollm2", kind)
        found = list(reach.pairs_of(measured, f"2 {kind}"))
        summary += pick(reach.reach_summary([reach.case_row(CURVATURE, *c) for c in found]))
    summary[:0] = pick(reach.reach_summary([reach.case_row(CURVATURE, *case) for case in cases]))
    cells = [
        [
            row["scale"],
            str(row["cases"]),
            *(
                plus_minus(row[name], row[f"{name}_error"])
                for name in ("same_sign", "spearman", "size", "negative")
            ),
            f"{row['predicted_negative']:.2f}",
            plus_minus(row["factor"], row["factor_error"]),
        ]
        for row in summary
    ]
    heads = ["removed together", "cases", "same sign", "Spearman", "size, measured / H"]
    heads += ["negative, measured", "negative, by H", "KL / sum of each alone"]
    yield "Measured interactions and the edges of H", heads, cells


TABLES: dict[str, Callable[[Plans], Iterable[Table]]] = {
    function.__name__: function
    for function in (
        methods,
        paired,
        edges,
        paper,
        readme,
        abilities,
        refitted,
        costs,
        scales,
        reached,
        strengths,
        texts,
        kinds,
    )
}


def printed(name: str) -> str:
    """The tables of one part, in Markdown."""
    found = TABLES[name](Plans(kept_plans(CURVATURE)))
    return "\n\n".join(f"**{title}**\n\n{table(heads, cells)}" for title, heads, cells in found)


def pages() -> dict[Path, str]:
    """The text of each page with the tables of today."""
    tables = {name: printed(name) for name in TABLES}
    return {page: filled(page, tables) for page in PAGES}


def main() -> None:
    parts = flag([], "by default all", nargs="*", choices=[[], *TABLES], positional=True, type=str)
    options = arguments(__doc__, parts=parts, write=flag(False, "put them into the pages"))
    if options.write:
        for page, text in pages().items():
            page.write_text(text, encoding="utf-8")
        return
    for name in options.parts or TABLES:
        print(f"{printed(name)}\n")


if __name__ == "__main__":
    main()
