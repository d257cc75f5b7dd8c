"""Claims about trusting the edges, beside the tables of the studies.

One function per study. A verdict needs two standard errors, so the same cell may say something else
of another model. Errors of differences between plans are over rows and draws of H where the study
made draws (see draws.py), else over rows alone.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.stats import rankdata

from ..claims import Claim, evaluate, name_plan
from ..findings import (
    ABOVE,
    BELOW,
    NOT_ABOVE,
    NOT_BELOW,
    Finding,
    Verdict,
    every,
    judged_column,
    percent,
    with_error,
)
from ..shared import sequence_values
from ..tables import Row, Rows, Table, brief, column, pick, plus_minus
from .choices import RELEASED, strength_summary
from .fidelity import ACROSS, POOL, correlations, fidelity_summary, resampled_means
from .reach import ANY, reach_summary
from .redundancy import redundancy_trend

FIDELITY = 'App. "Surrogate Fidelity"'
TRUST = 'Section "A trust-region view"'
TRUST_APPENDIX = 'App. "Trust-Region View"'
GUARDS = 'App. "The Greedy Co-Pruning Solver", anti-collapse guards'
RELEASE = "the authors' release"

NEAR = 0.1  # a prediction right to second order: measured / predicted this close to 1
TIMES = 2.0  # a prediction of a plan's risk is called accurate within this factor
STATISTICS = {  # as `fidelity_summary` calls them, where that is not how one writes them
    "spearman": "Spearman",
    "pearson": "Pearson",
    "median_ratio": "median measured / predicted",
}
NEARLY = 0.95  # greedy is called nearly the best if no objective lies below this share of its own


# Predictions --------------------------------------------------------------------------------------
SINGLE_UNITS = Claim(
    "single units",
    f"½ H_uu is the KL of removing u alone, to second order (here: within {NEAR:.0%})",
    'Prop. "Fisher quadratic"',
    f"median measured / predicted {{change}}; {{away:.0%}} of {{units}} units are off by more than "
    f"{NEAR:.0%}",
    "median",
    (1 - NEAR, 1 + NEAR),
)


def single_unit_findings(table: Table) -> list[Finding]:
    """From `single_unit_fidelity`: the median of measured / predicted, its error over units."""
    ratios = column(table, "measured_over_predicted").astype(float)
    ratios = ratios[np.isfinite(ratios)]
    row: Row = {"units": len(ratios), "median": None, "median_error": None}
    row["away"] = float((np.abs(ratios - 1) > NEAR).mean()) if len(ratios) else math.nan
    if len(ratios) > 1:
        draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
        row["median"] = float(np.median(ratios))
        row["median_error"] = float(np.median(draws, axis=1).std(ddof=1))
    return evaluate(SINGLE_UNITS, [row])


def _statistic(group: str, name: str, claim: str, low: float, high: float = math.inf) -> Claim:
    """Make a claim about one statistic of a summary."""
    ours, rows = "{name} {change} ({points} point{s})", {"group": group, "statistic": name}
    return Claim("fidelity", claim, FIDELITY, ours, "value", (low, high), rows)


_ALL = f"{ACROSS}, lambda 1"
_TOGETHER = "across ratios predicted and measured rise together: Spearman 1.00"
_CUBE = "the gap widens super-linearly, at most as the cube of the units removed (exponent 1 to 3)"
_ACCURATE = f"the joint prediction ½ sᵀHs is accurate (here: within a factor of {TIMES:g})"
_RANDOM = "random plans of that budget cost far more: about 3 times"
PREDICTIONS_HOLD = (  # lower ends are the paper's figures, less half of their last digit
    _statistic(_ALL, "spearman", _TOGETHER, 0.995),
    _statistic(_ALL, "pearson", "across ratios Pearson is 0.95", 0.945),
    _statistic(POOL, "spearman", "plans of one budget are ranked: Spearman 0.81", 0.805),
    _statistic(POOL, "random over structured", _RANDOM, 2.5),
    _statistic(_ALL, "gap exponent in units", _CUBE, 1, 3),
    _statistic(POOL, "median_ratio", _ACCURATE, 1 / TIMES, TIMES),
)
WITHOUT_EDGES = {  # score: claim, and the score in words
    "diagonal": (
        "the order within a budget comes from co-pruning, not from the units alone",
        "with the diagonal alone",
    ),
    "single_units": (
        "½ sᵀHs orders the plans of a budget better than the KLs of their units do, added up",
        "by the measured KLs of the units alone",
    ),
}
EDGES_ORDER = Claim(
    "fidelity",
    "{claim}",
    FIDELITY,
    "Spearman {full:.3f} with edges, {alone:.3f} {words}: {change} gained",
    "gain",
    ABOVE,
    lab=True,  # the paper expects the diagonal to rank as well by KL, and edges to show in tasks
)


def fidelity_findings(table: Table, draws: int = 2000) -> list[Finding]:
    """From `fidelity_study`: order and size across ratios, order within one budget, the gap."""
    summary = _with_whole_errors(fidelity_summary(table, draws))
    orders = _without_edges(table, draws)
    return evaluate(PREDICTIONS_HOLD, summary) + evaluate(EDGES_ORDER, orders)


def _with_whole_errors(summary: Table) -> Rows:
    """Return the rows with names to read and errors over sequences and of the fit together."""
    rows = []
    for row in pick(summary):
        errors = [e for e in (row["value_error"], row["fit_error"]) if e is not None]
        rows.append(
            row
            | {"value_error": math.hypot(*errors) if errors else None}
            | {"name": STATISTICS.get(row["statistic"], row["statistic"])}
            | {"s": "" if row["points"] == 1 else "s"}
        )
    return rows


def _without_edges(table: Table, draws: int) -> Rows:
    """The order of the pool by ½ sᵀHs against two without edges; paired over draws of text."""
    pool = pick(table, group=POOL)
    if len(pool) < 3:
        return []
    measured = rankdata(resampled_means(sequence_values(pool), draws, 0), axis=1)
    full = correlations(rankdata(column(pool, "predicted")), measured)
    rows = []
    for name, (claim, words) in WITHOUT_EDGES.items():
        score = column(pool, name).astype(float)
        if not np.isfinite(score).all():  # a released H knows no KL of a single unit
            continue
        alone = correlations(rankdata(score), measured)
        gain = (full - alone)[np.isfinite(full - alone)].round(12)  # equal ranks, equal bits
        row: Row = {"claim": claim, "words": words, "full": full[0], "alone": alone[0]}
        row["gain"] = float(gain[0]) if len(gain) else None
        row["gain_error"] = float(gain[1:].std(ddof=1)) if len(gain) > 2 else None
        rows.append(row)
    return rows


_EACH = "{scale}: {change}"
REMARK = 'Remark "Node saliency"'
REACH = (
    Claim(
        "reach",
        "{scale}: the edge has the sign of the extra harm (here: in more than half)",
        REMARK,
        "the same sign in a share of {change} of {cases}",
        value="same_sign",
        holds=(0.5, math.inf),
        lab=True,  # the paper calls single pairs the wrong scale
    ),
    Claim(
        "reach",
        "the larger the edge, the larger the extra harm",
        REMARK,
        "Spearman, {each}",
        value="spearman",
        holds=ABOVE,
        each=_EACH,
        lab=True,
    ),
    Claim(
        "reach",
        f"the edges are the extra harm (here: the mean size within a factor of {TIMES:g})",
        "eq. (decomp)",
        "measured / H, {each}",
        value="size",
        holds=(1 / TIMES, TIMES),
        each=_EACH,
        lab=True,
    ),
    Claim(
        "reach",
        "H sees saturation: no more interactions are negative than its edges",
        REMARK,
        "{each}",
        value="unseen",
        holds=NOT_ABOVE,
        each="{scale}: {negative:.0%}, by H {predicted_negative:.0%}",
        lab=True,
    ),
    Claim(
        "reach",
        "two losses saturate: the pair costs 0.92 of the sum, below 1",
        FIDELITY,
        "{change} of the sum, over {cases} pairs",
        value="factor",
        holds=(0, 1),
        rows={"scale": ANY},
    ),
)


def reach_findings(table: Table) -> list[Finding]:
    """From `edge_reach`: sign, order and size of measured interactions, and what H cannot see."""
    return evaluate(REACH, reach_summary(table))


# Lambda -------------------------------------------------------------------------------------------
def _gate_is_right(row: Row, factor: float) -> Verdict:
    """Tell whether edges help where the gate recommends them, and do not where it does not."""
    if row["gate"] is None:
        return None
    allowed = ABOVE if row["gate"] > 0 else NOT_ABOVE
    return judged_column(row, "edge_benefit", *allowed, factor)


def _at_each_ratio(
    claim: str, where: str, value: str, error: str | None = None, **more: Any
) -> Claim:
    ours, each = "{each}", "{ratio}: {change}"
    return Claim("lambda", claim, where, ours, value, error=error, each=each, **more)


EDGES_HELP = Claim(
    "lambda",
    "at {ratio} the edges help: λ = 1 costs less than λ = 0",
    'Section "Ablations: the edge term is decisive"',
    "KL(λ 0) - KL(λ 1) = {plain} nats per token{covered}",
    value="edge_benefit",
    holds=ABOVE,
)
GATE_IS_RIGHT = Claim(
    "gate",
    "the redundancy gate tells from H alone whether edges help",
    'App. "Scope"',
    "recommended λ, {each}",
    each="{ratio}: {recommended}",
    judge=_gate_is_right,
)
_FLOOR = "λ = 0 is a floor: what is chosen on held-out text is never worse"
TRUST_REGION = (
    _at_each_ratio(_FLOOR, TRUST, "lambda_0_behind", holds=NOT_BELOW),
    _at_each_ratio("the edge mass E is positive", TRUST_APPENDIX, "edge_mass", "", holds=ABOVE),
    _at_each_ratio("the remainder b is not negative", TRUST_APPENDIX, "remainder", holds=NOT_BELOW),
    _at_each_ratio(
        "1 - b/E is a λ between 0 and 1",
        "eq. (lambdastar)",
        "printed",
        "fitting_error",
        holds=(0, 1),
    ),
)


def strength_findings(table: Table) -> list[Finding]:
    """Judge the edge benefit at each ratio, the gate, the floor, and b/E; from `strength_study`."""
    rows = [
        row | {"recommended": "undecided" if row["gate"] is None else plus_minus(row["gate"])}
        for row in pick(strength_summary(table))
        if row["edge_benefit"] is not None
    ]
    return [*evaluate((EDGES_HELP, GATE_IS_RIGHT, *TRUST_REGION), rows), *_walk(table)]


def _walk(table: Table) -> list[Finding]:
    """Judge the best lambda by ratio; plans that the winner does not clearly beat are best too."""
    ratios = list(dict.fromkeys(row["requested_ratio"] for row in pick(table)))
    spans = {ratio: _as_good(table, ratio, 2.0) for ratio in ratios}
    ours = ", ".join(f"{percent(r)}: {low:.3g} to {high:.3g}" for r, (low, high) in spans.items())
    agrees = every(partial(_falls, table, pair) for pair in pairwise(ratios))
    found = [Finding("lambda", "the best λ falls with the ratio", TRUST, ours, agrees)]
    low, high = min(RELEASED.values()), max(RELEASED.values())
    for start, stop in (span for ratio, span in spans.items() if math.isclose(ratio, 0.2)):
        apart = start > high or stop < low
        inside = low <= start and stop <= high
        claim = f"at 20 % λ is {low:.2f} to {high:.2f}"
        ours = f"as good as the best: {start:.3g} to {stop:.3g}"
        verdict = False if apart else (True if inside else None)
        found.append(Finding("lambda", claim, f"{RELEASE}, 3 models", ours, verdict))
    return found


def _as_good(table: Table, ratio: float, factor: float) -> tuple[float, float]:
    """Return the least and the largest lambda of the plans within so many errors of the winner."""
    raced = pick(table, requested_ratio=ratio, role="candidate", stopped_early=False)
    # the winner is behind itself by nothing, and so is every plan whose error is unknown in part
    tied = [r for r in raced if judged_column(r, "difference", *ABOVE, factor) is not True]
    return min(r["start"] for r in tied), max(r["stop"] for r in tied)


def _falls(table: Table, ratios: tuple[float, float], factor: float) -> Verdict:
    """Tell whether the best lambdas of the larger ratio lie below those of the smaller one."""
    before, after = (_as_good(table, ratio, factor) for ratio in ratios)
    if after[1] < before[0]:
        return True
    return False if after[0] > before[1] else None


# Guards -------------------------------------------------------------------------------------------
def guards_findings(table: Table) -> list[Finding]:
    """Judge the KL without guards at each ratio, and with the release's rule; from `guards_study`.

    A difference is the plan's value minus that of the guards chosen on other text.
    """
    found = []
    for ratio in dict.fromkeys(row["requested_ratio"] for row in pick(table)):
        rows = {row["role"]: row for row in pick(table, requested_ratio=ratio, judge="kl")}
        best, free, rule = map(rows.get, ("best", "no guards", "release's guards"))
        assert best is not None
        at, verdict = f"at {percent(ratio)}", None
        ours = f"chosen: {best['guards']}; without guards no plan"
        if free is not None and free["difference"] == 0:
            ours = "the plan chosen is the one without guards"
        elif free is not None:
            more = with_error(free, "difference")
            ours = f"{best['guards']}; KL without guards higher by {more}"
            verdict = judged_column(free, "difference", *ABOVE)
        claim = f"{at} guards keep a plan from collapsing"
        found.append(Finding("guards", claim, GUARDS, ours, verdict))
        ours, verdict = "not tested: greedy does not reach the ratio under these guards", None
        if rule is not None:
            ours = f"KL above that of the chosen guards by {with_error(rule, 'difference')}"
            verdict = judged_column(rule, "difference", *NOT_ABOVE)
        claim = f"{at} a cap of 1.5 x ratio with two layers kept at either end is right"
        found.append(Finding("guards", claim, RELEASE, ours, verdict))
    return [*found, _judges_agree(table)]


def _judges_agree(table: Table) -> Finding:
    best = pick(table, role="best")  # one per ratio and judge
    by_kl, by_loss = (
        {row["requested_ratio"]: row["guards"] for row in pick(best, judge=judge)}
        for judge in ("kl", "nll")
    )
    ours = ", ".join(
        f"{percent(r)}: {kl}" + ("" if kl == by_loss[r] else f" by KL, {by_loss[r]} by loss")
        for r, kl in by_kl.items()
    )
    claim = "guards may be chosen by perplexity: KL chooses the same ones"
    where = 'App. "Evaluation Protocol"'
    return Finding("guards", claim, where, ours, by_kl == by_loss, lab=True)


EDGES_LOWER_LOSS = Claim(
    "edges or diagonal",
    "at {ratio}, {search}, edges lower perplexity (8B at 20%: 13.08 to 12.91)",
    'Section "Ablations: the edge term is decisive"',
    "{perplexity_0:.3f} to {perplexity_1:.3f}; loss(λ 0) - loss(λ 1) = {change} nats per token",
    value="loss_benefit",
    holds=ABOVE,
)
EDGES_LOWER_KL = Claim(
    "edges or diagonal",
    "{search}, at every ratio, plans of H cost less than plans of its diagonal",
    'Section "Ablations: the edge term is decisive"',
    "KL(λ 0) - KL(λ 1), {each}",
    value="edge_benefit",
    holds=ABOVE,
    each="{ratio}: {change}",
    lab=True,  # the paper expects no difference in KL
)


def diagonal_findings(table: Table) -> list[Finding]:
    """Judge edges against the diagonal, without guards and with; from `diagonal_study`.

    The paper's claim is on perplexity at 20 %, the ratio nearest to it here; the lab's on KL.
    """
    found = []
    for search in dict.fromkeys(row["search"] for row in pick(table)):
        rows = pick(table, search=search)
        nearest = min(rows, key=lambda row: abs(row["requested_ratio"] - 0.2))
        found += evaluate(EDGES_LOWER_LOSS, [nearest])
        found += evaluate(EDGES_LOWER_KL, rows, search=search)
    return found


# Better plans -------------------------------------------------------------------------------------
CHEAPER = Claim(
    "refinement",
    "a plan of lower R_λ costs less on held-out text",
    'App. "Surrogate Fidelity"',
    "{each}",
    value="difference",
    holds=BELOW,
    each="{plan}: {change}",
    between="; ",
    nothing="no plan was improved",
    lab=True,
)


def refinement_findings(table: Table) -> list[Finding]:
    """Judge greedy against the bound, and the KL of plans of lower R_λ; from `refinement_study`."""
    rows = [row for row in pick(table) if row["objective"] > 0]
    shares = [(row["refined_objective"] / row["objective"], row) for row in rows]
    bounds = [row["bound"] / row["objective"] for row in rows]
    ours = "; ".join(
        f"{name_plan(row)}: {share:.3f}, {bound:.3f}"
        for (share, row), bound in zip(shares, bounds, strict=True)
    )
    # a bound below the share may also be loose
    nearly = True if rows and min(bounds) >= NEARLY else None
    claim = (
        f"greedy is a well-behaved stand-in for the exact solution (here: within {1 - NEARLY:.0%})"
    )
    stand_in = Finding(
        "refinement",
        claim,
        'App. "Solver Guarantees"',
        f"R_λ after search, and bound, over that of greedy: {ours}",
        False if any(share < NEARLY for share, _ in shares) else nearly,
    )
    return [stand_in, *evaluate(CHEAPER, [row for row in pick(table) if row["units_exchanged"]])]


GAINS_LOWER_KL = Claim(
    "gains",
    "gains lower the KL ({plan})",
    'Section "Edge-derived coupling-aware compensation"',
    "γ {ridge:g}, τ {clip:g}: {change}",
    value="difference",
    holds=BELOW,
    rows={"role": "report"},
    needs={"ridge": ("no gains were applied: no setting beat the plan without gains", None)},
)


def gains_findings(table: Table) -> list[Finding]:
    """Judge the KL of each compensated plan on the reported rows; from `gains_study`."""
    return evaluate(GAINS_LOWER_KL, table)


GATE_TELLS = Claim(
    "redundancy",
    "{model}: the gate {advice}",
    'App. "Scope"',
    "redundancy {redundancy}, edge benefit {benefit}",
    "gate_right",
)


def redundancy_findings(table: Table) -> list[Finding]:
    """Judge the trend over models, and the gate's advice on each; from `redundancy_study`."""
    trend = redundancy_trend(table)
    verdict = None
    ours = trend["note"].rstrip(".")
    if trend["spearman"] is not None:
        ours = f"Spearman {trend['spearman']:.2f} over {trend['models']} models"
        ours += f", p = {brief(trend['p_value'], 2)}"
        verdict = None if trend["p_value"] > 0.05 else trend["spearman"] < 0
    where = 'Fig. "edge benefit vs. FFN redundancy"'
    claim = "the edge benefit falls as the FFN redundancy rises"
    rows = []
    for row in pick(table):
        gate = row["gate_lambda"]
        advice = "is undecided" if gate is None else f"says λ = {gate:g}, and that is right"
        redundancy = plus_minus(row["redundancy"], row["redundancy_error"])
        told = {"redundancy": redundancy, "benefit": with_error(row, "edge_benefit")}
        rows.append(
            {"model": row["model"], "gate_right": row["gate_right"], "advice": advice} | told
        )
    return [Finding("redundancy", claim, where, ours, verdict), *evaluate(GATE_TELLS, rows)]
