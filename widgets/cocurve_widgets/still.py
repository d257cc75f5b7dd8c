"""What stays of an instrument in a saved notebook: its state and its numbers, as HTML."""

from __future__ import annotations

import html
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import cocurve_lab as cl
from cocurve_lab.extensions.writing import brief, typeset

REST = 2.0  # seconds without a change after which the note is written again
ROWS = 40  # of the table; all of them would make notebooks large

# A widget without its model is a box with text alone, or (from nbconvert) with a script; a living
# one has elements.
_NOTE = """<style>.jp-OutputArea:has(.cocurve, .jupyter-widgets > :not(script)) .cocurve-still {{ display: none }}</style>
<div class="cocurve-still"><p><b>{name}</b> needs a running kernel: run this cell again. If this note
stays after that, scripts are blocked here: trust the notebook, or allow those of widgets.</p><p>Last state: {text}</p>{table}</div>"""  # noqa: E501


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
        """The note as HTML: how to get the instrument back, its last state, and its numbers."""
        with getattr(self, "lock", nullcontext()):
            try:
                rows = self.table()
            except cl.CocurveError:  # nothing to show yet
                rows = []
            text = html.escape(" ".join(part for part in (self.error, self.status) if part))
        return _NOTE.format(
            name=type(self).__name__, text=text, table=self._still_texts() + table_html(rows)
        )

    def _still_texts(self) -> str:
        """What the note has above its table, as HTML; empty for none."""
        return ""


def table_html(rows: Sequence[dict[str, Any]]) -> str:
    """The first rows of a table as HTML, behind a heading that opens it; empty for none."""
    from pandas import DataFrame  # here: it takes long to import

    some = f", {ROWS} of {len(rows):,} rows" if len(rows) > ROWS else ""
    found = DataFrame(rows[:ROWS])
    table = found.to_html(border=0, index=False, float_format=lambda x: typeset(brief(x, 4)))
    return f"<details><summary>Table{some}</summary>{table}</details>" if rows else ""
