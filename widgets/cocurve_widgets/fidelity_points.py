"""The points of FidelityScatter as plain rows: their names and statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import cocurve_lab as cl
from cocurve_lab.extensions.judging.agreement import DIAGONAL, EDGE_AWARE, RANDOM, SWAP, predictions

from .instrument import counted
from .session import MeasuredPlan, Session

OTHER, SINGLE = "other plan", "single unit"
METHODS = (EDGE_AWARE, DIAGONAL, SWAP, RANDOM, OTHER, SINGLE)
ALL_PLANS, SINGLE_UNITS = "all plans", "single units"
# the ranks of the scores without edges, which H must beat: name in `statistics` -> key of a row
RIVALS = {"spearman_diagonal": "diagonal_risk", "spearman_single_units": "single_units_risk"}
Row = dict[str, Any]
Rows = list[Row]
Pool = Sequence[tuple[str, cl.Selection]]  # plans measured together, each with its method
Plans = list[tuple[cl.Selection, Row]]  # measured plans with their rows


@dataclass
class Book:
    """The names of a session's plans; kept with the session, so that a re-run cell finds them.

    Attributes:
        names: plan fingerprint -> (method, name).
        pools: name of a set measured together -> fingerprints.
    """

    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    pools: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, session: Session) -> Book:
        """The book of a session, made on first use."""
        return _BOOKS.setdefault(session, cls())

    def add_pool(self, name: str, plans: Pool) -> None:
        """Record a set measured together, and number its random sets and swaps.

        Args:
            name: of the set.
            plans: (method, plan) of each.
        """
        numbers: dict[str, int] = {}
        for method, plan in plans:
            if method in (RANDOM, SWAP):
                numbers[method] = numbers.get(method, 0) + 1
                label = f"{method} {numbers[method]}, {plan.requested_ratio:.3g}"
                self.names.setdefault(plan.fingerprint, (method, label))
        self.pools[name] = [plan.fingerprint for _, plan in plans]

    def name(self, plan: cl.Selection) -> tuple[str, str]:
        """The method and name of a plan."""
        if plan.fingerprint in self.names:
            return self.names[plan.fingerprint]
        strength = plan.interaction_strength
        mark = plan.fingerprint[:4]  # tells plans of one name apart
        if strength is None:
            units = counted(len(plan), "unit")
            return OTHER, f"plan of {units}, {plan.realized_ratio:.3g} ({mark})"
        usual = {cl.Guards(): ", no guards", cl.opening_guards(plan.units): ""}
        guarded = usual.get(plan.guards, f", guarded ({mark})")
        method = EDGE_AWARE if strength > 0 else DIAGONAL
        return method, f"λ {strength:.4g}, ratio {plan.requested_ratio:.4g}{guarded}"


_BOOKS: WeakKeyDictionary[Session, Book] = WeakKeyDictionary()


# Rows -------------------------------------------------------------------------------------------


def _row(kind: str, method: str, name: str, record: MeasuredPlan, scores: dict[str, Any]) -> Row:
    """A row of `FidelityScatter.points`; `scores` are predictions by their keys of a row."""
    plan = record.selection
    return {
        "kind": kind,
        "method": method,
        "name": name,
        "interaction_strength": plan.interaction_strength,
        "requested_ratio": plan.requested_ratio,
        "realized_ratio": plan.realized_ratio,
        "units": len(plan),
        "predicted_risk": scores["predicted_risk"],
        "measured_risk": record.risk,
        "measured_risk_error": record.standard_error,
        "text": record.text,
        **scores,
    }


def plan_row(curvature: cl.Curvature, book: Book, record: MeasuredPlan) -> Row:
    """The row of a measured plan."""
    plan = record.selection
    # under this curvature, whatever made the plan
    found = predictions(curvature, plan.pruned)
    scores = {f"{name}_risk": value for name, value in found.items()}
    return _row("plan", *book.name(plan), record, scores)


def single_rows(curvature: cl.Curvature) -> Rows:
    """The rows of the single units; empty if the build did not keep them.

    Both risks are on the calibration text, unlike a plan's. The prediction is on the teacher's
    top-r support, and so is the measurement unless the build says otherwise (`risk_support`).
    """
    risks = curvature.single_unit_risk
    if risks is None:
        return []
    source = curvature.provenance.get("calibration_source", "calibration")
    text = f"{source} ({curvature.risk_support.removeprefix('the ')})"
    halves, rows = (curvature.saliency / 2).tolist(), []
    for unit, half, risk in zip(curvature.units, halves, risks.tolist(), strict=True):
        alone = cl.Selection.from_pruned(curvature.units, [unit])
        scores = {"predicted_risk": half, "diagonal_risk": half, "single_units_risk": risk}
        record = MeasuredPlan(alone, risk, math.nan, text)
        rows.append(_row(SINGLE, SINGLE, unit.name, record, scores))
    return rows


def rows_of(plans: Plans, marks: Sequence[str]) -> Rows:
    """The rows of the plans that have these fingerprints."""
    return [row for plan, row in plans if plan.fingerprint in marks]


# Words and numbers ------------------------------------------------------------------------------


def score(rows: Rows) -> dict[str, Any]:
    """`agreement` of predicted and measured risks, with the worst point named, and the RIVALS."""
    measured = [row["measured_risk"] for row in rows]
    found = cl.agreement([row["predicted_risk"] for row in rows], measured)
    worst = None if found.worst is None else rows[found.worst]["name"]
    ranks = {
        rank: cl.agreement([row[rival] for row in rows], measured).spearman
        for rank, rival in RIVALS.items()
    }
    return asdict(found) | {"worst": worst} | ranks


def caption(curvature: cl.Curvature, text: str | None) -> str:
    """The support and text that predictions and measurements are on; `text` is None without one."""
    support = f"top-{curvature.provenance.get('top_r', 'r')} support"
    gray = "This curvature does not hold the KL of single units: no gray points."
    if curvature.single_unit_risk is not None:
        gray = (
            f"Gray: each unit alone, ½ H_uu against its KL in the build, on the calibration text; "
            f"that KL is over {curvature.risk_support}."
        )
    return (
        f"Predicted: on the teacher's {support}, from the calibration text. Measured: over the "
        f"full vocabulary, on {text or 'the text each point names'}. {gray}"
    )
