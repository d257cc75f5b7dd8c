"""The paper's claims about trusting the edges, beside the tables of the studies.

One function per study. A verdict needs two standard errors, so the same cell may say something else
of another model. `every` judges a claim about several plans. Errors of differences between plans
are over rows and draws of H where the study made draws (see draws.py), else over rows alone.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import numpy as np
from scipy.stats import rankdata

from cocurve_lab.base.tables import Row, Table, brief, column, pick, plus_minus

from ..claims import Claim, evaluate, name_plan
from ..findings import (
    ABOVE,
    BELOW,
    NOT_ABOVE,
    NOT_BELOW,
    Finding,
    Judge,
    Verdict,
    covered,
    every,
    judged,
    judged_column,
    percent,
    with_error,
)
from ..shared import sequence_values
from .choices import RELEASED, strength_summary
from .fidelity import ACROSS, POOL, correlations, fidelity_summary, resampled_means
from .iterative import ITERATIVE
from .redundancy import redundancy_trend
from .saturation import PAIRS, saturation_summary

FIDELITY = 'App. "Surrogate Fidelity"'
TRUST = 'Section "A trust-region view"'
TRUST_APPENDIX = 'App. "Trust-Region View"'
GUARDS = 'App. "The Greedy Co-Pruning Solver", anti-collapse guards'

NEAR = 0.1  # a prediction right to second order: measured / predicted this close to 1
TIMES = 2.0  # a prediction of a plan's risk is called accurate within this factor
STATISTICS = {  # as `fidelity_summary` calls them, where that is not how one writes them
    "spearman": "Spearman",
    "pearson": "Pearson",
    "median_ratio": "median measured / predicted",
}
NEARLY = 0.95  # greedy is called nearly the best if no objective lies below this share of its own

_FINITE = "KL of the plan of H* minus that of H: {change}"
GAINS_LOWER_KL = Claim(
    "gains",
    "gains lower the KL ({plan})",
    'Section "Edge-derived coupling-aware compensation"',
    "γ {ridge:g}, τ {clip:g}: {change}",
    value="difference",
    holds=BELOW,
    rows={"role": "report"},
    needs={"ridge": ("no gains were applied: no setting beat the plan without gains", False)},
)
FINITE_IS_BETTER = Claim(
    "finite or not",
    "plans from whole removals cost less than plans from derivatives ({plan})",
    "Section 1, Introduction",
    _FINITE,
    value="difference",
    holds=ABOVE,
    needs={"difference": (f"{_FINITE}; greedy stalls", None)},
)
STEPS_ARE_BETTER = Claim(
    "steps",
    "{surrogate} measured anew on the way makes a better plan ({plan})",
    "Conclusion, as an outlook",
    "KL minus one shot's: {change}",
    value="difference",
    holds=BELOW,
    rows={"plan": ITERATIVE},
)


# Predictions --------------------------------------------------------------------------------------
def single_unit_findings(table: Table) -> list[Finding]:
    """From `single_unit_fidelity`: the median of measured / predicted, its error over units."""
    ratios = column(table, "measured_over_predicted").astype(float)
    ratios = ratios[np.isfinite(ratios)]
    middle, error = None, None
    if len(ratios) > 1:
        draws = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
        middle, error = float(np.median(ratios)), float(np.median(draws, axis=1).std(ddof=1))
    away = float((np.abs(ratios - 1) > NEAR).mean()) if len(ratios) else math.nan
    return [
        Finding(
            "single units",
            f"½ H_uu is the KL of removing u alone, to second order (here: within {NEAR:.0%})",
            'Prop. "Fisher quadratic"',
            f"median measured / predicted {plus_minus(middle, error)}; {away:.0%} of "
            f"{len(ratios)} units are off by more than {NEAR:.0%}",
            judged(middle, error, 1 - NEAR, 1 + NEAR),
        )
    ]


def fidelity_findings(table: Table, draws: int = 2000) -> list[Finding]:
    """From `fidelity_study`: order and size across ratios, order within one budget, the gap."""
    rows = {(r["group"], r["statistic"]): r for r in fidelity_summary(table, draws)}
    full, inf = f"{ACROSS}, lambda 1", math.inf
    asked = [
        (full, "spearman", "across ratios predicted and measured rise together: Spearman 1.00", 1),
        (full, "pearson", "across ratios Pearson is 0.95", 0.95),
        (POOL, "spearman", "plans of one budget are ranked: Spearman 0.81", 0.81),
        (
            POOL,
            "random over structured",
            "random plans of that budget cost far more: about 3 times",
            3,
        ),
    ]
    found = []
    for group, name, claim, least in asked:
        row, rounding = rows.get((group, name)), 0.005 if least <= 1 else 0.5
        if row is not None:
            found.append(_statistic("fidelity", claim, row, least - rounding, inf))
    gap = rows.get((full, "gap exponent in units"))
    if gap is not None:
        claim = "the gap widens super-linearly, at most as the cube of the units removed"
        found.append(_statistic("fidelity", f"{claim} (exponent 1 to 3)", gap, 1, 3))
    ratio = rows.get((POOL, "median_ratio"))
    if ratio is not None:
        claim = f"the joint prediction ½ sᵀHs is accurate (here: within a factor of {TIMES:g})"
        found.append(_statistic("fidelity", claim, ratio, 1 / TIMES, TIMES))
    return [*found, *_without_edges(table, draws)]


def _statistic(study: str, claim: str, row: Row, low: float, high: float) -> Finding:
    errors = [e for e in (row["value_error"], row["fit_error"]) if e is not None]
    error = math.hypot(*errors) if errors else None
    name, count = STATISTICS.get(row["statistic"], row["statistic"]), row["points"]
    points = f"{count} point{'' if count == 1 else 's'}"
    ours = f"{name} {plus_minus(row['value'], error)} ({points})"
    return Finding(study, claim, FIDELITY, ours, judged(row["value"], error, low, high))


def _without_edges(table: Table, draws: int) -> list[Finding]:
    """The order of the pool by ½ sᵀHs against two without edges; paired over draws of text."""
    pool = pick(table, group=POOL)
    if len(pool) < 3:
        return []
    measured = rankdata(resampled_means(sequence_values(pool), draws, 0), axis=1)
    full = correlations(rankdata(column(pool, "predicted")), measured)
    found = []
    for name, claim, words in (
        (
            "diagonal",
            "the order within a budget comes from co-pruning, not from the units alone",
            "with the diagonal alone",
        ),
        (
            "single_units",
            "½ sᵀHs orders the plans of a budget better than the KLs of their units do, added up",
            "by the measured KLs of the units alone",
        ),
    ):
        score = column(pool, name).astype(float)
        if not np.isfinite(score).all():  # a released H knows no KL of a single unit
            continue
        alone = correlations(rankdata(score), measured)
        gain = (full - alone)[np.isfinite(full - alone)].round(12)  # equal ranks, equal bits
        error = float(gain[1:].std(ddof=1)) if len(gain) > 2 else None
        value = float(gain[0]) if len(gain) else None
        ours = f"Spearman {full[0]:.3f} with edges, {alone[0]:.3f} {words}"
        gained = f"{ours}: {plus_minus(value, error)} gained"
        agrees = judged(value, error, *ABOVE)
        found.append(Finding("fidelity", claim, FIDELITY, gained, agrees))
    return found


def saturation_findings(table: Table, draws: int = 2000) -> list[Finding]:
    """From `pair_saturation`: the factor of a pair, and whether H_uv has the interaction's sign."""
    rows = {(r["group"], r["statistic"]): r for r in saturation_summary(table, draws)}
    factor = rows[PAIRS[0], "median factor"]
    claim = "two losses saturate: the pair costs 0.92 of the sum, below 1"
    found = [_statistic("pairs", claim, factor, 0, 1)]
    both = "strongest, both signs"
    sign, chance = rows.get((both, "sign agreement")), rows.get((both, "agreement by chance"))
    if sign is not None and chance is not None and sign["value"] is not None:
        gain = sign["value"] - chance["value"]
        found.append(
            Finding(
                "pairs",
                "the sign of H_uv says whether a pair is worse or better than the sum",
                "eq. (quadratic)",
                f"{sign['value']:.0%} of {sign['points']} strongest pairs, "
                f"{chance['value']:.0%} by chance: {plus_minus(gain, sign['value_error'])}",
                judged(gain, sign["value_error"], *ABOVE),
            )
        )
    return found


# Lambda -------------------------------------------------------------------------------------------
def strength_findings(table: Table) -> list[Finding]:
    """From `strength_study`: the edge benefit at each ratio, the gate, the floor, and b/E."""
    rows = [row for row in strength_summary(table) if row["edge_benefit"] is not None]
    found = []
    for row in rows:
        benefit = plus_minus(row["edge_benefit"], row["edge_benefit_error"])
        ours = f"KL(λ 0) - KL(λ 1) = {benefit} nats per token{covered(row, 'edge_benefit')}"
        claim = f"at {percent(row['requested_ratio'])} the edges help: λ = 1 costs less than λ = 0"
        where = 'Section "Ablations: the edge term is decisive"'
        agrees = judged_column(row, "edge_benefit", *ABOVE)
        found.append(Finding("lambda", claim, where, ours, agrees))
    told = ", ".join(
        f"{percent(r['requested_ratio'])}: "
        + ("undecided" if r["gate"] is None else plus_minus(r["gate"]))
        for r in rows
    )
    claim = "the redundancy gate tells from H alone whether edges help"
    agrees = every(partial(_gate_is_right, row) for row in rows)
    found.append(Finding("gate", claim, 'App. "Scope"', f"recommended λ, {told}", agrees))
    # claim, place, column, column of its error (None: exact), range
    claims: list[tuple[str, str, str, str | None, tuple[float, float]]] = [
        (
            "λ = 0 is a floor: what is chosen on held-out text is never worse",
            TRUST,
            "lambda_0_behind",
            "lambda_0_behind_error",
            NOT_BELOW,
        ),
        ("the edge mass E is positive", TRUST_APPENDIX, "edge_mass", None, ABOVE),
        (
            "the remainder b is not negative",
            TRUST_APPENDIX,
            "remainder",
            "remainder_error",
            NOT_BELOW,
        ),
        ("1 - b/E is a λ between 0 and 1", "eq. (lambdastar)", "printed", "fitting_error", (0, 1)),
    ]
    for claim, where, name, error, allowed in claims:
        agrees = every(partial(_allowed, row, name, error, allowed) for row in rows)
        found.append(Finding("lambda", claim, where, _by_ratio(rows, name, error), agrees))
    return [*found, *_walk(table)]


def _allowed(
    row: Row, name: str, error: str | None, allowed: tuple[float, float], factor: float
) -> Verdict:
    """The verdict on one column, with its error in another column or exact."""
    spread, degrees = 0.0 if error is None else row[error], row.get(f"{name}_degrees", math.inf)
    return judged(row[name], spread, *allowed, factor, degrees)


def _gate_is_right(row: Row, factor: float) -> Verdict:
    """Whether edges help where the gate recommends them, and do not where it does not."""
    if row["gate"] is None:
        return None
    allowed = ABOVE if row["gate"] > 0 else NOT_ABOVE
    return judged_column(row, "edge_benefit", *allowed, factor)


def _by_ratio(rows: Table, name: str, error: str | None) -> str:
    return ", ".join(
        f"{percent(row['requested_ratio'])}: "
        f"{plus_minus(row[name], None if error is None else row[error])}{covered(row, name)}"
        for row in rows
    )


def _walk(table: Table) -> list[Finding]:
    """The best lambda by ratio; plans that the winner does not clearly beat are best too."""
    ratios = list(dict.fromkeys(row["requested_ratio"] for row in table))
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
        found.append(Finding("lambda", claim, "the authors' release, 3 models", ours, verdict))
    return found


def _as_good(table: Table, ratio: float, factor: float) -> tuple[float, float]:
    """The least and the largest lambda of the plans within so many errors of the winner."""
    raced = pick(table, requested_ratio=ratio, role="candidate", stopped_early=False)
    # the winner is behind itself by nothing, and so is every plan whose error is unknown in part
    tied = [r for r in raced if judged_column(r, "difference", *ABOVE, factor) is not True]
    return min(r["start"] for r in tied), max(r["stop"] for r in tied)


def _falls(table: Table, ratios: tuple[float, float], factor: float) -> Verdict:
    """Whether the best lambdas of the larger ratio lie below those of the smaller one."""
    before, after = (_as_good(table, ratio, factor) for ratio in ratios)
    if after[1] < before[0]:
        return True
    return False if after[0] > before[1] else None


# Guards -------------------------------------------------------------------------------------------
def guards_findings(table: Table) -> list[Finding]:
    """From `guards_study`: the KL without guards at each ratio, and with the release's rule.

    A difference is the plan's value minus that of the guards chosen on other text.
    """
    found = []
    for ratio in dict.fromkeys(row["requested_ratio"] for row in table):
        part = pick(table, requested_ratio=ratio, judge="kl")
        best = next(row for row in part if row["role"] == "best")
        free = next((row for row in part if row["role"] == "no guards"), None)
        claim = f"at {percent(ratio)} guards keep a plan from collapsing"
        ours, verdict = f"chosen: {best['guards']}; without guards no plan", None
        if free is not None and free["difference"] == 0:
            ours, verdict = "the plan chosen is the one without guards", False
        elif free is not None:
            more = with_error(free, "difference")
            ours = f"{best['guards']}; KL without guards higher by {more}"
            verdict = judged_column(free, "difference", *ABOVE)
        found.append(Finding("guards", claim, GUARDS, ours, verdict))
        found.append(_release(ratio, part))
    return [*found, _judges_agree(table)]


def _release(ratio: float, part: Table) -> Finding:
    """Whether the release's guards are no worse than the best of the grid."""
    rule = next((row for row in part if row["role"] == "release's guards"), None)
    claim = f"at {percent(ratio)} a cap of 1.5 x ratio with two layers kept at either end is right"
    if rule is None:
        ours = "not tested: greedy does not reach the ratio under these guards"
        return Finding("guards", claim, "the authors' release", ours, None)
    ours = f"KL above that of the chosen guards by {with_error(rule, 'difference')}"
    verdict = judged_column(rule, "difference", *NOT_ABOVE)
    return Finding("guards", claim, "the authors' release", ours, verdict)


def _judges_agree(table: Table) -> Finding:
    chosen = {
        (row["requested_ratio"], row["judge"]): row["guards"]
        for row in pick(table, role="best")  # one per ratio and judge
    }
    ratios = list(dict.fromkeys(ratio for ratio, _ in chosen))
    same = [chosen[ratio, "kl"] == chosen[ratio, "nll"] for ratio in ratios]
    ours = ", ".join(
        f"{percent(r)}: {chosen[r, 'kl']}" + ("" if s else f" by KL, {chosen[r, 'nll']} by loss")
        for r, s in zip(ratios, same, strict=True)
    )
    claim = "guards may be chosen by perplexity: KL chooses the same ones"
    return Finding("guards", claim, 'App. "Evaluation Protocol"', ours, all(same))


# Better plans -------------------------------------------------------------------------------------
def refinement_findings(table: Table) -> list[Finding]:
    """From `refinement_study`: greedy against the bound, and the KL of plans of lower R_λ."""
    rows = [row for row in table if row["objective"] > 0]
    reached = [row["bound"] / row["objective"] >= NEARLY for row in rows]
    beaten = [row["refined_objective"] / row["objective"] < NEARLY for row in rows]
    ours = "; ".join(
        f"{name_plan(row)}: {row['refined_objective'] / row['objective']:.3f}, "
        f"{row['bound'] / row['objective']:.3f}"
        for row in rows
    )
    nearly = True if rows and all(reached) else None  # a bound may also be loose
    moved = [row for row in table if row["units_exchanged"]]
    cheaper: list[Judge] = [partial(judged_column, row, "difference", *BELOW) for row in moved]
    return [
        Finding(
            "refinement",
            "greedy is a well-behaved stand-in for the exact solution "
            f"(here: within {1 - NEARLY:.0%})",
            'App. "Solver Guarantees"',
            f"R_λ after search, and bound, over that of greedy: {ours}",
            False if any(beaten) else nearly,
        ),
        Finding(
            "refinement",
            "a plan of lower R_λ costs less on held-out text",
            'App. "Surrogate Fidelity"',
            _differences(moved) or "no plan was improved",
            every(cheaper),
        ),
    ]


def gains_findings(table: Table) -> list[Finding]:
    """From `gains_study`: the KL of each compensated plan on the reported rows."""
    return evaluate(GAINS_LOWER_KL, table)


def infinitesimal_findings(table: Table) -> list[Finding]:
    """From `measure_infinitesimal`: KL of plans of H* less that of H, one finding per plan."""
    return evaluate(FINITE_IS_BETTER, table)


def redundancy_findings(table: Table) -> list[Finding]:
    """From `redundancy_study`: the trend over models, and the gate's advice on each."""
    trend = redundancy_trend(table)
    verdict = None
    ours = trend["note"].rstrip(".")
    if trend["spearman"] is not None:
        ours = f"Spearman {trend['spearman']:.2f} over {trend['models']} models"
        ours += f", p = {brief(trend['p_value'], 2)}"
        verdict = None if trend["p_value"] > 0.05 else trend["spearman"] < 0
    where = 'Fig. "edge benefit vs. FFN redundancy"'
    claim = "the edge benefit falls as the FFN redundancy rises"
    found = [Finding("redundancy", claim, where, ours, verdict)]
    for row in table:
        ours = f"redundancy {plus_minus(row['redundancy'], row['redundancy_error'])}, "
        ours += f"edge benefit {with_error(row, 'edge_benefit')}"
        gate = row["gate_lambda"]
        told = "is undecided" if gate is None else f"says λ = {gate:g}, and that is right"
        claim = f"{row['model']}: the gate {told}"
        found.append(Finding("redundancy", claim, 'App. "Scope"', ours, row["gate_right"]))
    return found


def iterative_findings(table: Table) -> list[Finding]:
    """From `iterative_study`: KL of plans in steps less that of one shot."""
    return evaluate(STEPS_ARE_BETTER, table)


def _differences(rows: Table) -> str:
    return "; ".join(f"{name_plan(row)}: {with_error(row, 'difference')}" for row in rows)
