"""The paper's claims about the bake-off beside the cells; verdicts need two standard errors."""

from __future__ import annotations

import math
from functools import partial

from cocurve_lab.methods.registry import get_method
from cocurve_lab.solver.selection import Selection

from ..findings import ABOVE, Finding, Verdict, every, judged, percent
from ..tables import Row, Rows, Table, pick, plus_minus
from . import contenders
from .comparison import OURS, Comparison
from .speeds import speed_summary

MAIN = 'table "Main comparison", 20 %'
RECOVERY = 'table "Recovery-enabled bake-off"'
EFFICIENCY = 'table "Inference efficiency"'

SECOND = "LLM-Pruner"
BASELINES = [get_method(name).title for name in contenders.BASELINES]


def lead_finding(table: Table, leader: str = OURS) -> Finding:
    """Judge whether a method has the lowest perplexity of the paper's ten.

    It agrees if every other one is worse by more than two paired errors, and does not if one is
    clearly better (`every`).

    Args:
        table: of `paired_table(reference=leader)`; rows outside the paper's ten do not count.
        leader: the reference; LLM-Pruner is compared with the nine baselines alone.
    """
    rows = [row for row in pick(table) if row["method"] in BASELINES and row["method"] != leader]
    claims = {
        OURS: f"{OURS} has the lowest perplexity: 12.91 on WikiText-2, {SECOND} 13.23",
        SECOND: f"{SECOND} has the lowest perplexity of the nine baselines (13.23, next 16.29)",
    }
    ours = "no other method reached the ratio"
    if rows:
        best = min(rows, key=lambda row: float(row["nll_behind"]))
        (own,) = pick(table, method=leader)
        gap = plus_minus(best["nll_behind"], best["nll_behind_error"])
        worse, better = (sum(_behind(row) is which for row in rows) for which in (True, False))
        ours = (
            f"{leader} {own['perplexity']:.3f}, best of the others {best['method']} "
            f"{best['perplexity']:.3f} ({gap} nats per token from it, over rows alone); "
            f"of {len(rows)}, {better} clearly better and {worse} clearly worse"
        )
    claim = claims.get(leader, f"{leader} has the lowest perplexity")
    return Finding("bake-off", claim, MAIN, ours, every(partial(_behind, row) for row in rows))


def _behind(row: Row, factor: float = 2.0) -> Verdict:
    """Tell whether a plan is worse than the reference; None within so many errors."""
    value, error = row["nll_behind"], row["nll_behind_error"]
    # 0 ± 0 is the reference's own plan again, neither better nor worse
    return judged(value, error, *ABOVE, factor) if value or error else None


def accuracy_finding(comparison: Comparison, ratio: float, questions: int) -> Finding:
    """Judge whether CoCurve answers most questions, by the binomial errors of the shares."""
    summary = pick(comparison.summary(ratio, "searched"))
    rows = [row for row in summary if row.get("accuracy all") is not None]
    own = pick(rows, method=OURS)
    others = [row for row in rows if row["method"] in BASELINES]
    verdict, ours = None, "no questions were asked"
    if own and others:
        best = max(others, key=lambda row: float(row["accuracy all"]))
        shares = [float(row["accuracy all"]) for row in (own[0], best)]
        error = math.sqrt(sum(s * (1 - s) / questions for s in shares))
        # where all answers are right the formula gives 0, but one more question might be wrong
        error = max(error, 1 / questions)
        verdict = judged(shares[0] - shares[1], error, *ABOVE)
        ours = (
            f"{OURS} {percent(shares[0])}, best of the others {best['method']} "
            f"{percent(shares[1])} of {questions} questions right; difference "
            f"{plus_minus(shares[0] - shares[1], error)}"
        )
    claim = f"{OURS} has the best average accuracy (.610, {SECOND} .586)"
    return Finding("capabilities", claim, MAIN, ours, verdict)


def attention_finding(plan: Selection | None) -> Finding:
    """Judge whether 2SSP spends its whole ratio on FFN width at 20 %."""
    claim = "at 20 % 2SSP prunes no attention"
    where = 'section "Main results"'
    if plan is None:
        return Finding("why", claim, where, "2SSP found no plan", None)
    pruned = plan.indicator & (plan.units.kinds == "attention")
    ours = f"{int(pruned.sum())} of the {len(plan)} pruned units are attention"
    return Finding("why", claim, where, ours, not pruned.any())


def recovery_finding(comparison: Comparison, ratio: float, repaired: str) -> Finding:
    """Judge whether CoCurve's selection alone is better than SlimGPT with its weights refitted."""
    claim = f"{OURS}'s selection alone beats SlimGPT with refitted weights (Llama; not on Mistral)"
    found: Rows = []
    if OURS in comparison.methods:
        found = pick(comparison.leads(OURS, [repaired]), requested_ratio=ratio)
    if not found:
        return Finding("recovery", claim, RECOVERY, f"no cells of both at {percent(ratio)}", None)
    (row,) = found
    gap, error = row["behind"], row["behind_error"]
    ours = (
        f"at {percent(ratio)} {OURS} has KL {plus_minus(row['leader_kl'])}, {repaired} "
        f"{plus_minus(row['kl'])}; difference {plus_minus(gap, error)}"
    )
    if row["calibrations"] == 1:
        ours += " over rows alone"
    verdict = judged(gap, math.inf if error is None else error, *ABOVE)
    return Finding("recovery", claim, RECOVERY, ours, verdict)


def speed_finding(speeds: Table) -> Finding:
    """Judge whether speed at one budget is the same for every method, from `speed_table`.

    The paper is right if plans differ by more than repeats of one plan (`speed_summary`) in no
    quantity, and wrong if they do in more than half. In between, a busy machine may be the cause.
    """
    rows = pick(speed_summary(speeds))
    parts = []
    for ratio, quantity in dict.fromkeys((r["requested_ratio"], r["quantity"]) for r in rows):
        mine = pick(rows, requested_ratio=ratio, quantity=quantity)
        low, high = min(row["lowest"] for row in mine), max(row["highest"] for row in mine)
        parts.append(f"{quantity} {low:.2f}x to {high:.2f}x at {percent(ratio)}")
    compared = [row for row in rows if row["plans"] > 1]
    apart = sum(row["apart"] for row in compared)
    claim = (
        "at one budget speed does not depend on the method (prefill 1.15x to 1.19x, decode 1.03x "
        "to 1.17x); the difference is quality"
    )
    ours = f"{', '.join(parts)}; {apart} of {len(compared)} timings set plans apart"
    verdict = True if compared and not apart else False if 2 * apart > len(compared) else None
    return Finding("speed", claim, EFFICIENCY, ours, verdict)
