"""The additive KL as a surrogate of its own: what it predicts for a plan, and its greedy plan.

F(S) = E KL(p_0 || softmax(z_0 + sum of d_u over S)) with the shifts d_u of single units, from the
sketch that a build keeps (curvature/shifts.py). Where the teacher is sure of its token F sees what
its second order, H, cannot. With the strength lambda between F and its node part,

    F_lambda(S) = (1 - lambda) sum of F({u}) + lambda F(S),

the greedy loop is Algorithm 2 with other interactions: g_u = F(S + u) - F(S) - F({u}).

Every marginal is evaluated at every step. F is convex, so E[(p_S - p_0) . d_u] bounds the marginal
of u from below, and units whose bound is behind could be skipped without a change of the plan. But
the bound reads as much memory as the marginals do. Tried on 768 units of the demo model with 1,000
positions, ratio 0.2, one thread, the plan was the same. At lambda 1 the bound left 69 % of the
marginals to evaluate, and the loop took 1.8 to 2.1 times as long; at lambda 0.3 it left 4 %, and
the loop took 0.8 to 0.9 of the time. The default is lambda 1, so it is not done.
measuring/additive_solve.py evaluates them with torch, for a GPU.

This departs from the paper, which solves on H.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import numpy as np

from ..curvature.matrix import Curvature
from ..curvature.pair_kl import likelihood_ratios
from ..curvature.shifts import Part, Shifts
from ..models.units import Unit
from .greedy import Greedy
from .guards import FREE, Guards, UnitsLike
from .selection import Selection, risk_terms
from .targets import Target, require_strength

ADDITIVE_KL = "additive KL"  # the `surrogate` of a plan that was solved on it
LEAST_CHANGE = -1 + 2.0**-24  # of E_{p_S}[r_u] - 1 in float32, where a unit leaves p_S no token


class State(Protocol):
    """The additive KL with some units removed, none at first.

    Attributes:
        singles: F({u}) of each unit [M] float64, nats per token.
    """

    singles: np.ndarray

    def marginals(self) -> np.ndarray:
        """F(S + u) - F(S) of each unit u [M] float64; without meaning for the units of S."""
        ...

    def add(self, unit: int) -> None:
        """Remove a unit too."""
        ...


class AdditiveKL:
    """The additive KL of sets of units; `Curvature.additive` makes it.

    Attributes:
        curvature: the H it belongs to; plans state the risk that H predicts, as all plans do.
        shifts: its sketch.
    """

    def __init__(self, curvature: Curvature) -> None:
        self.curvature, self.shifts = curvature, curvature.require_shifts()

    def predict(self, plan: Selection | Iterable[Unit | str | int], part: Part = "all") -> float:
        """F(S) of a plan, nats per token, on the tokens of the sketch.

        If the build removed units beforehand, they count as part of every plan.

        A plan looks too cheap at the positions that it was solved on: for its price solve on "fit"
        and predict on "price" (`shifts.Part`).

        Args:
            plan: a plan, or units, names or indices; gains are not considered.
            part: the positions of the sketch.

        Raises:
            InputError: an unknown unit or part.
            MismatchError: the plan is of other units.
        """
        return float(self._by_position(plan, part).mean())

    def standard_error(
        self, plan: Selection | Iterable[Unit | str | int], part: Part = "all"
    ) -> float:
        """The standard error of `predict` over groups of sequences; NaN with fewer than two."""
        values, groups = self._by_position(plan, part), self.shifts.of(part).groups
        names = np.unique(groups)
        if len(names) < 2:
            return float("nan")
        # a ratio of sums: groups differ in their number of positions
        residuals = np.array([(values[groups == g] - values.mean()).sum() for g in names])
        scale = len(names) / (len(names) - 1)
        return float(np.sqrt(scale * (residuals**2).sum()) / len(values))

    def _by_position(self, plan: Selection | Iterable[Unit | str | int], part: Part) -> np.ndarray:
        units = self.curvature.units
        if isinstance(plan, Selection):
            plan.require_units(units)
            plan = plan.pruned
        shifts = self.shifts.of(part)
        indices, total = units.indices(plan), np.zeros(shifts.probabilities.shape)
        if shifts.base is not None:
            total += shifts.base
        elif not indices:
            return np.zeros(len(shifts))  # not 1e-18, which would be a price on log axes
        for index in indices:
            total += shifts.values[index]
        return likelihood_ratios(total, shifts.probabilities)[1]

    def marginals(self, pruned: Iterable[Unit | str | int] = (), part: Part = "all") -> np.ndarray:
        """F(S + u) - F(S) of each unit u [M] float64, nats per token; 0 for the units of S."""
        state = self.state(part)
        chosen = list(self.curvature.units.indices(pruned))
        for index in chosen:
            state.add(index)
        found = state.marginals()
        found[chosen] = 0.0
        return found

    def state(self, part: Part = "all") -> State:
        """What a solve steps through, with no unit removed."""
        return NumpyState(self.shifts.of(part))

    def solve(
        self,
        ratio: float | Target,
        interaction_strength: float = 1.0,
        guards: Guards = FREE,
        *,
        include: UnitsLike = (),
        exclude: UnitsLike = (),
        part: Part = "all",
    ) -> Selection:
        """Algorithm 2 on F_lambda: as `solve_greedy`, with the marginals of the additive KL.

        Args:
            ratio, guards, include, exclude: as for `solve_greedy`.
            interaction_strength: lambda >= 0; 0 ranks by the KL of single units, 1 is F.
            part: the positions of the sketch to solve on.

        Returns:
            A Selection in removal order. Its predicted risk is that of H, 1/2 s^T H s; `predict`
            tells the additive KL.

        Raises: as `solve_greedy`.
        """
        strength = require_strength(interaction_strength)
        goal = ratio.budget(self.curvature.units) if isinstance(ratio, Target) else ratio
        greedy = _AdditiveGreedy(self.curvature, goal, guards, include, exclude)
        greedy.begin(self.state(part))  # after the checks of the target: it may take seconds
        greedy.run(strength)
        if greedy.stalled:
            raise greedy.infeasible()
        plan = greedy.selection(strength)
        node, edge = risk_terms(self.curvature.matrix, plan.pruned)
        return replace(plan, node_terms=node, edge_terms=edge, surrogate=ADDITIVE_KL)


class NumpyState:
    """p_S and the likelihood ratio of every unit, M x S x K of them, in memory."""

    def __init__(self, shifts: Shifts) -> None:
        self.shifts = shifts
        start, teacher = shifts.start, shifts.teacher  # p_0 both, if nothing is removed already
        self.weights = start.astype(np.float32)  # p_S [S, K], which sums to 1 at each position
        # r_u - 1 = p_u / p_start - 1 of each unit. For a small unit r_u is all but 1, and float32
        # would round away what its marginal is made of; the difference keeps its digits.
        units, positions, tokens = shifts.values.shape
        self.changes = np.empty((positions, units, tokens), np.float32)
        self.logs = np.empty(shifts.values.shape[:2])  # E_{p_0}[log r_u], which is -F at a position
        self.singles = np.empty(len(shifts.values))
        for u, values in enumerate(shifts.values):
            ratios, kl = likelihood_ratios(values, start, teacher)
            self.changes[:, u], self.logs[u], self.singles[u] = ratios - 1, -kl, kl.mean()

    def marginals(self) -> np.ndarray:
        """F(S + u) - F(S) [M]: the mean of log E_{p_S}[r_u] - E_{p_0}[log r_u]."""
        found = np.matmul(self.changes, self.weights[..., None])[..., 0]  # E_{p_S}[r_u - 1] [S, M]
        logs = np.log1p(np.maximum(found, LEAST_CHANGE), dtype=np.float64)
        means: np.ndarray = (logs - self.logs.T).mean(axis=0)
        return means

    def add(self, unit: int) -> None:
        """Remove a unit: p_S r_u, normalised."""
        weights = self.weights * (1.0 + self.changes[:, unit].astype(np.float64))
        self.weights = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


class _AdditiveGreedy(Greedy):
    """Algorithm 2 whose interactions are those of the additive KL."""

    def begin(self, state: State) -> None:
        """Take the KL of single units for 1/2 H_uu."""
        self.state, self.half = state, state.singles

    def interactions(self, g: np.ndarray, unit: int, out: np.ndarray) -> np.ndarray:
        """F(S + u) - F(S) - F({u}) of every u, once `unit` has joined S."""
        self.state.add(unit)
        return np.subtract(self.state.marginals(), self.half, out=out)
