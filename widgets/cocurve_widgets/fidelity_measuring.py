"""Measuring plans a few at a time on the session's thread; finished plans are kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import cocurve_lab as cl

from .instrument import counted
from .session import Cancelled, CancelToken, MeasuredPlan, Session, text_name

CHUNK = 4  # plans measured at once; between two chunks Cancel is heard and the model is free
Step = tuple[Sequence[cl.Selection], cl.CalibrationSet]


class Measurer:
    """Measures plans and adds them to a session.

    Plans asked for while others are measured join the present work, so that one progress bar
    covers both.

    Args:
        session: has the model and the thread, and receives the results.
        moved: called whenever there is something new to show.
        failed: called with an error.

    Attributes:
        done, total: plans of the present work.
        took: size and time of the last finished work, in words; empty before the first.
    """

    def __init__(
        self, session: Session, moved: Callable[[], None], failed: Callable[[Exception], None]
    ) -> None:
        self.session, self._moved, self._failed = session, moved, failed
        self._lock = threading.Condition()
        self._steps: list[Step] = []  # the first one runs
        self._token = CancelToken()
        self._error: Exception | None = None
        self._began = 0.0
        self.done = self.total = 0
        self.took = ""

    @property
    def active(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self._steps)

    def words(self) -> str:
        """Progress as a sentence; empty when idle."""
        with self._lock:
            if not self._steps:
                return ""
            text = f"{self.done} of {counted(self.total, 'plan')} measured"
            if self._token.cancelled:
                return f"{text}, stopping after the plans being measured"
            left = (time.monotonic() - self._began) / max(1, self.done) * (self.total - self.done)
            return f"{text}, about {left:.0f} s left" if self.done else text

    def measure(self, plans: Sequence[cl.Selection], held_out: cl.CalibrationSet) -> None:
        """Measure plans, after those that wait."""
        new = [(plans[k : k + CHUNK], held_out) for k in range(0, len(plans), CHUNK)]
        with self._lock:
            if not self._steps:
                self.done = self.total = 0
                self._began, self._error = time.monotonic(), None
            idle = not self._steps or self._token.cancelled
            self._steps += new
            self.total += len(plans)
            if new and idle:
                kind = f"measure {id(self)}"
                self._token = self.session.worker.submit(kind, self._work, self._failed)
        self._moved()

    def wait(self) -> None:
        """Wait until all is measured or cancelled, and raise the error of what failed."""
        with self._lock:
            self._lock.wait_for(lambda: not self._steps)
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Stop after the plans that are in the model now, which still count."""
        with self._lock:
            del self._steps[1:]
            self._token.cancel()
        self._moved()

    # Steps --------------------------------------------------------------------------------------

    def _work(self, token: CancelToken) -> None:
        while self._steps and not token.cancelled:
            self._moved()
            plans, held_out = self._steps[0]
            try:
                with self.session.exclusive(token) as model:
                    self._measure(plans, held_out, model)
                self.done += len(plans)
            except Exception as error:
                # cancelled: while it waited for the model
                self._error = None if isinstance(error, Cancelled) else error
                raise
            finally:
                with self._lock:
                    del self._steps[: None if self._error else 1]
                    if not self._steps:
                        self.took = (
                            f"{self.done} of {counted(self.total, 'plan')} measured in "
                            f"{time.monotonic() - self._began:.1f} s"
                        )
                        self._lock.notify_all()
                self._moved()

    def _measure(
        self, plans: Sequence[cl.Selection], held_out: cl.CalibrationSet, model: Any
    ) -> None:
        text = text_name(held_out)
        table = cl.measure_plans(
            model, plans, held_out, progress=False, calibrated_on=self.session.curvature
        )
        self.session.add_measured(
            *(
                MeasuredPlan.of_rows(plan, kl, text, measured_at=time.time())
                for plan, kl in zip(plans, table.kl, strict=True)
            )
        )
