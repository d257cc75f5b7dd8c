"""A certified lower bound on the surrogate R_lambda (eq. lambda) of every feasible plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import eigvalsh, inv
from scipy.optimize import linprog

from ..curvature.matrix import Curvature
from ..errors import InputError, NumericalError
from .greedy import Greedy
from .guards import Guards, Rules, reachable_ratio
from .targets import target_cost

_ROUNDING = 1e-4  # eigenvalues of the correlation down to minus this are taken for rounding
_STEPS = 300  # linear programmes at most


def risk_lower_bound(
    curvature: Curvature,
    ratio: float,
    guards: Guards = Guards(),  # noqa: B008  (frozen, so sharing the default is safe)
    interaction_strength: float = 1.0,
) -> float:
    """A number that R_lambda of no feasible plan is below, nats per token.

    Feasible plans reach `target_cost` and keep the guards; forcing units or overshooting less only
    raises their objective. With A = lambda H + (1 - lambda) diag H, R_lambda(s) = 1/2 s^T A s. As
    s_u^2 = s_u, the convex f(s) = 1/2 s^T (A - D) s + 1/2 diag(D)^T s equals it on every plan, for
    any diagonal D with A - D positive semidefinite, and

        f(y) >= f(x) + grad f(x)^T (y - x)    for every x,

    so the minimum of the right side over budget and guards, a linear programme, bounds all plans. A
    good x comes from Frank-Wolfe; the programme's value is taken from its dual, which bounds it
    whatever the solver's tolerances. Nothing rests on x being optimal: that only makes it tight.

    How tight depends on H: near the optimum where units are weakly coupled, little above 0 where H
    has low rank and hence a combination of units that costs nothing.

    Args:
        curvature: H [M, M], positive semidefinite up to rounding.
        ratio: share of removable cost to remove, [0, 1).
        guards: where units may go.
        interaction_strength: lambda in [0, 1].

    Raises:
        InputError: lambda outside [0, 1], or ratio outside [0, 1).
        NumericalError: H is not positive semidefinite, so there is no convex f of this kind.
        InfeasibleError: no plan reaches the ratio under the guards, so there is nothing to bound.
    """
    if not 0 <= interaction_strength <= 1:
        raise InputError(
            f"interaction_strength is {interaction_strength}; the bound holds for lambda in "
            "[0, 1]: outside, lambda H + (1 - lambda) diag H need not be positive semidefinite."
        )
    units = curvature.units
    rules = Rules(units, guards, ratio)
    if reachable_ratio(units, guards, ratio) * units.total_cost < target_cost(units, ratio):
        raise Greedy(curvature, ratio, guards).infeasible()
    _require_semidefinite(curvature.matrix)
    may = np.flatnonzero(rules.admissible)
    if not len(may):  # feasible all the same: the ratio is 0 and the empty plan the only one
        return 0.0
    matrix = interaction_strength * curvature.matrix[np.ix_(may, may)]
    np.fill_diagonal(matrix, curvature.saliency[may])
    linear, floor = _linear_part(matrix)
    bound = _tangent_bound(matrix - np.diag(linear), linear, _Polytope.of(rules, ratio, may))
    rounding = len(may) * np.finfo(float).eps * float(np.abs(matrix).sum() + np.abs(linear).sum())
    return max(bound - rounding, floor)


def _require_semidefinite(matrix: np.ndarray) -> None:
    scale = _scales(matrix)
    lowest = _lowest_eigenvalue(matrix / np.outer(scale, scale))
    if lowest < -_ROUNDING:
        raise NumericalError(
            f"H is not positive semidefinite: its correlations have an eigenvalue of {lowest:.3g}, "
            "so the surrogate is not convex and has no such bound. Use the H of a build (a Gram "
            "matrix), not an edge variant of it."
        )


def _linear_part(matrix: np.ndarray) -> tuple[np.ndarray, float]:
    """D [n] with A - D positive semidefinite, and the bound 1/2 s^T A s >= floor for all s.

    In units in which A has unit diagonal, D = t / (A^-1)_uu with the largest t that A allows: a
    unit's conditional variance given all others, shrunk. A small multiple of the identity makes A
    invertible; it and what rounding leaves below 0 are taken off D again, so nothing is gained.
    """
    scale = _scales(matrix)
    unit = matrix / np.outer(scale, scale)
    margin = 4 * len(unit) * np.finfo(float).eps * float(np.abs(unit).sum(axis=1).max())
    lowest = _lowest_eigenvalue(unit) - margin
    ridge = max(1e-9, -2 * lowest)
    regular = unit + ridge * np.eye(len(unit))
    weights = 1 / np.diagonal(inv(regular))
    root = np.sqrt(weights)
    t = _lowest_eigenvalue(regular / np.outer(root, root))
    shares = t * weights - ridge
    left = _lowest_eigenvalue(unit - np.diag(shares)) - margin
    shares += min(left, 0.0)  # now A - D is positive semidefinite also after rounding
    return shares * scale**2, 0.5 * min(lowest, 0.0) * float((scale**2).sum())


def _scales(matrix: np.ndarray) -> np.ndarray:
    """Square roots of the diagonal [n]; of its mean for units that do nothing."""
    diagonal = np.diagonal(matrix)
    scale: np.ndarray = np.sqrt(np.where(diagonal > 0, diagonal, diagonal.mean() or 1.0))
    return scale


def _lowest_eigenvalue(matrix: np.ndarray) -> float:
    return float(eigvalsh(matrix, subset_by_index=[0, 0])[0])


@dataclass(frozen=True)
class _Polytope:
    """Relaxed plans y in [0, 1]^n with rows @ y <= limits: the budget, then the layer caps.

    In shares of the total cost. Costs are whole multiples of a step, so the budget is rounded up
    to one, and caps down: that cuts off relaxed plans, never a real one.
    """

    rows: np.ndarray
    limits: np.ndarray

    @classmethod
    def of(cls, rules: Rules, ratio: float, may: np.ndarray) -> _Polytope:
        costs, layers = rules.units.costs[may], rules.units.layers[may]
        step = int(np.gcd.reduce(costs))
        rows = [-costs]
        limits = [-step * np.ceil(target_cost(rules.units, ratio) / step)]
        for layer, room in enumerate(rules.room):
            mine = np.where(layers == layer, costs, 0)
            if mine.sum() > room:
                rows.append(mine)
                limits.append(room // step * step)
        total = rules.units.total_cost
        return cls(np.array(rows) / total, np.array(limits, dtype=float) / total)

    def minimum(self, slope: np.ndarray) -> tuple[np.ndarray, float]:
        """A vertex of lowest slope^T y [n], and a value that no point of the polytope is below."""
        size = float(np.abs(slope).max()) or 1.0  # the solver's tolerances are absolute
        found = linprog(slope / size, A_ub=self.rows, b_ub=self.limits, bounds=(0, 1))
        if found.x is None:
            raise NumericalError(
                f"the linear programme of the bound failed: {found.message} Check that entries of "
                "H and costs are not many orders of magnitude apart."
            )
        # weak duality: any prices >= 0 give a lower bound, so these need not be exact
        prices = np.maximum(-found.ineqlin.marginals, 0.0)
        reduced = slope / size + prices @ self.rows
        return found.x, size * float(np.minimum(reduced, 0.0).sum() - prices @ self.limits)


def _tangent_bound(convex: np.ndarray, linear: np.ndarray, polytope: _Polytope) -> float:
    """The best tangent bound on f(y) = 1/2 y^T convex y + 1/2 linear^T y along Frank-Wolfe.

    Fully corrective: x is the best mixture of the vertices found so far. Ends once the bound is
    within 0.1 % of f(x), beyond which only a better D would help, or within 0.01 % of the node
    risk at x, which is what counts where f(x) is next to 0.
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
        best = max(best, value + lowest - float(slope @ x))
        if value - best <= max(1e-3 * abs(value), 1e-4 * float(nodes @ x)):
            break
        vertices, weights = np.vstack([vertices, vertex]), np.append(weights, 0.0)
        curve, pull = vertices @ convex @ vertices.T, vertices @ linear / 2
        weights = _best_mixture(curve, pull, weights, (value - best) / 100)
        vertices, weights = vertices[weights > 0], weights[weights > 0]
    return best


def _best_mixture(
    curve: np.ndarray, pull: np.ndarray, weights: np.ndarray, tolerance: float
) -> np.ndarray:
    """Weights [k] >= 0 of sum 1 with low 1/2 w^T curve w + pull^T w: steps from worst to best."""
    weights = weights.copy()
    for _ in range(500):
        slope = curve @ weights + pull
        to = int(slope.argmin())
        out = int(np.where(weights > 0, slope, -np.inf).argmax())
        gap = slope[out] - slope[to]
        if gap <= tolerance:
            break
        bend = curve[to, to] + curve[out, out] - 2 * curve[to, out]
        step = min(weights[out], gap / bend) if bend > 0 else weights[out]
        weights[to] += step
        weights[out] -= step
    total: np.ndarray = weights / weights.sum()
    return total
