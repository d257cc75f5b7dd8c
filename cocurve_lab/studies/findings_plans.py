"""What the paper says of guards, solver, gains, derivatives, redundancy and steps, and our numbers.

One function per study; verdicts go by two standard errors, as in `findings_trust`.
"""

from __future__ import annotations

from .findings import Finding, every
from .findings_trust import ABOVE, BELOW, judged, percent
from .iterative import ITERATIVE
from .redundancy import redundancy_trend
from .tables import Row, Table, pick
from .views import plus_minus

NEARLY = 0.95  # a share of the objective of greedy; above it, greedy is called nearly the best
GUARDS = 'App. "The Greedy Co-Pruning Solver", anti-collapse guards'


def guards_findings(table: Table) -> list[Finding]:
    """Of `guards_study`: what guards bring at each ratio, and the release's rule beside the best.

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
            more, error = free["difference"], free["difference_error"]
            ours = f"{best['guards']}; KL without guards higher by {plus_minus(more, error)}"
            verdict = judged(more, error, *ABOVE)
        found.append(Finding("guards", claim, GUARDS, ours, verdict))
        found.append(_release(ratio, part))
    return [*found, _judges_agree(table)]


def _release(ratio: float, part: Table) -> Finding:
    """The release's guards are no worse than the best of the grid."""
    rule = next((row for row in part if row["role"] == "release's guards"), None)
    claim = f"at {percent(ratio)} a cap of 1.5 x ratio with two layers kept at either end is right"
    if rule is None:
        ours = "not tested: under it greedy does not reach the share"
        return Finding("guards", claim, "the authors' release", ours, None)
    more, error = rule["difference"], rule["difference_error"]
    ours = f"KL above that of the chosen guards by {plus_minus(more, error)}"
    return Finding("guards", claim, "the authors' release", ours, judged(more, error, *BELOW))


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


def refinement_findings(table: Table) -> list[Finding]:
    """Of `refinement_study`: how near greedy is to any plan, and whether a lower R_λ costs less."""
    rows = [row for row in table if row["objective"] > 0]
    reached = [row["bound"] / row["objective"] >= NEARLY for row in rows]
    beaten = [row["refined_objective"] / row["objective"] < NEARLY for row in rows]
    ours = "; ".join(
        f"{_plan(row)}: {row['refined_objective'] / row['objective']:.3f}, "
        f"{row['bound'] / row['objective']:.3f}"
        for row in rows
    )
    nearly = True if rows and all(reached) else None  # a bound may also be loose
    moved = [row for row in table if row["units_exchanged"]]
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
            _differences(moved, "difference", "difference_error") or "no plan was improved",
            every(judged(r["difference"], r["difference_error"], *BELOW) for r in moved),
        ),
    ]


def gains_findings(table: Table) -> list[Finding]:
    """Of `gains_study`: each compensated plan on the reported rows."""
    found = []
    for row in pick(table, role="report"):
        claim = f"gains lower the KL ({_plan(row)})"
        where = 'Section "Edge-derived coupling-aware compensation"'
        difference, error = row["difference"], row["difference_error"]
        if row["ridge"] is None:
            ours = "none were applied: no setting beat the plan without"
            found.append(Finding("gains", claim, where, ours, False))
            continue
        ours = f"γ {row['ridge']:g}, τ {row['clip']:g}: {plus_minus(difference, error)}"
        found.append(Finding("gains", claim, where, ours, judged(difference, error, *BELOW)))
    return found


def infinitesimal_findings(table: Table) -> list[Finding]:
    """Of `measure_infinitesimal`: whether whole removals plan better, one finding per plan."""
    found = []
    for row in table:
        claim = f"whole removals serve better than derivatives ({_plan(row)})"
        ours = f"KL of the plan of H* minus that of H: {plus_minus(None)}; greedy stalls"
        if row["difference"] is not None:
            more = plus_minus(row["difference"], row["difference_error"])
            ours = f"KL of the plan of H* minus that of H: {more}"
        verdict = judged(row["difference"], row["difference_error"], *ABOVE)
        found.append(Finding("finite or not", claim, "Section 1, Introduction", ours, verdict))
    return found


def redundancy_findings(table: Table) -> list[Finding]:
    """Of `redundancy_study`: the trend over models, and the gate on each."""
    trend = redundancy_trend(table)
    verdict = None
    ours = trend["note"].rstrip(".")
    if trend["spearman"] is not None:
        ours = f"Spearman {trend['spearman']:.2f} over {trend['models']} models"
        ours += f", p = {trend['p_value']:.2g}"
        verdict = None if trend["p_value"] > 0.05 else trend["spearman"] < 0
    where = 'Fig. "edge benefit vs. FFN redundancy"'
    claim = "the edge benefit falls as the FFN redundancy rises"
    found = [Finding("redundancy", claim, where, ours, verdict)]
    for row in table:
        ours = f"redundancy {plus_minus(row['redundancy'], row['redundancy_se'])}, "
        ours += f"edge benefit {plus_minus(row['edge_benefit'], row['edge_benefit_se'])}"
        told = "nothing" if row["gate_lambda"] is None else f"λ = {row['gate_lambda']:g}"
        claim = f"{row['model']}: the gate says {told}, and that is right"
        found.append(Finding("redundancy", claim, 'App. "Scope"', ours, row["gate_right"]))
    return found


def iterative_findings(table: Table) -> list[Finding]:
    """Of `iterative_study`: whether H rebuilt on the way gives better plans."""
    found = []
    for row in pick(table, plan=ITERATIVE):
        claim = f"H rebuilt half-way makes a better plan ({_plan(row)})"
        ours = f"KL minus one shot's: {plus_minus(row['difference'], row['difference_se'])}"
        verdict = judged(row["difference"], row["difference_se"], *BELOW)
        found.append(Finding("steps", claim, "Conclusion, as an outlook", ours, verdict))
    return found


def _plan(row: Row) -> str:
    ratio = row["ratio"] if "ratio" in row else row["requested_ratio"]
    return f"{percent(ratio)}, λ {row['interaction_strength']:g}"


def _differences(rows: Table, name: str, error: str) -> str:
    return "; ".join(f"{_plan(row)}: {plus_minus(row[name], row[error])}" for row in rows)
