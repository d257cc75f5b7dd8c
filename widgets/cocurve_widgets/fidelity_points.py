"""The points of FidelityScatter as plain rows, what is said about them, and their code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any
from weakref import WeakKeyDictionary

from cocurve_lab import CalibrationSet, Curvature, Selection
from cocurve_lab.measuring.agreement import DIAGONAL, EDGE_AWARE, RANDOM, SWAP
from cocurve_lab.solver.guards import Guards

from .fidelity_figure import OTHER
from .instrument import plan_code
from .session import Measured, Session

SINGLE = "single unit"
METHODS = (EDGE_AWARE, DIAGONAL, SWAP, RANDOM, OTHER, SINGLE)


@dataclass
class Book:
    """What a session's plans are called, so that a cell run again finds its points named.

    Attributes:
        names: plan fingerprint -> (method, name).
        pools: name of a set measured together -> (Python that measures it, fingerprints).
        rows: name of a text -> rows of the held-out set it stands for.
    """

    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    pools: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, session: Session) -> Book:
        return _BOOKS.setdefault(session, cls())

    def add_pool(self, name: str, code: str, plans: Sequence[tuple[str, Selection]]) -> None:
        """Remember a set measured together, and number its random sets and swaps."""
        numbers: dict[str, int] = {}
        for method, plan in plans:
            if method in (RANDOM, SWAP):
                numbers[method] = numbers.get(method, 0) + 1
                label = f"{method} {numbers[method]}, {plan.requested_ratio:.3g}"
                self.names.setdefault(plan.fingerprint, (method, label))
        self.pools[name] = (code, [plan.fingerprint for _, plan in plans])

    def name(self, plan: Selection) -> tuple[str, str]:
        """Method and name of a plan."""
        if plan.fingerprint in self.names:
            return self.names[plan.fingerprint]
        strength = plan.interaction_strength
        if strength is None:
            return OTHER, f"plan of {_units(len(plan))}, {plan.realized_ratio:.3g} ({_mark(plan)})"
        guarded = "" if plan.guards == Guards() else f", guarded ({_mark(plan)})"
        method = EDGE_AWARE if strength > 0 else DIAGONAL
        return method, f"λ {strength:.4g}, ratio {plan.requested_ratio:.4g}{guarded}"


_BOOKS: WeakKeyDictionary[Session, Book] = WeakKeyDictionary()


def text_name(text: CalibrationSet) -> str:
    """What a held-out set is called in Measured.text."""
    return f"{text.source}, {len(text)} x {text.seq_len} tokens ({text.fingerprint[:6]})"


def predicted_risk(curvature: Curvature, plan: Selection) -> float:
    """1/2 s^T H s under this curvature, whatever made the plan; nats per token."""
    known = plan.predicted_risk
    if known is not None and plan.curvature_fingerprint == curvature.fingerprint:
        return known
    return curvature.risk(plan.pruned)


def plan_row(curvature: Curvature, book: Book, record: Measured) -> dict[str, Any]:
    """One measured plan as a row of `points`."""
    plan = record.selection
    method, name = book.name(plan)
    return {
        "kind": "plan",
        "method": method,
        "name": name,
        "interaction_strength": plan.interaction_strength,
        "requested_ratio": plan.requested_ratio,
        "realized_ratio": plan.realized_ratio,
        "units": len(plan),
        "predicted_risk": predicted_risk(curvature, plan),
        "measured_risk": record.risk,
        "standard_error": record.standard_error,
        "text": record.text,
    }


def single_rows(curvature: Curvature) -> list[dict[str, Any]]:
    """The units alone as rows of `points`, in unit order; none where the build did not keep them.

    Both values are on the teacher's top-r support and on the calibration text, unlike a plan's.
    """
    risks = curvature.single_unit_risk
    if risks is None:
        return []
    text = f"{curvature.provenance.get('calibration_source', 'calibration')} (top-r support)"
    shares = curvature.units.costs / curvature.units.total_cost
    return [
        {
            "kind": SINGLE,
            "method": SINGLE,
            "name": unit.name,
            "interaction_strength": None,
            "requested_ratio": float(share),
            "realized_ratio": float(share),
            "units": 1,
            "predicted_risk": float(saliency / 2),
            "measured_risk": float(risk),
            "standard_error": math.nan,
            "text": text,
        }
        for unit, share, saliency, risk in zip(
            curvature.units, shares, curvature.saliency, risks, strict=True
        )
    ]


def drawable(row: dict[str, Any]) -> bool:
    """Whether both risks have a logarithm."""
    return bool(row["predicted_risk"] > 0 and row["measured_risk"] > 0)


def _units(count: int) -> str:
    return "1 unit" if count == 1 else f"{count} units"


def hover(row: dict[str, Any]) -> str:
    """What is shown over a point."""
    error = row["standard_error"]
    spread = "" if math.isnan(error) else f" ± {error:.2g}"
    ratio = row["measured_risk"] / row["predicted_risk"] if row["predicted_risk"] > 0 else math.nan
    lines = [
        f"<b>{escape(row['name'])}</b> ({row['method']})",
        f"removes {row['realized_ratio']:.2%} of removable cost, {_units(row['units'])}",
        f"predicted {row['predicted_risk']:.3g}",
        f"measured {row['measured_risk']:.3g}{spread} ({ratio:.3g} x)",
        f"on {escape(row['text'])}",
    ]
    return "<br>".join(lines)


def code_for(
    curvature: Curvature, book: Book, records: Sequence[Measured], controls: dict[str, Any]
) -> str:
    """Python that measures these plans again; `curvature`, `model`, `calibration` must exist."""
    options = "".join(f", {name}={value!r}" for name, value in controls.items())
    lines = [
        "import cocurve_lab as cl",
        "from cocurve_widgets import FidelityScatter",
        "",
        "# curvature, model and calibration (the held-out text) as in the notebook",
        f"f = FidelityScatter(curvature, model, calibration{options})",
    ]
    texts = dict.fromkeys(record.text for record in records)
    for text in texts:
        if text not in book.rows:
            lines.append(f"# points on {text!r} were measured elsewhere")
            continue
        lines.append(f"f.rows = {book.rows[text]}")
        lines += _measuring(curvature, book, [r.selection for r in records if r.text == text])
    return "\n".join(lines) + "\n"


def _measuring(curvature: Curvature, book: Book, plans: list[Selection]) -> list[str]:
    """Lines that measure these plans: complete pools, then the others one by one."""
    every = {plan.fingerprint: plan for plan in plans}
    pools = [pool for pool in book.pools.values() if every.keys() >= set(pool[1])]
    covered = {mark for _, members in pools for mark in members}
    single = [plan for mark, plan in every.items() if mark not in covered]
    return [code for code, _ in pools] + [
        f"f.measure({plan_code(plan, curvature)})" for plan in single
    ]


def _mark(plan: Selection) -> str:
    """A few digits that tell plans of one name apart."""
    return plan.fingerprint[:4]
