"""The paper's claims about the bake-off beside the cells; verdicts need two standard errors."""

from __future__ import annotations

from ..findings import Claim, Finding, Measured, percent
from ..tables import Rows, Table, pick, plus_minus
from .comparison import OURS, Comparison
from .speeds import speed_summary

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
