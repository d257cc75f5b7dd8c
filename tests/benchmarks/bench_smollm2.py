"""The tables of SMOLLM2.md and of the two pages after it, from what ships. No model is needed.

    python tests/benchmarks/bench_smollm2.py            # all tables
    python tests/benchmarks/bench_smollm2.py edges      # one of them
    python tests/benchmarks/bench_smollm2.py --write    # put them into the pages

`data/measure_smollm2.py` makes the measurements.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.analysis.gate import redundancy_gate
from cocurve_lab.extensions.analysis.stability import is_converged, selection_stability
from cocurve_lab.extensions.judging.agreement import RANDOM
from cocurve_lab.extensions.pretrained.kept import (
    KeptPlan,
    KeptPlans,
    kept_curvature,
    kept_folder,
    kept_interactions,
    kept_plans,
    read_plans,
)
from cocurve_lab.extensions.writing import plus_minus, typeset
from cocurve_lab.measuring.risk import standard_error
from cocurve_lab.solver.solve import solve_greedy
from cocurve_studies import abilities as ability
from cocurve_studies.certainty import findings as certain
from cocurve_studies.certainty import purposes
from cocurve_studies.findings import Findings
from cocurve_studies.structure import bridges, geometry
from cocurve_studies.structure import findings as structural
from cocurve_studies.tables import Row, pick
from cocurve_studies.trust import fidelity, reach
from cocurve_studies.trust import findings as trusting
from helpers.benchmarks import error_bar

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
PAGES = [Path(__file__).with_name(f"SMOLLM2{part}.md") for part in ("", "_SCALES", "_FINDINGS")]
CURVATURE = kept_curvature("smollm2")


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

    def named(self, begin: str) -> list[str]:
        return [name for name in self.by_name if name.startswith(begin)]

    @property
    def methods(self) -> list[str]:
        """Names of plans that are of no H, nor random, nor parts of other plans."""
        other = ("H", "random", "draw", "unit", "dense", "measured", "searched")
        return [x for x in self.by_name if not (x.startswith(other) or " units" in x)]


def methods(plans: Plans) -> Iterable[Table]:
    """Every method on every text."""
    cells = []
    for name in [*COMPARED, "searched", *plans.methods]:
        values = [plans.kl(name, ratio, text) for ratio, text in COLUMNS]
        cells.append([name, *("" if x is None else bar(x) for x in values)])
    cells.append(["random: mean, range of ten", *(_random(plans, *at) for at in COLUMNS)])
    yield "KL", ["plan", *HEADS], cells


def _random(plans: Plans, ratio: float, text: str) -> str:
    found = [plans.kl(name, ratio, text) for name in plans.named("random")]
    means = [values.mean() for values in found if values is not None]
    return f"{np.mean(means):.2f} ({min(means):.2f} to {max(means):.2f})" if means else ""


def paired(plans: Plans) -> Iterable[Table]:
    """The searched plan against every other, row by row."""
    cells = []
    for name in COMPARED + plans.methods:
        line = [name]
        for ratio, text in COLUMNS:
            mine, other = plans.kl("searched", ratio, text), plans.kl(name, ratio, text)
            line.append("" if mine is None or other is None else bar(mine - other, "+"))
        cells.append(line)
    yield "KL of the searched plan minus that of another", ["plan", *HEADS], cells


def edges(plans: Plans) -> Iterable[Table]:
    """Lambda 1 against lambda 0, with errors over rows and over draws of H."""
    words_of = {
        "": "",
        ", ends kept": ", two layers kept at either end",
        ", own guards": ", each with its own guards",
    }
    for words, title in words_of.items():
        cells = []
        for ratio in RATIOS:
            if words and plans.kl(f"H, lambda 1{words}", ratio, "c4") is None:
                continue
            line = [f"{ratio:.0%}"]
            for text in TEXTS:
                with_, without = (plans.kl(f"H, lambda {s}{words}", ratio, text) for s in (1, 0))
                line.append("" if with_ is None or without is None else bar(with_ - without, "+"))
            drawn = [] if words else _draws(plans, ratio, "c4")
            line.append(", ".join(f"{value:+.2f}" for value in drawn))
            cells.append(line)
        heads = ["removed", *TEXTS.values(), "draws of H, C4"]
        title = "KL at lambda 1 minus that at lambda 0" + title
        yield title, heads if not words else heads[:-1], [x if not words else x[:-1] for x in cells]


def _draws(plans: Plans, ratio: float, text: str) -> list[float]:
    found = []
    for name in plans.named("draw"):
        if name.endswith("lambda 1"):
            both = plans.kl(name, ratio, text), plans.kl(f"{name[:-1]}0", ratio, text)
            if both[0] is not None and both[1] is not None:
                found.append(float((both[0] - both[1]).mean()))
    return found


def strengths(plans: Plans) -> Iterable[Table]:
    """KL and the risk that H predicts, along lambda."""
    assert CURVATURE is not None
    for words in ("", ", ends kept"):
        cells = []
        for strength in STRENGTHS:
            line = [f"{strength:g}"]
            for ratio in (0.1, 0.2, 0.3):
                plan = plans.by_name[f"H, lambda {strength:g}{words}"].get(ratio)
                if plan is None:
                    line += ["", ""]
                    continue
                risk = CURVATURE.risk(plan.selection.pruned)
                line += [bar(plan.kl["c4"]), f"{risk:.2f}"]
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


def refitted(plans: Plans) -> Iterable[Table]:
    """Plans as pruned and refitted on 96 rows of C4."""
    assert CURVATURE is not None
    cells = []
    for plan in read_plans(kept_folder() / "refitted.json", CURVATURE).plans:
        ratio = plan.selection.requested_ratio or 0.0
        line = [f"{ratio:.0%}", plan.name]
        for text in TEXTS:
            before = plans.kl(plan.name, ratio, text)
            line += ["" if before is None else bar(before), bar(plan.kl[text])]
        cells.append(line)
    heads = [x for title in TEXTS.values() for x in (title, "refitted")]
    yield "KL as pruned, and refitted on 96 rows of C4", ["removed", "plan", *heads], cells


def texts(plans: Plans) -> Iterable[Table]:
    """What a plan is for."""
    assert CURVATURE is not None
    table = purposes.kept_purposes(CURVATURE, 0.2)
    for strength in purposes.STRENGTHS:
        cells = []
        for name in purposes.KEPT:
            rows = pick(table, calibrated_on=name, interaction_strength=strength)
            by = {row["judged_on"]: error_bar(row["kl"], row["kl_error"], 3) for row in rows}
            cells.append([name, *(by.get(judge, "") for judge in purposes.KEPT)])
        title = f"20%, lambda {strength:g}: H of 3 rows of a text, judged on four texts"
        yield title, ["H of", *purposes.KEPT], cells
    yield "H of 24 rows of C4 beside that of the manual", *likeness(CURVATURE)


def likeness(of_c4: Curvature) -> tuple[list[str], list[list[str]]]:
    """Rank correlations of the two H that ship, and what part of their units plans share."""
    of_manual = kept_curvature("smollm2", "manual")
    assert of_manual is not None
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
        cells = []
        for name in names:
            line = [name.removeprefix("H of ")]
            for ratio in (0.1, 0.2):
                for text in TEXTS:
                    values = plans.kl(f"{name}, lambda {strength:g}", ratio, text)
                    line.append("" if values is None else bar(values))
            cells.append(line)
        heads = ["H of", *(f"{r:.0%}, {title}" for r in (0.1, 0.2) for title in TEXTS.values())]
        yield f"H of texts that everyone has, lambda {strength:g}", heads, cells


def scales(plans: Plans) -> Iterable[Table]:
    """Whether a sum of KLs and of pairs ranks plans of all scales; predictions beside the KL."""
    assert CURVATURE is not None
    own = CURVATURE.single_unit_risk
    assert own is not None
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
                assert measured is not None
                share = np.array(
                    [own[sorted({*p} & {*chosen})].sum() / own[[*p]].sum() for p in measured.parts]
                )
                inside = share[list(measured.pool)]
                alone = float(measured.alone.mean(axis=0) @ share)
                whole += [alone, alone + float(inside @ measured.interaction @ inside) / 2]
            numbers.append(whole)
        table = np.array(numbers)
        ranks = [float(spearmanr(table[:, 0], column).statistic) for column in table.T[1:]]
        ranked.append([f"{ratio:.0%}", str(len(table)), *(f"{rank:+.2f}" for rank in ranks)])
        if ratio == 0.2:
            cells = [
                [name, *(f"{value:.2f}" for value in line)]
                for (name, _), line in zip(found.values(), table, strict=True)
            ]
            yield "20%: what each sum predicts", ["plan", *heads], cells
    yield "Rank correlation with the KL on C4", ["removed", "plans", *heads[1:]], ranked


def reached(plans: Plans) -> Iterable[Table]:
    """How far an edge is true: measured interactions of units, blocks and layers against H's."""
    assert CURVATURE is not None
    summary = []
    alone = {plan.selection.pruned: plan.kl["c4"] for plan in plans.all["unit"]}
    cases = []
    for name in plans.all:
        for plan in plans.all[name] if " units" in name else []:
            parts = tuple((unit,) for unit in plan.selection.pruned)
            cases.append((name, parts, plan.kl["c4"], sum(alone[part] for part in parts)))
    for kind in ("blocks", "layers"):
        measured = kept_interactions("smollm2", kind)
        assert measured is not None
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


def claims(plans: Plans) -> Iterable[Table]:
    """The claims that can be judged from H and these plans, the paper's and the lab's."""
    assert CURVATURE is not None
    h = CURVATURE
    found = [
        *trusting.single_unit_findings(fidelity.single_unit_fidelity(h)),
        *trusting.fidelity_findings(_fidelity(plans)),
        certain.redundancy_finding(redundancy_gate(h), len(h.grouped["group_grams"])),
        *(certain.stability_finding(selection_stability(h, 0.2, s)) for s in (0.0, 1.0)),
        certain.convergence_finding(is_converged(h, 0.2, 1.0), len(h.grouped["group_grams"])),
        *certain.purpose_findings(purposes.kept_purposes(h, 0.2)),
        *structural.bridge_findings(bridges.bridge_table(h), bridges.bridge_edges(h)),
        *structural.structure_findings(geometry.block_table(h), geometry.budget_table(h)),
        *structural.proposition_findings(geometry.proposition_table(h)),
        *ability.trade_off_finding(_trade_off(plans)),
    ]
    for who, some in Findings(found).sides():
        cells = [
            [
                text.replace("|", r"\|")
                for text in (f.study, typeset(f.claim), f.where, typeset(f.ours), f.said)
            ]
            for f in some
        ]
        heads = ["study", who, "where", "on SmolLM2-135M, C4", "verdict"]
        yield f"Claims of {who}", heads, cells


def _trade_off(plans: Plans) -> list[Row]:
    """The table of `abilities.trade_off` at 20 % on WikiText.

    Only counts of right answers are kept, so their difference has the error of two samples.
    """
    made = [(s, plans.by_name[f"H, lambda {s:g}"].get(0.2)) for s in (0.0, 0.5, 1.0)]
    found = [(strength, plan) for strength, plan in made if plan is not None and plan.right]
    rows: list[Row] = []
    for strength, plan in found:
        right, asked = (sum(x[n] for x in plan.right.values()) for n in (0, 1))
        share, first = right / asked, rows[0] if rows else None
        loss = plan.nll["wikitext"] - found[0][1].nll["wikitext"]
        row: Row = {"variant": f"λ {strength:g}", "requested_ratio": 0.2, "accuracy": share}
        row["accuracy_error"] = float(np.sqrt(share * (1 - share) / asked))
        row["perplexity"] = float(np.exp(plan.nll["wikitext"].mean()))
        row["loss_difference"] = float(loss.mean())
        row["loss_difference_error"] = float(standard_error(loss))
        row["difference"] = share - first["accuracy"] if first else None
        both = (row, first) if first else (row,)
        row["difference_error"] = float(np.hypot.reduce([x["accuracy_error"] for x in both]))
        rows.append(row)
    return rows


def _fidelity(plans: Plans) -> list[Row]:
    """The table of `fidelity_study`, of kept plans without guards."""
    assert CURVATURE is not None
    chosen = [
        (fidelity.ACROSS, f"lambda {strength:g}", plan)
        for strength in purposes.STRENGTHS
        for plan in plans.by_name[f"H, lambda {strength:g}"].values()
    ]
    names = [f"H, lambda {strength:g}" for strength in STRENGTHS]
    pool = [(name.removeprefix("H, "), name) for name in names]
    drawn = [(RANDOM, name) for name in plans.named("random")]
    pool = pool + drawn if drawn else []  # the paper's pool is of random plans by more than half
    for method, name in pool:
        chosen += [(fidelity.POOL, method, x) for r, x in plans.by_name[name].items() if r == 0.2]
    table = []
    for group, method, plan in chosen:
        kl, error = plan.kl["c4"], float(standard_error(plan.kl["c4"]))
        row = {"group": group, "method": method}
        row |= {
            "interaction_strength": plan.selection.interaction_strength,
            "requested_ratio": plan.selection.requested_ratio,
        }
        table.append(row | fidelity.plan_columns(CURVATURE, plan.selection, kl, error))
    return table


TABLES: dict[str, Callable[[Plans], Iterable[Table]]] = {
    function.__name__: function
    for function in (
        *(methods, paired, edges, abilities, refitted, scales, reached),
        *(strengths, texts, kinds, claims),
    )
}


def printed(name: str) -> str:
    """The tables of one part, in Markdown."""
    assert CURVATURE is not None
    kept = kept_plans(CURVATURE)
    assert kept is not None
    found = []
    for title, heads, cells in TABLES[name](Plans(kept)):
        lines = [f"| {' | '.join(line)} |" for line in (heads, *cells)]
        lines.insert(1, "|---" * len(heads) + "|")
        found.append(f"**{title}**\n\n" + "\n".join(lines))
    return "\n\n".join(found)


def page(text: str) -> str:
    """A page with the tables of today between its marks."""
    for name in TABLES:
        begin, end = f"<!-- {name} -->\n", f"\n<!-- end of {name} -->"
        if begin in text:
            before, rest = text.split(begin)
            text = f"{before}{begin}\n{printed(name)}\n{end}{rest.split(end)[1]}"
    return text


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("parts", nargs="*", choices=[[], *TABLES], help="by default all")
    parser.add_argument("--write", action="store_true", help="put them into the pages")
    options = parser.parse_args()
    if options.write:
        for file in PAGES:
            file.write_text(page(file.read_text(encoding="utf-8")), encoding="utf-8")
        return
    for name in options.parts or TABLES:
        print(f"{printed(name)}\n")


if __name__ == "__main__":
    main()
