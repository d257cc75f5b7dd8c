"""Measuring plans a few at a time, here or on the session's thread; finished plans are kept."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import cocurve_lab as cl
from cocurve_lab.measuring.gap import RiskSplit

from .instrument import counted
from .session import Cancelled, CancelToken, MeasuredPlan, Session, measured_on

CHUNK = 4  # plans measured at once; between two chunks Cancel is heard and the model is free
Waiting = tuple[cl.Selection, cl.CalibrationSet]


class Measurer:
    """Measures plans and adds them to a session.

    Plans asked for while others are measured join the present work, so that one progress bar
    covers both.

    Args:
        session: has the model, and receives the results.
        moved: called whenever there is something new to show.

    Attributes:
        done, total: plans of the present work, less the cancelled ones, or rows where it splits
            the risk of one plan; 0 when idle.
        noun: what `done` and `total` count, for a status line.
        stage: the present step, for a status line.
        took: size and time of the last finished work, in words; empty before the first.
    """

    def __init__(self, session: Session, moved: Callable[[], None]) -> None:
        self.session, self._moved = session, moved
        self._lock = threading.RLock()
        self._todo: deque[Waiting] = deque()
        self._running: list[Waiting] = []  # taken from `_todo`, in the model now
        self._dropped = 0  # plans of the present work that `cancel` took out of `_todo`
        self._tokens: list[CancelToken] = []  # of all work going on: a cell and the thread may both
        self._job: CancelToken | None = None  # of the job on the thread that takes from `_todo`
        self._began = 0.0
        self.done = self.total = 0
        self.noun, self.stage, self.took = "plan", "", ""

    @property
    def active(self) -> bool:
        """Whether anything waits or runs.

        The mailbox keeps one "measure" job, so another instrument of the session may have dropped
        ours before it began; then its token is cancelled and nothing is active.
        """
        with self._lock:
            return bool(self._tokens) or (self._job is not None and not self._job.cancelled)

    @property
    def seconds_left(self) -> float | None:
        """Estimate of the seconds left from the plans done so far; None before the first."""
        with self._lock:
            if not self.done:
                return None
            return (time.monotonic() - self._began) / self.done * (self.total - self.done)

    def words(self) -> str:
        """Progress as a sentence; empty when idle."""
        with self._lock:
            if not self.total:
                return ""
            left = self.seconds_left
            eta = "" if left is None else f", about {left:.0f} s left"
            return f"{self.done} of {counted(self.total, self.noun)} measured{eta} ({self.stage})"

    def measure_here(self, plans: Sequence[cl.Selection], held_out: cl.CalibrationSet) -> None:
        """Measure in this thread; return when all are done or cancelled."""
        token = CancelToken()
        self._expect(len(plans))
        self._start(token)
        try:
            for start in range(0, len(plans), CHUNK):
                self._measure(list(plans[start : start + CHUNK]), held_out, token)
        except Cancelled:
            pass
        finally:
            self._end(token)

    def split_here(
        self, plan: cl.Selection, held_out: cl.CalibrationSet, parts: list[RiskSplit]
    ) -> None:
        """Split the risk of a plan in this thread, row by row, until done or cancelled.

        Args:
            plan: the plan.
            held_out: text to measure on.
            parts: one per row done so far; the others are appended as they come.
        """
        token, todo = CancelToken(), range(len(parts), len(held_out))
        self._expect(len(todo), "row")
        self._start(token)
        try:
            for number in todo:
                token.check()
                self._say("waiting for the model")
                with self.session.exclusive(token) as model:
                    self._say("splitting the risk")
                    row = held_out.rows(number, number + 1)
                    parts.append(cl.split_risk(model, plan, row, progress=False))
                with self._lock:
                    self.done += 1
        except Cancelled:
            pass
        finally:
            with self._lock:
                left = len(held_out) - len(parts)
                self.total -= left
                self._dropped += left
            self._end(token)

    def measure_soon(
        self,
        plans: Sequence[cl.Selection],
        held_out: cl.CalibrationSet,
        failed: Callable[[Exception], None],
    ) -> None:
        """Hand plans to the session's thread, behind those it already has.

        Args:
            plans: those that wait or run already are skipped.
            held_out: text to measure on.
            failed: called with the error, should there be one.
        """
        if not plans:
            return
        with self._lock:
            pending = (*self._running, *self._todo)
            known = {plan.fingerprint for plan, text in pending if text is held_out}
            fresh = [plan for plan in plans if plan.fingerprint not in known]
            self._expect(len(fresh))
            self._todo.extend((plan, held_out) for plan in fresh)
            if self._job is None or self._job.cancelled:
                self._job = self.session.worker.submit("measure", self._work, failed)
        self._moved()

    def cancel(self) -> None:
        """Stop after the plans that are in the model now, which still count."""
        with self._lock:
            self.total -= len(self._todo)
            self._dropped += len(self._todo)
            self._todo.clear()
            if self._tokens:
                self.stage = "stopping after the plans being measured"
            for token in (*self._tokens, self._job):
                if token is not None:
                    token.cancel()
        self._moved()

    def _work(self, token: CancelToken) -> None:
        self._start(token)
        try:
            while chunk := self._next(token):
                self._measure([plan for plan, _ in chunk], chunk[0][1], token)
        finally:
            with self._lock:
                self._running = []
                if self._job is token:  # else a newer job has taken over what waits
                    self._job = None
                    self._todo.clear()
            self._end(token)

    def _next(self, token: CancelToken) -> list[Waiting]:
        """The next plans, all on one text; empty when all are done."""
        with self._lock:
            token.check()
            chunk: list[Waiting] = []
            while self._todo and len(chunk) < CHUNK:
                if chunk and self._todo[0][1] is not chunk[0][1]:
                    break
                chunk.append(self._todo.popleft())
            self._running = chunk
            if not chunk:
                self._job = None  # decided under the lock: later plans submit a new job
            return chunk

    def _measure(
        self, plans: list[cl.Selection], held_out: cl.CalibrationSet, token: CancelToken
    ) -> None:
        token.check()
        self._say("waiting for the model")
        with self.session.exclusive(token) as model:
            self._say("measuring")
            table = cl.measure_plans(
                model, plans, held_out, progress=False, calibrated_on=self.session.curvature
            )
        facts = measured_on(held_out)
        numbers = zip(plans, table.mean.tolist(), table.standard_error.tolist(), strict=True)
        with self._lock:
            self.done += len(plans)
        self.session.add_measured(*(MeasuredPlan(p, kl, se, **facts) for p, kl, se in numbers))

    def _expect(self, count: int, noun: str = "plan") -> None:
        with self._lock:
            if not self.active:
                self.done = self.total = self._dropped = 0
                self._began, self.noun = time.monotonic(), noun
            elif noun != self.noun:
                self.noun = "step"
            self.total += count

    def _start(self, token: CancelToken) -> None:
        with self._lock:
            self._tokens.append(token)

    def _end(self, token: CancelToken) -> None:
        with self._lock:
            self._tokens.remove(token)
            if not self.active:
                seconds = time.monotonic() - self._began
                asked = self.total + self._dropped
                stopped = ", then stopped" if self._dropped else ""
                how = f"measured in {seconds:.1f} s{stopped}"
                if asked:  # else all was known before
                    self.took = f"{self.done} of {counted(asked, self.noun)} {how}"
                self.done = self.total = 0
        self._moved()

    def _say(self, stage: str) -> None:
        with self._lock:
            self.stage = stage
        self._moved()
