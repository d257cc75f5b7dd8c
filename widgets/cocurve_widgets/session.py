"""What the instruments of one curvature share: plan, chosen unit, measured plans, one worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from traitlets import HasTraits, Instance, Int, Tuple

from cocurve_lab import CocurveError, Curvature, InputError, MismatchError, Selection

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Cancelled(CocurveError):
    """A job of the worker was asked to stop."""


class CancelToken:
    """Tells a running job to stop; the job looks at it where it can stop."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def cancel(self) -> None:
        self._event.set()

    @property
    def cancelled(self) -> bool:
        return self._event.is_set()

    def check(self) -> None:
        """Raise Cancelled if the job was asked to stop."""
        if self.cancelled:
            raise Cancelled("stopped on request.")


Job = Callable[[CancelToken], None]


class Worker:
    """One thread for slow work, with a mailbox that keeps only the newest job of each kind.

    The thread lives as long as there is work, so an idle session holds no thread and can be
    garbage-collected.
    """

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._waiting: dict[str, tuple[Job, CancelToken, Callable[[Exception], None]]] = {}
        self._running: tuple[str, CancelToken] | None = None
        self._thread: threading.Thread | None = None

    def submit(self, kind: str, job: Job, failed: Callable[[Exception], None]) -> CancelToken:
        """Run `job(token)` after what is running; replaces and cancels jobs of the same kind.

        `failed` gets whatever the job raises, except Cancelled.
        """
        token = CancelToken()
        with self._lock:
            self.cancel(kind)
            self._waiting[kind] = (job, token, failed)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="cocurve", daemon=True)
                self._thread.start()
        return token

    def cancel(self, kind: str) -> None:
        """Drop the waiting job of a kind and ask the running one to stop."""
        with self._lock:
            dropped = self._waiting.pop(kind, None)
            if dropped is not None:
                dropped[1].cancel()
            if self._running is not None and self._running[0] == kind:
                self._running[1].cancel()

    def busy(self, kind: str) -> bool:
        """Whether a job of this kind waits or runs."""
        with self._lock:
            return kind in self._waiting or (self._running is not None and self._running[0] == kind)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until all work is done; False if that took longer than `timeout` seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: self._thread is None, timeout)

    def _work(self) -> None:
        while True:
            with self._lock:
                self._running = None
                if not self._waiting:
                    self._thread = None
                    self._lock.notify_all()
                    return
                kind = next(iter(self._waiting))
                job, token, failed = self._waiting.pop(kind)
                self._running = (kind, token)
            try:
                job(token)
            except Cancelled:
                pass
            except Exception as error:
                failed(error)
            del job, failed  # they hold the instrument, which must be free to go


@dataclass(frozen=True)
class Measured:
    """The measured KL of one plan on one text.

    Attributes:
        selection: the plan.
        risk: mean KL(teacher || masked) over the text, full vocabulary, nats per token.
        standard_error: over sequences; NaN with a single one.
        text: what it was measured on.
    """

    selection: Selection
    risk: float
    standard_error: float
    text: str


class Session(HasTraits):
    """Binds one curvature, optionally its model, and what its instruments show.

    Instruments on the same curvature share the same session unless given another. Its traits can
    be observed and linked like any widget's.

    Args:
        curvature: H [M, M].
        model, tokenizer: as for `attach`.

    Attributes:
        selection: the plan all views show; None before the first.
        selected_unit: index of the unit all views mark; None for none.
        measured: every measured plan so far, a tuple of Measured; replaced, never changed.
        curvature, model, tokenizer: what it was made with; model and tokenizer may be None.
        worker: the thread for slow work.
        lock: held by callbacks of its instruments, never while a model runs.

    Raises:
        MismatchError: the model's units are not the curvature's.
    """

    selection = Instance(Selection, allow_none=True)
    selected_unit = Int(None, allow_none=True)
    measured = Tuple()

    def __init__(
        self,
        curvature: Curvature,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        super().__init__()
        self.curvature, self.tokenizer = curvature, tokenizer
        self.model: PreTrainedModel | None = None
        self.worker = Worker()
        # one for all its instruments: with one each, two that follow each other could deadlock
        self.lock = threading.RLock()
        if model is not None:
            self.attach(model, tokenizer)

    @classmethod
    def of(cls, curvature: Curvature) -> Session:
        """The session of this curvature, made on first use and kept while anybody holds it."""
        session = _SESSIONS.get(_identity(curvature))
        if session is None:
            session = cls(curvature)
            _SESSIONS[_identity(curvature)] = session
        return session

    @classmethod
    def bind(
        cls,
        curvature: Curvature,
        session: Session | None = None,
        model: PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> Session:
        """The session that an instrument on this curvature joins, with what it was given.

        Args:
            curvature: H [M, M].
            session: the one to share; None takes the curvature's own.
            model, tokenizer: join the session; None leaves what it has.

        Raises:
            MismatchError: the session is on another curvature, or the model's units are not the
                curvature's. The session then stays as it was.
        """
        session = cls.of(curvature) if session is None else session
        if _identity(session.curvature) != _identity(curvature):
            raise MismatchError(
                f"the session is on {session.curvature!r}, not on {curvature!r}. Give a session of "
                "this curvature, or none."
            )
        if model is not None:
            session.attach(model, tokenizer)
        elif tokenizer is not None:
            session.tokenizer = tokenizer
        return session

    def attach(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        """Measure with this model from here on.

        Raises:
            MismatchError: the model's units are not the curvature's.
        """
        from cocurve_lab.models.units import units_like

        units = self.curvature.units
        units_like(model, units).require_same(units, mine="the model", theirs="the curvature")
        self.model = model
        self.tokenizer = tokenizer or self.tokenizer

    def require_model(self) -> PreTrainedModel:
        """The model, or InputError saying how to give one."""
        if self.model is None:
            raise InputError(
                "this session has a curvature but no model, so nothing can be measured. Give "
                "model=, or call session.attach(model, tokenizer)."
            )
        return self.model

    @contextmanager
    def exclusive(self, token: CancelToken | None = None) -> Iterator[PreTrainedModel]:
        """The model, under its one lock; a cancelled job stops waiting for it.

        A build or a measurement in a cell holds the same lock.
        """
        from cocurve_lab.models.runtime import exclusive

        model = self.require_model()
        lock = exclusive(model)
        while not lock.acquire(timeout=0.1):
            if token is not None:
                token.check()
        try:
            yield model
        finally:
            lock.release()

    def add_measured(self, *records: Measured) -> None:
        """Add measured plans; a plan measured again on the same text replaces the old record."""
        with self.lock:  # two workers may add at once
            found = {(r.selection.fingerprint, r.text): r for r in (*self.measured, *records)}
            self.measured = tuple(found.values())

    def __repr__(self) -> str:
        model = "no model" if self.model is None else type(self.model).__name__
        return f"Session on {self.curvature!r}, {model}, {len(self.measured)} plans measured"


def _identity(curvature: Curvature) -> tuple[str, bool]:
    """What two views must agree on to share a session; the fingerprint knows no provenance."""
    return curvature.fingerprint, curvature.is_preview


_SESSIONS: WeakValueDictionary[tuple[str, bool], Session] = WeakValueDictionary()
