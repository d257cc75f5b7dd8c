"""FidelityScatter: the predicted risk of plans against their measured KL, updated as they come."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from traitlets import Dict, Float, Int, List, Unicode, validate

import cocurve_lab as cl
from cocurve_lab.figures import COLORS
from cocurve_lab.measuring.agreement import predictions, same_budget_pool
from cocurve_lab.measuring.gap import RiskSplit
from cocurve_lab.solver.targets import require_ratio, require_strength

from .fidelity_measuring import Measurer
from .fidelity_points import (
    METHODS,
    SINGLE,
    SURROGATES,
    Book,
    Rows,
    by_column,
    caption,
    code_for,
    drawable,
    plain,
    plan_row,
    predicted_by,
    predicted_risk,
    single_rows,
    status_line,
    summarize,
)
from .instrument import Instrument, front, guarded
from .session import MeasuredPlan, Session, text_name
from .still import plot_html
from .traits import Some

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAUSE = 0.2  # seconds between redraws at least


class FidelityScatter(Instrument):
    """Predicted against measured KL(dense || pruned), both in nats per token.

    H predicts 1/2 s^T H s, as in the paper. With a sketch of shifts the pair KL and the additive KL
    can predict instead (`surrogate`), on the part "price" of the sketch.

    The prediction is on the teacher's top-r support and the calibration text; the measurement is
    over the full vocabulary, on held-out text. Gray points are single units: both values are the
    build's, the measurement over the tokens of `Curvature.risk_support`. Both axes are logarithmic:
    a plan whose prediction or measurement is not above 0 (the empty plan) is not drawn but named in
    the status.

    Args:
        curvature: H [M, M] with its units.
        model: the dense model; None shows what is known and measures nothing.
        calibration: held-out text to measure on; rows that the curvature was built on are refused.
        session: shared with other instruments; by default the curvature's own.
        tokenizer: added to the session, for other instruments.
        **controls: any of the attributes below up to `text`.

    Attributes:
        ratio: share of removable cost of the lambda sweep and the same-budget pool, (0, 1).
        interaction_strength: lambda of the ratio sweep and of the pool's greedy set.
        strengths: lambdas of the lambda sweep.
        ratios: ratios of the ratio sweep, each in [0, 1).
        seed: seed of the pool's random sets and swaps.
        rows: rows of the held-out text to measure on; 0 means all of them.
        surrogate: what predicts in the picture and the statistics: "H", "pair KL" or "additive KL".
        methods: the methods shown, of METHODS.
        text: name of the text whose plans are shown; empty for all texts.
        selected_unit: the unit ringed among the single units.
        book: the names of the plans.
        measurer: measures them.
    """

    _esm = front("scatter.js", render="render")

    ratio = Float(0.2).tag(sync=True)
    interaction_strength = Float(1.0).tag(sync=True)
    strengths: List[float] = List(Float(), [0.0, 0.1, 0.25, 0.5, 1.0]).tag(sync=True)
    ratios: List[float] = List(Float(), [0.05, 0.1, 0.2, 0.3, 0.4, 0.5]).tag(sync=True)
    seed = Int(0).tag(sync=True)
    rows = Int(0).tag(sync=True)
    surrogate = Unicode("H").tag(sync=True)
    methods = Some(METHODS).tag(sync=True)
    text = Unicode().tag(sync=True)
    # what the page draws: rows by column, what can be chosen, and everything else
    plans: Dict[str, Any] = Dict(read_only=True).tag(sync=True)
    units: Dict[str, Any] = Dict(read_only=True).tag(sync=True)
    offered: Dict[str, Any] = Dict(read_only=True).tag(sync=True)
    view: Dict[str, Any] = Dict(read_only=True).tag(sync=True)

    def __init__(
        self,
        curvature: cl.Curvature,
        model: PreTrainedModel | None = None,
        calibration: cl.CalibrationSet | None = None,
        *,
        session: Session | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        **controls: Any,
    ) -> None:
        self._require_known(controls)
        if calibration is not None:
            calibration = calibration.require_disjoint(curvature)
        self.calibration = calibration
        shared: Any = {"session": session, "model": model, "tokenizer": tokenizer}
        super().__init__(curvature, **shared, **controls)
        self.book = Book.of(self.session)
        self.measurer = Measurer(self.session, self._changed, self.report)
        self._singles = single_rows(curvature)
        self._splits: dict[tuple[str, str], list[RiskSplit]] = {}  # a part per row done
        self._drawn_at = 0.0
        self._timer: threading.Timer | None = None
        self._actions = {
            "Measure this plan": lambda: self.measure(self.require_plan(), wait=False),
            "Lambda sweep": lambda: self.measure_lambda_sweep(wait=False),
            "Ratio sweep": lambda: self.measure_ratio_sweep(wait=False),
            "Same-budget pool": lambda: self.measure_pool(wait=False),
            "Cancel": self.cancel,
        }
        known = {"H": SURROGATES["H"]}
        with suppress(cl.InputError):  # no sketch of shifts, or one of too few groups
            curvature.require_shifts().of("price")
            known = SURROGATES
        rows = 0 if calibration is None else len(calibration)
        self.set_trait("offered", {"methods": METHODS, "surrogates": known, "rows": rows})
        self.set_trait("units", by_column(self._singles))
        for trait in ("selection", "measured", "selected_unit"):
            self.follow(self._changed, trait)
        self.observe(self._changed, ["methods", "text", "rows", "surrogate"])
        self.refresh()

    # Values -------------------------------------------------------------------------------------

    @validate("ratio", "ratios")
    def _check_ratio(self, proposal: Any) -> Any:
        name, value = proposal.trait.name, proposal.value
        for ratio in [value] if name == "ratio" else value:
            require_ratio(ratio)
        if not value:
            raise cl.InputError(f"{name} is {value}, which removes nothing. Set a ratio above 0.")
        return value

    @validate("interaction_strength", "strengths")
    def _check_strength(self, proposal: Any) -> Any:
        value = proposal.value
        for strength in value if isinstance(value, list) else [value]:
            require_strength(strength)
        if value == []:
            raise cl.InputError("strengths is empty. Set at least one lambda to sweep.")
        return value

    @validate("rows")
    def _check_rows(self, proposal: Any) -> Any:
        most = 0 if self.calibration is None else len(self.calibration)
        if not 0 <= proposal.value <= most:
            raise cl.InputError(
                f"rows is {proposal.value}; the held-out text has {most} rows. Set 0 for all of "
                f"them, or at most {most}."
            )
        return proposal.value

    @validate("surrogate")
    def _check_surrogate(self, proposal: Any) -> Any:
        if proposal.value not in SURROGATES:
            known = ", ".join(SURROGATES)
            raise cl.InputError(f"surrogate is {proposal.value!r}. Choose one of {known}.")
        if proposal.value != "H":
            self.curvature.require_shifts().of("price")  # says what is missing
        return proposal.value

    # Points -------------------------------------------------------------------------------------

    @property
    def points(self) -> Rows:
        """The shown points, one dict each: measured plans, then the single units.

        Keys: kind ("plan", "single unit"), method, name, interaction_strength, requested_ratio,
        realized_ratio, units (how many), predicted_risk (of H, whatever `surrogate` is),
        measured_risk, measured_risk_error (NaN where unknown), text (measured on), and the other
        scores of `cocurve_lab.predictions`: diagonal_risk, single_units_risk, pair_kl_risk and
        additive_kl_risk, None where unknown. Risks in nats per token. Includes points that log axes
        cannot show.
        """
        return self._rows(self._records())

    def _rows(self, records: list[MeasuredPlan]) -> Rows:
        """The rows of these plans, and of the single units if they are shown."""
        plans = [plan_row(self.curvature, self.book, record) for record in records]
        return plans + (self._singles if SINGLE in self.methods else [])

    def _records(self) -> list[MeasuredPlan]:
        """The measured plans that pass the filters."""
        return [
            record
            for record in self.session.measured
            if self.text in ("", record.text)
            and self.book.name(record.selection)[0] in self.methods
        ]

    def table(self) -> Rows:
        """The points, as in `points`."""
        return self.points

    def _still_picture(self) -> str:
        """Predicted against measured KL of the shown points."""
        points = [
            (row["predicted_risk"], row["measured_risk"], COLORS["attention"])
            for row in predicted_by(self.points, self.surrogate)
        ]
        return plot_html(points, ("predicted, nats per token", "measured, nats per token"))

    def statistics(self) -> dict[str, dict[str, Any]]:
        """How well the predictions of `surrogate` agree with measurements, for the shown points.

        Keys: "all plans", each set measured together (sweeps, pools), and "single units" where they
        are known; single units are kept apart because both their values come from the build.
        Values: the fields of `cocurve_lab.Agreement`, with the worst point's name under "worst",
        and the Spearman of two scores without edges: "spearman_diagonal" of ½ Σ H_uu and
        "spearman_single_units" of the sum of the measured KLs of the units alone (NaN if unknown).
        """
        records = self._records()
        rows = predicted_by(self._rows(records), self.surrogate)
        return summarize(rows, [r.selection.fingerprint for r in records], self.book)

    def code(self) -> str:
        """The Python that measures the shown plans again; needs curvature, model, calibration."""
        names = (
            "ratio",
            "interaction_strength",
            "strengths",
            "ratios",
            "seed",
            "surrogate",
            "methods",
        )
        return code_for(self.curvature, self.book, self._records(), self.changed(names))

    # Measuring ----------------------------------------------------------------------------------

    def measure(self, selections: cl.Selection | Iterable[cl.Selection], wait: bool = True) -> Rows:
        """Measure plans and add their points; plans already measured on this text are skipped.

        Args:
            selections: one plan or several.
            wait: True measures in this thread (Ctrl-C keeps the finished plans); False hands the
                plans to the session's thread, as the buttons do.

        Returns:
            The rows (as in `points`) of those plans that are measured by now, in order.
        """
        plans = [selections] if isinstance(selections, cl.Selection) else list(selections)
        held_out = self._require_measurable(plans)
        text = text_name(held_out)
        self.book.rows[text] = len(held_out)
        known = self._on(text)
        fresh: dict[str, cl.Selection] = {}
        for plan in plans:  # of equal plans the first gives the name
            if plan.fingerprint not in known:
                fresh.setdefault(plan.fingerprint, plan)
        if wait:
            self.measurer.measure_here(list(fresh.values()), held_out)
            self.refresh()
        else:
            self.measurer.measure_soon(list(fresh.values()), held_out)
        known = self._on(text)
        found = [known[plan.fingerprint] for plan in plans if plan.fingerprint in known]
        return [plan_row(self.curvature, self.book, record) for record in found]

    def _on(self, text: str) -> dict[str, MeasuredPlan]:
        """The plans measured on one text, by fingerprint."""
        return {r.selection.fingerprint: r for r in self.session.measured if r.text == text}

    def _require_measurable(self, plans: list[cl.Selection]) -> cl.CalibrationSet:
        """The text to measure on; an error if these plans cannot be measured."""
        if reason := self.reason():
            raise cl.InputError(reason)
        for plan in plans:
            if not isinstance(plan, cl.Selection):
                raise cl.InputError(f"{plan!r:.80} is not a Selection. Make one with solve_greedy.")
            plan.require_units(self.curvature.units)
        return self._held_out()

    def _held_out(self) -> cl.CalibrationSet:
        """The first `rows` rows of the held-out text."""
        assert self.calibration is not None
        if self.rows in (0, len(self.calibration)):
            return self.calibration
        return self.calibration.rows(0, self.rows)

    def measure_lambda_sweep(
        self,
        ratio: float | None = None,
        strengths: Sequence[float] | None = None,
        wait: bool = True,
    ) -> Rows:
        """Measure greedy plans of one ratio at several lambdas, under `opening_guards`.

        `ratio` and `strengths` default to the attributes; returns and raises as `measure`.
        """
        ratio = self.ratio if ratio is None else ratio
        strengths = list(self.strengths if strengths is None else strengths)
        plans = [self._solve(ratio, strength) for strength in strengths]
        code = f"f.measure_lambda_sweep({ratio!r}, {strengths!r})"
        return self._measure_sweep(f"lambda sweep, ratio {ratio:.4g}", code, plans, wait)

    def measure_ratio_sweep(
        self,
        interaction_strength: float | None = None,
        ratios: Sequence[float] | None = None,
        wait: bool = True,
    ) -> Rows:
        """Measure greedy plans of several ratios at one lambda, under `opening_guards`.

        Arguments default to the attributes; returns and raises as `measure`.
        """
        strength = self._strength(interaction_strength)
        ratios = list(self.ratios if ratios is None else ratios)
        plans = [self._solve(ratio, strength) for ratio in ratios]
        code = f"f.measure_ratio_sweep({strength!r}, {ratios!r})"
        return self._measure_sweep(f"ratio sweep, lambda {strength:.4g}", code, plans, wait)

    def _solve(self, ratio: float, strength: float) -> cl.Selection:
        guards = cl.opening_guards(self.curvature.units)
        return cl.solve_greedy(self.curvature, ratio, strength, guards)

    def measure_pool(
        self,
        ratio: float | None = None,
        seed: int | None = None,
        interaction_strength: float | None = None,
        wait: bool = True,
    ) -> Rows:
        """Measure the paper's 26 sets of one budget (`cocurve_lab.same_budget_pool`).

        Arguments default to the attributes; returns and raises as `measure`.
        """
        ratio = self.ratio if ratio is None else ratio
        seed = self.seed if seed is None else seed
        strength = self._strength(interaction_strength)
        self._require_measurable([])
        pool = same_budget_pool(self.curvature, ratio, seed, interaction_strength=strength)
        name = f"same-budget pool, ratio {ratio:.4g}, lambda {strength:.4g}, seed {seed}"
        code = f"f.measure_pool({ratio!r}, {seed!r}, {strength!r})"
        self.book.add_pool(name, code, pool)
        return self.measure([plan for _, plan in pool], wait)

    def _strength(self, given: float | None) -> float:
        return float(self.interaction_strength) if given is None else given

    def _measure_sweep(self, name: str, code: str, plans: list[cl.Selection], wait: bool) -> Rows:
        self._require_measurable(plans)
        self.book.add_pool(name, code, [("", plan) for plan in plans])
        return self.measure(plans, wait)

    def split(self, plan: cl.Selection | None = None) -> RiskSplit:
        """Measure where the prediction of a plan and its KL part (`cocurve_lab.split_risk`).

        It measures in this thread, row by row, under the bar of the instrument. Cancel and Ctrl-C
        keep the finished rows, and another call goes on after them.

        Args:
            plan: a plan without gains; None takes the session's.

        Returns:
            The split over the rows done: all of them, or fewer after Cancel.
        """
        plan = self.require_plan() if plan is None else plan
        held_out = self._require_measurable([plan])
        parts = self._splits.setdefault((plan.fingerprint, text_name(held_out)), [])
        try:
            self.measurer.split_here(plan, held_out, parts)
        finally:
            self.refresh()
        if not parts:
            raise cl.InputError("the split was cancelled before its first row. Call split again.")
        return RiskSplit.join(parts)

    def cancel(self) -> None:
        """Stop measuring; measured plans are kept, and so are those in the model now."""
        self.measurer.cancel()

    def require_plan(self) -> cl.Selection:
        """The session's plan; InputError if none is chosen."""
        if self.session.selection is None:
            raise cl.InputError(
                "no plan is chosen yet. Set session.selection, click a point, or run a sweep."
            )
        return self.session.selection

    def reason(self) -> str:
        """The reason why nothing can be measured; empty if measuring is possible."""
        if self.session.model is None:
            return (
                "Nothing can be measured: there is a curvature but no model. Pass model=, or call "
                "session.attach(model, tokenizer)."
            )
        if self.calibration is None:
            return (
                "Nothing can be measured: there is no held-out text. Pass rows that H was not "
                "built on: FidelityScatter(curvature, model, calibration)."
            )
        return ""

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

    # Outside the lock: all other views of the session answer and take theirs.
    def _heard(self, widget: Any, content: Any, buffers: Any) -> None:
        """Press a button, choose a plan or mark a unit by name, or send a file."""
        if "want" in content:
            super()._heard(widget, content, buffers)
            return
        try:
            self.error = ""
            if "press" in content:
                self._actions[content["press"]]()
            elif "choose" in content:
                self.choose(content["choose"])
            elif "mark" in content:
                name = content["mark"]
                self.selected_unit = self.curvature.units.index(name) if name else None
        except Exception as error:
            self.report(error)
        self.send({"heard": True})

    # Drawing ------------------------------------------------------------------------------------

    @guarded
    def _changed(self, _: Any = None) -> None:
        """Redraw now, or after the rest of PAUSE: measuring would redraw more often than that."""
        if self._timer is not None or self.comm is None:
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
        if self.comm is not None:  # else closed while the timer ran
            self.refresh()

    @guarded
    def refresh(self) -> None:
        """Bring picture, numbers and status up to date."""
        records, work, plan = self._records(), self.measurer, self.session.selection
        rows, marks = self._rows(records), [record.selection.fingerprint for record in records]
        priced = predicted_by(rows, self.surrogate)
        names = [row["name"] for row in rows[: len(marks)]]
        chosen = "" if plan is None else self.book.name(plan)[1]
        drawn = {mark for mark, row in zip(marks, priced, strict=False) if drawable(row)}
        known, unit = plan is None or plan.fingerprint in drawn, self.selected_unit
        scores = summarize(priced, marks, self.book)
        here = None if self.calibration is None else text_name(self._held_out())
        view = {
            "chosen": chosen if chosen in names else "",
            "waiting": None if known else self._predicted(plan),
            "unit": "" if unit is None else self.curvature.units[unit].name,
            "reason": self.reason(),
            "done": work.done,
            "total": work.total,
            "moving": work.words(),
            "texts": list(dict.fromkeys(record.text for record in self.session.measured)),
            "caption": caption(self.curvature, self.surrogate, here),
            "scores": {
                name: {key: plain(value) for key, value in score.items()}
                for name, score in scores.items()
            },
        }
        self._drawn_at = time.monotonic()
        self.set_trait("plans", by_column(rows[: len(marks)]))
        self.set_trait("view", view)
        self.status = status_line(priced, marks, self._plan_words(), work.took)

    def _plan_words(self) -> str:
        """The session's plan, its prediction, and whether it is measured; empty without one."""
        plan = self.session.selection
        if plan is None:
            return ""
        known = (record.selection.fingerprint for record in self.session.measured)
        measured = plan.fingerprint in known  # also where the filters hide its point
        how = "measured" if measured else "only predicted so far"
        by = "" if self.surrogate == "H" else f" by the {self.surrogate}"
        predicted = f"predicted {self._predicted(plan):.3g} nats{by}"
        return f"chosen: {self.book.name(plan)[1]}, {predicted} ({how})"

    def _predicted(self, plan: cl.Selection) -> float:
        """The prediction of `surrogate`."""
        if self.surrogate == "H":
            return predicted_risk(self.curvature, plan)
        name = SURROGATES[self.surrogate][0].removesuffix("_risk")
        known = predictions(self.curvature, plan.pruned)[name]
        assert known is not None  # `_check_surrogate` has seen the sketch
        return known

    # Closing ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop measuring, leave the session, and close the widget."""
        if "measurer" in vars(self):  # else the constructor failed half-way
            with self.lock:
                if self._timer is not None:
                    self._timer.cancel()
                self._timer = None
            self.measurer.cancel()
        super().close()

    def __repr__(self) -> str:
        return f"FidelityScatter on {self.session!r}: {self.status}"
