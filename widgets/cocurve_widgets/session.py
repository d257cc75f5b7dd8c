"""The session: the plan, chosen unit, measured plans and thread that instruments share."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from traitlets import HasTraits, Tuple

import cocurve_lab as cl
from cocurve_lab.base.arguments import require_type
from cocurve_lab.extensions.pretrained.kept import KeptPlans, kept_plans
from cocurve_lab.measuring.results import mean_and_error
from cocurve_lab.models.units import units_like
from cocurve_lab.solver.solve import longest

from .traits import PlanOfUnits, UnitIndex, UnitIndices

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

AnyCurvature = cl.Curvature | str | os.PathLike[str]  # H, or its file
MOST_RATIO = 0.6  # curves and sliders of the ratio end here
MOST_KEPT = 64  # removal orders, a few kB each


class Cancelled(cl.CocurveError):
    """Raised inside a job that was asked to stop."""


class CancelToken(threading.Event):
    """A request to stop, which a running job checks wherever it can stop."""

    cancel = threading.Event.set
    cancelled = property(threading.Event.is_set)

    def check(self) -> None:
        """Raise Cancelled if the job was asked to stop."""
        self.rest(0.0)

    def rest(self, seconds: float) -> None:
        """Wait, unless the job is asked to stop meanwhile; then raise Cancelled at once."""
        if self.wait(max(0.0, seconds)):
            raise Cancelled("stopped on request.")


Job = Callable[[CancelToken], None]
Failed = Callable[[Exception], None]


class Letter(NamedTuple):
    """A job in the mailbox: its kind, what to run, and who hears of its error."""

    kind: str
    token: CancelToken
    job: Job
    failed: Failed


class Mailbox:
    """A thread for slow work, one job at a time; of each kind of job it keeps only the newest.

    The thread lives as long as there is work, so an idle session holds no thread and can be
    garbage-collected. It is a daemon: a kernel does not wait for its job at the end.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._letters: list[Letter] = []  # the first one runs, the others wait

    def submit(self, kind: str, job: Job, failed: Failed) -> CancelToken:
        """Run `job(token)` after the running job; replace and cancel earlier jobs of its kind.

        Args:
            kind: name of the kind; a newer job of a kind makes an older one pointless.
            job: called on the thread with its token.
            failed: called with whatever the job raises, except Cancelled.
        """
        token = CancelToken()
        with self._lock:
            # A dragged slider asks 60 times a second and only its last place counts. Were they
            # queued, the instrument would go on solving long after the hand has stopped.
            self.cancel(kind)
            self._letters.append(Letter(kind, token, job, failed))
            if len(self._letters) == 1:
                self._start()
        return token

    def cancel(self, kind: str) -> None:
        """Drop the waiting job of a kind and ask the running one to stop."""
        with self._lock:
            for letter in self._letters:
                if letter.kind == kind:
                    letter.token.cancel()
            self._letters[1:] = [letter for letter in self._letters[1:] if letter.kind != kind]

    def busy(self, kind: str) -> bool:
        """Whether a job of this kind waits or runs."""
        with self._lock:
            return any(letter.kind == kind for letter in self._letters)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until all work is done; return False after `timeout` seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._letters, timeout)

    def _start(self) -> None:
        threading.Thread(target=self._work, name="cocurve", daemon=True).start()

    def _work(self) -> None:
        """Run the first job. The next one has a thread of its own, even where this one died."""
        letter = self._letters[0]
        try:
            letter.token.check()  # it may be dropped before it begins
            letter.job(letter.token)
        except Cancelled:
            pass
        except Exception as error:
            letter.failed(error)
        finally:
            with self._lock:
                del self._letters[0]
                if self._letters:
                    self._start()
                self._lock.notify_all()


@dataclass(frozen=True)
class MeasuredPlan:
    """The measured KL of one plan on one text.

    Attributes:
        selection: the plan.
        risk: mean KL(teacher || masked) over the text, full vocabulary, nats per token.
        standard_error: of `risk`, over sequences; NaN with a single one.
        text: name of the text it was measured on.
        abilities: right answers by ability, as (right, asked); empty where none were counted.
        rows: rows of the text that `risk` is the mean of; None where that was not kept.
        measured_at: when, in seconds since 1970; None where that was not kept.
        edge: of a plan of two units, the KL beyond that of each alone, and its standard error over
            the rows; None for other plans, and where the units alone were not measured.
        by_row: KL of each row, nats per token; empty where it was not kept.
    """

    selection: cl.Selection
    risk: float
    standard_error: float
    text: str
    abilities: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    rows: int | None = None
    measured_at: float | None = None
    edge: tuple[float, float] | None = None
    by_row: tuple[float, ...] = ()

    @classmethod
    def of_rows(
        cls, selection: cl.Selection, kl: np.ndarray, text: str, **facts: Any
    ) -> MeasuredPlan:
        """A plan with its KL on every row so far; `facts` are the other attributes."""
        known: dict[str, Any] = {"rows": len(kl), "by_row": tuple(kl.tolist())}
        return cls(selection, *mean_and_error(kl), text, **known | facts)


def text_name(text: cl.CalibrationSet) -> str:
    """The name of a held-out set in `MeasuredPlan.text`."""
    return f"{text.source}, {len(text)} x {text.seq_len} tokens (id {text.fingerprint[:6]})"


def opened(curvature: AnyCurvature) -> cl.Curvature:
    """An H, read from its file where a path is given."""
    if isinstance(curvature, (str, os.PathLike)):
        return cl.Curvature.load(curvature)
    require_type(curvature, cl.Curvature, "curvature")
    return curvature


def _shown(curvature: cl.Curvature) -> tuple[Any, ...]:
    """What instruments show of H: two that differ in any of it cannot share a session."""
    alone = curvature.single_unit_risk
    return (
        curvature.fingerprint,
        curvature.matrix_name,
        str(curvature.provenance.get("model_name", "")),
        None if alone is None else alone.tobytes(),
    )


class Session(HasTraits):
    """One curvature, optionally its model, and the plan and unit that its instruments show.

    A plan has one road: whoever moves a control calls `solve`, which remembers, and sets
    `selection`, which all views follow.

    Instruments on the same curvature share one session unless given another. Its traits can be
    observed and linked like any widget's.

    Args:
        curvature: H [M, M].
        model, tokenizer: as for `attach`.

    Attributes:
        selection: the plan all views show; None before the first.
        selected_unit: index of the unit all views mark; None for none.
        brushed: indices of the units brushed in any view, ascending.
        measured: every measured plan so far, a tuple of MeasuredPlan; replaced, never changed in
            place.
        curvature, model, tokenizer: H and its model; model and tokenizer may be None.
        worker: the Mailbox, whose thread does slow work.
        lock: held by callbacks of its instruments, never while a model runs.
    """

    selection = PlanOfUnits(cl.Selection, allow_none=True)
    selected_unit = UnitIndex(None, allow_none=True)
    brushed = UnitIndices()
    measured = Tuple()

    def __init__(
        self,
        curvature: cl.Curvature,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.curvature, self.tokenizer = curvature, tokenizer
        self._longest = lru_cache(MOST_KEPT)(partial(longest, curvature))
        # one for all its instruments: with one each, two that follow each other could deadlock
        self.lock = threading.RLock()
        super().__init__()
        self.model: PreTrainedModel | None = None
        self.worker = Mailbox()
        kept = kept_plans(curvature)
        if kept is not None:
            self.add_measured(*_kept(kept))
        if model is not None:
            self.attach(model, tokenizer)

    @classmethod
    def of(cls, curvature: cl.Curvature) -> Session:
        """The session of this curvature, made on first use and kept as long as it is in use."""
        key = _shown(curvature)
        _SESSIONS[key] = session = _SESSIONS.get(key) or cls(curvature)
        return session

    @classmethod
    def bind(
        cls,
        curvature: AnyCurvature,
        session: Session | None = None,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Session:
        """The session that an instrument on this curvature joins.

        Args:
            curvature: H [M, M], or the path of its file.
            session: the session to share; None means the curvature's own.
            model, tokenizer: added to the session; None keeps what it has.
        """
        curvature = opened(curvature)
        session = cls.of(curvature) if session is None else session
        if _shown(session.curvature) != _shown(curvature):
            raise cl.MismatchError(
                f"the session is on {session.curvature!r}, not on {curvature!r}. Pass a session of "
                "this curvature, or omit session=."
            )
        if model is not None:
            session.attach(model, tokenizer)
        elif tokenizer is not None:
            session.tokenizer = tokenizer
        return session

    def run(self, ratio: float, strength: float, guards: cl.Guards) -> cl.Selection:
        """The removals of greedy up to MOST_RATIO, under the cap that holds at a ratio.

        Greedy is nested: one run has the plans of all ratios with the same cap, so a dragged ratio
        is solved once.
        """
        cap = guards.cap_at(ratio)
        fixed = replace(guards, layer_cap=cap if 0 < cap < 1 else None, layer_cap_factor=None)
        upto = max(MOST_RATIO, ratio) if cap else 0.0  # a multiple of ratio 0 allows nothing
        return self._longest(fixed, upto, strength)

    def solve(self, ratio: float, strength: float, guards: cl.Guards) -> cl.Selection:
        """The greedy plan of a ratio at a lambda; InfeasibleError where there is none."""
        try:
            return self.run(ratio, strength, guards).prefix(ratio).with_made(guards=guards)
        except cl.CocurveError:
            return cl.solve_greedy(self.curvature, ratio, strength, guards)

    def diagonal(self, ratio: float, guards: cl.Guards) -> cl.Selection | None:
        """The plan of lambda 0; None where there is none."""
        try:
            return self.solve(ratio, 0.0, guards)
        except cl.InfeasibleError:
            return None

    def attach(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        """Use this model for all measurements from now on."""
        units = self.curvature.units
        units_like(model, units).require_same(units, mine="the model", theirs="the curvature")
        self.model = model
        self.tokenizer = tokenizer or self.tokenizer

    def require_model(self) -> PreTrainedModel:
        """The model; InputError if there is none."""
        if self.model is None:
            raise cl.InputError(
                "this session has a curvature but no model, so nothing can be measured. Pass "
                "model=, or call session.attach(model, tokenizer)."
            )
        return self.model

    def require_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; InputError if there is none."""
        if self.tokenizer is None:
            raise cl.InputError("the session has no tokenizer. Pass tokenizer= with the model.")
        return self.tokenizer

    def require_plan(self) -> cl.Selection:
        """The plan; InputError if none is chosen."""
        if self.selection is None:
            raise cl.InputError("there is no plan yet. Choose one, or set session.selection.")
        return self.selection

    @contextmanager
    def exclusive(self, token: CancelToken | None = None) -> Iterator[PreTrainedModel]:
        """The model, held under its lock; raise Cancelled if the job is cancelled while it waits.

        A build or a measurement in a cell holds the same lock.
        """
        from cocurve_lab.models.runtime import exclusive

        model = self.require_model()
        lock = exclusive(model)
        # a build holds the model for minutes; the short timeout lets Cancel end the wait
        while not lock.acquire(timeout=0.1):
            if token is not None:
                token.check()
        try:
            yield model
        finally:
            lock.release()

    def add_measured(self, *records: MeasuredPlan) -> None:
        """Add measured plans; a plan measured again on the same text replaces the old record."""
        with self.lock:  # the mailbox's thread and a cell may add at once
            found = {(r.selection.fingerprint, r.text): r for r in (*self.measured, *records)}
            self.measured = tuple(found.values())

    def __repr__(self) -> str:
        model = "no model" if self.model is None else type(self.model).__name__
        return f"Session on {self.curvature!r}, {model}, plans measured: {len(self.measured)}"


def _kept(kept: KeptPlans) -> Iterator[MeasuredPlan]:
    """What was measured once and ships with the model of a kept H."""
    for name, facts in reversed(kept.texts.items()):  # the first text is told last, so it shows
        plans = [plan for plan in kept.plans if len(plan.kl.get(name, ())) == facts["rows"]]
        kl = {frozenset(plan.selection.pruned): plan.kl[name] for plan in plans}
        for plan in plans:
            source = f"{facts['source']}, {len(plan.kl[name])} rows (kept)"
            yield MeasuredPlan.of_rows(
                plan.selection,
                plan.kl[name],
                source,
                edge=edge_of(plan.selection, kl),
                abilities=plan.right,
            )


def edge_of(
    plan: cl.Selection, kl: Mapping[frozenset[int], np.ndarray]
) -> tuple[float, float] | None:
    """The `edge` of a plan in MeasuredPlan, from the KL by row of sets of units."""
    parts = [frozenset(plan.pruned), *(frozenset([unit]) for unit in plan.pruned)]
    if len(plan) != 2 or not all(part in kl for part in parts):
        return None
    both, one, other = (kl[part] for part in parts)
    return mean_and_error(both - one - other)


def count_right(names: Sequence[str], right: np.ndarray) -> dict[str, tuple[int, int]]:
    """(right, asked) by ability, from 1 or 0 by question; NaN is a question that was not asked."""
    answers = list(zip(names, right, strict=True))
    asked = Counter(name for name, answer in answers if not np.isnan(answer))
    correct = Counter(name for name, answer in answers if answer == 1)
    return {name: (correct[name], count) for name, count in asked.items()}


_SESSIONS: WeakValueDictionary[tuple[Any, ...], Session] = WeakValueDictionary()
