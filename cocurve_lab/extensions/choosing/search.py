"""Search for a plan by measured KL: swaps proposed, raced over rows, judged on held-out text.

No surrogate ranks plans perfectly, so this search measures them. It starts from a plan and keeps
the best one so far. Each round draws a few plans near it (neighbors.py) and races them (race.py). A
plan with a lower mean over all rows replaces the best. Choosing among many plans on few rows
overfits them; the start and the finalists are therefore measured again on unused rows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...base.arguments import as_float, as_int, as_list, require_type
from ...base.errors import InputError
from ...base.progress import Progress, open_bar
from ...base.text_windows import joined
from ...calibration import CalibrationSet
from ...curvature.matrix import Curvature
from ...measuring.results import Tabular
from ...measuring.risk import Meter, PlanTable
from ...models.identity import require_source
from ...solver.guards import UnitsLike
from ...solver.selection import Selection
from ..interactions.measured import Interactions
from ..repairing.repaired import Repair, RepairedMeter
from .marginals import marginals
from .neighbors import Neighbors, Units
from .race import doubling_stages, race, require_pairs, survivors

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
_TRIES = 20  # draws per wanted plan; after that the plans near the best are taken to be all known
_BACKWARD = 3  # row evaluations that a forward and a backward pass are worth
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
        gradient_rows: rows on which the first-order marginals of the best plan are taken whenever
            it changes (`marginals`); they then guide draws of units in place of the surrogate. A
            row counts as three evaluations. 0 takes none; with a repair there are none.
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
    gradient_rows: int = 0
    children: int = 8
    first_rows: int = 4
    stop_beyond: float = 1.0
    finalists: int = 3

    def __post_init__(self) -> None:
        limits = {
            "seed": 0,
            "swaps": 1,
            "gradient_rows": 0,
            "children": 1,
            "first_rows": 2,
            "finalists": 1,
        }
        for name, least in limits.items():
            object.__setattr__(self, name, as_int(getattr(self, name), name, least))
        if self.finalists > 3:
            raise InputError(f"finalists is {self.finalists}. Give 1, 2 or 3: more fit held_out.")
        for name, most in (("random_share", 1.0), ("stop_beyond", np.inf)):
            value = as_float(getattr(self, name), name)
            if not 0 <= value <= most:
                raise InputError(f"{name} is {value:g}. Give a number from 0 to {most:g}.")
            object.__setattr__(self, name, value)
        object.__setattr__(self, "exclude", tuple(as_list(self.exclude, "exclude")))


@dataclass(frozen=True, eq=False, repr=False)
class PlanSearch(Tabular):
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

    def __repr__(self) -> str:
        return f"{super().__repr__()}\nheld out: {self.held_out.source}"

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

    @property
    def table(self) -> DataFrame:
        """One row per plan on both texts: the start, then the finalists; nats per token."""
        from pandas import DataFrame

        plans = self.held_out.selections
        differences = [self.held_out.paired(place, 0) for place in range(len(plans))]
        return DataFrame(
            {
                "realized_ratio": [plan.realized_ratio for plan in plans],
                "kl": self.held_out.mean,
                "kl_error": self.held_out.standard_error,
                "difference": [difference for difference, _ in differences],
                "difference_error": [error for _, error in differences],
                "search_kl": self.searched.mean,
                "distance": [len(set(plan.pruned) ^ set(self.start.pruned)) for plan in plans],
                "chosen": [place == self.chosen for place in range(len(plans))],
            }
        )


@dataclass(frozen=True, eq=False, repr=False)
class SearchFront(Tabular):
    """Size against KL: one search per start, from one budget; made by `search_front`.

    Attributes:
        results: one PlanSearch per start, in the given order.
    """

    results: tuple[PlanSearch, ...]

    @property
    def evaluations(self) -> int:
        """Row evaluations of all searches together."""
        return sum(result.evaluations for result in self.results)

    @property
    def table(self) -> DataFrame:
        """The chosen plan of each start, as in `PlanSearch.table`."""
        from pandas import concat

        chosen = [result.table.iloc[[result.chosen]] for result in self.results]
        return concat(chosen, ignore_index=True)

    def __len__(self) -> int:
        return len(self.results)


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
    scales: Sequence[Interactions] = (),
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Progress = True,
    options: SearchOptions = SearchOptions(),
) -> PlanSearch:
    """Search for a plan of lower measured KL near a plan; not in the paper.

    Every candidate keeps the target, guards, forced units and uniformity of `selection`; removing
    any unit from it would miss the target. At the end the start and the best few are measured on
    `held_out`. The result is the start itself unless one of them is better there. During the search
    the dense model's final hidden states at the scored positions of `rows` stay in memory.

    Args:
        model: the dense model.
        selection: the start, without gains.
        rows: the rows to search on, at least two. H may have seen them.
        held_out: the rows to judge on, at least two. Neither the search nor the surrogate nor the
            plan may have seen them; the source in `.held_out` states a share that they have.
        evaluations: budget of row evaluations on `rows`: one plan on one row. The start takes one
            per row, and so does a plan that replaces it. The comparison on `held_out` is not
            counted: at most 1 + `finalists` plans on each of its rows.
        repair: a function (model, plan) that returns a new model, pruned and repaired, or a context
            manager inside which the model behaves so: `lambda model, plan: cl.repair(model, plan,
            calibration)`. Plans are then judged by KL(dense || repaired). The same plan must give
            the same model. Text it is fitted on should be neither in `rows`, where it would look
            too good, nor in `held_out`; that is not checked.
        surrogate: H [M, M] that proposes swaps; without it all swaps are random.
        scales: measured blocks or layers (`measure_interactions`) that draws may move as a whole.
        checkpoint: file of measured values on `rows`, to resume from; those on `held_out` are in a
            second file, with ".held_out" at its end. The search is drawn again from its seed and
            reads what was measured, so the result does not depend on interruptions. Use another
            file for another repair.
        progress: show the evaluations and the best KL so far; "lines" writes lines instead.
        options: a SearchOptions.

    Returns:
        A PlanSearch: `.selection`, `.kl`, `.standard_error`, `.evaluations`. Ctrl-C raises
        KeyboardInterrupt; with a checkpoint nothing is lost.
    """
    search = _Search(
        model,
        [selection],
        rows,
        held_out,
        evaluations,
        repair,
        surrogate,
        scales,
        checkpoint,
        progress,
        options,
    )
    return search.run().results[0]


def search_front(
    model: PreTrainedModel,
    starts: Sequence[Selection],
    rows: CalibrationSet,
    *,
    held_out: CalibrationSet,
    evaluations: int,
    repair: Repair | None = None,
    surrogate: Curvature | None = None,
    scales: Sequence[Interactions] = (),
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
        model, rows, held_out, repair, surrogate, scales, checkpoint, progress, options: as for
            `search_plan`.

    Returns:
        A SearchFront: `.results` has a PlanSearch per start.
    """
    search = _Search(
        model,
        starts,
        rows,
        held_out,
        evaluations,
        repair,
        surrogate,
        scales,
        checkpoint,
        progress,
        options,
    )
    return search.run()


@dataclass
class _Line:
    """The search at one size."""

    start: Selection
    neighbors: Neighbors
    drawn: set[str] = field(default_factory=set)  # fingerprints of the plans drawn so far
    whole: dict[str, Selection] = field(default_factory=dict)  # measured on all rows
    spent: int = 0  # row evaluations
    history: list[tuple[int, float]] = field(default_factory=list)  # as in `PlanSearch`
    guided: str = ""  # fingerprint of the plan whose marginals guide the draws
    done: bool = False  # nothing is left to draw, or to draw it with

    def __post_init__(self) -> None:
        self.best = self.start  # the plan of lowest mean so far
        self.drawn.add(self.start.fingerprint)


@dataclass
class _Search:
    """The state of `search_front`, whose arguments come first.

    A value that a file already held is counted in `spent` too, so that a resumed search ends where
    an uninterrupted one does.
    """

    model: PreTrainedModel
    starts: Sequence[Selection]
    text: CalibrationSet
    held_out: CalibrationSet
    budget: int
    repair: Repair | None
    surrogate: Curvature | None
    scales: Sequence[Interactions]
    checkpoint: str | os.PathLike[str] | None
    progress: Progress
    options: SearchOptions
    spent: int = 0  # row evaluations of all lines
    counted: dict[str, np.ndarray] = field(default_factory=dict)  # rows [N] bool by plan

    def __post_init__(self) -> None:
        self.budget = as_int(self.budget, "evaluations", 1)
        self.starts = as_list(self.starts, "starts")
        for start in self.starts:
            require_type(start, Selection, "a plan")
        if not self.starts:
            raise InputError("there is no plan to start from. Give at least one Selection.")
        for start in self.starts:
            require_source(self.model, start)
        for text, name in ((self.text, "rows"), (self.held_out, "held_out")):
            require_type(text, CalibrationSet, name)
            require_pairs(text, name)
        self.held_out.require_disjoint(self.text)
        if self.surrogate is not None:
            require_type(self.surrogate, Curvature, "surrogate")
            require_source(self.model, self.surrogate, what="H")
            for start in self.starts:
                start.require_own_terms(self.surrogate)
            self._compare(self.surrogate)
        self.scales = as_list(self.scales, "scales")
        for found in self.scales:
            require_type(found, Interactions, "a scale")
            require_source(self.model, found.curvature, what="a scale")
            self.starts[0].units.require_same(found.units, mine="the plan", theirs="a scale")
            self._compare(found.curvature)
        known = {self.surrogate.fingerprint} if self.surrogate is not None else set()
        for start in self.starts:  # a plan without H has seen no text that it knows of
            if start.curvature_fingerprint not in {None, *known}:
                self._compare(start)
        self.rows = len(self.text)
        self.rng = np.random.default_rng(self.options.seed)
        self.lines = [_Line(start, self._near(start)) for start in self.starts]

    def _compare(self, other: Curvature | Selection) -> None:
        """Require that `other` has not seen the held-out rows, whose source names the share."""
        self.held_out = self.held_out.require_disjoint(other)

    def run(self) -> SearchFront:
        """Search, then compare the starts and the finalists on the held-out rows."""
        bar = open_bar(self.progress, total=self.budget, desc="search", unit="evaluation")
        with bar:
            self.bar, self.meter = bar, self._meter(self.text, self.checkpoint, keep_teacher=True)
            self._spend()
        path = None if self.checkpoint is None else f"{os.fspath(self.checkpoint)}.held_out"
        judge = self._meter(self.held_out, path)
        return SearchFront(tuple(self._result(line, judge) for line in self.lines))

    def _near(self, start: Selection) -> Neighbors:
        options = self.options
        known = start.curvature_fingerprint is not None
        seen = [*[start.text_windows] * known, self.text.text_windows]
        return Neighbors(
            start,
            options.exclude,
            self.surrogate,
            most=options.swaps,
            random_share=options.random_share,
            scales=self.scales,
            seen=joined(seen),
        )

    def _meter(
        self,
        text: CalibrationSet,
        path: str | os.PathLike[str] | None,
        *,
        keep_teacher: bool = False,
    ) -> Meter:
        if self.repair is None:
            return Meter(self.model, text, checkpoint=path, keep_teacher=keep_teacher)
        return RepairedMeter(self.model, text, self.repair, checkpoint=path)

    def _result(self, line: _Line, judge: Meter) -> PlanSearch:
        """Compare the start and the finalists of a line on held-out rows."""
        mean = {mark: self._mean(plan) for mark, plan in line.whole.items()}
        base = mean.get(line.start.fingerprint, -np.inf)  # not measured: the budget was too small
        better = sorted((mark for mark in mean if mean[mark] < base), key=mean.__getitem__)
        plans = (line.start, *(line.whole[mark] for mark in better[: self.options.finalists]))
        empty = np.full((self.rows, 2), np.nan)
        known = [self.meter.memory.values.get(plan.fingerprint, empty) for plan in plans]
        searched, held_out = (
            PlanTable(plans, values[..., 0], text.source, values[..., 1])
            for values, text in (
                (np.array(known), self.text),
                (judge.measure(plans, progress=self.progress), self.held_out),
            )
        )
        repaired = self.repair is not None
        return PlanSearch(searched, held_out, line.spent, repaired, tuple(line.history))

    def _spend(self) -> None:
        """Measure the starts, then let the lines take turns until the budget is spent."""
        least = self.rows * (len(self.lines) + 1)
        if self.budget < least:
            log.warning(
                "%d evaluations judge no plan: %d starts and one more on %d rows take %d",
                *(self.budget, len(self.lines), self.rows, least),
            )
            return
        for line in self.lines:
            self._measure(line, [line.start], np.arange(self.rows))
            self._enter(line, line.start)
        while not all(line.done for line in self.lines):
            for line in self.lines:
                if not line.done:
                    self._round(line)

    def _round(self, line: _Line) -> None:
        """Draw some plans near the best, race them over the rows, and keep the winner."""
        self._guide(line)
        stages = doubling_stages(self.rows, self.options.first_rows)
        first = stages[0].stop
        # one of them must be able to reach the last row
        wanted = (self.budget - self.spent - (self.rows - first)) // first
        most = 1 if self.repair is not None else self.options.children
        children = self._draw(line, min(wanted, most))
        if not children:
            line.done = True
            return
        order = self.rng.permutation(self.rows)  # other rows first in each round

        def ahead(plans: list[Selection], stage: slice) -> list[Selection]:
            """Those not clearly behind, best first: the better half at most, within the budget."""
            values = self._values([line.best, *plans], order[: stage.stop])
            places = [place for place in survivors(values, self.options.stop_beyond) if place]
            places.sort(key=lambda place: values[place].mean())
            next_rows = min(stage.stop, self.rows - stage.stop)
            count = min(max(1, len(plans) // 2), (self.budget - self.spent) // next_rows)
            return [plans[place - 1] for place in places[:count]]

        def measure(plans: list[Selection], stage: slice) -> None:
            self._measure(line, plans, order[stage])

        for plan in race(children, stages, measure, ahead):
            self._enter(line, plan)

    def _guide(self, line: _Line) -> None:
        """Take the marginals of a new best plan on rows drawn for it, if they are asked for."""
        count = min(self.options.gradient_rows, self.rows)
        if not count or self.repair is not None or line.guided == line.best.fingerprint:
            return
        rows = self.rng.permutation(self.rows)[:count]
        line.neighbors.guide(marginals(self.model, line.best, self.text, rows.tolist()))
        line.guided = line.best.fingerprint
        self._spent(line, _BACKWARD * count)

    def _enter(self, line: _Line, plan: Selection) -> None:
        """Take in a plan measured on all rows; it is the best if its mean is the lowest."""
        line.whole[plan.fingerprint] = plan
        mean = self._mean(plan)
        if plan is line.start or mean < self._mean(line.best):
            line.best = plan
            line.history.append((self.spent, mean))
            begun = [line for line in self.lines if line.history]
            best = ", ".join(f"{line.history[-1][1]:.4g}" for line in begun)
            starts = ", ".join(f"{line.history[0][1]:.4g}" for line in begun)
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
        ranked = sorted(self.lines, key=lambda other: other.start.pruned_cost)
        place = next(n for n, other in enumerate(ranked) if other is line)
        beside = ranked[max(0, place - 1) : place] + ranked[place + 1 : place + 2]
        if beside and not line.start.counted and self.rng.random() < _NEIGHBOR_SHARE:
            other = beside[int(self.rng.integers(len(beside)))]
            return line.neighbors.draw(other.best.pruned, self.rng, least=0)
        return line.neighbors.draw(line.best.pruned, self.rng)

    def _measure(self, line: _Line, plans: list[Selection], rows: np.ndarray) -> None:
        """Measure plans on rows and count what was not counted yet."""
        count = 0
        for plan in plans:
            done = self.counted.setdefault(plan.fingerprint, np.zeros(self.rows, dtype=bool))
            count += int((~done[rows]).sum())
            done[rows] = True
        self.meter.measure(plans, rows.tolist())
        self._spent(line, count)

    def _spent(self, line: _Line, count: int) -> None:
        self.spent += count
        line.spent += count
        self.bar.update(count)

    def _values(self, plans: list[Selection], rows: np.ndarray | slice) -> np.ndarray:
        """KL [plans, rows] of values measured before."""
        return np.array([self.meter.memory.values[p.fingerprint][rows, 0] for p in plans])

    def _mean(self, plan: Selection) -> float:
        """Mean KL over all rows, nats per token; of a plan measured on all of them."""
        return float(self._values([plan], slice(None)).mean())
