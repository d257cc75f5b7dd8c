"""The interaction strength lambda: a default from H alone, and every plan that lambda can make.

The redundancy gate recommends a lambda before any evaluation (Section "Scope of Applicability").
The lambda path lists all plans between the diagonal selector and the full edge model, for sliders
and for choosing lambda on held-out text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from ..base.arguments import require_type
from ..base.errors import InputError
from ..base.progress import Bar
from ..curvature.matrix import Curvature
from ..curvature.saturation import Saturation
from ..curvature.uncertainty import Groups, jackknife
from ..models.families import KINDS
from .greedy import Greedy
from .guards import FREE, Guards, UnitsLike
from .selection import Selection
from .solve import solve_greedy
from .targets import require_strength

GRAY, HIGH = 0.10, 0.12  # the mean |rho| at which the two upper bands begin
_DRAWS = 100  # bootstrap draws behind the error of the balance
_PREVIEW = (
    "This H is a preview from random probes: it is infinitesimal, and its noise alone can cross a "
    "threshold. The gate says nothing on it; build H by ablations."
)


# The redundancy gate ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Gate:
    """A recommendation for lambda from the curvature alone; made by `redundancy_gate`.

    Attributes:
        redundancy: mean |rho_uv| over FFN pairs; NaN without such pairs.
        noise_floor: the part of `redundancy` that is sampling noise alone; None without groups.
        corrected: `redundancy` without its upward bias; None without groups.
        diagonal_cv: kind -> std / mean of the saliency H_uu (population std); NaN where undefined.
        edge_to_diagonal: 2 |S| |rho_bar| of Proposition "Edge-to-diagonal balance".
        edge_to_diagonal_measured: the left-hand side of that proposition, measured on S.
        band: "low", "gray" or "high"; "unknown" without FFN pairs or on a preview.
        recommended: the lambda of the band, also where undecided; None where unknown.
        reason: the numbers and the verdict in words, which begin with "Undecided" where `decided`
            is False but the band is known; then the warning of a saturated teacher, if it is one.
        decided: whether the recommendation stands within the errors; see `redundancy_gate`.
        redundancy_error: standard error of `redundancy` over groups; None without groups.
        edge_to_diagonal_error: standard error of `edge_to_diagonal_measured`; None without groups.
        saturation: how sure the teacher is on the calibration text; None if unknown.
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
    decided: bool = False
    redundancy_error: float | None = None
    edge_to_diagonal_error: float | None = None
    saturation: Saturation | None = None

    @property
    def verdict(self) -> float | None:
        """The lambda that the data support: `recommended` where `decided`, else None."""
        return self.recommended if self.decided else None


def redundancy_gate(curvature: Curvature, ratio: float = 0.2) -> Gate:
    """Recommend lambda from the FFN redundancy, before any evaluation (Section "Scope").

    The paper's thresholds conflict: its table calls < 0.10 favorable, about 0.11 gray and > 0.15
    high; its text damps from about 0.12, yet also damps Mistral-Nemo at 0.111. Here the bands are
    low below 0.10, gray from 0.10 and high from 0.12. The recommendation follows the paper: 1 when
    low, 0 otherwise. It is a default to start from, not a verdict: the best lambda also falls with
    the ratio. A preview (`Curvature.is_preview`) gets no recommendation, because the noise of its
    probes alone can cross a threshold.

    The gate is undecided, and says so, in two cases. Both need the errors, hence the groups of H;
    without groups the paper's rule stands as it is.

    - The border of 0.10 lies within the errors of the redundancy: between `corrected` (or
      `redundancy`, if lower) less two standard errors, and `redundancy` plus two.
    - It would recommend 1, but the measured balance is not above 1 by two standard errors. The
      edges are then no larger than the diagonal: they refine its order (Section "When Do
      Cross-Module Edges Help?"), and H alone does not tell whether for better or worse.

    The edge-to-diagonal balance is taken on S, the plan of `ratio` at lambda = 0 without guards.
    Predicted: 2 |S| |rho_bar|, rho_bar = mean signed rho_uv over ordered pairs u != v of S.
    Measured: median over u in S with H_uu > 0 of |sum over v in S, v != u of H_uv| / (1/2 H_uu).
    The error of the redundancy is the jackknife's, that of the balance a bootstrap's over groups
    (100 draws, S fixed).

    Args:
        curvature: H [M, M]; the noise floor needs its group Grams.
        ratio: share of removable cost of S, [0, 1).

    Raises:
        InputError: the ratio is out of range, or the matrix is a pair KL, which the thresholds are
            not made for.
    """
    require_type(curvature, Curvature, "curvature")
    curvature.require_gram("the redundancy gate")
    redundancy = curvature.ffn_redundancy
    band, strength = ("unknown", None) if curvature.is_preview else _band(redundancy)
    chosen = list(solve_greedy(curvature, ratio, 0.0).pruned)
    predicted, measured = _edge_to_diagonal(curvature, chosen)
    error, balance_error = _errors(curvature, chosen)
    gate = Gate(
        redundancy=redundancy,
        noise_floor=curvature.ffn_redundancy_noise_floor,
        corrected=curvature.ffn_redundancy_corrected,
        diagonal_cv=_variation(curvature),
        edge_to_diagonal=predicted,
        edge_to_diagonal_measured=measured,
        band=band,
        recommended=strength,
        reason=_PREVIEW,
        redundancy_error=error,
        edge_to_diagonal_error=balance_error,
        saturation=curvature.saturation,
    )
    if curvature.is_preview:
        return gate
    doubts = _doubts(gate)
    decided = strength is not None and not doubts
    return replace(gate, decided=decided, reason=_reason(gate, doubts, ratio))


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
    """Both sides of Proposition "Edge-to-diagonal balance" on a set S: predicted, measured.

    (0, 0) for fewer than two units.
    """
    size = len(chosen)
    if size < 2:
        return 0.0, 0.0
    block = np.ix_(chosen, chosen)
    mean_correlation = (curvature.correlation()[block].sum() - size) / (size * (size - 1))
    return float(2 * size * abs(mean_correlation)), _balance(curvature.matrix[block])


def _balance(curve: np.ndarray) -> float:
    """Median over u of |edges of u| / (1/2 H_uu) in a block of H; 0 without any saliency."""
    diagonal = np.diagonal(curve)
    edges = np.abs(curve.sum(axis=1) - diagonal)
    live = diagonal > 0
    return float(np.median(edges[live] / (diagonal[live] / 2))) if live.any() else 0.0


def _errors(curvature: Curvature, chosen: list[int]) -> tuple[float | None, float | None]:
    """Standard errors of the redundancy and of the measured balance; None without groups."""
    if curvature.group_grams is None:
        return None, None
    try:
        groups = Groups.of(curvature)
    except InputError:  # the matrix was edited, so these groups are not its own
        return None, None
    if len(groups) < 2:
        return None, None
    redundancy = float(jackknife(curvature, "ffn_redundancy").standard_error)
    if len(chosen) < 2:
        return redundancy, 0.0
    # a median has no jackknife error, so whole groups are drawn again
    grams = groups.grams[:, chosen][:, :, chosen]
    draws = np.random.default_rng(0).multinomial(
        len(groups), np.full(len(groups), 1 / len(groups)), size=_DRAWS
    )
    drawn = [_balance(np.tensordot(counts.astype(float), grams, axes=1)) for counts in draws]
    return redundancy, float(np.std(drawn, ddof=1))


def _doubts(gate: Gate) -> list[str]:
    """Reasons against the recommendation, as clauses; none where it stands or has no errors."""
    error, balance_error = gate.redundancy_error, gate.edge_to_diagonal_error
    if gate.recommended is None or error is None or balance_error is None:
        return []
    doubts = []
    lowest = gate.redundancy if gate.corrected is None else min(gate.redundancy, gate.corrected)
    low, high = max(0.0, lowest - 2 * error), gate.redundancy + 2 * error
    if low < GRAY < high:
        doubts.append(f"within noise and errors it may lie anywhere in {low:.3f} to {high:.3f}")
    if gate.recommended > 0 and gate.edge_to_diagonal_measured - 2 * balance_error <= 1:
        doubts.append("the edges are not clearly larger than the diagonal")
    return doubts


def _reason(gate: Gate, doubts: list[str], ratio: float) -> str:
    warning = "" if gate.saturation is None else gate.saturation.warning
    said = _verdict(gate, doubts) + _balance_words(gate, ratio)
    return f"{said} {warning}".strip()


def _verdict(gate: Gate, doubts: list[str]) -> str:
    if gate.recommended is None:
        return (
            "The FFN redundancy is NaN because there is no pair of FFN units, so the gate cannot "
            "recommend a lambda. Choose it on held-out text."
        )
    bounds = {"low": f"below {GRAY:.2f}", "gray": f"in {GRAY:.2f} to {HIGH:.2f}"}
    bound = bounds.get(gate.band, f"at least {HIGH:.2f}")
    error = "" if gate.redundancy_error is None else f" ± {gate.redundancy_error:.3f}"
    floor = gate.noise_floor
    noise = "" if floor is None else f" (sampling noise alone would give {floor:.3f})"
    advice = "use the edges in full" if gate.recommended else "ignore the edges"
    fact = (
        f"he FFN redundancy is {gate.redundancy:.3f}{error}{noise}, {bound}, the {gate.band} band: "
        f"{advice} (lambda = {gate.recommended:g})"
    )
    if not doubts:
        return f"T{fact}."
    return (
        f"Undecided: t{fact} by the paper's rule, but {', and '.join(doubts)}. Choose lambda on "
        "held-out text (choose_interaction_strength)."
    )


def _balance_words(gate: Gate, ratio: float) -> str:
    """The balance of edges and diagonal as a sentence."""
    error = gate.edge_to_diagonal_error
    spread = "" if error is None else f" ± {error:.2f}"
    return (
        f" On the plan of {ratio:.0%} the edges come to {gate.edge_to_diagonal_measured:.2f}"
        f"{spread} times the diagonal (2 |S| |rho| = {gate.edge_to_diagonal:.2f})."
    )


# The lambda path --------------------------------------------------------------------------------


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
        """The values of lambda, strictly inside (0, maximum), at which the pruned set changes."""
        return tuple(segment.start for segment in self.segments[1:])

    @property
    def distinct_sets(self) -> int:
        """Number of different pruned sets; one that returns at a larger lambda counts once."""
        plans = [segment.selection for segment in self.segments if segment.selection is not None]
        return len({frozenset(plan.pruned) for plan in plans})

    def at(self, interaction_strength: float) -> Segment:
        """Return the segment that contains a lambda.

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
    guards: Guards = FREE,
    maximum: float = 1.0,
    *,
    include: UnitsLike = (),
    exclude: UnitsLike = (),
    progress: bool = False,
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
        progress: show a bar over lambda.

    Raises:
        InputError: as for `solve_greedy`, or the maximum is out of range.
        InfeasibleError: no plan reaches the ratio under the guards at any lambda. If only greedy
            stalls, the segment states that instead.
    """
    greedy = Greedy(curvature, ratio, guards, include, exclude, keep_history=True)
    return path_of(greedy, maximum, progress)


def path_of(greedy: Greedy, maximum: float, progress: bool = False) -> LambdaPath:
    """`lambda_path` for a loop that keeps its history, whatever its interactions are."""
    maximum = require_strength(maximum)
    sweep = _Sweep(greedy)
    with _bar(progress, maximum) as bar:
        while (event := sweep.next_event()) < maximum:
            done = sweep.now
            sweep.advance(event)
            bar.update(sweep.now - done)
        sweep.close(maximum)
    return LambdaPath(tuple(sweep.segments), sweep.orders, greedy.budget.share)


class _Sweep:
    """State of the event sweep over lambda, which only ever moves up.

    Attributes:
        now: the lambda reached.
        since: the lambda from which the current order (`greedy.order`) holds.
        orders: removal orders passed through.
        events: [M] per step, the next lambda at which its winner may change; inf if none is left.
        patience: [M] per step, how far ahead to look again after an event that changed nothing.
        base: [M] a_u, the score of each unit at lambda = 0.
    """

    def __init__(self, greedy: Greedy) -> None:
        self.greedy = greedy
        self.now = self.since = 0.0
        self.orders = 1
        self.may_stall = False  # known: some plan reaches the ratio, so a stall is greedy's own
        self.segments: list[Segment] = []
        self.pruned: bytes | None = None  # the set of the last segment, as sorted indices
        self.widest = 0.0  # the longest interval of one order in the last segment
        self.events = np.full(greedy.size, np.inf)
        self.patience = np.zeros(greedy.size)
        self.base = greedy.half / greedy.costs
        self._solve(0)

    def next_event(self) -> float:
        """Return the smallest lambda at which any step may change its winner; inf if none can."""
        return float(self.events.min(initial=np.inf))

    def advance(self, event: float) -> None:
        """Move to the next event: start a new order, or look at the step again a little later."""
        self.now = max(self.now, event)  # rounding may put an event before the last one
        step = int(self.events.argmin())
        if self._winner(step) == self.greedy.order[step]:
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
            self._solve(step)  # steps before this one keep their winners, and so their events

    def close(self, stop: float) -> None:
        """Record that the current order held until `stop`, in a new segment or the last one."""
        start, width = self.since, stop - self.since
        if width == 0 and stop > 0:
            return  # another order replaced it where it began
        # orders differ more often than sets do, and a segment is one set
        pruned = np.sort(self.greedy.order).tobytes()
        if pruned != self.pruned:
            self.segments.append(Segment(start, stop, *self._outcome(start, stop)))
            self.pruned, self.widest = pruned, width
        elif width > self.widest:  # the order that holds longest stands for the set
            first = self.segments.pop().start
            self.segments.append(Segment(first, stop, *self._outcome(start, stop)))
            self.widest = width
        else:
            self.segments.append(replace(self.segments.pop(), stop=stop))

    def _outcome(self, start: float, stop: float) -> tuple[Selection | None, float | None]:
        """The plan of the current order, or None and the ratio at which greedy stalls."""
        if self.greedy.stalled:
            return None, self.greedy.realized_ratio
        # recorded at the middle of its interval, where rounding cannot give another order
        return self.greedy.selection((start + stop) / 2), None

    def _solve(self, start: int) -> None:
        """Solve again at `now` from step `start` on, and find the events of the new steps."""
        greedy = self.greedy
        # from `stop` on the new order removes the same units as the old one, so the old steps and
        # their events are kept. `run` requires that none of them changes its winner at this lambda:
        # the event was the earliest of all steps
        stop = greedy.run(self.now, start)
        if greedy.stalled and not self.may_stall:
            error = greedy.infeasible()  # expensive, so asked once: can any plan reach the ratio?
            if error.stalled_ratio is None:
                raise error
            self.may_stall = True
        if stop == len(greedy.order):  # nothing was kept: drop events beyond a shorter new order
            self.events[start:] = np.inf
        self.patience[start:stop] = self._hair()
        start = max(start, len(greedy.rules.forced))  # forced steps have no rivals
        if start < stop:
            self.events[start:stop] = self._crossings(start, stop).min(axis=1)

    def _hair(self) -> float:
        """Distance after an event at which to look at a step again for the first time."""
        return 1e-13 * max(self.now, 1e-3)  # relative, but not 0 at lambda = 0

    def _winner(self, step: int) -> int:
        """The unit that greedy would remove at this step at the current lambda."""
        greedy = self.greedy
        assert greedy.history is not None
        # the same operations in the same order as in the loop of greedy, so the same rounding
        half = np.where(greedy.until > step, greedy.half, np.inf)
        return int(((greedy.history[step] * self.now + half) / greedy.costs).argmin())

    def _crossings(self, start: int, stop: int) -> np.ndarray:
        """Lambda [stop - start, M] at which each unit overtakes the winner of each step, or inf."""
        greedy = self.greedy
        assert greedy.history is not None
        # per step: b_w - b_v and a_v - a_w of the docstring of `lambda_path`. Only a unit whose
        # score grows more slowly than the winner's can overtake it (the winner itself does not),
        # and only one that is still admissible at that step
        steps = np.arange(start, stop)
        winners = np.array(greedy.order[start:stop])
        slope = greedy.history[start:stop] / greedy.costs
        faster = slope[steps - start, winners][:, None] - slope
        ahead = self.base - self.base[winners][:, None]
        rival = (faster > 0) & (greedy.until > steps[:, None])
        return np.divide(ahead, faster, out=np.full_like(ahead, np.inf), where=rival)


def _bar(progress: bool, maximum: float) -> Any:
    form = "{desc} {n:.3f}/{total:.3f} [{elapsed}]"
    return Bar(total=maximum, desc="lambda", bar_format=form, disable=not progress)
