"""Progress of long work: a bar on a screen, or whole lines in the log of a batch job."""

from __future__ import annotations

import io
import sys
from typing import Any, Literal

from tqdm import tqdm

Progress = bool | Literal["lines"]
SECONDS_APART = 30.0
_LINE = (
    "{desc}: {n_fmt} of {total_fmt} {unit}s ({percentage:.0f}%), {elapsed} so far, {remaining} left"
)


class Bar(tqdm):
    """A tqdm bar. In a notebook it is a line of text that goes when all is done.

    The bars that tqdm itself makes in notebooks are widgets: done ones would stay, and a saved
    notebook shows an error in their place. A bar that was interrupted stays, unless `leave` is
    False. With `lines` it is whole lines on stderr, `SECONDS_APART` seconds apart or more, and one
    at the end.
    """

    leave: bool

    def __init__(self, *args: Any, lines: bool = False, **settings: Any) -> None:
        self._cell: Any = None  # the output that is replaced
        self._lines = lines
        ipython = sys.modules.get("IPython")
        cell = ipython is not None and hasattr(ipython.get_ipython(), "kernel")
        if lines or cell:  # tqdm then calls display() and writes nothing itself
            settings |= {"gui": True, "file": io.StringIO(), "ncols": 100}
        if lines:
            settings |= {
                "bar_format": _LINE,
                "smoothing": 0,
                "miniters": 1,
                "mininterval": SECONDS_APART,
            }
        super().__init__(*args, **settings)

    def __exit__(self, kind: Any, *more: Any) -> None:
        if kind is None and self._cell is not None:  # an early end is an end
            self.leave = False
        super().__exit__(kind, *more)

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        """Change the words before the counts; in lines, as of the next one."""
        super().set_description(desc, refresh=refresh and not self._lines)

    def write(self, text: str) -> None:
        """Write a line beside the bar: to stderr where the bar is lines, else to stdout."""
        tqdm.write(text, file=sys.stderr if self._lines else sys.stdout)

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        """Show the bar as it is."""
        if self._lines:
            print(self, file=sys.stderr, flush=True)
            return True
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
        if self._lines and self.leave and not self.disable:
            self.display()
        super().close()
        # a total may be a sum of fractions
        done = self.total is None or self.n >= self.total * (1 - 1e-9)
        if self._cell is not None and (done or not self.leave):
            self._cell.update({}, raw=True)


def open_bar(progress: Progress, **settings: Any) -> Bar:
    """Make a `Bar` (True), a hidden one (False), or one of lines ("lines").

    If there is nothing to do (total 0), nothing is shown. `settings` are those of tqdm.
    """
    hidden = not (progress and settings["total"])
    return Bar(**settings, lines=progress == "lines", disable=hidden)
