"""What stays of an instrument in a saved notebook: a picture and its table, as HTML."""

from __future__ import annotations

import base64
import html
import math
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import cocurve_lab as cl
from cocurve_lab.base.tables import brief, typeset

REST = 2.0  # seconds without a change after which the note is written again
ROWS = 40  # of the table; all of them would make notebooks large
_SIZE = (420, 260)  # of a plot, pixels
_EDGE = (64, 12, 12, 34)  # left, right, top, bottom

# A widget without its model is a box with text alone, a living one has elements.
_NOTE = """<style>.jp-OutputArea:has(.cocurve, .jupyter-widgets > *) .cocurve-still {{ display: none }}</style>
<div class="cocurve-still">{picture}<p><b>{name}</b>: run this cell to use it. If this note
stays, scripts are blocked here: trust the notebook, or allow those of widgets.</p><p>Last state: {text}</p>{table}</div>"""  # noqa: E501

Point = tuple[float, float, str]  # x, y, color


class Still:
    """Shows an instrument together with a note that stays in a saved notebook.

    A notebook that is opened again has no kernel behind its outputs, and JupyterLab then shows an
    error in place of a widget. The note beside it is hidden as long as the widget lives. It is
    written again whenever `status` has rested for a while.
    """

    _still_timer: threading.Timer | None = None
    _still_changed = 0.0
    _still_watched = False

    def _ipython_display_(self: Any) -> None:
        from IPython.display import display

        display(self._still_data(), raw=True, display_id=f"still {self.model_id}")
        shown: Any = self._repr_mimebundle_()
        data, metadata = shown if isinstance(shown, tuple) else (shown, {})
        display(data, metadata=metadata, raw=True)
        if not self._still_watched:
            self._still_watched = True
            self.observe(self._still_rest, "status")
        self._still_rest()

    def _still_rest(self: Any, _: Any = None) -> None:
        """Write the note again once nothing has changed for a while."""
        self._still_changed = time.monotonic()
        if self._still_timer is None:
            self._still_wait(REST)

    def _still_wait(self: Any, seconds: float) -> None:
        self._still_timer = threading.Timer(seconds, self._still_again)
        self._still_timer.daemon = True
        self._still_timer.start()

    def _still_again(self: Any) -> None:
        from IPython.display import update_display

        left = REST - (time.monotonic() - self._still_changed)
        if left > 0:
            self._still_wait(left)
            return
        self._still_timer = None
        if self.comm is not None:  # else it is closed
            update_display(self._still_data(), raw=True, display_id=f"still {self.model_id}")

    def _still_data(self) -> dict[str, str]:
        return {"text/html": self._still(), "text/plain": repr(self)}

    def _still(self: Any) -> str:
        """The note as HTML: how to get the instrument back, what it showed, and its numbers."""
        with getattr(self, "lock", nullcontext()):
            try:
                rows = self.table()
            except cl.CocurveError:  # nothing to show yet
                rows = []
            text = html.escape(" ".join(part for part in (self.error, self.status) if part))
            picture = self._still_picture()
        return _NOTE.format(
            name=type(self).__name__, text=text, picture=picture, table=table_html(rows)
        )

    def _still_picture(self) -> str:
        """A small picture for the note, as HTML; empty for none."""
        return ""


def table_html(rows: Sequence[dict[str, Any]]) -> str:
    """The first rows of a table as HTML, behind a heading that opens it; empty for none."""
    if not rows:
        return ""

    def line(cells: Any, kind: str) -> str:
        return "<tr>" + "".join(f"<{kind}>{cell(c)}</{kind}>" for c in cells) + "</tr>"

    def cell(value: Any) -> str:
        return html.escape(typeset(brief(value, 4)) if isinstance(value, float) else str(value))

    some = f", {ROWS} of {len(rows):,} rows" if len(rows) > ROWS else ""
    body = "".join(line(row.values(), "td") for row in rows[:ROWS])
    return (
        f"<details><summary>Table{some}</summary><table><thead>{line(rows[0], 'th')}</thead>"
        f"<tbody>{body}</tbody></table></details>"
    )


def plot_html(
    points: Sequence[Point], names: tuple[str, str], *, log: bool = True, joined: bool = False
) -> str:
    """Points in a plane as an SVG inside HTML; empty for none.

    Args:
        points: x, y and color of each; with `log`, those that are not positive are left out.
        names: of the two axes.
        log: logarithmic axes.
        joined: a line from point to point.
    """
    seen = [p for p in points if not log or all(value > 0 for value in p[:2])]
    if not seen:
        return ""
    (wide, tall), (left, right, top, bottom) = _SIZE, _EDGE
    scale = math.log10 if log else float

    def place(values: list[float], low: int, high: int) -> tuple[list[float], list[str]]:
        """Pixels of one coordinate of all points, and its two ends in words."""
        least, most = min(values), max(values)
        span = scale(most) - scale(least) or 1.0
        at = [low + (scale(v) - scale(least)) / span * (high - low) for v in values]
        return at, [typeset(brief(least)), typeset(brief(most))]

    xs, x_ends = place([p[0] for p in seen], left, wide - right)
    ys, y_ends = place([p[1] for p in seen], tall - bottom, top)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{color}"/>'
        for x, y, (*_, color) in zip(xs, ys, seen, strict=True)
    )
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True)) if joined else ""
    words = [html.escape(name + (", log" if log else "")) for name in names]
    base, foot = tall - bottom + 14, tall - 4
    text = (
        f'<text x="{left}" y="{base}">{x_ends[0]}</text>'
        f'<text x="{wide - right}" y="{base}" text-anchor="end">{x_ends[1]}</text>'
        f'<text x="{(left + wide - right) / 2}" y="{foot}" text-anchor="middle">{words[0]}</text>'
        f'<text x="{left - 6}" y="{tall - bottom}" text-anchor="end">{y_ends[0]}</text>'
        f'<text x="{left - 6}" y="{top + 8}" text-anchor="end">{y_ends[1]}</text>'
        f'<text x="12" y="{tall / 2}" text-anchor="middle" '
        f'transform="rotate(-90 12 {tall / 2})">{words[1]}</text>'
    )
    drawn = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{tall}" '
        f'font-family="sans-serif" font-size="11" fill="#808080">'
        f'<path d="M{left} {top}V{tall - bottom}H{wide - right}" stroke="#808080" fill="none"/>'
        f'<polyline points="{path}" stroke="#808080" fill="none"/>{dots}{text}</svg>'
    )
    data = base64.b64encode(drawn.encode()).decode()
    alt = html.escape(f"{names[1]} against {names[0]}", quote=True)
    return f'<img alt="{alt}" src="data:image/svg+xml;base64,{data}">'
