"""Measuring plans a few at a time, here or on the session's thread; finished plans are kept."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import cocurve_lab as cl
from cocurve_lab.extensions.judging.gap import RiskSplit

from .instrument import counted
from .session import Cancelled, CancelToken, MeasuredPlan, Session, text_name

CHUNK = 4  # plans measured at once; between two chunks Cancel is heard and the model is free
Waiting = tuple[cl.Selection, cl.CalibrationSet]
Key = tuple[str, str]  # the fingerprints of both


class Measurer:
    """Measures plans and adds them to a session.

    Plans asked for while others are measured join the present work, so that one progress bar
    covers both.

    Args:
        session: has the model, and receives the results.
        moved: called whenever there is something new to show.
        failed: called with an error of the session's thread.

    Attributes:
        done, total: plans of the present work, or rows where it splits the risk of one plan; 0
            when idle.
        noun: what `done` and `total` count, for a status line.
        stage: the present step, for a status line.
        took: size and time of the last finished work, in words; empty before the first.
    """

    def __init__(
        self, session: Session, moved: Callable[[], None], failed: Callable[[Exception], None]
    ) -> None:
        self.session, self._moved, self._failed = session, moved, failed
        self._lock = threading.RLock()
        self._todo: dict[Key, Waiting] = {}  # what the thread measures, or is to measure
        self._serving = False  # whether the thread measures what is in `_todo`, or soon will
        self._tokens: list[CancelToken] = []  # of what goes on: a cell and the thread may both
        self._began = 0.0
        self.done = self.total = 0
        self.noun, self.stage, self.took = "plan", "", ""

    @property
    def active(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._tokens or self._todo)

    def words(self) -> str:
        """Progress as a sentence; empty when idle."""
        with self._lock:
            if not self.total:
                return ""
            spent, eta = time.monotonic() - self._began, ""
            if self.done and not any(token.cancelled for token in self._tokens):
                eta = f", about {spent / self.done * (self.total - self.done):.0f} s left"
            return f"{self.done} of {counted(self.total, self.noun)} measured{eta} ({self.stage})"

    def measure_here(self, plans: Sequence[cl.Selection], held_out: cl.CalibrationSet) -> None:
        """Measure in this thread; return when all are done or cancelled."""
        chunks = (plans[start : start + CHUNK] for start in range(0, len(plans), CHUNK))
        steps = (partial(self._measure, chunk, held_out) for chunk in chunks)
        self._here(len(plans), "plan", steps)

    def split_here(
        self, plan: cl.Selection, held_out: cl.CalibrationSet, parts: list[RiskSplit]
    ) -> None:
        """Split the risk of a plan in this thread, row by row, until done or cancelled.

        Args:
            plan: the plan.
            held_out: text to measure on.
            parts: one per row done so far; the others are appended as they come.
        """
        left = range(len(parts), len(held_out))
        steps = (partial(self._split, plan, held_out.rows(k, k + 1), parts) for k in left)
        self._here(len(left), "row", steps)

    def measure_soon(self, plans: Sequence[cl.Selection], held_out: cl.CalibrationSet) -> None:
        """Hand plans to the session's thread, behind those it already has."""
        with self._lock:
            asked = {(plan.fingerprint, held_out.fingerprint): (plan, held_out) for plan in plans}
            self._expect(len(asked.keys() - self._todo.keys()), "plan")
            self._todo |= asked
            if asked and not self._serving:
                self._serving = True
                self.session.worker.submit(f"measure {id(self)}", self._serve, self._failed)
        self._moved()

    def cancel(self) -> None:
        """Stop after the plans that are in the model now, which still count."""
        with self._lock:
            self._todo.clear()
            if self._tokens:
                self.stage = "stopping after the plans being measured"
            for token in self._tokens:
                token.cancel()
        self._sum_up()

    # Steps --------------------------------------------------------------------------------------

    def _here(self, count: int, noun: str, steps: Iterable[Callable[[CancelToken], None]]) -> None:
        self._expect(count, noun)
        with self._going_on() as token:
            for step in steps:
                step(token)

    def _serve(self, _: CancelToken) -> None:
        """Measure what waits, on the thread."""
        try:
            while chunk := self._next():
                plans, texts = zip(*chunk.values(), strict=True)
                with self._going_on() as token:
                    self._measure(plans, texts[0], token)
                with self._lock:
                    self._todo = {k: v for k, v in self._todo.items() if k not in chunk}
        except Exception:
            with self._lock:
                self._todo, self._serving = {}, False
            raise
        finally:
            self._sum_up()

    def _next(self) -> dict[Key, Waiting]:
        """The next plans, all on one text; empty when all are done."""
        with self._lock:
            first = dict(itertools.islice(self._todo.items(), CHUNK))
            # decided under the lock: plans that come later submit a new job
            self._serving = bool(first)
            return {k: v for k, v in first.items() if k[1] == next(iter(first))[1]}

    def _measure(
        self, plans: Sequence[cl.Selection], held_out: cl.CalibrationSet, token: CancelToken
    ) -> None:
        token.check()
        self._say("waiting for the model")
        with self.session.exclusive(token) as model:
            self._say("measuring")
            table = cl.measure_plans(
                model, plans, held_out, progress=False, calibrated_on=self.session.curvature
            )
            self.done += len(plans)
        text, rows, now = text_name(held_out), len(held_out), time.time()
        numbers = zip(plans, table.mean.tolist(), table.standard_error.tolist(), strict=True)
        self.session.add_measured(
            *(MeasuredPlan(p, kl, se, text, rows=rows, measured_at=now) for p, kl, se in numbers)
        )

    def _split(
        self,
        plan: cl.Selection,
        row: cl.CalibrationSet,
        parts: list[RiskSplit],
        token: CancelToken,
    ) -> None:
        token.check()
        self._say("waiting for the model")
        with self.session.exclusive(token) as model:
            self._say("splitting the risk")
            parts.append(cl.split_risk(model, plan, row, progress=False))
            self.done += 1

    def _expect(self, count: int, noun: str) -> None:
        with self._lock:
            if not self.active:
                self.done = self.total = 0
                self._began, self.noun = time.monotonic(), noun
            elif noun != self.noun:
                self.noun = "step"
            self.total += count

    @contextmanager
    def _going_on(self) -> Iterator[CancelToken]:
        """Within the block `cancel` ends the work; after it all is summed up if it was the last."""
        token = CancelToken()
        with self._lock:
            self._tokens.append(token)
        try:
            yield token
        except Cancelled:
            pass
        finally:
            with self._lock:
                self._tokens.remove(token)
            self._sum_up()

    def _sum_up(self) -> None:
        """Tell what the work took, once nothing of it waits or runs."""
        with self._lock:
            if self.total and not self.active:
                stopped = ", then stopped" if self.done < self.total else ""
                seconds = time.monotonic() - self._began
                how = f"measured in {seconds:.1f} s{stopped}"
                self.took = f"{self.done} of {counted(self.total, self.noun)} {how}"
                self.done = self.total = 0
        self._moved()

    def _say(self, stage: str) -> None:
        self.stage = stage
        self._moved()
