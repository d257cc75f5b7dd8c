"""FidelityScatter: the predicted risk of plans against their measured KL, updated as they come."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets
from pandas import DataFrame
from traitlets import Enum, Float, Int, List, Unicode

import cocurve_lab as cl
from cocurve_lab.base.arguments import require_type
from cocurve_lab.extensions.judging.agreement import same_budget_pool
from cocurve_lab.extensions.writing import brief, typeset

from . import fidelity_points
from .fidelity_figure import Picture
from .fidelity_measuring import Measurer
from .fidelity_points import METHODS, SINGLE, Book, Plans, Pool, Row, Rows, rows_of
from .instrument import Instrument, counted, guarded
from .session import AnyCurvature, CancelToken, Mailbox, MeasuredPlan, Session, opened, text_name
from .still import table_html
from .traits import Some, Within

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAUSE = 0.2  # seconds between redraws at least
BUTTONS = {
    "Measure this plan": "the plan that all instruments of this session show",
    "Lambda sweep": "greedy plans at the ratio, one for each λ to sweep, under the opening guards",
    "Ratio sweep": "greedy plans at λ, one for each ratio to sweep, under the opening guards",
    "Same-budget pool": "26 sets at the ratio, no guards: greedy, diagonal, 14 random, 10 swaps",
    "Cancel": "stop measuring; measured plans are kept",
}
SCORES = {  # key of `statistics` -> heading
    "points": "points",
    "spearman": "Spearman",
    "spearman_diagonal": "of ½ Σ H_uu",
    "spearman_single_units": "of Σ KL alone",
    "pearson_log": "Pearson of logs",
    "median_ratio": "median measured / predicted",
    "worst": "worst",
    "worst_ratio": "measured / predicted",
}
_STYLE = """<style>
.cocurve-fidelity :is(p, td, th) { line-height: 1.4; white-space: normal; }
.cocurve-fidelity .jupyter-widget-hbox { gap: 4px 12px; }
.cocurve-fidelity :is(td, th) { padding: 2px 8px; text-align: right; }
.cocurve-fidelity :is(td, th):first-child { text-align: left; }
</style>"""


class FidelityScatter(Instrument, ipywidgets.VBox):
    """Predicted against measured KL(dense || pruned), both in nats per token.

    H predicts 1/2 s^T H s, as in the paper, on the teacher's top-r support and the calibration
    text. The measurement is over the full vocabulary, on held-out text. Gray points are single
    units: both values are the build's, the measurement over the tokens of `Curvature.risk_support`.
    A click on a point makes its plan the session's, or its unit the chosen one. Logarithmic axes
    cannot show a plan whose prediction or measurement is not above 0; the status names it.

    Args:
        curvature: H [M, M] with its units, or the path of its file.
        model: the dense model; None shows what is known and measures nothing.
        calibration: held-out text to measure on; rows that the curvature was built on are refused.
        session: shared with other instruments; by default the curvature's own.
        tokenizer: added to the session, for other instruments.
        **controls: any of the attributes below up to `text`.

    Attributes:
        ratio: share of removable cost of the lambda sweep and the same-budget pool, 0.01 to 0.99.
        interaction_strength: lambda of the ratio sweep and of the pool's greedy set.
        strengths: lambdas of the lambda sweep.
        ratios: ratios of the ratio sweep.
        seed: seed of the pool's random sets and swaps.
        methods: the methods shown, of METHODS; a click on the legend sets them, too.
        text: name of the text whose plans are shown; empty for all texts.
        axes: "log" or "linear", for both axes.
        selected_unit: the unit ringed among the single units.
        picture: the plotly FigureWidget.
        book: the names of the plans.
        measurer: measures them.
    """

    ratio = Within(0.2, min=0.01, max=0.99).tag(sync=True)
    interaction_strength = Within(1.0, min=0, max=1e3).tag(sync=True)
    strengths: List[float] = List(Float(), [0.0, 0.1, 0.25, 0.5, 1.0]).tag(sync=True)
    ratios: List[float] = List(Float(), [0.05, 0.1, 0.2, 0.3, 0.4, 0.5]).tag(sync=True)
    seed = Int(0).tag(sync=True)
    methods = Some(METHODS).tag(sync=True)
    text = Unicode().tag(sync=True)
    axes = Enum(("log", "linear"), "log").tag(sync=True)

    def __init__(
        self,
        curvature: AnyCurvature,
        model: PreTrainedModel | None = None,
        calibration: cl.CalibrationSet | None = None,
        *,
        session: Session | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **controls: Any,
    ) -> None:
        curvature = opened(curvature)
        if calibration is not None:
            calibration = calibration.require_disjoint(curvature)
        self.calibration = calibration
        super().__init__(curvature, session=session, model=model, tokenizer=tokenizer, **controls)
        self.book = Book.of(self.session)
        self._singles = fidelity_points.single_rows(curvature)
        self._drawing, self._drawn_at = Mailbox(), 0.0
        self.measurer = Measurer(self.session, self._changed, self.report)
        self._actions = {
            "Measure this plan": lambda: self.measure(self.session.require_plan(), wait=False),
            "Lambda sweep": lambda: self.measure_lambda_sweep(self.ratio, self.strengths, False),
            "Ratio sweep": lambda: self.measure_ratio_sweep(
                self.interaction_strength, self.ratios, False
            ),
            "Same-budget pool": lambda: self.measure_pool(
                self.ratio, self.seed, self.interaction_strength, False
            ),
            "Cancel": self.measurer.cancel,
        }
        self.picture = Picture(self._clicked, self._hide)
        self._chosen = ""
        self.add_class("cocurve-fidelity")
        self.children = self._layout()
        self._closing.callback(self._drawing.cancel, "draw")
        self._closing.callback(self.measurer.cancel)
        for trait in ("selection", "measured", "selected_unit"):
            self.follow(self._changed, trait)
        self.observe(self._changed, ["methods", "text", "axes"])
        self.observe(self._tell, ["status", "error"])
        self.refresh()

    # Points -------------------------------------------------------------------------------------

    @property
    def points(self) -> DataFrame:
        """The shown points, a row each: measured plans, then the single units.

        Columns: kind ("plan", "single unit"), method, name, interaction_strength, requested_ratio,
        realized_ratio, units (how many), predicted_risk, measured_risk, measured_risk_error (NaN
        where unknown), text (measured on), and the other scores of `cocurve_lab.predictions`:
        diagonal_risk and single_units_risk, NaN where unknown. Risks in nats per token. Includes
        points that log axes cannot show.
        """
        return DataFrame(self.table())

    def _plans(self) -> Plans:
        """The measured plans that pass the filters, each with its row."""
        return [
            (record.selection, fidelity_points.plan_row(self.curvature, self.book, record))
            for record in self.session.measured
            if self.text in ("", record.text)
            and self.book.name(record.selection)[0] in self.methods
        ]

    def _units(self) -> Rows:
        """The rows of the single units; none while they are hidden."""
        return self._singles if SINGLE in self.methods else []

    def table(self) -> Rows:
        """The points, as in `points`."""
        return [row for _, row in self._plans()] + self._units()

    def statistics(self) -> dict[str, dict[str, Any]]:
        """How well the predictions agree with measurements, for the shown points.

        Keys: "all plans", each set measured together (sweeps, pools), and "single units" where they
        are known; single units are kept apart because both their values come from the build.
        Values: the fields of `cocurve_lab.Agreement`, with the worst point's name under "worst",
        and the Spearman of two scores without edges: "spearman_diagonal" of ½ Σ H_uu and
        "spearman_single_units" of the sum of the measured KLs of the units alone (NaN if unknown).
        """
        plans = self._plans()
        groups = {fidelity_points.ALL_PLANS: [row for _, row in plans]}
        for name, members in self.book.pools.items():
            groups[name] = rows_of(plans, members)
        groups[fidelity_points.SINGLE_UNITS] = self._units()
        return {
            name: fidelity_points.score(rows)
            for name, rows in groups.items()
            if rows or name == fidelity_points.ALL_PLANS
        }

    # Measuring ----------------------------------------------------------------------------------

    def measure(self, selections: cl.Selection | Iterable[cl.Selection], wait: bool = True) -> Rows:
        """Measure plans and add their points; plans already measured on this text are skipped.

        Args:
            selections: one plan or several.
            wait: whether to return when they are measured (Ctrl-C keeps the finished plans) or at
                once, as the buttons do. The session's thread measures.

        Returns:
            The rows (as in `points`) of those plans that are measured by now, in order.
        """
        plans = [selections] if isinstance(selections, cl.Selection) else list(selections)
        held_out = self._require_measurable(plans)
        text = text_name(held_out)
        known = self._on(text)
        fresh: dict[str, cl.Selection] = {}
        for plan in plans:  # of equal plans the first gives the name
            if plan.fingerprint not in known:
                fresh.setdefault(plan.fingerprint, plan)
        try:
            self.measurer.measure(list(fresh.values()), held_out)
            if wait:
                self.measurer.wait()
        except KeyboardInterrupt:  # also one that comes before the wait
            self.measurer.cancel()
            raise
        finally:
            if wait:
                self.refresh()
        known = self._on(text)
        found = [known[plan.fingerprint] for plan in plans if plan.fingerprint in known]
        return [fidelity_points.plan_row(self.curvature, self.book, record) for record in found]

    def _on(self, text: str) -> dict[str, MeasuredPlan]:
        """The plans measured on one text, by fingerprint."""
        return {r.selection.fingerprint: r for r in self.session.measured if r.text == text}

    def _require_measurable(self, plans: list[cl.Selection]) -> cl.CalibrationSet:
        """The text to measure on; an error if these plans cannot be measured."""
        self.session.require_model()
        if self.calibration is None:
            raise cl.InputError(
                "there is no held-out text to measure on. Pass rows that H was not built on: "
                "FidelityScatter(curvature, model, calibration)."
            )
        for plan in plans:
            require_type(plan, cl.Selection, "a plan to measure")
            plan.require_units(self.curvature.units)
        return self.calibration

    def measure_lambda_sweep(
        self, ratio: float, strengths: Sequence[float], wait: bool = True
    ) -> Rows:
        """Measure greedy plans of one ratio at several lambdas, under `opening_guards`.

        Returns and raises as `measure`.
        """
        plans = [self._solve(ratio, strength) for strength in strengths]
        return self._measure_set(f"lambda sweep, ratio {ratio:.4g}", plans, wait)

    def measure_ratio_sweep(
        self, interaction_strength: float, ratios: Sequence[float], wait: bool = True
    ) -> Rows:
        """Measure greedy plans of several ratios at one lambda, under `opening_guards`.

        Returns and raises as `measure`.
        """
        plans = [self._solve(ratio, interaction_strength) for ratio in ratios]
        return self._measure_set(f"ratio sweep, lambda {interaction_strength:.4g}", plans, wait)

    def _solve(self, ratio: float, strength: float) -> tuple[str, cl.Selection]:
        guards = cl.opening_guards(self.curvature.units)
        return "", cl.solve_greedy(self.curvature, ratio, strength, guards)  # named by its lambda

    def measure_pool(
        self, ratio: float, seed: int = 0, interaction_strength: float = 1.0, wait: bool = True
    ) -> Rows:
        """Measure the paper's 26 sets of one budget (`cocurve_lab.same_budget_pool`).

        Returns and raises as `measure`.
        """
        plans = same_budget_pool(
            self.curvature, ratio, seed, interaction_strength=interaction_strength
        )
        made = f"ratio {ratio:.4g}, lambda {interaction_strength:.4g}, seed {seed}"
        return self._measure_set(f"same-budget pool, {made}", plans, wait)

    def _measure_set(self, name: str, pool: Pool, wait: bool) -> Rows:
        """Measure plans under one name."""
        self.book.add_pool(name, pool)
        return self.measure([plan for _, plan in pool], wait)

    # Choosing -----------------------------------------------------------------------------------

    def choose(self, name: str) -> None:
        """Make the measured plan of this name (as in `points`) the session's; "" has no effect."""
        if not name:
            return
        for record in self.session.measured:
            if self.book.name(record.selection)[1] == name:
                self.session.selection = record.selection
                return
        raise cl.InputError(f"no measured plan is called {name!r}. Measure it, or choose another.")

    # None of these holds the lock: all other views of the session answer and take theirs.
    def _do(self, action: Callable[[], object], *_: Any) -> None:
        """Do what the page asks for, and show its error."""
        try:
            self.error = ""
            action()
        except Exception as error:
            self.report(error)

    def _clicked(self, row: Row) -> None:
        self._do(partial(self._mark if row["kind"] == SINGLE else self.choose, row["name"]))

    def _mark(self, name: str) -> None:
        self.selected_unit = self.curvature.units.index(name)

    def _hide(self, hidden: set[str]) -> None:
        self.methods = [name for name in METHODS if name not in hidden]

    # Controls -----------------------------------------------------------------------------------

    def _layout(self) -> list[ipywidgets.Widget]:
        """The parts of the instrument from top to bottom."""
        number, whole = ipywidgets.BoundedFloatText, ipywidgets.BoundedIntText
        several, label = ipywidgets.FloatsInput, ipywidgets.Label
        fields = [
            self._tied("ratio", "Ratio", number, min=0.01, max=0.99, step=0.05),
            self._tied("interaction_strength", "λ of ratio sweep and pool", number, max=1e3),
            _row(label("λ to sweep"), self._tied("strengths", "", several, min=0, format=".4")),
            _row(
                label("Ratios to sweep"),
                self._tied("ratios", "", several, min=0, max=0.99, format=".4"),
            ),
            self._tied("seed", "Seed", whole, max=2**31 - 1),
        ]
        self._buttons = {}
        for name, tip in BUTTONS.items():
            self._buttons[name] = ipywidgets.Button(description=name, tooltip=tip)
            self._buttons[name].on_click(partial(self._do, self._actions[name]))
        self._bar, self._moving = ipywidgets.IntProgress(), ipywidgets.Label()
        menu, typed = ipywidgets.Combobox, {"continuous_update": False}
        self._plan = _named("Show plan", menu, **typed)
        self._plan.observe(self._choose_name, "value")
        self._text = self._tied("text", "Text", menu, placeholder="all texts", **typed)
        axes = self._tied("axes", "Axes", ipywidgets.Dropdown, options=["log", "linear"])
        self._words, self._agreement = ipywidgets.HTML(), ipywidgets.HTML()
        return [
            ipywidgets.HTML("<h3>Predicted and measured risk of plans</h3>"),
            _row(*fields),
            _row(*self._buttons.values(), self._bar, self._moving),
            self.picture,
            _row(self._plan, self._text, axes),
            self._words,
            self._agreement,
        ]

    def _tied(self, name: str, label: str, kind: Any, **options: Any) -> Any:
        """A control that is kept equal to a trait; the error of a refused value is shown."""
        control = _named(label, kind, **{"value": getattr(self, name)} | options)
        control.observe(
            lambda change: self._do(partial(setattr, self, name, change["new"])), "value"
        )
        self.observe(lambda change: setattr(control, "value", change["new"]), name)
        return control

    def _choose_name(self, change: Any) -> None:
        if change["new"] != self._chosen:  # else it is we who have filled the menu
            self._do(partial(self.choose, change["new"]))

    # Drawing ------------------------------------------------------------------------------------

    def _changed(self, _: Any = None) -> None:
        """Redraw soon: measuring would redraw more often than once in PAUSE."""
        if self.comm is not None:
            self._drawing.submit("draw", self._later, self.report)

    def _later(self, token: CancelToken) -> None:
        token.rest(self._drawn_at + PAUSE - time.monotonic())
        self.refresh()

    @guarded
    def refresh(self) -> None:
        """Bring picture, numbers and status up to date."""
        plans, plan = self._plans(), self.session.selection
        mine = [] if plan is None else rows_of(plans, [plan.fingerprint])
        known = plan is None or any(map(self._drawable, mine))
        self._chosen = mine[0]["name"] if mine else ""
        rows = [row for _, row in plans]
        waiting = None if plan is None or known else self.curvature.risk(plan.pruned)
        unit = self.selected_unit
        marked = [] if unit is None else [self.curvature.units[unit].name]
        self.picture.show_points(rows, self._units(), [self._chosen, *marked], waiting, self.axes)
        self._drawn_at = time.monotonic()
        work = self.measurer
        for name, button in self._buttons.items():
            button.disabled = name == "Cancel" and not work.active
        self._bar.max, self._bar.value = max(1, work.total), work.done
        self._bar.layout.visibility = "visible" if work.active else "hidden"
        self._moving.value = work.words()
        self._plan.options = list(dict.fromkeys(row["name"] for row in rows))
        self._plan.value = self._chosen
        self._text.options = list(dict.fromkeys(m.text for m in self.session.measured))
        self._agreement.value = self._agreement_html(plans)
        self.status = self._status(rows)

    def _tell(self, _: Any = None) -> None:
        """Show error, status and caption."""
        here = None if self.calibration is None else text_name(self.calibration)
        lines = {
            "alert": self.error,
            "status": self.status,
            "note": fidelity_points.caption(self.curvature, here),
        }
        self._words.value = "".join(
            f'<p role="{role}">{html.escape(text)}</p>' for role, text in lines.items() if text
        )

    def _agreement_html(self, plans: Plans) -> str:
        """The statistics as a table, and a table of the points."""
        found = DataFrame(self.statistics()).T[list(SCORES)].rename(columns=SCORES)
        scores = found.to_html(border=0, na_rep="-", float_format=lambda x: typeset(brief(x)))
        points = table_html([row for _, row in plans])
        return f"{_STYLE}<h4>Agreement</h4>{scores}{points}"

    def _drawable(self, row: Row) -> bool:
        """Whether both risks are above 0, so that log axes can show them."""
        return bool(row["predicted_risk"] > 0 and row["measured_risk"] > 0)

    def _status(self, plans: Rows) -> str:
        """How many points, those that cannot be drawn, the time taken."""
        units = self._units()
        texts = len({row["text"] for row in plans})
        hidden = sum(not self._drawable(row) for row in plans + units)
        parts = [
            f"{counted(len(plans), 'measured plan')} on {counted(texts, 'text')} and "
            f"{counted(len(units), 'single unit')} shown",
            f"{hidden} not above 0, which only linear axes show" if hidden else "",
            f"last: {self.measurer.took}" if self.measurer.took else "",
        ]
        return "; ".join(filter(None, parts)) + "."

    def __repr__(self) -> str:
        return f"FidelityScatter on {self.session!r}: {self.status}"


def _named(label: str, kind: Any, **options: Any) -> Any:
    """A control with its name above it, which screen readers read with it."""
    wide = {"flex": "0 1 auto", "width": "auto"}
    return kind(description=label, style={"description_width": "initial"}, layout=wide, **options)


def _row(*parts: ipywidgets.Widget) -> ipywidgets.HBox:
    return ipywidgets.HBox(parts, layout={"flex_flow": "row wrap"})
