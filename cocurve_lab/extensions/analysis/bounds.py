"""A certified lower bound on the surrogate R_lambda (eq. lambda) of every feasible plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import eigvalsh, inv
from scipy.optimize import linprog

from ...base.arguments import require_type
from ...base.errors import InputError, NumericalError
from ...curvature.matrix import Curvature
from ...solver.greedy import Greedy
from ...solver.guards import FREE, Guards, Rules

_ROUNDING = 1e-4  # eigenvalues of the correlation matrix above minus this count as rounding
_STEPS = 300  # the most linear programs that are solved


def risk_lower_bound(
    curvature: Curvature,
    ratio: float,
    guards: Guards = FREE,
    interaction_strength: float = 1.0,
) -> float:
    """Bound R_lambda (eq. lambda) of every feasible plan from below, in nats per token.

    A feasible plan reaches `target_cost` and keeps the guards. (Forced units, or less overshoot,
    only restrict the plans further.) With A = lambda H + (1 - lambda) diag H, the objective is
    R_lambda(s) = 1/2 s^T A s. Because s_u^2 = s_u for a plan, it equals the convex function
    f(s) = 1/2 s^T (A - D) s + 1/2 diag(D)^T s, for any diagonal D with A - D positive semidefinite.
    A convex function lies above its tangents,

        f(y) >= f(x) + grad f(x)^T (y - x)    for every x,

    so the minimum of the right-hand side over budget and guards bounds all plans. That minimum is a
    linear program. Its value is taken from the dual, which is a bound whatever the tolerance of the
    solver. Frank-Wolfe finds a good x, which only makes the bound tight: it holds for any x.

    The bound is close to the optimum where units are weakly coupled. It is little above 0 where H
    has low rank, because some combination of units then costs nothing. It is not in the paper.
    """
    require_type(curvature, Curvature, "curvature")
    if not 0 <= interaction_strength <= 1:
        raise InputError(
            f"interaction_strength is {interaction_strength}. Give one in [0, 1]; outside, "
            "lambda H + (1 - lambda) diag H need not be positive semidefinite."
        )
    rules = Rules(curvature.units, guards, ratio)
    if rules.reachable() < rules.budget.needed:
        raise Greedy(curvature, rules).infeasible()
    _require_semidefinite(curvature.matrix)
    may = np.flatnonzero(rules.admissible)
    if not len(may):  # feasible all the same: the ratio is 0, and the empty plan is the only one
        return 0.0
    matrix = interaction_strength * curvature.matrix[np.ix_(may, may)]
    np.fill_diagonal(matrix, curvature.saliency[may])
    linear, floor = _linear_part(matrix)
    bound = _tangent_bound(matrix - np.diag(linear), linear, _Polytope.of(rules, may))
    # the bound must hold in exact arithmetic, so subtract the most that rounding may have added
    rounding = len(may) * np.finfo(float).eps * float(np.abs(matrix).sum() + np.abs(linear).sum())
    return max(bound - rounding, floor)


def _require_semidefinite(matrix: np.ndarray) -> None:
    scale = _scales(matrix)
    lowest = _lowest_eigenvalue(matrix / np.outer(scale, scale))
    if lowest < -_ROUNDING:
        raise NumericalError(
            f"H is not positive semidefinite: its correlations have an eigenvalue of {lowest:.3g}. "
            "Use the H of a build (a Gram matrix), not an edge variant of it."
        )


def _linear_part(matrix: np.ndarray) -> tuple[np.ndarray, float]:
    """D [n] with A - D positive semidefinite, and a floor: 1/2 s^T A s >= floor for all s.

    D_uu = t / (A^-1)_uu with the largest t that A allows, after scaling A to unit diagonal. That is
    the conditional variance of unit u given all others, shrunk.
    """
    scale = _scales(matrix)
    unit = matrix / np.outer(scale, scale)
    # more than the rounding error of a computed eigenvalue, so `lowest` is a true lower bound
    margin = 4 * len(unit) * np.finfo(float).eps * float(np.abs(unit).sum(axis=1).max())
    lowest = _lowest_eigenvalue(unit) - margin
    ridge = max(1e-9, -2 * lowest)
    # a small multiple of the identity makes A invertible; it is subtracted from D again below
    regular = unit + ridge * np.eye(len(unit))
    weights = 1 / np.diagonal(inv(regular))
    root = np.sqrt(weights)
    t = _lowest_eigenvalue(regular / np.outer(root, root))
    shares = t * weights - ridge
    # what is still below 0 is rounding: with it gone, A - D is positive semidefinite beyond doubt
    left = _lowest_eigenvalue(unit - np.diag(shares)) - margin
    shares += min(left, 0.0)
    return shares * scale**2, 0.5 * min(lowest, 0.0) * float((scale**2).sum())


def _scales(matrix: np.ndarray) -> np.ndarray:
    """Square roots of the diagonal [n]; for units with H_uu = 0, of the mean of the diagonal."""
    diagonal = np.diagonal(matrix)
    scale: np.ndarray = np.sqrt(np.where(diagonal > 0, diagonal, diagonal.mean() or 1.0))
    return scale


def _lowest_eigenvalue(matrix: np.ndarray) -> float:
    return float(eigvalsh(matrix, subset_by_index=[0, 0])[0])


@dataclass(frozen=True)
class _Polytope:
    """Relaxed plans: y in [0, 1]^n with rows @ y <= limits, in shares of the total cost.

    The first row is the budget, the others are the layer caps that can bind.
    """

    rows: np.ndarray
    limits: np.ndarray

    @classmethod
    def of(cls, rules: Rules, may: np.ndarray) -> _Polytope:
        costs, layers = rules.units.costs[may], rules.units.layers[may]
        # costs of real plans are multiples of a step: rounding the budget up to one, and caps down,
        # cuts off relaxed plans only
        step = int(np.gcd.reduce(costs))
        rows = [-costs]
        limits = [-step * np.ceil(rules.budget.needed / step)]
        for layer, room in enumerate(rules.room):
            mine = np.where(layers == layer, costs, 0)
            if mine.sum() > room:
                rows.append(mine)
                limits.append(room // step * step)
        total = rules.units.total_cost
        return cls(np.array(rows) / total, np.array(limits, dtype=float) / total)

    def minimum(self, slope: np.ndarray) -> tuple[np.ndarray, float]:
        """A vertex [n] that minimizes slope^T y, and a lower bound on that minimum."""
        size = float(np.abs(slope).max()) or 1.0  # the solver's tolerances are absolute
        found = linprog(slope / size, A_ub=self.rows, b_ub=self.limits, bounds=(0, 1))
        if found.x is None:
            raise NumericalError(
                f"the linear program of the bound failed: {found.message} Check that the entries "
                "of H and the costs are not many orders of magnitude apart."
            )
        # weak duality: any prices >= 0 give a lower bound, so those of the solver need not be exact
        prices = np.maximum(-found.ineqlin.marginals, 0.0)
        reduced = slope / size + prices @ self.rows
        return found.x, size * float(np.minimum(reduced, 0.0).sum() - prices @ self.limits)


def _tangent_bound(convex: np.ndarray, linear: np.ndarray, polytope: _Polytope) -> float:
    """The best tangent bound on f(y) = 1/2 y^T convex y + 1/2 linear^T y found by Frank-Wolfe.

    The fully corrective variant: x is the best mixture of all vertices found so far.
    """
    nodes = (np.diagonal(convex) + linear) / 2
    vertices = polytope.minimum(nodes)[0][None]
    weights = np.ones(1)
    best = -np.inf
    for _ in range(_STEPS):
        x = weights @ vertices
        slope = convex @ x + linear / 2
        value = float(x @ slope + linear @ x / 2) / 2
        vertex, lowest = polytope.minimum(slope)
        best = max(best, value + lowest - float(slope @ x))  # the tangent at x, minimized
        # within 0.1 % of f(x) only a better D would help; where f(x) is next to 0, the node risk at
        # x is the scale that matters
        if value - best <= max(1e-3 * abs(value), 1e-4 * float(nodes @ x)):
            break
        vertices, weights = np.vstack([vertices, vertex]), np.append(weights, 0.0)
        curve, pull = vertices @ convex @ vertices.T, vertices @ linear / 2
        weights = _best_mixture(curve, pull, weights, (value - best) / 100)
        # a vertex of weight 0 only costs time, and comes back if it is needed
        vertices, weights = vertices[weights > 0], weights[weights > 0]
    return best


def _best_mixture(
    curve: np.ndarray, pull: np.ndarray, weights: np.ndarray, tolerance: float
) -> np.ndarray:
    """Weights [k] >= 0 that sum to 1 and make 1/2 w^T curve w + pull^T w small.

    Each step moves weight from the vertex of largest slope to the one of smallest slope.
    """
    weights = weights.copy()
    for _ in range(500):
        slope = curve @ weights + pull
        to = int(slope.argmin())
        out = int(np.where(weights > 0, slope, -np.inf).argmax())
        gap = slope[out] - slope[to]
        if gap <= tolerance:
            break
        # along this move the objective is a parabola: go to its minimum, or until a weight is 0
        bend = curve[to, to] + curve[out, out] - 2 * curve[to, out]
        step = min(weights[out], gap / bend) if bend > 0 else weights[out]
        weights[to] += step
        weights[out] -= step
    total: np.ndarray = weights / weights.sum()
    return total
