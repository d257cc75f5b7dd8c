"""Search for a plan by measured KL: swaps proposed, raced over rows, judged on held-out text.

No surrogate ranks plans perfectly, so this search measures them. It starts from a plan and keeps
the best one so far. Each round draws a few plans near it (neighbors.py) and races them
(racing.py). A plan with a lower mean over all rows replaces the best. Choosing among many plans on
few rows overfits them; the start and the finalists are therefore measured again on unused rows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...base.arguments import as_int
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
from .neighbors import Neighbors
from .racing import doubling_stages, race, require_pairs, survivors

if TYPE_CHECKING:
    from pandas import DataFrame
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)
_CHILDREN = 8  # plans per round; with a repair 1, because each repair makes a model
_FIRST_ROWS = 4  # of the first stage of a round; each further stage doubles the rows done
# a plan that is behind the best of its round by more than this many paired standard errors at the
# end of a stage is dropped; at least half are dropped anyway
_STOP_BEYOND = 1.0
# plans compared with the start on held-out rows: the KL of the chosen one is the lowest of so many,
# which makes it a little too low
_FINALISTS = 3
_TRIES = 20  # draws per wanted plan; after that the plans near the best are taken to be all known


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
    """

    seed: int = 0
    exclude: UnitsLike = ()
    swaps: int = 3
    random_share: float = 0.5

    def __post_init__(self) -> None:
        as_int(self.seed, "seed")
        as_int(self.swaps, "swaps", 1)
        if not 0 <= self.random_share <= 1:
            raise InputError(f"random_share is {self.random_share}. Give a number from 0 to 1.")


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
            counted: at most four plans on each of its rows.
        repair: a function (model, plan) that returns a new model, pruned and repaired: `lambda
            model, plan: cl.repair(model, plan, calibration)`. Plans are then judged by KL(dense ||
            repaired). The same plan must give the same model. Text it is fitted on should be
            neither in `rows`, where it would look too good, nor in `held_out`; that is not checked.
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
        selection,
        rows,
        held_out,
        evaluations,
        repair,
        surrogate,
        scales,
        checkpoint,
        options,
    )
    return search.run(progress)


@dataclass
class _Search:
    """The state of `search_plan`, whose arguments come first.

    A value that a file already held is counted in `spent` too, so that a resumed search ends where
    an uninterrupted one does.
    """

    model: PreTrainedModel
    start: Selection
    text: CalibrationSet
    held_out: CalibrationSet
    budget: int
    repair: Repair | None
    surrogate: Curvature | None
    scales: Sequence[Interactions]
    checkpoint: str | os.PathLike[str] | None
    options: SearchOptions
    spent: int = 0  # row evaluations
    drawn: set[str] = field(default_factory=set)  # fingerprints of the plans drawn so far
    whole: dict[str, Selection] = field(default_factory=dict)  # measured on all rows
    history: list[tuple[int, float]] = field(default_factory=list)  # as in `PlanSearch`

    def __post_init__(self) -> None:
        self.budget = as_int(self.budget, "evaluations", 1)
        require_source(self.model, self.start)
        require_pairs(self.text, "rows")
        require_pairs(self.held_out, "held_out")
        self.held_out.require_disjoint(self.text)
        guides = [found.curvature for found in self.scales]
        if self.surrogate is not None:
            self.start.require_own_terms(self.surrogate)
            guides.append(self.surrogate)
        for guide in guides:
            require_source(self.model, guide, what="a surrogate or a scale")
            self._compare(guide)
        # a plan without H has seen no text that it knows of
        if self.start.curvature_fingerprint not in {None, *(guide.fingerprint for guide in guides)}:
            self._compare(self.start)
        self.rows = len(self.text)
        self.rng = np.random.default_rng(self.options.seed)
        self.neighbors = self._near()
        self.best = self.start  # the plan of lowest mean so far
        self.drawn.add(self.start.fingerprint)

    def _compare(self, other: Curvature | Selection) -> None:
        """Require that `other` has not seen the held-out rows, whose source names the share."""
        self.held_out = self.held_out.require_disjoint(other)

    def _near(self) -> Neighbors:
        seen: list[str | None] = [self.text.text_windows]
        if self.start.curvature_fingerprint is not None:
            seen.append(self.start.text_windows)
        return Neighbors(
            self.start,
            self.options.exclude,
            self.surrogate,
            most=self.options.swaps,
            random_share=self.options.random_share,
            scales=self.scales,
            seen=joined(seen),
        )

    def run(self, progress: Progress) -> PlanSearch:
        """Search, then compare the start and the finalists on the held-out rows."""
        bar = open_bar(progress, total=self.budget, desc="search", unit="evaluation")
        with bar:
            self.bar, self.meter = bar, self._meter(self.text, self.checkpoint, keep_teacher=True)
            self._spend()
        path = None if self.checkpoint is None else f"{os.fspath(self.checkpoint)}.held_out"
        plans = (self.start, *self._finalists())
        empty = np.full((self.rows, 2), np.nan)
        values = self.meter.memory.values
        searched = np.array([values.get(plan.fingerprint, empty) for plan in plans])
        judged = self._meter(self.held_out, path).measure(plans, progress=progress)
        return PlanSearch(
            PlanTable(plans, searched[..., 0], self.text.source, searched[..., 1]),
            PlanTable(plans, judged[..., 0], self.held_out.source, judged[..., 1]),
            self.spent,
            self.repair is not None,
            tuple(self.history),
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

    def _finalists(self) -> list[Selection]:
        """The plans of lowest mean on the rows of the search, of those below the start."""
        mean = {mark: self._mean(plan) for mark, plan in self.whole.items()}
        base = mean.get(self.start.fingerprint, -np.inf)  # not measured: the budget was too small
        better = sorted((mark for mark in mean if mean[mark] < base), key=mean.__getitem__)
        return [self.whole[mark] for mark in better[:_FINALISTS]]

    def _spend(self) -> None:
        """Measure the start, then race plans round by round until the budget is spent."""
        if self.budget < 2 * self.rows:
            log.warning(
                "%d evaluations judge no plan: the start and one more on %d rows take %d",
                self.budget,
                self.rows,
                2 * self.rows,
            )
            return
        self._measure([self.start], np.arange(self.rows))
        self._enter(self.start)
        stages = doubling_stages(self.rows, _FIRST_ROWS)
        first = stages[0].stop
        most = 1 if self.repair is not None else _CHILDREN
        while True:
            # one of them must be able to reach the last row
            wanted = (self.budget - self.spent - (self.rows - first)) // first
            children = self._draw(min(wanted, most))
            if not children:
                return
            self._race(children, stages)

    def _race(self, children: list[Selection], stages: list[slice]) -> None:
        """Race plans drawn near the best over the rows, and keep the winner."""
        order = self.rng.permutation(self.rows)  # other rows first in each round

        def ahead(plans: list[Selection], stage: slice) -> list[Selection]:
            """Those not clearly behind, best first: the better half at most, within the budget."""
            values = self._values([self.best, *plans], order[: stage.stop])
            places = [place for place in survivors(values, _STOP_BEYOND) if place]
            places.sort(key=lambda place: values[place].mean())
            next_rows = min(stage.stop, self.rows - stage.stop)
            count = min(max(1, len(plans) // 2), (self.budget - self.spent) // next_rows)
            return [plans[place - 1] for place in places[:count]]

        def measure(plans: list[Selection], stage: slice) -> None:
            self._measure(plans, order[stage])

        for plan in race(children, stages, measure, ahead):
            self._enter(plan)

    def _enter(self, plan: Selection) -> None:
        """Take in a plan measured on all rows; it is the best if its mean is the lowest."""
        self.whole[plan.fingerprint] = plan
        mean = self._mean(plan)
        if plan is self.start or mean < self._mean(self.best):
            self.best = plan
            self.history.append((self.spent, mean))
            self.bar.set_description(f"search: KL {mean:.4g} (start {self.history[0][1]:.4g})")

    def _draw(self, count: int) -> list[Selection]:
        """Draw up to `count` plans that were not drawn before."""
        found: list[Selection] = []
        for _ in range(_TRIES * max(0, count)):
            if len(found) == count:
                break
            units = self.neighbors.draw(self.best.pruned, self.rng)
            if units is None:
                continue
            plan = self.neighbors.selection(units, self.surrogate)
            if plan.fingerprint not in self.drawn:
                self.drawn.add(plan.fingerprint)
                found.append(plan)
        return found

    def _measure(self, plans: list[Selection], rows: np.ndarray) -> None:
        """Measure plans on rows that they were not measured on yet, and count them."""
        self.meter.measure(plans, rows.tolist())
        self.spent += len(plans) * len(rows)
        self.bar.update(len(plans) * len(rows))

    def _values(self, plans: list[Selection], rows: np.ndarray | slice) -> np.ndarray:
        """KL [plans, rows] of values measured before."""
        return np.array([self.meter.memory.values[p.fingerprint][rows, 0] for p in plans])

    def _mean(self, plan: Selection) -> float:
        """Mean KL over all rows, nats per token; of a plan measured on all of them."""
        return float(self._values([plan], slice(None)).mean())
