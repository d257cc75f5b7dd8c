"""Problems without a model: unit sets and curvatures from numpy alone; Algorithm 2 the slow way."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cocurve_lab.curvature.groups import Groups
from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.models.unit import Kind
from cocurve_lab.models.units import Unit, UnitSet
from cocurve_lab.solver.guards import Guards


def make_units(
    layers: int = 3,
    attention: int = 2,
    ffn: int = 3,
    attention_cost: int = 5,
    ffn_cost: int = 11,
) -> UnitSet:
    """`layers` layers of equal units per kind; a cost is also the width of its columns."""
    shape: list[tuple[Kind, int, int]] = [
        ("attention", attention, attention_cost),
        ("ffn", ffn, ffn_cost),
    ]
    return UnitSet(
        tuple(
            Unit(kind, layer, i, i * cost, (i + 1) * cost, cost)
            for layer in range(layers)
            for kind, count, cost in shape
            for i in range(count)
        ),
        ffn_groups=ffn,
    )


def llama_8b_units() -> UnitSet:
    """The units of Llama-3.1-8B: 32 layers of 8 query groups and 16 FFN groups."""
    return make_units(32, 8, 16, attention_cost=5_242_880, ffn_cost=11_010_048)


def random_curvature(
    units: UnitSet,
    seed: int = 0,
    *,
    shared: float = 0.3,
    positions: int = 60,
    groups: int | None = None,
) -> Curvature:
    """A Gram matrix of random features: log-normal saliencies, correlations of about `shared`^2.

    Features are [M, positions]; row u is scale_u * (noise + shared * a_u * common), a_u normal, so
    correlations have both signs. With `groups` the positions are dealt to that many groups.
    """
    rng = np.random.default_rng(seed)
    size = len(units)
    features = rng.normal(size=(size, positions))
    features += shared * rng.normal(size=(size, 1)) * rng.normal(size=positions)
    features *= 0.01 * np.exp(rng.normal(size=(size, 1)))
    return gram_curvature(units, features, groups)


NO_TEXT = {"text_windows": ""}  # the record of an H that no text made


def gram_curvature(units: UnitSet, features: np.ndarray, groups: int | None = None) -> Curvature:
    """H = features features^T / positions, whole or in groups (eq. gram)."""
    if groups is None:
        return Curvature(features @ features.T / features.shape[1], units, NO_TEXT)
    parts = np.array_split(features, groups, axis=1)
    sums = Groups(
        np.stack([part @ part.T for part in parts]),
        np.array([part.shape[1] for part in parts]),
        np.stack([0.5 * (part**2).sum(axis=1) for part in parts]),
    )
    rows = {"row_fingerprints": [f"row {i}" for i in range(groups)]}
    return Curvature.from_groups(units, sums, NO_TEXT | rows)


def allowed(
    units: UnitSet,
    pruned: Sequence[int],
    u: int,
    ratio: float,
    guards: Guards,
    costs: Sequence[float] | None = None,
) -> bool:
    """Whether u may join `pruned`, from the definitions of the guards; never at a cost of 0."""
    costs = [unit.cost for unit in units] if costs is None else costs
    unit, cap = units[u], guards.cap_at(ratio)
    layer = [i for i in range(len(units)) if units[i].layer == unit.layer]
    gone = sum(costs[i] for i in layer if i in pruned)
    return (
        u not in pruned
        and costs[u] > 0
        and guards.protect_first <= unit.layer < units.num_layers - guards.protect_last
        and guards.allows(unit.kind)
        and gone + costs[u] <= cap * sum(costs[i] for i in layer) * (1 + 1e-12)
    )


def naive_greedy(
    curvature: Curvature,
    ratio: float,
    strength: float = 1.0,
    guards: Guards = Guards(),  # noqa: B008  (frozen)
    *,
    include: Sequence[int] = (),
    exclude: Sequence[int] = (),
    costs: Sequence[float] | None = None,
) -> list[int] | None:
    """Alg. 2 word for word: every marginal summed afresh. The removal order; None if it stalls."""
    units, matrix, pruned = curvature.units, curvature.matrix, list(include)
    costs = [unit.cost for unit in units] if costs is None else costs
    target = ratio * sum(costs) * (1 - 1e-12)
    while sum(costs[u] for u in pruned) < target:
        best, best_score = None, np.inf
        for u in range(len(units)):
            if u in exclude or not allowed(units, pruned, u, ratio, guards, costs):
                continue
            edges = sum(matrix[u, v] for v in pruned)
            score = (matrix[u, u] / 2 + strength * edges) / costs[u]
            if score < best_score:  # strictly: the lowest index wins a tie
                best, best_score = u, score
        if best is None:
            return None
        pruned.append(best)
    return pruned


def interrupt_at(
    monkeypatch: pytest.MonkeyPatch, sequence: int, cause: BaseException | signal.Signals
) -> None:
    """Raise an error, or send this process a signal, while the Gram of a sequence is computed.

    For SIGINT use the fixture `ctrl_c` too.
    """
    from cocurve_lab.estimator import algorithm1 as features

    real, calls = features.gram_matrix, [0]

    def gram(features: Any) -> np.ndarray:
        calls[0] += 1
        if calls[0] == sequence + 1:
            if isinstance(cause, BaseException):
                raise cause
            signal.raise_signal(cause)
        return real(features)

    monkeypatch.setattr(features, "gram_matrix", gram)


# two layers of cost 7: with room for 4 in each, attention (3) in layer 0 blocks both FFN groups (2)
STALLING = UnitSet(
    (
        Unit("attention", 0, 0, 0, 3, 3),
        Unit("ffn", 0, 0, 0, 2, 2),
        Unit("ffn", 0, 1, 2, 4, 2),
        Unit("ffn", 1, 0, 0, 4, 4),
        Unit("ffn", 1, 1, 4, 7, 3),
    )
)
