"""Which plans an instrument measures: single ones, sweeps, and the pool of one budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from traitlets import Float, Int, List, validate

from cocurve_lab import (
    CalibrationSet,
    Curvature,
    InputError,
    Selection,
    same_budget_pool,
    solve_greedy,
)
from cocurve_lab.solver.greedy import require_strength
from cocurve_lab.solver.targets import require_ratio

from .fidelity_measuring import Measurer
from .fidelity_points import Book, plan_row, text_name
from .instrument import Instrument
from .session import Measured


class MeasuresPlans(Instrument):
    """An instrument that measures plans; its traits are documented in FidelityScatter.

    Attributes:
        curvature, calibration: H and the held-out text; the text may be None.
        book: what the plans are called.
        measurer: what measures them.
    """

    curvature: Curvature
    calibration: CalibrationSet | None
    book: Book
    measurer: Measurer

    ratio = Float(0.2).tag(sync=True)
    interaction_strength = Float(1.0).tag(sync=True)
    strengths: List[float] = List(Float(), [0.0, 0.1, 0.25, 0.5, 1.0]).tag(sync=True)
    ratios: List[float] = List(Float(), [0.05, 0.1, 0.2, 0.3, 0.4, 0.5]).tag(sync=True)
    seed = Int(0).tag(sync=True)
    rows = Int(0).tag(sync=True)

    # Values -------------------------------------------------------------------------------------

    @validate("ratio", "ratios")
    def _check_ratio(self, proposal: Any) -> Any:
        name, value = proposal.trait.name, proposal.value
        for ratio in [value] if name == "ratio" else value:
            require_ratio(ratio)
        if not value:
            raise InputError(f"{name} is {value}; a plan of ratio 0 removes nothing. Give more.")
        return value

    @validate("interaction_strength", "strengths")
    def _check_strength(self, proposal: Any) -> Any:
        value = proposal.value
        for strength in value if isinstance(value, list) else [value]:
            require_strength(strength)
        if value == []:
            raise InputError("strengths is empty; a sweep needs at least one lambda.")
        return value

    @validate("rows")
    def _check_rows(self, proposal: Any) -> Any:
        most = 0 if self.calibration is None else len(self.calibration)
        if not 0 <= proposal.value <= most:
            raise InputError(
                f"rows is {proposal.value}; the held-out text has {most} rows (0 means all)."
            )
        return proposal.value

    # Measuring ----------------------------------------------------------------------------------

    def measure(
        self, selections: Selection | Iterable[Selection], wait: bool = True
    ) -> list[dict[str, Any]]:
        """Measure plans and add their points; plans already measured on this text are not repeated.

        Args:
            selections: one plan or several.
            wait: measure here and now (Ctrl-C keeps what is done); False hands them to the worker,
                as the buttons do.

        Returns:
            The rows (as in `points`) of those of the plans that are measured by now, in order.

        Raises:
            InputError: no model or no held-out text, or something that is not a plan.
            MismatchError: a plan is for other units.
        """
        plans = [selections] if isinstance(selections, Selection) else list(selections)
        held_out = self._require_measurable(plans)
        text = text_name(held_out)
        self.book.rows[text] = len(held_out)
        known = self._on(text)
        fresh: dict[str, Selection] = {}
        for plan in plans:  # of equal plans the first gives the name
            if plan.fingerprint not in known:
                fresh.setdefault(plan.fingerprint, plan)
        if wait:
            self.measurer.measure_here(list(fresh.values()), held_out)
            self.refresh()
        else:
            self.measurer.measure_soon(list(fresh.values()), held_out, self.report)
        known = self._on(text)
        found = [known[plan.fingerprint] for plan in plans if plan.fingerprint in known]
        return [plan_row(self.curvature, self.book, record) for record in found]

    def _on(self, text: str) -> dict[str, Measured]:
        """Plans measured on one text, by fingerprint."""
        return {r.selection.fingerprint: r for r in self.session.measured if r.text == text}

    def _require_measurable(self, plans: list[Selection]) -> CalibrationSet:
        """The text to measure on, or the error that says why these plans cannot be measured."""
        if reason := self.reason():
            raise InputError(reason)
        for plan in plans:
            if not isinstance(plan, Selection):
                raise InputError(f"{plan!r:.80} is not a Selection. Make one with solve_greedy.")
            plan.require_units(self.curvature.units)
        return self._held_out()

    def _held_out(self) -> CalibrationSet:
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
    ) -> list[dict[str, Any]]:
        """Measure greedy plans of one ratio at several lambdas, without guards.

        `ratio` and `strengths` default to the attributes; returns and raises as `measure`.
        """
        ratio = self.ratio if ratio is None else ratio
        strengths = list(self.strengths if strengths is None else strengths)
        plans = [solve_greedy(self.curvature, ratio, strength) for strength in strengths]
        code = f"f.measure_lambda_sweep({ratio!r}, {strengths!r})"
        return self._measure_pool(f"lambda sweep, ratio {ratio:.4g}", code, plans, wait)

    def measure_ratio_sweep(
        self,
        interaction_strength: float | None = None,
        ratios: Sequence[float] | None = None,
        wait: bool = True,
    ) -> list[dict[str, Any]]:
        """Measure greedy plans of several ratios at one lambda, without guards.

        Arguments default to the attributes; returns and raises as `measure`.
        """
        strength = (
            self.interaction_strength if interaction_strength is None else interaction_strength
        )
        ratios = list(self.ratios if ratios is None else ratios)
        plans = [solve_greedy(self.curvature, ratio, strength) for ratio in ratios]
        code = f"f.measure_ratio_sweep({strength!r}, {ratios!r})"
        return self._measure_pool(f"ratio sweep, lambda {strength:.4g}", code, plans, wait)

    def measure_pool(
        self,
        ratio: float | None = None,
        seed: int | None = None,
        interaction_strength: float | None = None,
        wait: bool = True,
    ) -> list[dict[str, Any]]:
        """Measure the paper's 26 sets of one budget (`cocurve_lab.same_budget_pool`).

        Arguments default to the attributes; returns and raises as `measure`.
        """
        ratio = self.ratio if ratio is None else ratio
        seed = self.seed if seed is None else seed
        strength = (
            self.interaction_strength if interaction_strength is None else interaction_strength
        )
        self._require_measurable([])
        pool = same_budget_pool(self.curvature, ratio, seed, interaction_strength=strength)
        name = f"same-budget pool, ratio {ratio:.4g}, lambda {strength:.4g}, seed {seed}"
        code = f"f.measure_pool({ratio!r}, {seed!r}, {strength!r})"
        self.book.add_pool(name, code, pool)
        return self.measure([plan for _, plan in pool], wait)

    def _measure_pool(
        self, name: str, code: str, plans: list[Selection], wait: bool
    ) -> list[dict[str, Any]]:
        self._require_measurable(plans)
        self.book.add_pool(name, code, [("", plan) for plan in plans])
        return self.measure(plans, wait)

    def cancel(self) -> None:
        """Stop measuring; what is measured stays, and the plans in the model now still count."""
        self.measurer.cancel()

    def require_plan(self) -> Selection:
        """The session's plan, or InputError saying how to choose one."""
        if self.session.selection is None:
            raise InputError(
                "no plan is chosen yet. Set session.selection, click a point, or use a sweep."
            )
        return self.session.selection

    def reason(self) -> str:
        """Why nothing can be measured; empty where it can."""
        if self.session.model is None:
            return (
                "Nothing can be measured: there is a curvature but no model. Give model=, or call "
                "session.attach(model, tokenizer)."
            )
        if self.calibration is None:
            return (
                "Nothing can be measured: there is no held-out text. Give FidelityScatter(curvature"
                ", model, calibration) rows that H was not built on."
            )
        return ""

    def refresh(self) -> None:
        """Bring what is shown up to date."""
        raise NotImplementedError
