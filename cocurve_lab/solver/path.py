"""The lambda path: every plan between the diagonal selector and the full edge model."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..base.arguments import require_type
from ..base.errors import InputError
from ..curvature.matrix import Curvature
from .greedy import Greedy, fill
from .guards import FREE, Guards, Rules, UnitsLike
from .selection import Selection
from .targets import Target, require_strength

BLOCK = 50_000  # crossings found at once: arrays that stay in the cache of the processor


@dataclass(frozen=True)
class Segment:
    """One plan and the half-open interval start <= lambda < stop on which greedy makes it.

    Attributes:
        start, stop: the interval; the last segment of a path includes its stop.
        selection: the plan; None where greedy stalls. Several removal orders may prune the same
            set; this is the order that holds longest. Its `interaction_strength` is the middle of
            the interval of that order, so `solve_greedy` at that lambda gives the plan again.
        stalled_ratio: the share of removable cost at which greedy stalls; None if it does not.
    """

    start: float
    stop: float
    selection: Selection | None
    stalled_ratio: float | None = None


@dataclass(frozen=True)
class LambdaPath:
    """Every distinct plan of `solve_greedy` for lambda in [0, maximum]; made by `lambda_path`.

    Attributes:
        segments: tile [0, maximum] without gaps; neighbors have different pruned sets.
        orders: number of removal orders passed through (several may prune the same set).
    """

    segments: tuple[Segment, ...]
    orders: int
    requested_ratio: float

    @property
    def maximum(self) -> float:
        return self.segments[-1].stop

    @property
    def breakpoints(self) -> tuple[float, ...]:
        """The values of lambda, strictly inside (0, maximum), at which the pruned set changes."""
        return tuple(segment.start for segment in self.segments[1:])

    @property
    def distinct_sets(self) -> int:
        """Number of different pruned sets; one that returns at a larger lambda counts once."""
        plans = [segment.selection for segment in self.segments if segment.selection is not None]
        return len({frozenset(plan.pruned) for plan in plans})

    def at(self, interaction_strength: float) -> Segment:
        """Return the segment that contains a lambda; raise InputError outside [0, maximum]."""
        if not 0 <= interaction_strength <= self.maximum:
            raise InputError(
                f"lambda {interaction_strength} is outside this path's [0, {self.maximum:g}]. "
                "Compute the path with a larger maximum."
            )
        starts = [segment.start for segment in self.segments]
        return self.segments[bisect_right(starts, interaction_strength) - 1]

    def __len__(self) -> int:
        return len(self.segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self.segments)

    def __repr__(self) -> str:
        stalls = sum(segment.selection is None for segment in self.segments)
        return (
            f"LambdaPath at ratio {self.requested_ratio:g}: {len(self)} segments over lambda in "
            f"[0, {self.maximum:g}], {self.distinct_sets} distinct plans from {self.orders} orders"
            + (f", {stalls} segments where greedy stalls" if stalls else "")
        )


def lambda_path(
    curvature: Curvature,
    ratio: float | Target,
    guards: Guards = FREE,
    maximum: float = 1.0,
    *,
    include: UnitsLike = (),
    exclude: UnitsLike = (),
) -> LambdaPath:
    """Find all plans of `solve_greedy` over lambda in [0, maximum], by an exact event sweep.

    A removal order holds on an interval of lambda, because guards, budget and g depend only on the
    units already removed, and lambda enters only the argmin. At each step the score of u is the
    line a_u + lambda b_u, with a = (1/2 H_uu) / c_u and b = g_u / c_u. Candidate v therefore
    overtakes the winner w at lambda = (a_v - a_w) / (b_w - b_v), if b_v < b_w. The first such event
    over all steps ends the order, and only the steps from there on are solved again.

    The path equals `solve_greedy` at every lambda farther than rounding (about 1e-9) from a
    breakpoint. The exception is two units that score alike at every lambda (one is a copy of the
    other): rounding then decides between them, once per interval on the path and anew at each
    lambda in `solve_greedy`.

    Args:
        curvature, ratio, guards, include, exclude: as for `solve_greedy`.
        maximum: the largest lambda, finite and >= 0.

    Returns:
        The path. Where only greedy stalls, a segment states it; if no plan reaches the ratio at any
        lambda, InfeasibleError is raised.

    Example:
        >>> import numpy as np
        >>> from cocurve_lab import Curvature, Unit, UnitSet, lambda_path
        >>> units = UnitSet(tuple(Unit("ffn", 0, i, i, i + 1, 10) for i in range(4)))
        >>> H = np.diag([1.0, 1.1, 1.5, 9.0])
        >>> H[0, 1] = H[1, 0] = 1.0
        >>> for part in lambda_path(Curvature(H, units), 0.5):
        ...     print(f"{part.start:.1f} to {part.stop:.1f}: {part.selection.pruned}")
        0.0 to 0.2: (0, 1)
        0.2 to 1.0: (0, 2)
    """
    require_type(curvature, Curvature, "curvature")
    rules = Rules(curvature.units, guards, ratio, include, exclude)
    maximum = require_strength(maximum)
    sweep = _Sweep(curvature, rules)
    while sweep.events.min(initial=np.inf) < maximum:
        sweep.advance()
    sweep.close(maximum)
    return LambdaPath(tuple(sweep.segments), sweep.orders, rules.budget.share)


class _Sweep(Greedy):
    """The event sweep over lambda, which only ever moves up: Algorithm 2 that keeps its steps.

    Attributes:
        now: the lambda reached.
        since: the lambda from which the current order holds.
        orders: removal orders passed through.
        history: [M + 1, M], g before each step.
        opens: [M + 1, M], 1/2 H_uu of the units admissible before each step, +inf for all others.
        events: [M] per step, the next lambda at which its winner may change; inf if none is left.
        patience: [M] per step, how far ahead to look again after an event that changed nothing.
        base: [M] a_u, the score of each unit at lambda = 0.
    """

    def __init__(self, curvature: Curvature, rules: Rules) -> None:
        super().__init__(curvature, rules)
        self.now = self.since = 0.0
        self.orders = 1
        self.segments: list[Segment] = []
        self.pruned: bytes | None = None  # the set of the last segment, as sorted indices
        self.widest = 0.0  # the longest interval of one order in the last segment
        size = len(self.half)
        self.history, self.opens = np.zeros((size + 1, size)), np.zeros((size + 1, size))
        self.events, self.patience = np.full(size, np.inf), np.zeros(size)
        self.base = self.half / self.divisors
        self.run(0.0)
        if self.stalled:
            error = self.infeasible()
            if error.stalled_ratio is None:  # no plan reaches the ratio at any lambda
                raise error
        self._find_events(0, len(self.order))

    def restart(self, strength: float) -> None:
        """Begin anew at a lambda, before the included units."""
        super().restart(strength)
        self._keep()

    def remove(self, u: int) -> None:
        """Remove a unit, and keep the state after it."""
        super().remove(u)
        self._keep()

    def _keep(self) -> None:
        self.history[len(self.order)] = self.g
        self.opens[len(self.order)] = self.open

    def advance(self) -> None:
        """Move to the next event: start a new order, or look at the step again a little later."""
        step = int(self.events.argmin())
        event = float(self.events[step])
        self.now = max(self.now, event)  # rounding may put an event before the last one
        # the same operations in the same order as in `cheapest`, so the same rounding
        score = (self.history[step] * self.now + self.opens[step]) / self.divisors
        if score.argmin() == self.order[step]:
            # the division that gave the event rounds differently from the scores, which may change
            # places a hair later. So look again after 1e-13, 2e-13, 4e-13, ... (relative): doubling
            # bounds the number of looks, and stopping at the next crossing skips none
            times = self._crossings(step, step + 1)[0]
            crossing = (times == event).any()  # otherwise this was itself such a later look
            self.patience[step] = self._hair() if crossing else 2 * self.patience[step]
            later = times[times > self.now].min(initial=np.inf)
            self.events[step] = min(self.now + self.patience[step], later)
        else:
            self.close(self.now)
            self.orders += self.now > self.since  # an order of zero width was never in force
            self.since = self.now
            # steps before this one keep their winners, and so their events
            self._find_events(step, self._resume(step))

    def close(self, stop: float) -> None:
        """Record that the current order held until `stop`, in a new segment or the last one."""
        start, width = self.since, stop - self.since
        if width == 0 and stop > 0:
            return  # another order replaced it where it began
        # orders differ more often than sets do, and a segment is one set
        pruned = np.sort(self.order).tobytes()
        plan, stalled = None, None
        if pruned == self.pruned:
            last = self.segments.pop()
            start, plan, stalled = last.start, last.selection, last.stalled_ratio
        if pruned != self.pruned or width > self.widest:
            # the order that holds longest stands for the set. It is recorded at the middle of its
            # interval, where rounding cannot give another order
            self.pruned, self.widest = pruned, width
            plan = None if self.stalled else self.selection((self.since + stop) / 2)
            stalled = self.pruned_share if self.stalled else None
        self.segments.append(Segment(start, stop, plan, stalled))

    def _resume(self, start: int) -> int:
        """Run at `now` from step `start` on; the steps before it stay.

        Once the new order has removed the same set as the old one at that step, the rest of the old
        order is kept too, with its events: g, caps and cost depend on the set alone. None of those
        steps changes its winner at this lambda, for the event was the earliest of all steps.

        Returns:
            The step from which on the old order was kept.
        """
        order, edges, stalled = self.order[start:], self.edges[start:], self.stalled
        del self.order[start:], self.edges[start:]
        self.strength = self.now
        self.g, self.open = self.history[start].copy(), self.opens[start].copy()
        self.spent = self.pruned_cost
        self.room = self.rules.room_after(self.order)
        self.spare = self.rules.spare_after(self.order)
        differs: set[int] = set()  # units that only one of the two orders has removed

        def rejoined() -> bool:
            return len(self.order) > start > 0 and not differs

        def take(u: int) -> None:
            self.remove(u)
            place = len(self.order) - start - 1
            differs.symmetric_difference_update({u} ^ set(order[place : place + 1]))

        self.stalled = not fill(self.cheapest(), take, lambda: rejoined() or self.enough())
        kept = len(self.order)
        if rejoined():
            self.order += order[kept - start :]
            self.edges += edges[kept - start :]
            self.stalled = stalled
        else:  # drop events beyond a shorter new order
            self.events[start:] = np.inf
        return kept

    def _find_events(self, start: int, stop: int) -> None:
        """Find the events of the new steps."""
        self.patience[start:stop] = self._hair()
        start = max(start, len(self.rules.forced))  # forced steps have no rivals
        steps = BLOCK // len(self.history) + 1
        for first in range(start, stop, steps):
            last = min(first + steps, stop)
            self.events[first:last] = self._crossings(first, last).min(axis=1)

    def _hair(self) -> float:
        """Distance after an event at which to look at a step again for the first time."""
        return 1e-13 * max(self.now, 1e-3)  # relative, but not 0 at lambda = 0

    def _crossings(self, start: int, stop: int) -> np.ndarray:
        """Lambda [stop - start, M] at which each unit overtakes the winner of each step, or inf."""
        # per step: b_w - b_v and a_v - a_w of the docstring of `lambda_path`. Only a unit whose
        # score grows more slowly than the winner's can overtake it (the winner itself does not),
        # and only one that is still admissible at that step
        steps = np.arange(start, stop)
        winners = np.array(self.order[start:stop])
        slope = self.history[start:stop] / self.divisors
        faster = slope[steps - start, winners][:, None] - slope
        ahead = self.base - self.base[winners][:, None]
        rival = (faster > 0) & np.isfinite(self.opens[start:stop])
        return np.divide(ahead, faster, out=np.full_like(ahead, np.inf), where=rival)
