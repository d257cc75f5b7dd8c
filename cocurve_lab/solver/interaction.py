"""How much to trust the edges: the redundancy gate, and every plan lambda can make.

The gate reads a default off the matrix alone (Section "Scope of Applicability"); the path lists all
plans between the diagonal selector and the full edge model, for sliders and for choosing lambda on
held-out text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..curvature.matrix import Curvature
from ..errors import InputError
from ..models.families import KINDS
from .greedy import Greedy, require_strength
from .guards import Guards, UnitsLike
from .selection import Selection
from .solve import solve_greedy

GRAY, HIGH = 0.10, 0.12
_PREVIEW = (
    "This H is a preview from random probes: infinitesimal, and noisy enough to cross a threshold "
    "by itself. The gate says nothing on it; build H by ablations."
)


@dataclass(frozen=True)
class Gate:
    """What the curvature alone says about lambda; made by `redundancy_gate`.

    Attributes:
        redundancy: mean |rho_uv| over FFN pairs; NaN without such pairs.
        noise_floor: what sampling alone puts into `redundancy`; None without groups.
        corrected: `redundancy` without its upward bias; None without groups.
        diagonal_cv: kind -> std / mean of the saliency H_uu (population std); NaN where undefined.
        edge_to_diagonal: 2 |S| |rho_bar| of Proposition "Edge-to-diagonal balance".
        edge_to_diagonal_measured: the left-hand side of that proposition, measured on S.
        band: "low", "gray", "high", or "unknown" without FFN pairs and on a preview.
        recommended: lambda; None where unknown.
        reason: one sentence with the numbers.
    """

    redundancy: float
    noise_floor: float | None
    corrected: float | None
    diagonal_cv: dict[str, float]
    edge_to_diagonal: float
    edge_to_diagonal_measured: float
    band: Literal["low", "gray", "high", "unknown"]
    recommended: float | None
    reason: str


def redundancy_gate(curvature: Curvature, ratio: float = 0.2) -> Gate:
    """Recommend lambda from the FFN redundancy, before any evaluation (Section "Scope").

    The paper's thresholds conflict: its table calls < 0.10 favorable, about 0.11 gray and > 0.15
    high; its text damps from about 0.12, yet also damps Mistral-Nemo at 0.111. We say low below
    0.10, gray from 0.10, high from 0.12, and recommend what the paper did: 1 when low, 0 otherwise.
    A default to start from, not a verdict: the best lambda also falls with the ratio. On a preview
    (`Curvature.is_preview`) it recommends nothing: the noise of probes alone can cross a threshold.

    The edge-to-diagonal balance is taken on S, the plan of `ratio` at lambda = 0 without guards.
    Predicted: 2 |S| |rho_bar|, rho_bar = mean signed rho_uv over ordered pairs u != v of S.
    Measured: median over u in S with H_uu > 0 of |sum over v in S, v != u of H_uv| / (1/2 H_uu).

    Args:
        curvature: H [M, M]; with group Grams the noise floor is known too.
        ratio: share of removable cost of S, [0, 1).

    Raises:
        InputError: the ratio is out of range.
    """
    redundancy = curvature.ffn_redundancy
    floor = curvature.ffn_redundancy_noise_floor
    band, strength = ("unknown", None) if curvature.is_preview else _band(redundancy)
    chosen = list(solve_greedy(curvature, ratio, 0.0).pruned)
    predicted, measured = _edge_to_diagonal(curvature, chosen)
    return Gate(
        redundancy=redundancy,
        noise_floor=floor,
        corrected=curvature.ffn_redundancy_corrected,
        diagonal_cv=_variation(curvature),
        edge_to_diagonal=predicted,
        edge_to_diagonal_measured=measured,
        band=band,
        recommended=strength,
        reason=_PREVIEW if curvature.is_preview else _reason(redundancy, floor, band, strength),
    )


@dataclass(frozen=True)
class Segment:
    """One plan and the half-open interval start <= lambda < stop on which greedy makes it.

    Attributes:
        start, stop: the interval; the last segment of a path includes its stop.
        selection: the plan; None where greedy stalls. Several removal orders may prune its set:
            this is the one that holds longest, and its `interaction_strength` is the middle of
            where it does, so that `solve_greedy` there gives it again.
        stalled_ratio: the share of removable cost at which it stalls; None where it does not.
    """

    start: float
    stop: float
    selection: Selection | None
    stalled_ratio: float | None = None


@dataclass(frozen=True)
class LambdaPath:
    """Every distinct plan of `solve_greedy` for lambda in [0, maximum]; made by `lambda_path`.

    Attributes:
        segments: tile [0, maximum] without gaps; neighbours have different pruned sets.
        orders: number of removal orders passed through (several may prune the same set).
        requested_ratio: share of removable cost asked for.
    """

    segments: tuple[Segment, ...]
    orders: int
    requested_ratio: float

    @property
    def maximum(self) -> float:
        return self.segments[-1].stop

    @property
    def breakpoints(self) -> tuple[float, ...]:
        """The lambda strictly inside (0, maximum) at which the pruned set changes."""
        return tuple(segment.start for segment in self.segments[1:])

    @property
    def distinct_sets(self) -> int:
        """Number of different plans; a set that comes back later counts once."""
        plans = [segment.selection for segment in self.segments if segment.selection is not None]
        return len({frozenset(plan.pruned) for plan in plans})

    def at(self, interaction_strength: float) -> Segment:
        """The segment that holds a lambda.

        Raises:
            InputError: it lies outside [0, maximum].
        """
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
    ratio: float,
    guards: Guards = Guards(),  # noqa: B008  (frozen, so sharing the default is safe)
    maximum: float = 1.0,
    *,
    include: UnitsLike = (),
    exclude: UnitsLike = (),
    progress: bool = False,
) -> LambdaPath:
    """All plans of `solve_greedy` over lambda in [0, maximum], by an exact event sweep.

    A removal order holds on an interval of lambda, because everything but the argmin depends on the
    units already removed. At each step the score of u is the line a_u + lambda b_u with
    a = (1/2 H_uu) / c_u and b = g_u / c_u, so candidate v overtakes the winner w at
    (a_v - a_w) / (b_w - b_v), where b_v < b_w. The first such event over all steps ends the order;
    only the steps from there on are solved again.

    Equal to `solve_greedy` at every lambda farther than rounding (about 1e-9) from a breakpoint,
    unless two units score alike at every lambda (one the copy of the other): which of them goes is
    then up to rounding, at each lambda anew in a solve, once for an interval on the path.

    Args:
        curvature, ratio, guards, include, exclude: as for `solve_greedy`.
        maximum: the largest lambda, finite and >= 0.
        progress: show a bar over lambda.

    Raises:
        InputError: as for `solve_greedy`, and for a bad maximum.
        InfeasibleError: no plan reaches the ratio under the guards, whatever lambda. Where only
            greedy stalls, the segment says so instead.
    """
    require_strength(maximum)
    greedy = Greedy(curvature, ratio, guards, include, exclude, keep_history=True)
    sweep = _Sweep(greedy)
    with _bar(progress, maximum) as bar:
        while (event := sweep.next_event()) < maximum:
            done = sweep.now
            sweep.advance(event)
            bar.update(sweep.now - done)
        sweep.close(maximum)
    return LambdaPath(tuple(sweep.segments), sweep.orders, float(ratio))


class _Sweep:
    """The state of the event sweep: the current order, since when it holds, and what ends it."""

    def __init__(self, greedy: Greedy) -> None:
        self.greedy = greedy
        self.now = self.since = 0.0
        self.orders = 1
        self.may_stall = False  # known: some plan reaches the ratio, so a stall is greedy's own
        self.segments: list[Segment] = []
        self.pruned: bytes | None = None  # the set of the last segment, as sorted indices
        self.widest = 0.0  # the longest interval of one order in it
        self.events = np.full(greedy.size, np.inf)  # per step, the lambda of its next event
        self.patience = np.zeros(greedy.size)
        self.base = greedy.half / greedy.costs
        self._solve(0)

    def next_event(self) -> float:
        return float(self.events.min(initial=np.inf))

    def advance(self, event: float) -> None:
        """Go to the next event: a new order, or a second look a little later.

        Rounding can put an event a hair before the lambda at which floating-point scores really
        change places. Then the step is looked at again after 1e-13, 2e-13, 4e-13, ... (relative),
        but no later than its next event, after which this begins anew: the sweep always moves and
        skips nothing.
        """
        self.now = max(self.now, event)
        step = int(self.events.argmin())
        if self._winner(step) == self.greedy.order[step]:
            times = self._crossings(step, step + 1)[0]
            crossing = (times == event).any()  # else one more look after the last
            self.patience[step] = self._hair() if crossing else 2 * self.patience[step]
            later = times[times > self.now].min(initial=np.inf)
            self.events[step] = min(self.now + self.patience[step], later)
        else:
            self.close(self.now)
            self.orders += self.now > self.since
            self.since = self.now
            self._solve(step)

    def close(self, stop: float) -> None:
        """The current order held until `stop`: append its segment or lengthen the last one."""
        start, width = self.since, stop - self.since
        if width == 0 and stop > 0:
            return  # superseded where it began
        pruned = np.sort(self.greedy.order).tobytes()
        if pruned != self.pruned:
            self.segments.append(Segment(start, stop, *self._outcome(start, stop)))
            self.pruned, self.widest = pruned, width
        elif width > self.widest:
            first = self.segments.pop().start
            self.segments.append(Segment(first, stop, *self._outcome(start, stop)))
            self.widest = width
        else:
            self.segments.append(replace(self.segments.pop(), stop=stop))

    def _outcome(self, start: float, stop: float) -> tuple[Selection | None, float | None]:
        """The plan or the ratio of the stall; lambda mid-way, where rounding changes nothing."""
        if self.greedy.stalled:
            return None, self.greedy.realized_ratio
        return self.greedy.selection((start + stop) / 2), None

    def _solve(self, start: int) -> None:
        greedy = self.greedy
        stop = greedy.run(self.now, start)  # later steps stand, and so do their events
        if greedy.stalled and not self.may_stall:
            error = greedy.infeasible()
            if error.stalled_ratio is None:
                raise error
            self.may_stall = True
        if stop == len(greedy.order):
            self.events[start:] = np.inf
        self.patience[start:stop] = self._hair()
        start = max(start, len(greedy.rules.forced))  # forced steps have no rivals
        if start < stop:
            self.events[start:stop] = self._crossings(start, stop).min(axis=1)

    def _hair(self) -> float:
        """How far after an event a step is looked at again for the first time."""
        return 1e-13 * max(self.now, 1e-3)

    def _winner(self, step: int) -> int:
        """What greedy would remove at this step at the current lambda; the very sum of its loop."""
        greedy = self.greedy
        assert greedy.history is not None
        half = np.where(greedy.until > step, greedy.half, np.inf)
        return int(((greedy.history[step] * self.now + half) / greedy.costs).argmin())

    def _crossings(self, start: int, stop: int) -> np.ndarray:
        """Lambda [stop - start, M] at which each unit overtakes the winner of each step, or inf."""
        greedy = self.greedy
        assert greedy.history is not None
        steps = np.arange(start, stop)
        winners = np.array(greedy.order[start:stop])
        slope = greedy.history[start:stop] / greedy.costs
        faster = slope[steps - start, winners][:, None] - slope
        ahead = self.base - self.base[winners][:, None]
        rival = (faster > 0) & (greedy.until > steps[:, None])
        return np.divide(ahead, faster, out=np.full_like(ahead, np.inf), where=rival)


def _bar(progress: bool, maximum: float) -> Any:
    from tqdm.auto import tqdm  # imported late: only a path has a bar

    form = "{desc} {n:.3f}/{total:.3f} [{elapsed}]"
    return tqdm(total=maximum, desc="lambda", bar_format=form, disable=not progress)


def _band(redundancy: float) -> tuple[Literal["low", "gray", "high", "unknown"], float | None]:
    if np.isnan(redundancy):
        return "unknown", None
    if redundancy < GRAY:
        return "low", 1.0
    return ("gray" if redundancy < HIGH else "high"), 0.0


def _variation(curvature: Curvature) -> dict[str, float]:
    """Coefficient of variation of the saliency per kind; NaN for no unit or no saliency."""
    saliency, kinds = curvature.saliency, curvature.units.kinds
    parts = {kind: saliency[kinds == kind] for kind in KINDS}
    return {
        kind: float(part.std() / part.mean()) if part.any() else float("nan")
        for kind, part in parts.items()
    }


def _edge_to_diagonal(curvature: Curvature, chosen: list[int]) -> tuple[float, float]:
    """Both sides of Proposition "Edge-to-diagonal balance" on a set S; (0, 0) without pairs."""
    size = len(chosen)
    if size < 2:
        return 0.0, 0.0
    block = np.ix_(chosen, chosen)
    mean_correlation = (curvature.correlation()[block].sum() - size) / (size * (size - 1))
    curve = curvature.matrix[block]
    diagonal = np.diagonal(curve)
    edges = np.abs(curve.sum(axis=1) - diagonal)
    live = diagonal > 0
    measured = np.median(edges[live] / (diagonal[live] / 2)) if live.any() else 0.0
    return float(2 * size * abs(mean_correlation)), float(measured)


def _reason(redundancy: float, floor: float | None, band: str, strength: float | None) -> str:
    if strength is None:
        return (
            "The FFN redundancy is NaN because there is no pair of FFN units, so the gate has "
            "nothing to read: choose lambda on held-out text."
        )
    bounds = {"low": f"below {GRAY:.2f}", "gray": f"in {GRAY:.2f} to {HIGH:.2f}"}
    bound = bounds.get(band, f"at least {HIGH:.2f}")
    noise = "" if floor is None else f" (sampling alone reads {floor:.3f})"
    advice = "take the edges in full" if strength else "damp the edges away"
    return (
        f"The FFN redundancy is {redundancy:.3f}{noise}, {bound}, "
        f"the {band} band: {advice} (lambda = {strength:g})."
    )
