"""Search of a plan by measured KL: swaps proposed, raced over rows, and judged on held-out text.

No surrogate ranks plans perfectly, so this search measures them. It starts from a plan and keeps
the best one so far. Each round draws a few plans near it (swaps.py), measures them on a few rows,
drops those that are behind, and measures the rest on more rows. A plan with a lower mean over all
rows replaces the best. Many plans compared on few rows fit those rows, so the start and the last
few are at the end compared on rows that the search did not use.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base.arguments import as_float, as_int, as_list, require_type
from ...base.errors import InputError
from ...base.progress import Progress, open_bar
from ...base.tables import Folded
from ...calibration import CalibrationSet
from ...curvature.matrix import Curvature
from ...measuring.risk import Meter, PlanTable
from ...solver.guards import UnitsLike
from ...solver.selection import Selection
from ..repairing.repaired import Repair, RepairedMeter
from .neighbors import Neighbors, Units
from .racing import survivors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
_TRIES = 20  # draws per wanted plan; after that the plans near the best are taken to be all known
_NEIGHBOR_SHARE = 0.25  # of the draws of a front, those from the plan of a neighboring size


# Options and results ------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchOptions:
    """Options of a search.

    Attributes:
        seed: seed of all draws. The same seed and inputs give the same result.
        exclude: units that may not enter a plan. Repeat those given to `solve_greedy`: a Selection
            does not record them.
        swaps: the most units that a draw takes out of the best plan.
        random_share: share of the draws that are random although there is a surrogate, [0, 1].
        children: plans per round. With a repair it is 1, because each repair makes a model.
        first_rows: rows of the first stage of a round, at least 2. Each further stage doubles the
            rows done. Rows are drawn anew for each round.
        stop_beyond: a plan that is behind the best of its round by more than this many paired
            standard errors at the end of a stage is dropped. At least half are dropped anyway.
        finalists: plans compared with the start on `held_out`, 1 to 3. The KL of the chosen one is
            the lowest of so many, which makes it a little too low.
    """

    seed: int = 0
    exclude: UnitsLike = ()
    swaps: int = 3
    random_share: float = 0.5
    children: int = 8
    first_rows: int = 4
    stop_beyond: float = 1.0
    finalists: int = 3

    def __post_init__(self) -> None:
        limits = {"seed": 0, "swaps": 1, "children": 1, "first_rows": 2, "finalists": 1}
        for name, least in limits.items():
            number = as_int(getattr(self, name), name)
            if number < least:
                raise InputError(f"{name} is {number}. Give at least {least}.")
            object.__setattr__(self, name, number)
        if self.finalists > 3:
            raise InputError(f"finalists is {self.finalists}. Give 1, 2 or 3: more fit held_out.")
        for name, most in (("random_share", 1.0), ("stop_beyond", np.inf)):
            value = as_float(getattr(self, name), name)
            if not 0 <= value <= most:
                raise InputError(f"{name} is {value:g}. Give a number from 0 to {most:g}.")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "exclude", tuple(as_list(self.exclude, "exclude")))


@dataclass(frozen=True, eq=False)
class PlanSearch(Folded):
    """The plan found, and how it compares with the start; made by `search_plan`.

    Attributes:
        searched: KL of the start and of the finalists [1 + finalists, rows] on the rows of the
            search. It is too low for the finalists, which were chosen on these rows.
        held_out: the same plans on the held-out rows.
        evaluations: row evaluations of the search: one plan on one row, each counted once.
        repaired: whether the plans were measured after a repair.
        history: (evaluations, lowest mean KL on the rows of the search), at the start and at each
            improvement.
    """

    searched: PlanTable
    held_out: PlanTable
    evaluations: int
    repaired: bool
    history: tuple[tuple[int, float], ...]

    @cached_property
    def chosen(self) -> int:
        """Place in both tables of the plan of lowest mean on `held_out`; 0 is the start."""
        return int(self.held_out.mean.argmin())  # the first of equal ones, so the start if it ties

    @property
    def selection(self) -> Selection:
        """The chosen plan: the best finalist if it is better on `held_out`, else the start."""
        return self.held_out.selections[self.chosen]

    @property
    def start(self) -> Selection:
        """The plan that the search started from."""
        return self.held_out.selections[0]

    @property
    def improved(self) -> bool:
        """Whether a plan was found that is better than the start on `held_out`."""
        return self.chosen > 0

    @property
    def kl(self) -> float:
        """Held-out KL of the chosen plan, after its repair if there is one; nats per token.

        It is the lowest of up to four means over these rows, so a little too low.
        """
        return float(self.held_out.mean[self.chosen])

    @property
    def standard_error(self) -> float:
        """Standard error of `kl` over rows, nats per token."""
        return float(self.held_out.standard_error[self.chosen])

    @property
    def difference(self) -> tuple[float, float]:
        """Held-out KL of the chosen plan minus that of the start, and its paired standard error."""
        return self.held_out.paired(self.chosen, 0)

    @property
    def distance(self) -> int:
        """Number of units that only one of the two plans prunes, the chosen one and the start."""
        return len(set(self.selection.pruned) ^ set(self.start.pruned))

    def row(self) -> dict[str, Any]:
        """Return one flat dict, ready for a table."""
        difference, error = self.difference
        return {
            "realized_ratio": self.selection.realized_ratio,
            "kl": self.kl,
            "kl_error": self.standard_error,
            "start_kl": float(self.held_out.mean[0]),
            "difference": difference,
            "difference_error": error,
            "search_kl": float(self.searched.mean[self.chosen]),
            "search_start_kl": float(self.searched.mean[0]),
            "distance": self.distance,
            "evaluations": self.evaluations,
            "improved": self.improved,
        }

    def __repr__(self) -> str:
        row = self.row()
        rows = self.held_out.kl.shape[1]
        found = (
            f"{self.distance} units differ from the start"
            if self.improved
            else "the start, because no plan found is better on held-out rows"
        )
        return (
            f"PlanSearch: KL {self.kl:.5f} ± {self.standard_error:.5f} nats per token"
            f"{' after repair' * self.repaired} on {rows} held-out rows ({found})\n"
            f"  start {row['start_kl']:.5f}, difference {row['difference']:+.5f} ± "
            f"{row['difference_error']:.5f}; {self.selection.realized_ratio:.2%} removed\n"
            f"  on the rows of the search {row['search_kl']:.5f}, start "
            f"{row['search_start_kl']:.5f}; {self.evaluations:,} row evaluations"
        )


@dataclass(frozen=True, eq=False)
class SearchFront:
    """Size against KL: one search per start, from one budget; made by `search_front`.

    Attributes:
        results: one PlanSearch per start, in the given order.
    """

    results: tuple[PlanSearch, ...]

    @property
    def evaluations(self) -> int:
        """Row evaluations of all searches together."""
        return sum(result.evaluations for result in self.results)

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict per start, ready for a DataFrame."""
        return [result.row() for result in self.results]

    def __len__(self) -> int:
        return len(self.results)

    def __repr__(self) -> str:
        lines = [f"SearchFront({len(self)} sizes, {self.evaluations:,} row evaluations)"]
        for row in self.rows():
            lines.append(
                f"  removed {row['realized_ratio']:6.2%}  KL {row['kl']:.5f} ± "
                f"{row['kl_error']:.5f}  against start {row['difference']:+.5f} ± "
                f"{row['difference_error']:.5f}"
            )
        return "\n".join(lines)


# Searches -----------------------------------------------------------------------------------------


def search_plan(
    model: PreTrainedModel,
    selection: Selection,
    rows: CalibrationSet,
    *,
    held_out: CalibrationSet,
    evaluations: int,
    repair: Repair | None = None,
    surrogate: Curvature | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Progress = True,
    options: SearchOptions = SearchOptions(),
) -> PlanSearch:
    """Search for a plan of lower measured KL near a plan; not in the paper.

    Plans keep the target, guards, forced units and uniformity of `selection`, and hold no
    superfluous unit. At the end the start and the best few are measured on `held_out`. The result
    is the start itself unless one of them is better there. During the search the dense model's
    final hidden states at the scored positions of `rows` stay in memory.

    Args:
        model: the dense model.
        selection: the start, without gains.
        rows: the rows to search on, at least two. H may have seen them.
        held_out: the rows to judge on, at least two; neither the search nor the surrogate may have
            seen them.
        evaluations: budget of row evaluations on `rows`: one plan on one row. The start takes one
            per row, and so does a plan that replaces it. The comparison on `held_out` is not
            counted: at most 1 + `finalists` plans on each of its rows.
        repair: a function (model, plan) that returns a new model, pruned and repaired, or a context
            manager inside which the model behaves so: `lambda model, plan: cl.repair(model, plan,
            calibration)`. Plans are then judged by KL(dense || repaired). The same plan must give
            the same model. Text it is fitted on should be neither in `rows`, where it would look
            too good, nor in `held_out`; that is not checked.
        surrogate: H [M, M] that proposes swaps; without it all swaps are random.
        checkpoint: file of measured values on `rows`, to resume from; those on `held_out` are in a
            second file, with ".held_out" at its end. The search is drawn again from its seed and
            reads what was measured, so the result does not depend on interruptions. Use another
            file for another repair.
        progress: show the evaluations and the best KL so far; "lines" writes lines instead.
        options: a SearchOptions.

    Returns:
        A PlanSearch: `.selection`, `.kl`, `.standard_error`, `.evaluations`. Ctrl-C raises
        KeyboardInterrupt; with a checkpoint nothing is lost.

    Raises:
        InputError: a budget below 1, fewer than two rows, a start that has gains, misses its
            target or breaks its guards, or a repair that returns no model.
        MismatchError: rows are shared, the plan or surrogate is of other units, or the file is of
            another model, text or repair.
        NumericalError: NaN or infinite logits.
    """
    return search_front(
        model,
        [selection],
        rows,
        held_out=held_out,
        evaluations=evaluations,
        repair=repair,
        surrogate=surrogate,
        checkpoint=checkpoint,
        progress=progress,
        options=options,
    ).results[0]


def search_front(
    model: PreTrainedModel,
    starts: Sequence[Selection],
    rows: CalibrationSet,
    *,
    held_out: CalibrationSet,
    evaluations: int,
    repair: Repair | None = None,
    surrogate: Curvature | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Progress = True,
    options: SearchOptions = SearchOptions(),
) -> SearchFront:
    """Search at several sizes in one run: the front between size and KL.

    The searches take turns on one budget and share all measurements. Some plans of each are drawn
    from the best plan of the next smaller or larger size, with units added or dropped.

    Args:
        starts: plans of one model, one per size.
        evaluations: budget of all searches together.
        model, rows, held_out, repair, surrogate, checkpoint, progress, options: as for
            `search_plan`.

    Returns:
        A SearchFront: `.results` has a PlanSearch per start.

    Raises: as `search_plan`; InputError too if there is no start.
    """
    budget = as_int(evaluations, "evaluations")
    if budget < 1:
        raise InputError("evaluations is 0. Give at least 1: the plans to measure times the rows.")
    starts = as_list(starts, "starts")
    for start in starts:
        require_type(start, Selection, "a plan")
    if not starts:
        raise InputError("there is no plan to start from. Give at least one Selection.")
    for text, name in ((rows, "rows"), (held_out, "held_out")):
        require_type(text, CalibrationSet, name)
        if len(text) < 2:
            raise InputError(
                f"{name} has {len(text)} row, but a paired standard error needs two. Give more."
            )
    held_out.require_disjoint(rows)
    if surrogate is not None:
        require_type(surrogate, Curvature, "surrogate")
        held_out.require_disjoint(surrogate)
    lines = [_Line(start, _neighbors(start, surrogate, options)) for start in starts]
    bar = open_bar(progress, total=budget, desc="search", unit="evaluation")
    with bar:
        meter = _meter(model, rows, repair, checkpoint, keep_teacher=True)
        race = _Race(meter, lines, budget, options, bar, surrogate)
        race.run()
    final = None if checkpoint is None else f"{os.fspath(checkpoint)}.held_out"
    judge = _meter(model, held_out, repair, final)
    return SearchFront(tuple(_result(line, race, judge, progress) for line in lines))


def _neighbors(start: Selection, surrogate: Curvature | None, options: SearchOptions) -> Neighbors:
    return Neighbors(
        start,
        options.exclude,
        surrogate,
        most=options.swaps,
        random_share=options.random_share,
    )


def _meter(
    model: PreTrainedModel,
    text: CalibrationSet,
    repair: Repair | None,
    checkpoint: str | os.PathLike[str] | None,
    *,
    keep_teacher: bool = False,
) -> Meter:
    if repair is None:
        return Meter(model, text, checkpoint=checkpoint, keep_teacher=keep_teacher)
    return RepairedMeter(model, text, repair, checkpoint=checkpoint)


def _result(line: _Line, race: _Race, judge: Meter, progress: Progress) -> PlanSearch:
    """Compare the start and the finalists of a search on held-out rows."""
    mean = {mark: race.mean(plan) for mark, plan in line.whole.items()}
    base = mean.get(line.start.fingerprint, -np.inf)  # not measured: the budget was too small
    better = sorted((mark for mark in mean if mean[mark] < base), key=mean.__getitem__)
    finalists = [line.whole[mark] for mark in better[: race.options.finalists]]
    plans = (line.start, *finalists)
    values = judge.measure(plans, progress=progress)
    return PlanSearch(
        race.table(plans),
        PlanTable(plans, values[..., 0], judge.text.source, values[..., 1]),
        line.spent,
        race.one_at_a_time,
        tuple(line.history),
    )


# The race -----------------------------------------------------------------------------------------


@dataclass
class _Line:
    """The search at one size.

    Attributes:
        start: its start.
        neighbors: draws plans near a plan, and makes them.
        best: the plan of lowest mean so far.
        drawn: fingerprints of the plans drawn so far.
        whole: the plans measured on all rows, by fingerprint.
        spent: row evaluations.
        history: as in `PlanSearch`.
        done: nothing is left to draw, or to draw it with.
    """

    start: Selection
    neighbors: Neighbors
    best: Selection = field(init=False)
    drawn: set[str] = field(default_factory=set)
    whole: dict[str, Selection] = field(default_factory=dict)
    spent: int = 0
    history: list[tuple[int, float]] = field(default_factory=list)
    done: bool = False

    def __post_init__(self) -> None:
        self.best = self.start
        self.drawn.add(self.start.fingerprint)


class _Race:
    """Draws and measures plans for some lines until the budget is spent.

    Attributes:
        spent: row evaluations of all lines. A value that a file already held counts too, so that a
            resumed search ends where an uninterrupted one does.
        known: rows [N] bool on which each plan has been counted, by fingerprint.
    """

    def __init__(
        self,
        meter: Meter,
        lines: list[_Line],
        budget: int,
        options: SearchOptions,
        bar: Any,
        surrogate: Curvature | None,
    ) -> None:
        self.meter, self.lines, self.budget, self.options = meter, lines, budget, options
        self.bar, self.surrogate = bar, surrogate
        self.rng = np.random.default_rng(options.seed)
        self.rows, self.spent = len(meter.text), 0
        self.known: dict[str, np.ndarray] = {}
        self.one_at_a_time = isinstance(meter, RepairedMeter)

    def run(self) -> None:
        """Measure the starts, then let the lines take turns."""
        if self.budget < self.rows * (len(self.lines) + 1):
            log.warning(
                "%d evaluations judge no plan: %d starts and one more on %d rows take %d",
                *(self.budget, len(self.lines), self.rows, self.rows * (len(self.lines) + 1)),
            )
            return
        for line in self.lines:
            self._measure(line, [line.start], np.arange(self.rows))
            self._enter(line, line.start)
        while not all(line.done for line in self.lines):
            for line in self.lines:
                if not line.done:
                    self._round(line)

    def mean(self, plan: Selection) -> float:
        """Mean KL over all rows, nats per token; of a plan measured on all of them."""
        return float(self.meter.memory.values[plan.fingerprint][:, 0].mean())

    def table(self, plans: tuple[Selection, ...]) -> PlanTable:
        """KL of plans on the rows of the search; NaN where it was not measured."""
        empty = np.full((self.rows, 2), np.nan)
        values = np.array([self.meter.memory.values.get(p.fingerprint, empty) for p in plans])
        return PlanTable(plans, values[..., 0], self.meter.text.source, values[..., 1])

    def _round(self, line: _Line) -> None:
        """Draw some plans near the best, race them over the rows, and keep the winner."""
        first = min(self.options.first_rows, self.rows)
        # one of them must be able to reach the last row
        wanted = (self.budget - self.spent - (self.rows - first)) // first
        alive = self._draw(line, min(wanted, 1 if self.one_at_a_time else self.options.children))
        if not alive:
            line.done = True
            return
        order = self.rng.permutation(self.rows)  # other rows first in each round
        start, stop = 0, first
        while alive:
            alive = alive[: (self.budget - self.spent) // (stop - start)]
            self._measure(line, alive, order[start:stop])
            if stop == self.rows:
                break
            alive = self._ahead(line.best, alive, order[:stop])
            start, stop = stop, min(2 * stop, self.rows)
        for plan in alive:
            self._enter(line, plan)

    def _ahead(self, best: Selection, plans: list[Selection], rows: np.ndarray) -> list[Selection]:
        """The plans that run on: not clearly behind, the better half at most; best first."""
        values = self._values([best, *plans], rows)
        places = [place for place in survivors(values, self.options.stop_beyond) if place]
        places.sort(key=lambda place: values[place].mean())
        return [plans[place - 1] for place in places[: max(1, len(plans) // 2)]]

    def _enter(self, line: _Line, plan: Selection) -> None:
        """Take in a plan measured on all rows; it is the best if its mean is the lowest."""
        line.whole[plan.fingerprint] = plan
        mean = self.mean(plan)
        if plan is line.start or mean < self.mean(line.best):
            line.best = plan
            line.history.append((self.spent, mean))
            best = ", ".join(f"{self.mean(line.best):.4g}" for line in self.lines if line.history)
            starts = ", ".join(f"{line.history[0][1]:.4g}" for line in self.lines if line.history)
            self.bar.set_description(f"search: KL {best} (start {starts})")

    def _draw(self, line: _Line, count: int) -> list[Selection]:
        """Draw up to `count` plans that this line has not drawn before."""
        found: list[Selection] = []
        for _ in range(_TRIES * max(0, count)):
            if len(found) == count:
                break
            units = self._draw_one(line)
            if units is None:
                continue
            plan = line.neighbors.selection(units, self.surrogate)
            if plan.fingerprint not in line.drawn:
                line.drawn.add(plan.fingerprint)
                found.append(plan)
        return found

    def _draw_one(self, line: _Line) -> Units | None:
        others = self._beside(line)
        if others and not line.start.uniform and self.rng.random() < _NEIGHBOR_SHARE:
            other = others[int(self.rng.integers(len(others)))]
            return line.neighbors.draw(other.best.pruned, self.rng, least=0)
        return line.neighbors.draw(line.best.pruned, self.rng)

    def _beside(self, line: _Line) -> list[_Line]:
        """The lines of the next smaller and the next larger size."""
        ranked = sorted(self.lines, key=lambda other: other.start.pruned_cost)
        place = next(n for n, other in enumerate(ranked) if other is line)
        return ranked[max(0, place - 1) : place] + ranked[place + 1 : place + 2]

    def _values(self, plans: list[Selection], rows: np.ndarray) -> np.ndarray:
        """KL [plans, rows] of values measured before."""
        return np.array([self.meter.memory.values[p.fingerprint][rows, 0] for p in plans])

    def _measure(self, line: _Line, plans: list[Selection], rows: np.ndarray) -> None:
        """Measure plans on rows and count what was not counted yet."""
        count = 0
        for plan in plans:
            known = self.known.setdefault(plan.fingerprint, np.zeros(self.rows, dtype=bool))
            count += int((~known[rows]).sum())
            known[rows] = True
        self.meter.measure(plans, rows.tolist())
        self.spent += count
        line.spent += count
        self.bar.update(count)
