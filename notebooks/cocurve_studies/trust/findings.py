"""Claims about trusting the edges, beside the tables of the studies.

Errors of differences between plans are over rows and draws of H where the study made draws (see
draws.py), else over rows alone.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from ..findings import (
    NOT_BELOW,
    Claim,
    Finding,
    Measured,
    column_of,
    nearest,
    percent,
)
from ..tables import Table, column, pick
from .choices import NONE, OWN
from .fidelity import ACROSS, POOL, fidelity_summary
from .reach import ANY, reach_summary

FIDELITY = 'App. "Surrogate Fidelity"'
TRUST = 'Section "A trust-region view"'
DECISIVE = 'Section "Ablations: the edge term is decisive"'

NEAR = 0.1  # a prediction right to second order: measured / predicted this close to 1
TIMES = 2.0  # a prediction of a plan's risk is called accurate within this factor
WITHIN = (1 / TIMES, TIMES)

SINGLE_UNITS = Claim(
    "single units",
    f"½ H_uu is the KL of removing u alone, to second order (here: within {NEAR:.0%})",
    'Prop. "Fisher quadratic"',
    (1 - NEAR, 1 + NEAR),
)
_ALL = f"{ACROSS}, lambda 1"


def _fidelity(claim: str, low: float, high: float = math.inf) -> Claim:
    return Claim("fidelity", claim, FIDELITY, (low, high))


# group and statistic -> name of the statistic, and the claim; lower ends are the paper's figures
# less half of their last digit
PREDICTIONS_HOLD = {
    (_ALL, "spearman"): (
        "Spearman",
        _fidelity("across ratios predicted and measured rise together: Spearman 1.00", 0.995),
    ),
    (_ALL, "pearson"): ("Pearson", _fidelity("across ratios Pearson is 0.95", 0.945)),
    (POOL, "spearman"): (
        "Spearman",
        _fidelity("plans of one budget are ranked: Spearman 0.81", 0.805),
    ),
    (POOL, "random over structured"): (
        "random over structured",
        _fidelity("random plans of that budget cost far more: about 3 times", 2.5),
    ),
    (_ALL, "gap exponent in units"): (
        "gap exponent in units",
        _fidelity(
            "the gap widens super-linearly, at most as the cube of the units removed (exponent 1 "
            "to 3)",
            1,
            3,
        ),
    ),
    (POOL, "median_ratio"): (
        "median measured / predicted",
        _fidelity(
            f"the joint prediction ½ sᵀHs is accurate (here: within a factor of {TIMES:g})", *WITHIN
        ),
    ),
}
SATURATES = Claim(
    "reach", "two losses saturate: the pair costs 0.92 of the sum, below 1", FIDELITY, (0, 1)
)
FLOOR = Claim(
    "lambda",
    "λ = 0 is a floor: what is chosen on held-out text is never worse",
    TRUST,
    NOT_BELOW,
)
FALLS = Claim("lambda", "the best λ falls with the ratio", TRUST)
LOWER_LOSS = Claim(
    "edges or diagonal",
    "{search}, edges lower perplexity (8B at 20%: 13.08 to 12.91)",
    DECISIVE,
)


def single_unit_findings(table: Table) -> list[Finding]:
    """From `single_unit_fidelity`: the median of measured / predicted, its error over units."""
    ratios = column(table, "measured_over_predicted").astype(float)
    ratios = ratios[np.isfinite(ratios)]
    if len(ratios) < 2:
        return [SINGLE_UNITS.on()]
    draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    error = float(np.median(draws, axis=1).std(ddof=1))
    away = float((np.abs(ratios - 1) > NEAR).mean())
    ours = f"median measured / predicted {{}}; {away:.0%} of {len(ratios)} units are off by more"
    ours += f" than {NEAR:.0%}"
    return [SINGLE_UNITS.on(Measured(float(np.median(ratios)), error), ours=ours)]


def fidelity_findings(table: Table, draws: int = 2000) -> list[Finding]:
    """From `fidelity_study`: order and size across ratios, order within one budget, the gap."""
    rows = {(row["group"], row["statistic"]): row for row in pick(fidelity_summary(table, draws))}
    found = []
    for key, (name, claim) in PREDICTIONS_HOLD.items():
        if key in rows:
            row = rows[key]
            ours = f"{name} {{}} ({row['points']} points)"
            found.append(claim.on(Measured(row["value"], row["value_error"]), ours=ours))
    return found


def reach_findings(table: Table) -> list[Finding]:
    """From `edge_reach`: whether the loss of a pair saturates."""
    found = []
    for row in pick(reach_summary(table), scale=ANY):
        ours = f"{{}} of the sum, over {row['cases']} pairs"
        found.append(SATURATES.on(column_of(row, "factor"), ours=ours))
    return found


def strength_findings(table: Table) -> list[Finding]:
    """Judge the floor, and the best lambda by ratio; from `strength_study`."""
    zero = pick(table, plan="lambda 0")
    gaps = [column_of(row, "difference", percent(row["requested_ratio"])) for row in zero]
    found = [FLOOR.on(*gaps)]
    spans: dict[float, tuple[float, float]] = {}
    for ratio in dict.fromkeys(row["requested_ratio"] for row in pick(table)):
        tied = pick(table, plan="candidate", requested_ratio=ratio, tied=True)
        spans[ratio] = min(row["start"] for row in tied), max(row["stop"] for row in tied)
    ours = ", ".join(f"{percent(r)}: {low:.3g} to {high:.3g}" for r, (low, high) in spans.items())
    rises = any(after[0] > before[1] for before, after in pairwise(spans.values()))
    falls = len(spans) > 1 and all(b[1] < a[0] for a, b in pairwise(spans.values()))
    found.append(FALLS.given(ours, True if falls else False if rises else None))
    return found


def diagonal_findings(table: Table) -> list[Finding]:
    """Judge edges against the diagonal, without guards and with; from `diagonal_study`.

    The paper's claims are on 20 %, the ratio nearest to it here.
    """
    found = []
    for search in (NONE, OWN):
        for row in nearest(pick(table, search=search)):
            ours = f"at {percent(row['requested_ratio'])} {row['perplexity_0']:.3f} to "
            ours += f"{row['perplexity_1']:.3f}; loss(λ 0) - loss(λ 1) = {{}} nats per token"
            found.append(LOWER_LOSS.on(column_of(row, "loss_benefit"), ours=ours, search=search))
    return found
