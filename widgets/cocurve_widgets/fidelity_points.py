"""The points of FidelityScatter as plain rows: their names, statistics, and the code for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import cocurve_lab as cl
from cocurve_lab.extensions.surrogates.additive import ADDITIVE_KL
from cocurve_lab.extensions.surrogates.pair_kl import PAIR_KL
from cocurve_lab.measuring.agreement import DIAGONAL, EDGE_AWARE, RANDOM, SWAP, predictions

from .instrument import counted, plan_code
from .session import MeasuredPlan, Session

OTHER, SINGLE = "other plan", "single unit"
METHODS = (EDGE_AWARE, DIAGONAL, SWAP, RANDOM, OTHER, SINGLE)
ALL_PLANS, SINGLE_UNITS = "all plans", "single units"
# the scores that order plans: H with its edges, and the two without edges that it must beat
SCORES = ("predicted_risk", "diagonal_risk", "single_units_risk")
# what can predict: its name -> (key of a row, title of the axis)
SURROGATES = {
    "H": ("predicted_risk", "predicted ½ sᵀHs, nats per token"),
    PAIR_KL: ("pair_kl_risk", "predicted pair KL ½ sᵀQs, nats per token"),
    ADDITIVE_KL: ("additive_kl_risk", "predicted additive KL F(S), nats per token"),
}
RIVAL_RANKS = ("spearman_diagonal", "spearman_single_units")
Rows = list[dict[str, Any]]


@dataclass
class Book:
    """The names of a session's plans; kept with the session, so that a re-run cell finds them.

    Attributes:
        names: plan fingerprint -> (method, name).
        pools: name of a set measured together -> (Python that measures it, fingerprints).
        rows: name of a text -> number of held-out rows it stands for.
    """

    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    pools: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, session: Session) -> Book:
        """The book of a session, made on first use."""
        return _BOOKS.setdefault(session, cls())

    def add_pool(self, name: str, code: str, plans: Sequence[tuple[str, cl.Selection]]) -> None:
        """Record a set measured together, and number its random sets and swaps.

        Args:
            name: of the set.
            code: Python that measures it again.
            plans: (method, plan) of each.
        """
        numbers: dict[str, int] = {}
        for method, plan in plans:
            if method in (RANDOM, SWAP):
                numbers[method] = numbers.get(method, 0) + 1
                label = f"{method} {numbers[method]}, {plan.requested_ratio:.3g}"
                self.names.setdefault(plan.fingerprint, (method, label))
        self.pools[name] = (code, [plan.fingerprint for _, plan in plans])

    def name(self, plan: cl.Selection) -> tuple[str, str]:
        """The method and name of a plan."""
        if plan.fingerprint in self.names:
            return self.names[plan.fingerprint]
        strength = plan.interaction_strength
        mark = plan.fingerprint[:4]  # tells plans of one name apart
        if strength is None:
            return (
                OTHER,
                f"plan of {counted(len(plan), 'unit')}, {plan.realized_ratio:.3g} ({mark})",
            )
        opening, guarded = cl.opening_guards(plan.units), f", guarded ({mark})"
        if plan.guards in (opening, cl.Guards()):
            guarded = "" if plan.guards == opening else ", no guards"
        method = EDGE_AWARE if strength > 0 else DIAGONAL
        return method, f"λ {strength:.4g}, ratio {plan.requested_ratio:.4g}{guarded}"


_BOOKS: WeakKeyDictionary[Session, Book] = WeakKeyDictionary()


# Rows -------------------------------------------------------------------------------------------


def predicted_risk(curvature: cl.Curvature, plan: cl.Selection) -> float:
    """1/2 s^T H s under this curvature, whatever made the plan; nats per token."""
    known = plan.predicted_risk
    if known is not None and plan.curvature_fingerprint == curvature.fingerprint:
        return known
    return curvature.risk(plan.pruned)


def plan_row(curvature: cl.Curvature, book: Book, record: MeasuredPlan) -> dict[str, Any]:
    """One measured plan as a row of `FidelityScatter.points`."""
    plan = record.selection
    method, name = book.name(plan)
    scores = predictions(curvature, plan.pruned)
    others = ("diagonal", "single_units", "pair_kl", "additive_kl")
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
        "measured_risk_error": record.standard_error,
        "text": record.text,
        **{f"{name}_risk": scores[name] for name in others},
    }


def single_rows(curvature: cl.Curvature) -> Rows:
    """The single units as rows of `FidelityScatter.points`; empty if the build did not keep them.

    Both risks are on the calibration text, unlike a plan's. The prediction is on the teacher's
    top-r support, and so is the measurement unless the build says otherwise (`risk_support`).
    """
    risks = curvature.single_unit_risk
    if risks is None:
        return []
    source = curvature.provenance.get("calibration_source", "calibration")
    text = f"{source} ({curvature.risk_support.removeprefix('the ')})"
    shares = curvature.units.costs / curvature.units.total_cost
    prices: list[float | None] = [None] * len(risks)
    with suppress(cl.InputError):  # no sketch of shifts, or one of too few groups
        prices = curvature.additive().state("price").singles.tolist()
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
            "measured_risk_error": math.nan,
            "text": text,
            "diagonal_risk": float(saliency / 2),
            "single_units_risk": float(risk),
            "pair_kl_risk": price,  # of one unit the two are one
            "additive_kl_risk": price,
        }
        for unit, share, saliency, risk, price in zip(
            curvature.units, shares, curvature.saliency, risks, prices, strict=True
        )
    ]


def predicted_by(rows: Rows, surrogate: str) -> Rows:
    """The rows with the prediction of a surrogate as their predicted risk; NaN where unknown."""
    key = SURROGATES[surrogate][0]
    unknown = ((row, math.nan if row[key] is None else row[key]) for row in rows)
    return [row | {"predicted_risk": value} for row, value in unknown]


def drawable(row: dict[str, Any]) -> bool:
    """Whether both risks are above 0, so that log axes can show them."""
    return bool(row["predicted_risk"] > 0 and row["measured_risk"] > 0)


# Words and numbers ------------------------------------------------------------------------------


def by_column(rows: Rows) -> dict[str, list[Any]]:
    """The rows as the page receives them: the values of each key, with None for NaN."""
    return {key: [plain(row[key]) for row in rows] for key in (rows[0] if rows else ())}


def plain(value: Any) -> Any:
    """The value, or None in place of NaN, which JSON does not have."""
    return None if isinstance(value, float) and math.isnan(value) else value


def summarize(rows: Rows, marks: list[str], book: Book) -> dict[str, dict[str, Any]]:
    """`agreement` of all plans, of each pool, and of the single units, with the worst point named.

    Args:
        rows: rows of `FidelityScatter.points`; the single units come last.
        marks: fingerprint of each plan among them, in order.
        book: the pools.
    """
    groups = {ALL_PLANS: rows[: len(marks)]}
    for name, (_, members) in book.pools.items():
        mine = set(members)
        groups[name] = [row for row, mark in zip(rows, marks, strict=False) if mark in mine]
    groups[SINGLE_UNITS] = rows[len(marks) :]
    return {name: _score(group) for name, group in groups.items() if group or name == ALL_PLANS}


def _score(rows: Rows) -> dict[str, Any]:
    measured = [row["measured_risk"] for row in rows]
    found, *rivals = (cl.agreement([row[key] for row in rows], measured) for key in SCORES)
    worst = None if found.worst is None else rows[found.worst]["name"]
    ranks = dict(zip(RIVAL_RANKS, (rival.spearman for rival in rivals), strict=True))
    return asdict(found) | {"worst": worst} | ranks


def caption(curvature: cl.Curvature, surrogate: str, text: str | None) -> str:
    """The support and text that predictions and measurements are on; `text` is None without one."""
    known = curvature.provenance
    top_r = known.get("top_r")
    support = "top-r support (r unknown)" if top_r is None else f"top-{top_r} support"
    by, alone = f"on the teacher's {support}, from the calibration text", "½ H_uu"
    if surrogate != "H":
        count, tokens = curvature.require_shifts().of("price").probabilities.shape
        by = (
            f"by the {surrogate} of the shifts at {counted(count, 'position')}, on "
            f"{counted(tokens, 'token')} each. A "
            'plan solved on part "fit" of the shifts has not seen these positions; H has'
        )
        alone = "its KL there"
    parts = [
        f"Predicted: {by}. Measured: over the full vocabulary, on "
        f"{text or 'the text each point names'}."
    ]
    if curvature.single_unit_risk is None:
        parts.append("This curvature does not hold the KL of single units: no gray points.")
    else:
        parts.append(
            f"Gray: each unit alone, {alone} against its KL in the build, on the calibration text; "
            f"that KL is over {curvature.risk_support}."
        )
    if text and "row_fingerprints" not in known:
        parts.append("H does not record its calibration rows, so overlap cannot be checked.")
    return " ".join(parts)


def status_line(rows: Rows, marks: list[str], plan: str, took: str) -> str:
    """The status: how many points, those that cannot be drawn, the chosen plan, the time taken.

    Args:
        rows, marks: as for `summarize`.
        plan: words about the chosen plan; may be empty.
        took: words about the last work; may be empty.
    """
    units = len(rows) - len(marks)
    plans, singles = counted(len(marks), "measured plan"), counted(units, "single unit")
    parts = [f"{plans} and {singles} shown"]
    texts = {row["text"] for row in rows[: len(marks)]}
    if len(texts) > 1:
        parts.append(f"plans were measured on {len(texts)} texts; choose one under Text to compare")
    hidden = [row["name"] for row in rows if not drawable(row)]
    if hidden:
        some = ", ".join(hidden[:3]) + (", ..." if len(hidden) > 3 else "")
        verb = "is" if len(hidden) == 1 else "are"
        parts.append(
            f"{len(hidden)} of them {verb} not above 0 and cannot be drawn on log axes: {some}"
        )
    parts += [plan] if plan else []
    parts += [f"last: {took}"] if took else []
    return "; ".join(parts) + "."


# Code -------------------------------------------------------------------------------------------


def code_for(
    curvature: cl.Curvature, book: Book, records: Sequence[MeasuredPlan], controls: dict[str, Any]
) -> str:
    """The Python that measures these plans again; it needs `curvature`, `model`, `calibration`."""
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


def _measuring(curvature: cl.Curvature, book: Book, plans: list[cl.Selection]) -> list[str]:
    """Lines that measure these plans: complete pools, then the others one by one."""
    every = {plan.fingerprint: plan for plan in plans}
    pools = [pool for pool in book.pools.values() if every.keys() >= set(pool[1])]
    covered = {mark for _, members in pools for mark in members}
    single = [plan for mark, plan in every.items() if mark not in covered]
    return [code for code, _ in pools] + [
        f"f.measure({plan_code(plan, curvature)})" for plan in single
    ]
