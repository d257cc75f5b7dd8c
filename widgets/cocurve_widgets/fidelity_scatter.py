"""Predicted risk against measured KL, plan by plan, while the worker measures."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import ipywidgets as W
from traitlets import List, Unicode, validate

from cocurve_lab import CalibrationSet, Curvature, InputError

from .fidelity_controls import FidelityControls
from .fidelity_figure import FidelityFigure
from .fidelity_measuring import Measurer
from .fidelity_points import (
    METHODS,
    SINGLE,
    Book,
    code_for,
    drawable,
    hover,
    plan_row,
    predicted_risk,
    single_rows,
    text_name,
)
from .fidelity_pools import MeasuresPlans
from .fidelity_words import caption, scores_table, status_line, summarize
from .instrument import guarded
from .session import Measured, Session

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAUSE = 0.2  # seconds between redraws at least


class FidelityScatter(MeasuresPlans, W.VBox):
    """Predicted 1/2 s^T H s against measured KL(dense || pruned), both in nats per token.

    The prediction lives on the teacher's top-r support and the calibration text; the measurement is
    over the full vocabulary, on held-out text. Grey points are single units from the build, where
    both values are on the top-r support. Log axes; a plan whose prediction or measurement is not
    above 0 (the empty plan) is not drawn but named in the status.

    One per notebook: a plotly FigureWidget sends 5 MB to the page.

    Args:
        curvature: H [M, M] with its units.
        model: the dense model; None shows what is known and measures nothing.
        calibration: held-out text to measure on; rows the curvature was built on are refused.
        session: shared with other instruments; by default the curvature's own.
        tokenizer: kept in the session for other instruments.
        **controls: any of the attributes below up to `text`.

    Attributes:
        ratio: share of removable cost of the lambda sweep and the same-budget pool, (0, 1).
        interaction_strength: lambda of the ratio sweep and of the pool's greedy set.
        strengths: lambdas of the lambda sweep.
        ratios: ratios of the ratio sweep, each in [0, 1).
        seed: of the pool's random sets and swaps.
        rows: rows of the held-out text to measure on; 0 means all of them.
        methods: which methods are shown, of METHODS.
        text: name of the text whose plans are shown; empty for all texts.
            selected_unit: the unit ringed among the single units.

    Raises:
        InputError: a control that does not exist, or a value out of range.
        MismatchError: the session or the model is not this curvature's, or the text shares a row
            with what the curvature was built on.
    """

    methods: List[str] = List(Unicode(), list(METHODS)).tag(sync=True)
    text = Unicode().tag(sync=True)

    def __init__(
        self,
        curvature: Curvature,
        model: PreTrainedModel | None = None,
        calibration: CalibrationSet | None = None,
        *,
        session: Session | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **controls: Any,
    ) -> None:
        self._require_known(controls)
        if calibration is not None:
            calibration.require_disjoint(curvature)
        session = Session.bind(curvature, session, model, tokenizer)
        self.curvature, self.calibration = curvature, calibration
        super().__init__(session, **controls)
        self.book = Book.of(self.session)
        self.measurer = Measurer(self.session, self._changed)
        self._singles = single_rows(curvature)
        self._drawn_plans: list[Measured] = []
        self._drawn_at = 0.0
        self._timer: threading.Timer | None = None
        self.figure = FidelityFigure(
            self._singles, [hover(row) for row in self._singles], preview=self.preview
        )
        self.figure.on_click(self._clicked_plan, self._clicked_unit)
        self.controls = FidelityControls(self)
        self.children = self.controls.around(self.figure.widget)
        for trait in ("selection", "measured", "selected_unit"):
            self.follow(self._changed, trait)
        self.observe(self._changed, ["methods", "text", "rows"])
        self.refresh()

    @validate("methods")
    def _check_methods(self, proposal: Any) -> Any:
        unknown = [name for name in proposal.value if name not in METHODS]
        if unknown:
            raise InputError(f"methods names {unknown[0]!r}; choose from {', '.join(METHODS)}.")
        return proposal.value

    # Points -------------------------------------------------------------------------------------

    @property
    def points(self) -> list[dict[str, Any]]:
        """What is shown, one dict per point: measured plans, then the units alone.

        Keys: kind ("plan", "single unit"), method, name, interaction_strength, requested_ratio,
        realized_ratio, units (how many), predicted_risk, measured_risk, standard_error (NaN where
        unknown) and text (what was measured on). Risks in nats per token. Points that log axes
        cannot show are in it.
        """
        plans = [plan_row(self.curvature, self.book, record) for record in self._records()]
        return plans + (self._singles if SINGLE in self.methods else [])

    def _records(self) -> list[Measured]:
        """The measured plans that pass the filters."""
        return [
            record
            for record in self.session.measured
            if self.text in ("", record.text)
            and self.book.name(record.selection)[0] in self.methods
        ]

    def table(self) -> list[dict[str, Any]]:
        """The points, as in `points`."""
        return self.points

    def statistics(self) -> dict[str, dict[str, Any]]:
        """How well predictions agree with measurements, for what is shown.

        Keys: "all plans", each set measured together (sweeps, pools), and "single units" where they
        are known; single units are kept apart because both their values are on the top-r support.
        Values: the fields of `cocurve_lab.Agreement`, with the worst point's name under "worst".
        """
        records = self._records()
        return summarize(self.points, [r.selection.fingerprint for r in records], self.book)

    def code(self) -> str:
        """Python that measures the shown plans again; it expects curvature, model, calibration."""
        names = ("ratio", "interaction_strength", "strengths", "ratios", "seed", "methods")
        defaults = self.trait_defaults()
        changed = {n: getattr(self, n) for n in names if getattr(self, n) != defaults[n]}
        return code_for(self.curvature, self.book, self._records(), changed)

    # Choosing -----------------------------------------------------------------------------------

    def choose(self, name: str) -> None:
        """Make the measured plan of this name (as in `points`) the session's; "" chooses nothing.

        Raises:
            InputError: no measured plan has this name.
        """
        if not name:
            return
        for record in self.session.measured:
            if self.book.name(record.selection)[1] == name:
                self.session.selection = record.selection
                return
        raise InputError(f"no measured plan is called {name!r}. Measure it, or pick another.")

    # Not under the lock: all other views of the session answer, and take theirs.
    def _clicked_plan(self, number: int) -> None:
        try:
            self.session.selection = self._drawn_plans[number].selection
        except Exception as error:
            self.report(error)

    def _clicked_unit(self, number: int) -> None:
        try:
            self.selected_unit = number
        except Exception as error:
            self.report(error)

    # Drawing ------------------------------------------------------------------------------------

    @guarded
    def _changed(self, _: Any = None) -> None:
        """Redraw now, or a little later where the last time was just now."""
        if self._timer is not None or not self.children:
            return
        wait = self._drawn_at + PAUSE - time.monotonic()
        if wait <= 0:
            self.refresh()
        else:
            self._timer = threading.Timer(wait, self._later)
            self._timer.daemon = True
            self._timer.start()

    @guarded
    def _later(self) -> None:
        self._timer = None
        if self.children:
            self.refresh()

    @guarded
    def refresh(self) -> None:
        """Bring picture, numbers and status up to date."""
        self._drawn_at = time.monotonic()
        records, rows = self._records(), self.points
        plans = rows[: len(records)]
        pairs = [(record, row) for record, row in zip(records, plans, strict=True) if drawable(row)]
        self._drawn_plans = [record for record, _ in pairs]
        shown = [row for _, row in pairs]
        rings, waiting = self._chosen(shown)
        self.figure.draw(
            shown,
            [hover(row) for row in shown],
            show_singles=len(rows) > len(plans),
            rings=rings,
            waiting=waiting,
        )
        self._refresh_words(records, rows)

    def _chosen(
        self, shown: list[dict[str, Any]]
    ) -> tuple[list[tuple[float, float]], float | None]:
        """Where rings go, and the chosen plan's prediction where it is not measured."""
        rings, waiting = [], None
        plan, unit = self.session.selection, self.selected_unit
        if plan is not None:
            mark = plan.fingerprint
            mine = [
                r
                for r, m in zip(shown, self._drawn_plans, strict=True)
                if m.selection.fingerprint == mark
            ]
            rings += [(row["predicted_risk"], row["measured_risk"]) for row in mine]
            predicted = predicted_risk(self.curvature, plan)
            waiting = predicted if not mine and predicted > 0 else None
        if unit is not None and SINGLE in self.methods and self._singles:
            row = self._singles[unit]
            rings += [(row["predicted_risk"], row["measured_risk"])] if drawable(row) else []
        return rings, waiting

    def _refresh_words(self, records: list[Measured], rows: list[dict[str, Any]]) -> None:
        controls, work, plan = self.controls, self.measurer, self.session.selection
        marks = [record.selection.fingerprint for record in records]
        scores = summarize(rows, marks, self.book)
        names = list(dict.fromkeys(row["name"] for row in rows[: len(marks)]))
        chosen = "" if plan is None else self.book.name(plan)[1]
        texts = list(dict.fromkeys(record.text for record in self.session.measured))
        controls.show_work(self.reason(), work.done, work.total, work.words())
        controls.show_menus(names, chosen if chosen in names else "", texts)
        controls.fill(controls.scores, value=scores_table(scores))
        controls.fill(controls.caption, value=caption(self.curvature, self._text()))
        controls.show_table(rows, None if plan is None else plan.to_json())
        self.status = status_line(rows, marks, self._plan_words(), work.took)

    def _text(self) -> str | None:
        return None if self.calibration is None else text_name(self._held_out())

    def _plan_words(self) -> str:
        """The session's plan, its prediction, and whether it is measured; empty without one."""
        plan = self.session.selection
        if plan is None:
            return ""
        known = (record.selection.fingerprint for record in self.session.measured)
        measured = plan.fingerprint in known  # also where the filters hide its point
        how = "measured" if measured else "only predicted so far"
        predicted = predicted_risk(self.curvature, plan)
        return f"chosen: {self.book.name(plan)[1]}, predicted {predicted:.3g} nats ({how})"

    def close(self) -> None:
        """Stop measuring, leave the session, and close all its widgets."""
        if "controls" in vars(self):  # else its making was refused half-way
            self._leave()
        super().close()

    def _leave(self) -> None:
        with self.lock:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None
            inside: Any = self.children
            self.children = []
        self.measurer.cancel()
        for widget in inside:
            _close(widget)

    def __repr__(self) -> str:
        return f"FidelityScatter on {self.session!r}: {self.status}"


def _close(widget: W.Widget) -> None:
    """Close a widget and what belongs to it: layouts and styles are models of their own."""
    parts = (*getattr(widget, "children", ()), getattr(widget, "layout", None))
    for part in (*parts, getattr(widget, "style", None)):
        if isinstance(part, W.Widget):
            _close(part)
    widget.close()
