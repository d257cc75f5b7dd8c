"""Progress where there is no screen: whole lines, seconds apart, for the log of a batch job."""

from __future__ import annotations

import sys
import time
from typing import Any, Literal

from tqdm.auto import tqdm

Progress = bool | Literal["lines"]
SECONDS_APART = 30.0


def open_bar(progress: Progress, **settings: Any) -> Any:
    """A tqdm bar (True), a hidden one (False), or `Lines`; `settings` are those of tqdm.

    Where nothing is left to do (total 0), nothing is shown.
    """
    if progress == "lines" and settings["total"]:
        return Lines(**settings)
    return tqdm(**settings, disable=not (progress and settings["total"]))


class Lines:
    """Stands in for a tqdm bar: a line on stderr at most every `SECONDS_APART`, and at the end."""

    def __init__(self, total: int, initial: int = 0, desc: str = "", unit: str = "") -> None:
        self.total, self.initial, self.done = total, initial, initial
        self.desc, self.unit = desc, unit
        self.begun = self.said = time.monotonic()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        self._say()

    def update(self, count: int = 1) -> None:
        self.done += count
        if time.monotonic() - self.said >= SECONDS_APART:
            self._say()

    def write(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _say(self) -> None:
        self.said = time.monotonic()
        passed, new = self.said - self.begun, self.done - self.initial
        left = "" if not new > 0 or self.done >= self.total else (
            f", about {duration(passed / new * (self.total - self.done))} left"
        )  # fmt: skip
        share = self.done / max(self.total, 1)
        self.write(
            f"{self.desc}: {self.done:,} of {self.total:,} {self.unit}s ({share:.0%}), "
            f"{duration(passed)} here{left}"
        )


def duration(seconds: float) -> str:
    """Seconds as a reader says them: "45 s", "12 min", "3.4 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
