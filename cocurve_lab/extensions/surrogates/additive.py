"""The additive KL as a surrogate of its own: its prediction for a plan, and its greedy plan.

F(S) = E KL(p_0 || softmax(z_0 + sum of d_u over S)) with the shifts d_u of single units, from the
sketch that a build keeps (shifts.py). Where the teacher is sure of its token F sees what
its second order, H, cannot. With the strength lambda between F and its node part,

    F_lambda(S) = (1 - lambda) sum of F({u}) + lambda F(S),

the greedy loop is Algorithm 2 with other interactions: g_u = F(S + u) - F(S) - F({u}).

Every marginal is evaluated at every step: a lower bound from the convexity of F reads as much
memory and saved nothing. additive_torch.py evaluates them with torch, for a GPU. This departs from
the paper, which solves on H.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy
from typing import Protocol

import numpy as np

from ...curvature.matrix import Curvature
from ...models.units import Unit
from ...solver.greedy import Greedy
from ...solver.guards import FREE, Guards, UnitsLike
from ...solver.path import LambdaPath
from ...solver.selection import Selection
from ...solver.targets import Target, require_strength
from .pair_kl import likelihood_ratios
from .shifts import Part, Shifts

ADDITIVE_KL = "additive KL"  # the `surrogate` of a plan that was solved on it
Plan = Selection | Iterable[Unit | str | int]  # a plan, or units, their names or indices
EachStep = Callable[[], object]  # called before each step of a solve; what it raises ends the solve
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
        self._starts: dict[Part, State] = {}  # the likelihood ratios take as long as a solve

    def predict(self, plan: Plan, part: Part = "all") -> float:
        """Predict F(S) of a plan, nats per token, on the tokens of the sketch.

        If the build removed units beforehand, they count as part of every plan. For an unbiased
        price, solve on "fit" and predict on "price" (`shifts.Part`).

        Args:
            plan: its gains are not considered.
            part: the positions of the sketch.
        """
        return float(self._by_position(plan, part).mean())

    def standard_error(self, plan: Plan, part: Part = "all") -> float:
        """Return the standard error of `predict` over groups of sequences; NaN below two groups."""
        values, groups = self._by_position(plan, part), self.shifts.of(part).groups
        names = np.unique(groups)
        if len(names) < 2:
            return float("nan")
        # a ratio of sums: groups differ in their number of positions
        residuals = np.array([(values[groups == g] - values.mean()).sum() for g in names])
        scale = len(names) / (len(names) - 1)
        return float(np.sqrt(scale * (residuals**2).sum()) / len(values))

    def _by_position(self, plan: Plan, part: Part) -> np.ndarray:
        indices, shifts = self._indices(plan), self.shifts.of(part)
        if shifts.base is None and not indices:
            return np.zeros(len(shifts))  # not 1e-18, which would be a price on log axes
        total = _removed_before(shifts)
        for index in indices:
            total += shifts.values[index]
        return likelihood_ratios(total, shifts.probabilities)[1]

    def _indices(self, plan: Plan) -> list[int]:
        units = self.curvature.units
        if isinstance(plan, Selection):
            plan.require_units(units)
            plan = plan.pruned
        return list(units.indices(plan))

    def marginals(self, pruned: Plan = (), part: Part = "all") -> np.ndarray:
        """Return F(S + u) - F(S) of each unit u [M] float64, nats per token; 0 for units of S."""
        state, chosen = self.state(part), self._indices(pruned)
        for index in chosen:
            state.add(index)
        found = state.marginals()
        found[chosen] = 0.0
        return found

    def along(self, plan: Plan, part: Part = "all") -> np.ndarray:
        """Return F of each prefix of a removal order [len(plan) + 1] float64, nats per token."""
        indices, shifts = self._indices(plan), self.shifts.of(part)
        total, found = _removed_before(shifts), [self.predict((), part)]
        for index in indices:
            total += shifts.values[index]
            found.append(float(likelihood_ratios(total, shifts.probabilities)[1].mean()))
        return np.array(found)

    def singles(self, part: Part = "all") -> np.ndarray:
        """Return F({u}) of each unit [M] float64, nats per token, one unit in memory at a time."""
        shifts = self.shifts.of(part)
        kls = (likelihood_ratios(v, shifts.start, shifts.teacher)[1] for v in shifts.values)
        return np.array([kl.mean() for kl in kls])

    def state(self, part: Part = "all") -> State:
        """Return a state with no unit removed, for a solve to step through."""
        if part not in self._starts:
            self._starts[part] = self._start(part)
        return copy(self._starts[part])

    def _start(self, part: Part) -> State:
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
        each_step: EachStep | None = None,
    ) -> Selection:
        """Solve by Algorithm 2 on F_lambda: as `solve_greedy`, with the marginals of this KL.

        Args:
            ratio, guards, include, exclude: as for `solve_greedy`.
            interaction_strength: lambda >= 0; 0 ranks by the KL of single units, 1 is F.
            part: the positions of the sketch to solve on.
            each_step: called before each step; an exception it raises ends the solve.

        Returns:
            A Selection in removal order. Its predicted risk is that of H, 1/2 s^T H s; `predict`
            returns the additive KL.
        """
        strength = require_strength(interaction_strength)
        goal = ratio.budget(self.curvature.units) if isinstance(ratio, Target) else ratio
        greedy = _AdditiveGreedy(self.curvature, goal, guards, include, exclude)
        return greedy.begin(self, part, each_step).solve(strength)

    def longest(
        self,
        guards: Guards,
        upto: float,
        interaction_strength: float = 1.0,
        *,
        part: Part = "all",
        each_step: EachStep | None = None,
    ) -> Selection:
        """Return the longest plan that greedy reaches on F_lambda, as `solve.longest` does on H."""
        strength = require_strength(interaction_strength)
        greedy = _AdditiveGreedy(self.curvature, upto, guards)
        return greedy.begin(self, part, each_step).longest(strength)

    def lambda_path(
        self,
        ratio: float,
        guards: Guards = FREE,
        maximum: float = 1.0,
        *,
        part: Part = "all",
        each_step: EachStep | None = None,
        progress: bool = False,
    ) -> LambdaPath:
        """Find all plans of `solve` over lambda in [0, maximum], by the sweep of `lambda_path`.

        The sweep is valid because F's marginals, too, depend on the set alone. They are float32
        sums, so the path equals `solve` farther than about 1e-6 from a breakpoint.
        """
        greedy = _AdditiveGreedy(self.curvature, ratio, guards, keep_history=True)
        return path_of(greedy.begin(self, part, each_step), maximum, progress)


def _removed_before(shifts: Shifts) -> np.ndarray:
    """The shift of the units that the build had removed [S, K] float64; 0 without any."""
    total = np.zeros(shifts.probabilities.shape)
    if shifts.base is not None:
        total += shifts.base
    return total


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
        """Remove a unit: p_S r_u, normalized."""
        weights = self.weights * (1.0 + self.changes[:, unit].astype(np.float64))
        self.weights = (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


class _AdditiveGreedy(Greedy):
    """Algorithm 2 whose interactions are those of the additive KL."""

    def begin(
        self, surrogate: AdditiveKL, part: Part, each_step: EachStep | None
    ) -> _AdditiveGreedy:
        """Take the KL of single units for 1/2 H_uu; call it last, since a state takes seconds."""
        self.state = surrogate.state(part)
        self.start, self.half = copy(self.state), self.state.singles
        self.each_step = each_step
        return self

    def interactions(self, g: np.ndarray, unit: int, out: np.ndarray) -> np.ndarray:
        """F(S + u) - F(S) - F({u}) of every u, once `unit` has joined S."""
        if self.each_step is not None:
            self.each_step()
        self.state.add(unit)
        return np.subtract(self.state.marginals(), self.half, out=out)

    def _rewind(self, start: int) -> FormerRun:
        former = super()._rewind(start)
        self.state = copy(self.start)
        for unit in self.order:
            self.state.add(unit)
        return former

    def selection(self, strength: float) -> Selection:
        """The plan of the last run, whose predicted risk is that of H."""
        plan = super().selection(strength).predicted_by(self.curvature)
        return plan.with_made(matrix=ADDITIVE_KL)
