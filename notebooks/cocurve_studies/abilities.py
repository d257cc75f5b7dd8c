"""Right answers under a plan, by capability: the paper's evidence for the edges is capability.

Every plan answers the same questions, so a comparison of two plans counts the questions that only
one of them gets right: McNemar's exact test gives the verdict, the paired standard error the length
of the bar.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from scipy.stats import norm

from cocurve_lab.base.storage import fingerprint
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.judging.answers import ALL, AnswerOptions, answer_accuracy
from cocurve_lab.extensions.judging.generation import Question
from cocurve_lab.extensions.judging.kept import answers_file
from cocurve_lab.solver.selection import Selection

from .findings import ABOVE, BELOW, Claim, Finding, Verdict, every
from .lazy import DataFrame, PreTrainedModel, PreTrainedTokenizerBase
from .shared import known, marks, solved
from .structure.edges import structure_table
from .tables import Columns, Folder, Row, Rows, Table, kept_table, pick, plus_minus

DENSE, FULL, ALL_EDGES = "dense", "full H", "λ 1"
CODE = "code"  # the capability that the paper calls fragile

# columns of `ability_study` for reading, with `shown`
COLUMNS: Columns = {
    "requested_ratio": "removed",
    "variant": "plan",
    "capability": "",
    "questions": "",
    "accuracy": "right",
    "difference": "right − base",
    "lost": "only base right",
    "gained": "only plan right",
    "p_value": "McNemar's p",
}


# Plans --------------------------------------------------------------------------------------------
def strength_plans(
    curvature: Curvature,
    ratios: Sequence[float] = (0.2, 0.3, 0.4),
    strengths: Sequence[float] = (0.0, 0.5, 1.0),
) -> Rows:
    """Solve for every ratio and lambda (Table "Ablations at 20 %"); the base is the first lambda.

    Returns:
        Rows for `ability_study`: variant, base, requested_ratio and selection (None where there is
        no plan).
    """
    base = f"λ {strengths[0]:g}"
    return [
        _entry(f"λ {strength:g}", base, ratio, solved(curvature, ratio, strength)[0])
        for ratio in ratios
        for strength in strengths
    ]


def edge_plans(curvature: Curvature, ratio: float = 0.2) -> Rows:
    """Solve for every edge structure and for single kinds (Table "Extended ablations").

    These are the axes "structure" and "kinds" of `structure_table`; the base is the method itself.
    Returns rows as `strength_plans` does.
    """
    return [
        _entry(row["name"], FULL, ratio, row["selection"])
        for row in structure_table(curvature, ratio)
        if row["axis"] in ("structure", "kinds") and row["name"] != "joint"  # the method once more
    ]


def _entry(variant: str, base: str, ratio: float, plan: Selection | None) -> Row:
    return {"variant": variant, "base": base, "requested_ratio": ratio, "selection": plan}


# The study ----------------------------------------------------------------------------------------
def ability_study(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    plans: Rows,
    questions: Sequence[Question],
    *,
    cache: Folder = None,
    progress: bool = True,
) -> DataFrame:
    """Ask every plan and the dense model the same questions, and count right answers by capability.

    Args:
        plans: from `strength_plans` or `edge_plans`; those without a selection have no row.
        questions: with answers, from `demo_questions` or `read_questions`.

    Returns:
        One row per plan and capability ("all" last), the dense model first (requested_ratio 0):
        variant, base, requested_ratio, capability, questions; accuracy in [0, 1] and the ends of
        its 95 % Wilson interval (accuracy_low, _high). Against the base plan of the ratio:
        difference of accuracy, questions lost (only the base is right) and gained, and p_value of
        McNemar's exact test. These are None for the dense model, for a base, and for a plan that
        removes the same units as its base.
    """
    made = [row for row in plans if row["selection"] is not None]
    asked = fingerprint([[q.capability, q.prompt, q.answer] for q in questions])
    named = [
        [row["variant"], row["base"], row["requested_ratio"], row["selection"].fingerprint]
        for row in made
    ]
    settings = marks(model, questions=asked, plans=named)

    def compute() -> Rows:
        nothing = Selection.from_pruned(made[0]["selection"].units, [])
        rows = [_entry(DENSE, "", 0.0, nothing), *made]
        answers = answer_accuracy(
            model,
            tokenizer,
            [row["selection"] for row in rows],
            questions,
            options=AnswerOptions(checkpoint=answers_file(cache, model, questions)),
            progress=progress,
        )
        whole, found = answers.table, []
        places = {(row["requested_ratio"], row["variant"]): n for n, row in enumerate(rows)}
        for number, row in enumerate(rows):
            base = places.get((row["requested_ratio"], row["base"]))
            pairs: dict[str, Row] = {}
            if base is not None and row["selection"].pruned != rows[base]["selection"].pruned:
                pairs = {r["capability"]: r for r in pick(answers.paired(number, base))}
            names = ("variant", "base", "requested_ratio")
            for one in pick(whole, plan=number):
                pair = pairs.get(one["capability"], {})
                found.append({name: row[name] for name in names} | _values(one, pair))
        return found

    return kept_table(cache, "abilities", settings, compute)


def _values(one: Row, pair: Row) -> Row:
    """Return the measured columns of a plan on one capability, and those of its comparison."""
    names = ("capability", "questions", "accuracy", "accuracy_low", "accuracy_high")
    row = {name: one[name] for name in names} | {"accuracy_error": known(one["accuracy_error"])}
    row |= {name: pair.get(name) for name in ("lost", "gained", "p_value")}
    row["difference"] = pair.get("accuracy")
    row["difference_error"] = known(pair["accuracy_error"]) if pair else None
    return row


# Findings -----------------------------------------------------------------------------------------


def _variant(claim: str, table: str = "full") -> Claim:
    return Claim("variants", claim, f"Table ablation-{table}", BELOW)


VARIANTS = {
    "diagonal": _variant("the diagonal alone loses code: MBPP .000 to .100"),
    "within module": _variant("edges without cross edges lose code: MBPP .000 to .100"),
    "head-only": _variant("head-only pruning loses code: MBPP .000 to .122", "edge"),
    "FFN-only": _variant("FFN-only pruning keeps less code: MBPP .076 to .122", "edge"),
    "ffn block, no diagonal": _variant(
        "an isolated FFN block without the diagonal loses code: MBPP .000 to .100"
    ),
}


def edge_ability_findings(table: Table) -> list[Finding]:
    """Judge the paper's claims on abilities by edge variant, from the study of `edge_plans`.

    Each variant is compared with the full H on code, the column in which the paper's variants
    differ, or on all questions where there is no such capability.
    """
    name = CODE if pick(table, capability=CODE) else ALL
    return [
        _judged(claim, pick(table, variant=variant, capability=name), f"{variant} − {FULL}")
        for variant, claim in VARIANTS.items()
    ]


def _judged(claim: Claim, rows: Rows, what: str) -> Finding:
    parts = []
    for row in rows:
        told = "one and the same plan"
        if row["difference"] is not None:
            told = plus_minus(row["difference"], row["difference_error"])
            told += f" ({row['gained']} gained, {row['lost']} lost of {row['questions']})"
        parts.append(f"{row['capability']} {told}")
    verdict = every(partial(_clear, row, claim.holds == ABOVE) for row in rows)
    return claim.given(f"{what}: {'; '.join(parts) or 'no plan'}", verdict)


def _clear(row: Row, above: bool, factor: float) -> Verdict:
    """Whether a plan is right more often (or less) than its base; None where chance may decide."""
    if row["p_value"] is None or row["p_value"] > 2 * norm.sf(factor):
        return None
    return bool((row["difference"] > 0) == above)
