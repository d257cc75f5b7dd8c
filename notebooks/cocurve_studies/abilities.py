"""Right answers under a plan, by capability: the paper's evidence for the edges is capability.

One study for two notebooks: plans by lambda (06) and by edge variant (07). Every plan answers the
same questions, so a comparison of two plans counts the questions that only one of them gets right:
McNemar's exact test gives the verdict, the paired standard error the length of the bar.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from scipy.stats import norm

from cocurve_lab.base.errors import InputError
from cocurve_lab.base.storage import fingerprint
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.judging.answers import ALL, AnswerOptions, AnswerTable, answer_accuracy
from cocurve_lab.extensions.judging.generation import Question
from cocurve_lab.extensions.judging.kept import answers_file
from cocurve_lab.measuring.results import standard_error
from cocurve_lab.solver.guards import FREE, Guards
from cocurve_lab.solver.selection import Selection

from .chart import add, chart, empty, share_axis
from .findings import ABOVE, Finding, Verdict, every, judged_column, percent
from .shared import known, marks, solved
from .structure.ablations import structure_table
from .study import Study
from .tables import (
    Columns,
    DataFrame,
    Folder,
    Row,
    Rows,
    Table,
    kept_table,
    pick,
    plus_minus,
    table_of,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Figure
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from cocurve_lab.calibration import CalibrationSet


DENSE, FULL, NO_EDGES, ALL_EDGES = "dense", "full H", "λ 0", "λ 1"
CODE = "code"  # the capability that the paper calls fragile
PAPER_RATIO = 0.2  # of its ablations


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
    "log_likelihood_difference": "log p(answer) − base",
}


# Plans --------------------------------------------------------------------------------------------
def strength_plans(
    curvature: Curvature,
    ratios: Sequence[float] = (0.2, 0.3, 0.4),
    strengths: Sequence[float] = (0.0, 0.5, 1.0),
    guards: Guards = FREE,
) -> Rows:
    """Solve for every ratio and lambda (Table "Ablations at 20 %"); the base is the first lambda.

    Returns:
        Rows for `ability_study`: variant, base, requested_ratio, selection (None where there is no
        plan) and note (why).
    """
    rows = []
    for ratio in ratios:
        for strength in strengths:
            plan, note = solved(curvature, ratio, strength, guards)
            base = f"λ {strengths[0]:g}"
            rows.append(_entry(f"λ {strength:g}", base, ratio, plan, note))
    return rows


def edge_plans(
    curvature: Curvature,
    ratio: float = PAPER_RATIO,
    interaction_strength: float = 1.0,
    guards: Guards = FREE,
) -> Rows:
    """Solve for every edge structure and for single kinds (Table "Extended ablations").

    These are the axes "structure" and "kinds" of `structure_table`; the base is the method itself.
    Returns rows as `strength_plans` does.
    """
    found = structure_table(curvature, ratio, interaction_strength, guards)
    return [
        _entry(row["name"], FULL, ratio, row["selection"], row["note"])
        for row in found
        if row["axis"] in ("structure", "kinds") and row["name"] != "joint"  # the method once more
    ]


def _entry(variant: str, base: str, ratio: float, plan: Selection | None, note: str) -> Row:
    named: Row = {"variant": variant, "base": base, "requested_ratio": ratio}
    return named | {"selection": plan, "note": note}


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

    Plans that remove the same units are measured once.

    Args:
        plans: from `strength_plans` or `edge_plans`.
        questions: with answers, from `demo_questions` or `read_questions`; none measures nothing.

    Returns:
        One row per plan and capability ("all" last), the dense model first (requested_ratio 0):
        variant, base, requested_ratio, realized_ratio, units, same_as (an earlier variant of the
        ratio that removes the same units, or ""), note, capability, questions; accuracy in [0, 1]
        and the ends of its 95 % Wilson interval (accuracy_low, _high). Against the base plan of the
        ratio: difference of accuracy, questions lost (only the base is right) and gained, p_value
        of McNemar's exact test, log_likelihood_difference of the answers (nats per answer). These
        are None for the dense model, for a base, and where either has no plan.
    """
    made = [row["selection"] for row in plans if row["selection"] is not None]
    if not made:
        raise InputError("there is no plan to ask. Choose a smaller ratio or fewer guards.")
    if not questions:
        return table_of([])
    asked = fingerprint([[q.capability, q.prompt, q.answer] for q in questions])
    named = [
        [row["variant"], row["base"], row["requested_ratio"], _mark(row["selection"])]
        for row in plans
    ]
    settings = marks(model, questions=asked, plans=named)

    def compute() -> Rows:
        dense = _entry(DENSE, "", 0.0, Selection.from_pruned(made[0].units, []), "")
        rows = [dense, *(row for row in plans if row["selection"] is not None)]
        options = AnswerOptions(checkpoint=answers_file(cache, model, questions))
        answers = answer_accuracy(
            model,
            tokenizer,
            [row["selection"] for row in rows],
            questions,
            options=options,
            progress=progress,
        )
        found = _measured(rows, answers)
        missing = [row for row in plans if row["selection"] is None]
        names = (*answers.capabilities, ALL)
        return found + [_identity(row, []) | _values(name) for row in missing for name in names]

    return kept_table(cache, "abilities", settings, compute)


def _mark(plan: Selection | None) -> str | None:
    return None if plan is None else plan.fingerprint


def _measured(rows: Rows, answers: AnswerTable) -> Rows:
    """Return the rows of the plans that there are, `answers` in the same order."""
    whole = answers.table
    places = {(row["requested_ratio"], row["variant"]): n for n, row in enumerate(rows)}
    table: Rows = []
    for number, row in enumerate(rows):
        identity = _identity(row, rows[:number])
        base = places.get((row["requested_ratio"], row["base"]))
        compare = base is not None and base != number
        pairs = pick(answers.paired(number, base)) if compare and base is not None else []
        for one in pick(whole, plan=number):
            pair = next((p for p in pairs if p["capability"] == one["capability"]), {})
            table.append(identity | _values(one["capability"], one, pair))
    return table


def _identity(row: Row, before: Rows) -> Row:
    """Return the columns that name a plan."""
    plan: Selection | None = row["selection"]
    alike = [
        other["variant"]
        for other in before
        if other["requested_ratio"] == row["requested_ratio"]
        and _mark(other["selection"]) == _mark(plan)
    ]
    return {
        **{name: row[name] for name in ("variant", "base", "requested_ratio", "note")},
        "realized_ratio": None if plan is None else plan.realized_ratio,
        "units": None if plan is None else len(plan),
        "same_as": alike[0] if alike else "",
    }


def _values(capability: str, one: Row | None = None, pair: Row | None = None) -> Row:
    """Return the measured columns of a plan on one capability; None where nothing was measured."""
    one, pair = one or {}, pair or {}
    value: dict[str, Any] = {
        name: one.get(name)
        for name in ("questions", "accuracy", "accuracy_low", "accuracy_high", "log_likelihood")
    }
    value |= {
        "accuracy_error": _known(one.get("accuracy_error")),
        "difference": pair.get("accuracy"),
        "difference_error": _known(pair.get("accuracy_error")),
        "log_likelihood_difference": pair.get("log_likelihood"),
        "log_likelihood_difference_error": _known(pair.get("log_likelihood_error")),
    }
    return {"capability": capability} | value | {n: pair.get(n) for n in _COUNTS}


_COUNTS = ("lost", "gained", "p_value")


def _known(value: float | None) -> float | None:
    return None if value is None else known(value)


def trade_off(
    model: PreTrainedModel,
    plans: Rows,
    answers: Table,
    held_out: CalibrationSet,
    cache: Folder = None,
    progress: bool = True,
) -> DataFrame:
    """Set the perplexity of each plan on held-out text beside its right answers.

    Args:
        plans, answers: from `strength_plans`, and their `ability_study`.
        held_out: rows to measure on, none of them of H.

    Returns:
        One row per plan, in the order of `plans`: variant, base, requested_ratio, perplexity,
        `loss_difference` to the base (log of the ratio of perplexities, nats per token, with its
        paired error), and accuracy and its `difference` to the base over all questions.
    """
    if not len(answers):  # there were no questions
        return table_of([])
    made = [row for row in plans if row["selection"] is not None]
    study = Study(model, held_out, cache=cache, progress=progress)
    table = study.measure([row["selection"] for row in made])
    assert table.nll is not None  # measure_plans always has it
    places = {(row["requested_ratio"], row["variant"]): n for n, row in enumerate(made)}
    rows: Rows = []
    for place, row in enumerate(made):
        named = {name: row[name] for name in ("variant", "requested_ratio", "base")}
        base = places.get((row["requested_ratio"], row["base"]))
        (right,) = pick(answers, **named, capability=ALL)
        loss = table.nll[place] - table.nll[place if base is None else base]
        named |= {"perplexity": table.perplexity[place], "loss_difference": float(loss.mean())}
        named["loss_difference_error"] = known(standard_error(loss))
        measured = ("accuracy", "accuracy_error", "difference", "difference_error")
        rows.append(named | {name: right[name] for name in measured})
    return table_of(rows)


# Findings -----------------------------------------------------------------------------------------
def trade_off_finding(table: Table) -> list[Finding]:
    """Judge whether both perplexity and right answers rise from lambda 0 to 1, nearest to 20 %.

    Args:
        table: from `trade_off`.
    """
    mine = [row for row in pick(table) if row["variant"] == ALL_EDGES]
    if not mine:
        return []
    row = min(mine, key=lambda row: abs(row["requested_ratio"] - PAPER_RATIO))
    columns = ("loss_difference", "difference")
    loss, right = (plus_minus(row[name], row[f"{name}_error"]) for name in columns)
    along = pick(table, requested_ratio=row["requested_ratio"])
    listed = ", ".join(f"{one['variant']} {one['perplexity']:.4g}" for one in along)
    return [
        Finding(
            "abilities",
            "edges trade perplexity for abilities: both rise with λ (Falcon3-7B: 6.97 to 7.68)",
            'Section "A perplexity-capability trade-off at the redundancy floor"',
            f"at {percent(row['requested_ratio'])} perplexity {listed}; λ 1 − λ 0: loss {loss} "
            f"nats per token, right answers {right}",
            every(partial(judged_column, row, name, *ABOVE) for name in columns),
        )
    ]


def strength_ability_findings(table: Table) -> list[Finding]:
    """Judge the paper's claims on abilities by lambda, from the study of `strength_plans`.

    A difference is clear where chance makes one so large in less than one of twenty cases
    (McNemar), as two standard errors do. The ratio is the nearest to 20 %.
    """
    mine = [row for row in pick(table) if row["variant"] == ALL_EDGES]
    if not mine:
        return []
    nearest = min((r["requested_ratio"] for r in mine), key=lambda r: abs(r - PAPER_RATIO))
    rows = pick(mine, requested_ratio=nearest)
    where = 'Section "Ablations: the edge term is decisive"'
    ours = f"λ 1 − λ 0 at {percent(nearest)}"
    claims = (
        (
            "edges keep abilities: more right answers at λ = 1 than at λ = 0",
            where,
            pick(rows, capability=ALL),
        ),
        (
            "every ability gains by the edges (Falcon3-7B: all four measured do)",
            where,
            [row for row in rows if row["capability"] != ALL],
        ),
        (
            "what edges save is code, the fragile ability (8B: MBPP .000 to .100)",
            "Table ablation-full",
            pick(rows, capability=CODE),
        ),
    )
    return [
        Finding("abilities", claim, place, f"{ours}: {_told(some)}", _all(some, above=True))
        for claim, place, some in claims
        if some
    ]


def edge_ability_findings(table: Table) -> list[Finding]:
    """Judge the paper's claims on abilities by edge variant, from the study of `edge_plans`.

    Each variant is compared with the full H on code, the column in which the paper's variants
    differ, or on all questions where there is no such capability.
    """
    name = CODE if pick(table, capability=CODE) else ALL
    claims = (
        ("diagonal", "the diagonal alone loses code: MBPP .000 to .100", "Table ablation-full"),
        (
            "within module",
            "edges without cross edges lose code: MBPP .000 to .100",
            "Table ablation-full",
        ),
        ("head-only", "head-only pruning loses code: MBPP .000 to .122", "Table ablation-edge"),
        ("FFN-only", "FFN-only pruning keeps less code: MBPP .076 to .122", "Table ablation-edge"),
        (
            "ffn block, no diagonal",
            "an isolated FFN block without the diagonal loses code: MBPP .000 to .100",
            "Table ablation-full",
        ),
    )
    found = []
    for variant, claim, where in claims:
        rows = pick(table, variant=variant, capability=name)
        ours = f"{variant} − {FULL}, {_told(rows) if rows else 'not asked'}"
        found.append(Finding("variants", claim, where, ours, _all(rows, above=False)))
    return found


def _told(rows: Rows) -> str:
    """Return differences in words, with the counts that McNemar's test is about."""
    parts = []
    for row in rows:
        if row["difference"] is None:
            parts.append(f"{row['capability']} no plan")
            continue
        value = plus_minus(row["difference"], row["difference_error"])
        counts = f"{row['gained']} gained, {row['lost']} lost of {row['questions']}"
        parts.append(f"{row['capability']} {value} ({counts})")
    return "; ".join(parts)


def _all(rows: Rows, *, above: bool) -> Verdict:
    """Tell whether every row differs from its base in one direction."""
    return every(partial(_clear, row, above) for row in rows)


def _clear(row: Row, above: bool, factor: float) -> Verdict:
    """Whether a plan is right more often (or less) than its base; None where chance may decide."""
    if row["p_value"] is None:
        return None
    if row["same_as"] == row["base"]:
        return None  # one and the same plan says nothing about two
    if row["p_value"] > 2 * norm.sf(factor):
        return None
    return bool((row["difference"] > 0) == above)


# Pictures -----------------------------------------------------------------------------------------
def plot_trade_off(table: Table) -> Figure:
    """Plot right answers by perplexity, a line per ratio along lambda."""
    figure, hover = empty(), "%{hovertext}<br>perplexity %{x:.4g}, right %{y:.1%}<extra></extra>"
    for number, ratio in enumerate(dict.fromkeys(row["requested_ratio"] for row in pick(table))):
        rows = pick(table, requested_ratio=ratio)
        names = [row["variant"] for row in rows]
        ends = [name if k in (0, len(names) - 1) else "" for k, name in enumerate(names)]
        more: dict[str, Any] = {"line": "solid", "hovertext": names, "hover": hover}
        more |= {"mode": "lines+markers+text", "text": ends, "textposition": "middle right"}
        add(figure, rows, "perplexity", "accuracy", f"{percent(ratio)} removed", number, **more)
    y = share_axis("share of questions answered right")
    return chart(figure, "Perplexity and abilities along λ", "perplexity on held-out text", y)


def plot_abilities(table: Table) -> Figure:
    """Plot right answers of every plan, one symbol per capability; the dense model comes first.

    All questions together have a bar, their 95 % interval; those of the capabilities would lie on
    top of each other, so they are in the hover text.
    """
    figure, hover = empty(), "%{text}<extra></extra>"
    rows = [row for row in pick(table) if row["accuracy"] is not None]
    for number, name in enumerate(dict.fromkeys(row["capability"] for row in rows)):
        mine = pick(rows, capability=name)
        whole = name == ALL
        bars = {
            "array": [row["accuracy_high"] - row["accuracy"] for row in mine],
            "arrayminus": [row["accuracy"] - row["accuracy_low"] for row in mine],
            "type": "data",
            "symmetric": False,
            "visible": whole,
        }
        y = [[percent(row["requested_ratio"]) for row in mine], [row["variant"] for row in mine]]
        more: dict[str, Any] = {
            "error_x": bars,
            "text": [_hover(row) for row in mine],
            "hover": hover,
        }
        add(figure, mine, "accuracy", y, name, number, bars="", size=10 if whole else 8, **more)
    lines, asked = (
        len({(row["requested_ratio"], row["variant"]) for row in some})
        for some in (rows, pick(table))
    )
    title = "Right answers by plan and capability" if rows else "No question with a known answer"
    title += f"; {asked - lines} plans without a solution" if asked > lines else ""
    x = share_axis("share of questions answered right")
    y_axis = {"title_text": "removed, and plan", "autorange": "reversed"}
    return chart(figure, title, x, y_axis, height=200 + 28 * max(lines, 4))


def _hover(row: Row) -> str:
    ends = f"{row['accuracy_low']:.0%} to {row['accuracy_high']:.0%}"
    name = f"{row['variant']}, {row['capability']}: {row['accuracy']:.0%} of {row['questions']}"
    if row["difference"] is None:
        return f"{name} ({ends})"
    against = plus_minus(row["difference"], row["difference_error"])
    return f"{name} ({ends})<br>{against} against {row['base']}, p {row['p_value']:.2g}"
