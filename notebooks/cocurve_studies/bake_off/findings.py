"""The paper's claims about the bake-off beside the cells; verdicts need two standard errors."""

from __future__ import annotations

import math

from cocurve_lab.methods.registry import get_method

from ..findings import Claim, Finding, Measured, percent
from ..tables import Rows, Table, pick, plus_minus
from . import contenders
from .comparison import OURS, Comparison
from .speeds import speed_summary

MAIN = 'table "Main comparison", 20 %'
SECOND = "LLM-Pruner"
BASELINES = [get_method(name).title for name in contenders.BASELINES]

LEAD = Claim(
    "bake-off",
    f"{OURS} has the lowest perplexity: 12.91 on WikiText-2, {SECOND} 13.23, next 16.29",
    MAIN,
)
ACCURATE = Claim(
    "capabilities", f"{OURS} has the best average accuracy (.610, {SECOND} .586)", MAIN
)
RECOVERED = Claim(
    "recovery",
    f"{OURS}'s selection alone beats SlimGPT with refitted weights (Llama; not on Mistral)",
    'table "Recovery-enabled bake-off"',
)
SPEED = Claim(
    "speed",
    "at one budget speed does not depend on the method (prefill 1.15x to 1.19x, decode 1.03x to "
    "1.17x); the difference is quality",
    'table "Inference efficiency"',
)


def lead_finding(table: Table) -> Finding:
    """Judge whether CoCurve has the lowest perplexity of the paper's ten; from `paired_table`.

    Every other one must be worse by two paired errors; rows outside the paper's ten do not count.
    """
    measured = []
    for row in pick(table):
        if row["method"] in BASELINES:
            words = f"{row['method']} {plus_minus(row['nll_behind'], row['nll_behind_error'])}"
            measured.append(Measured(row["nll_behind"], row["nll_behind_error"], words=words))
    own = pick(table, method=OURS)[0]["perplexity"]
    ours = f"perplexity {own:.3f}; loss above it, nats per token over rows alone: {{}}"
    return LEAD.on(*measured, ours=ours)


def accuracy_finding(comparison: Comparison, ratio: float, questions: int) -> Finding:
    """Judge whether CoCurve answers most questions, by the binomial errors of the shares."""
    rows = pick(comparison.summary(ratio, "searched"))
    shares = {r["method"]: float(r["accuracy all"]) for r in rows if r.get("accuracy all")}
    others = {name: share for name, share in shares.items() if name in BASELINES}
    if OURS not in shares or not others:
        return ACCURATE.given("no questions were asked", None)
    best = max(others, key=lambda name: others[name])
    pair = shares[OURS], others[best]
    error = math.sqrt(sum(share * (1 - share) / questions for share in pair))
    # where all answers are right the formula gives 0, but one more question might be wrong
    gap = Measured(pair[0] - pair[1], max(error, 1 / questions))
    ours = f"{OURS} {percent(pair[0])}, best of the others {best} {percent(pair[1])} of "
    return ACCURATE.on(gap, ours=ours + f"{questions} questions right; difference {{}}")


def recovery_finding(comparison: Comparison, ratio: float, repaired: str) -> Finding:
    """Judge whether CoCurve's selection alone is better than SlimGPT with its weights refitted."""
    found: Rows = pick(comparison.leads(OURS, [repaired]), requested_ratio=ratio)
    measured = [Measured(row["behind"], row["behind_error"]) for row in found]
    kl = [f"KL {plus_minus(r['leader_kl'])}, {repaired} {plus_minus(r['kl'])}" for r in found]
    ours = f"at {percent(ratio)} {', '.join(kl)}; difference {{}} nats per token"
    return RECOVERED.on(*measured, ours=ours)


def speed_finding(speeds: Table) -> Finding:
    """Judge whether speed at one budget is the same for every method, from `speed_table`.

    The paper is right if plans differ by more than repeats of one plan (`speed_summary`) in no
    quantity, and wrong if they do in more than half. In between, a busy machine may be the cause.
    """
    rows = [row for row in pick(speed_summary(speeds)) if row["plans"] > 1]
    apart = sum(row["apart"] for row in rows)
    parts = [
        f"{row['quantity']} {row['lowest']:.2f}x to {row['highest']:.2f}x at "
        f"{percent(row['requested_ratio'])}, batch {row['batch_size']}"
        for row in rows
    ]
    ours = f"{'; '.join(parts)}; {apart} of {len(rows)} timings set plans apart"
    verdict = True if rows and not apart else False if 2 * apart > len(rows) else None
    return SPEED.given(ours, verdict)
