"""What stays of an instrument in a saved notebook: a picture and its table, as HTML."""

from __future__ import annotations

import html
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

import cocurve_lab as cl
from cocurve_lab.extensions.writing import brief, typeset

from .packing import image_html

REST = 2.0  # seconds without a change after which the note is written again
ROWS = 40  # of the table; all of them would make notebooks large
_SIZE = (420, 260)  # of a plot, pixels
_LEAST, _MOST = (64, 226), (408, 12)  # where the axes begin and end in it

# A widget without its model is a box with text alone, or (from nbconvert) with a script; a living
# one has elements.
_NOTE = """<style>.jp-OutputArea:has(.cocurve, .jupyter-widgets > :not(script)) .cocurve-still {{ display: none }}</style>
<div class="cocurve-still">{picture}<p><b>{name}</b> needs a running kernel: run this cell again. If this note
stays after that, scripts are blocked here: trust the notebook, or allow those of widgets.</p><p>Last state: {text}</p>{table}</div>"""  # noqa: E501

Point = tuple[float, float, str]  # x, y, color


class Still:
    """Shows an instrument together with a note that stays in a saved notebook.

    A notebook that is opened again has no kernel behind its outputs, and JupyterLab then shows an
    error in place of a widget. The note beside it is hidden as long as the widget lives. It is
    written again whenever `status` has rested for a while.
    """

    _still_timer: threading.Timer | None = None

    def _ipython_display_(self: Any) -> None:
        from IPython.display import display

        display(self._still_data(), raw=True, display_id=f"still {self.model_id}")
        shown: Any = self._repr_mimebundle_()
        data, metadata = shown if isinstance(shown, tuple) else (shown, {})
        display(data, metadata=metadata, raw=True)
        self.observe(self._still_rest, "status")
        self._still_rest()

    def _still_rest(self: Any, _: Any = None) -> None:
        """Write the note again once nothing has changed for a while."""
        if self._still_timer is not None:
            self._still_timer.cancel()
        self._still_timer = threading.Timer(REST, self._still_again)
        self._still_timer.daemon = True
        self._still_timer.start()

    def _still_again(self: Any) -> None:
        from IPython.display import update_display

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
    from pandas import DataFrame  # here: it takes long to import

    some = f", {ROWS} of {len(rows):,} rows" if len(rows) > ROWS else ""
    found = DataFrame(rows[:ROWS])
    table = found.to_html(border=0, index=False, float_format=lambda x: typeset(brief(x, 4)))
    return f"<details><summary>Table{some}</summary>{table}</details>" if rows else ""


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
    (wide, tall), (left, bottom), (right, top) = _SIZE, _LEAST, _MOST
    values = np.array([p[:2] for p in seen], float)
    least, most = values.min(axis=0), values.max(axis=0)
    scaled, low, high = (np.log10(x) if log else x for x in (values, least, most))
    shares = (scaled - low) / np.where(high > low, high - low, 1.0)
    pixels = _LEAST + shares * np.subtract(_MOST, _LEAST)
    places = [(f"{x:.1f}", f"{y:.1f}") for x, y in pixels]
    dots = "".join(
        f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>'
        for (x, y), (*_, color) in zip(places, seen, strict=True)
    )
    path = " ".join(map(",".join, places)) if joined else ""
    (x_least, y_least), (x_most, y_most) = ([typeset(brief(v)) for v in x] for x in (least, most))
    x_name, y_name = (html.escape(name + (", log" if log else "")) for name in names)
    text = (
        f'<text x="{left}" y="{bottom + 14}">{x_least}</text>'
        f'<text x="{right}" y="{bottom + 14}" text-anchor="end">{x_most}</text>'
        f'<text x="{(left + right) / 2}" y="{tall - 4}" text-anchor="middle">{x_name}</text>'
        f'<text x="{left - 6}" y="{bottom}" text-anchor="end">{y_least}</text>'
        f'<text x="{left - 6}" y="{top + 8}" text-anchor="end">{y_most}</text>'
        f'<text text-anchor="middle" transform="translate(12 {tall / 2}) rotate(-90)">'
        f"{y_name}</text>"
    )
    drawn = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{tall}" '
        f'font-family="sans-serif" font-size="11" fill="#808080">'
        f'<path d="M{left} {top}V{bottom}H{right}" stroke="#808080" fill="none"/>'
        f'<polyline points="{path}" stroke="#808080" fill="none"/>{dots}{text}</svg>'
    )
    return image_html("svg+xml", drawn.encode(), f"{names[1]} against {names[0]}")
