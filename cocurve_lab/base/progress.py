"""Progress of long work: a bar on a screen, or whole lines in the log of a batch job."""

from __future__ import annotations

import io
import sys
import time
from typing import Any, Literal

from tqdm import tqdm

Progress = bool | Literal["lines"]
SECONDS_APART = 30.0


class Bar(tqdm):
    """A tqdm bar. In a notebook it is a line of text that goes when all is done.

    The bars that tqdm itself makes in notebooks are widgets: done ones would stay, and a saved
    notebook shows an error in their place. A bar that was interrupted stays, unless `leave` is
    False.
    """

    leave: bool

    def __init__(self, *args: Any, **settings: Any) -> None:
        self._cell: Any = None  # the output that is replaced
        ipython = sys.modules.get("IPython")
        if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
            # tqdm then calls display() and writes nothing itself
            settings |= {"gui": True, "file": io.StringIO(), "ncols": 100}
        super().__init__(*args, **settings)

    def __exit__(self, kind: Any, *more: Any) -> None:
        if kind is None and self._cell is not None:  # an early end is an end
            self.leave = False
        super().__exit__(kind, *more)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Show the bar as it is."""
        if not self.gui:
            return super().display(msg, pos)
        shown = {"text/plain": str(self)}
        if self._cell is not None:
            self._cell.update(shown, raw=True)
            return True
        from IPython.display import display

        self._cell = display(shown, raw=True, display_id=True)
        return True

    def close(self) -> None:
        """End the bar; the line goes if all is done, or if `leave` is False."""
        if not hasattr(self, "start_t"):  # hidden, or interrupted while it was made
            return
        super().close()
        # a total may be a sum of fractions
        done = self.total is None or self.n >= self.total * (1 - 1e-9)
        if self._cell is not None and (done or not self.leave):
            self._cell.update({}, raw=True)


def open_bar(progress: Progress, **settings: Any) -> Any:
    """Make a `Bar` (True), a hidden bar (False), or `Lines` ("lines").

    If there is nothing to do (total 0), nothing is shown. `settings` are those of tqdm.
    """
    if progress == "lines" and settings["total"]:
        return Lines(**settings)
    return Bar(**settings, disable=not (progress and settings["total"]))


class Lines:
    """A substitute for a tqdm bar: lines on stderr, `SECONDS_APART` seconds apart or more.

    A last line is written at the end, unless `leave` is False.
    """

    leave = True

    def __init__(self, total: int, initial: int = 0, desc: str = "", unit: str = "") -> None:
        self.total, self.initial, self.done = total, initial, initial
        self.desc, self.unit = desc, unit
        self.begun = self.said = time.monotonic()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        if self.leave:
            self._say()

    def update(self, count: int = 1) -> None:
        """Count work as done."""
        self.done += count
        if time.monotonic() - self.said >= SECONDS_APART:
            self._say()

    def set_description(self, text: str) -> None:
        """Change the words before the counts, as of the next line."""
        self.desc = text

    def write(self, text: str) -> None:
        """Write one line to stderr at once."""
        print(text, file=sys.stderr, flush=True)

    def _say(self) -> None:
        self.said = time.monotonic()
        # the rate is that of this run: what an earlier run did (initial) took none of its time
        passed, new = self.said - self.begun, self.done - self.initial
        left = ""
        if new > 0 and self.done < self.total:
            left = f", about {duration(passed / new * (self.total - self.done))} left"
        share = self.done / max(self.total, 1)
        self.write(
            f"{self.desc}: {self.done:,} of {self.total:,} {self.unit}s ({share:.0%}), "
            f"{duration(passed)} in this run{left}"
        )


def duration(seconds: float) -> str:
    """Write seconds in a readable unit: "45 s", "12 min", "3.4 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
