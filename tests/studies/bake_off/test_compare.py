"""The bake-off on a tiny model: cells are what one would measure by hand, kept, and never fatal."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.extensions.choosing.gains import choose_gains
from cocurve_lab.extensions.choosing.settings import (
    RELEASE_GUARDS,
    choose_guards,
    guards_grid,
)
from cocurve_lab.methods.base import Evidence, Method
from cocurve_lab.methods.cocurve import CoCurve, Diagonal
from cocurve_lab.methods.magnitude import Magnitude
from cocurve_lab.methods.random_units import Random
from cocurve_lab.models.units import UnitSet
from cocurve_lab.solver.guards import Guards
from cocurve_lab.solver.selection import Selection
from cocurve_studies.bake_off import bench
from cocurve_studies.bake_off.bench import Bench
from cocurve_studies.bake_off.compare import compare
from cocurve_studies.bake_off.comparison import Comparison
from cocurve_studies.bake_off.contenders import Contender
from cocurve_studies.bake_off.settings import CompareOptions, Judges
from cocurve_studies.shared import marks
from cocurve_studies.tables import pick
from helpers.comparisons import cell
from helpers.tiny_models import GROUPS, tiny_model, tiny_text

GRID = (Guards(), Guards(protect_first=1), Guards(layer_cap=0.5))
RATIOS = (0.2, 0.4)


class Setting:
    """A tiny model and texts that share no row."""

    def __init__(self) -> None:
        self.model = tiny_model()
        text = tiny_text(16, 20, 5)
        self.calibrations = [text.rows(0, 4), text.rows(4, 8)]
        self.judges = Judges(text.rows(8, 12), text.rows(12, 16))

    def run(self, methods: Any, folder: Path | None = None, **changes: Any) -> Comparison:
        options = CompareOptions(folder, changes.pop("guards", GRID), GROUPS, progress=False)
        arguments = {"ratios": RATIOS, "calibrations": self.calibrations, "judges": self.judges}
        tokenizer: Any = None  # without questions none is needed
        return compare(self.model, tokenizer, methods, **(arguments | changes), options=options)

    def leaky(self, judge: str) -> Judges:
        return self.judges._replace(**{judge: self.calibrations[0]})

    def same(self) -> Judges:
        return self.judges._replace(test=self.judges.held_out)


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting()


@dataclass(frozen=True)
class Broken(Method):
    """Fails the way a real method might."""

    name = "broken"
    title = "Broken"

    def measure(
        self,
        model: PreTrainedModel,
        units: UnitSet,
        calibration: CalibrationSet,
        *,
        seed: int = 0,
        progress: bool = True,
    ) -> Evidence:
        raise RuntimeError("the accelerator went away")

    def select(
        self, evidence: Evidence, units: UnitSet, ratio: float, guards: Guards = GRID[0]
    ) -> Selection:
        raise AssertionError("nothing was measured")


def test_cells_are_what_one_measures_by_hand(setting: Setting) -> None:
    result = setting.run([CoCurve(top_r=16), Magnitude()])
    units = cl.enumerate_units(setting.model, GROUPS)
    assert len(result.rows) == 1 + 2 * 2 * 2 * 2  # dense; calibration, method, ratio, search
    for row in result.rows[1:]:
        assert row["failed"] == ""
        if row["method"] != "CoCurve":
            continue
        calibration = setting.calibrations[row["calibration"]]
        h = cl.estimate_curvature(setting.model, units, calibration, 16, progress=False)
        plans = [cl.solve_greedy(h, row["requested_ratio"], 1.0, guards) for guards in GRID]
        kl = cl.measure_plans(setting.model, plans, setting.judges.held_out, progress=False)
        best = int(kl.mean.argmin()) if row["search"] == "searched" else 0
        expected = cl.pruning_risk(setting.model, plans[best], setting.judges.test)
        assert row["kl"] == pytest.approx(expected, rel=1e-4)
        assert row["realized_ratio"] == plans[best].realized_ratio
    dense = result.dense()
    assert (dense["kl"], dense["realized_ratio"]) == (0, 0)
    assert dense["perplexity"] > 1


def test_guards_are_searched_as_choose_guards_does_and_counted(setting: Setting) -> None:
    assert CompareOptions().guards == guards_grid()
    assert {Guards(), Guards(protect_first=2, protect_last=2), RELEASE_GUARDS} < set(guards_grid())
    assert len(set(guards_grid())) == 15
    grid = (None, 0.5), ((0, 0), (1, 0), (2, 1))  # the last keeps all of three layers
    result = setting.run([CoCurve(top_r=16)], guards=guards_grid(*grid))
    units = cl.enumerate_units(setting.model, GROUPS)
    for row in result.rows[1:]:
        calibration = setting.calibrations[row["calibration"]]
        h = cl.estimate_curvature(setting.model, units, calibration, 16, progress=False)
        options = cl.ChoiceOptions(progress=False)
        chosen = choose_guards(
            *(setting.model, h, row["requested_ratio"], setting.judges.held_out),
            layer_caps=grid[0],
            protections=grid[1],
            options=options,
        )
        searched = row["search"] == "searched"
        counts = (6, len(chosen.infeasible)) if searched else (1, 0)
        assert (row["settings_tried"], row["settings_out"]) == counts
        assert row["guards"] == str(chosen.guards) or not searched
    assert len(chosen.infeasible) == 3  # a cap of a half and two of three layers are too little
    assert "(of 6, 2 out of reach)" in result.to_html(0.2, "searched")


def test_a_killed_run_goes_on(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = {"one": CoCurve(top_r=16), "two": Magnitude(), "three": Random()}
    real, calls = Bench.enter, []

    def counted(self: Any, *arguments: Any) -> Any:
        calls.append(arguments[0].methods[0].name)
        if len(calls) == 7:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(Bench, "enter", counted)
    with pytest.raises(KeyboardInterrupt):
        setting.run(methods, tmp_path)
    first = setting.run(methods, tmp_path)
    # six finished cells are read, and magnitude's are the same on the second calibration
    assert len(calls) == 7 + (3 * 2 * 2 * 2 - 6 - 4)
    monkeypatch.setattr(Bench, "enter", None)
    monkeypatch.setattr(Magnitude, "measure", None)
    again = setting.run(methods, tmp_path)
    assert again.rows == first.rows
    other = setting.run({"renamed": Magnitude()}, tmp_path)
    assert {row["method"] for row in other.rows} == {"Dense", "renamed"}


def test_the_model_is_read_once_for_all_cells(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[PreTrainedModel] = []
    monkeypatch.setattr(bench, "marks", lambda model: seen.append(model) or marks(model))
    setting.run([CoCurve(top_r=16), Magnitude()], tmp_path)
    assert seen == [setting.model]


def test_a_failure_stays_in_its_cells(setting: Setting, tmp_path: Path) -> None:
    result = setting.run([Broken(), Magnitude()], tmp_path)
    broken = [row for row in result.rows if row["method"] == "Broken"]
    assert len(broken) == 8
    assert all("RuntimeError: the accelerator went away" in row["failed"] for row in broken)
    assert all(not row["failed"] for row in result.rows if row["method"] == "Magnitude")
    summary = {row["method"]: row for row in pick(result.summary(0.2))}
    assert summary["Broken"]["kl"] is None
    assert summary["Magnitude"]["kl_rank"] == 1
    assert "went away" in result.to_html(0.2)


def test_a_ratio_out_of_reach_is_said(setting: Setting) -> None:
    result = setting.run(["head-only"], ratios=(0.9,), guards=())
    (row,) = (r for r in result.rows if r["method"] == "Heads only" and r["calibration"] == 0)
    assert re.search(r"\d", row["failed"])
    assert "kl" not in row


def test_random_draws_anew_with_each_calibration(setting: Setting) -> None:
    rows = setting.run([Random()], guards=()).rows[1:]
    kl = {row["calibration"]: row["kl"] for row in rows if row["requested_ratio"] == 0.4}
    assert kl[0] != kl[1]
    (summary,) = pick(setting.run([Random()], guards=()).summary(0.4))
    assert summary["kl"] == pytest.approx(np.mean(list(kl.values())))
    assert summary["kl_spread"] == pytest.approx(np.std(list(kl.values()), ddof=1))


def test_gains_that_pass_the_gate_are_measured_on_the_model_that_has_them(
    setting: Setting,
) -> None:
    methods = {"plain": CoCurve(top_r=16), "gains": CoCurve(top_r=16, compensate=True)}
    result = setting.run(methods, guards=(), ratios=(0.4,))
    units = cl.enumerate_units(setting.model, GROUPS)
    h = cl.estimate_curvature(setting.model, units, setting.calibrations[0], 16, progress=False)
    plan = cl.solve_greedy(h, 0.4, 1.0)
    ungated = plan.with_gains(cl.solve_gains(h, plan))
    quiet = cl.ChoiceOptions(progress=False)
    held_out = setting.judges.held_out
    plan = choose_gains(setting.model, h, plan, held_out, options=quiet).best
    assert plan.gains != ungated.gains
    row = next(r for r in result.rows if r["method"] == "gains" and r["calibration"] == 0)
    assert row["kl"] == pytest.approx(
        cl.pruning_risk(setting.model, plan, setting.judges.test), rel=1e-3
    )


# The table ---------------------------------------------------------------------------------------


def test_best_and_second_are_marked_and_under_pruned_rows_are_not_ranked() -> None:
    result = Comparison(
        [
            cell("Dense", 0.0, search="dense", requested_ratio=0.0, realized_ratio=0.0),
            cell("A", 0.3),
            cell("B", 0.1),
            cell("cheat <i>", 0.01, realized_ratio=0.15, comparable=False),
            cell("C", 0.3),
        ]
    )
    rows = {row["method"]: row for row in pick(result.summary(0.2))}
    assert (rows["B"]["kl_rank"], rows["A"]["kl_rank"], rows["C"]["kl_rank"]) == (1, 2, 2)
    assert rows["B"]["accuracy all_rank"] == 1  # high accuracy, low KL
    assert rows["cheat <i>"]["kl_rank"] is None
    assert rows["cheat <i>"]["mark"] == "†"
    page = result.to_html(0.2)
    assert "<b>0.100</b>" in page
    assert page.count("<u>0.300</u>") == 2
    assert "cheat &lt;i&gt;†" in page
    assert "Dense" in result._repr_html_()


def test_spread_is_over_calibrations() -> None:
    result = Comparison([cell("A", kl, calibration=n) for n, kl in enumerate((0.1, 0.2, 0.6))])
    (row,) = pick(result.summary(0.2))
    assert row["kl"] == pytest.approx(0.3)
    assert row["kl_spread"] == pytest.approx(np.std([0.1, 0.2, 0.6], ddof=1))
    assert row["calibrations"] == 3


def test_methods_without_guards_stand_in_both_searches() -> None:
    result = Comparison([cell("A", 0.2), cell("A", 0.1, search="searched"), cell("2SSP", 0.15)])
    assert result.summary(0.2, "searched")["kl"].tolist() == [0.1, 0.15]
    assert result.summary(0.2)["kl"].tolist() == [0.2, 0.15]


def test_csv_holds_every_cell(tmp_path: Path) -> None:
    result = Comparison([cell("A", 0.2), cell("B", None, failed="why") | {"extra": 1}])
    with result.to_csv(tmp_path / "cells.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["A", "B"]
    assert (rows[0]["kl"], rows[1]["failed"], rows[0]["extra"]) == ("0.2", "why", "")


def test_methods_without_a_plan_are_named_with_their_reason() -> None:
    reached = [cell("A", 0.2), cell("A", 0.3, search="searched", requested_ratio=0.4)]
    assert Comparison(reached).unreached() == "Every method has a plan at every ratio."
    failed = [cell("B", None, failed="why", search=search) for search in ("none", "searched")]
    one_of_two = [cell("C", None, failed="no"), cell("C", 0.2, calibration=1)]
    result = Comparison([*reached, *failed, *one_of_two])
    assert result.unreached() == "B has no plan at 20%: why"


# Bad input ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (lambda s: s.run([]), cl.InputError, "method"),
        (lambda s: s.run([Magnitude(), Magnitude()]), cl.InputError, "title"),
        (lambda s: s.run(["wanda"]), cl.InputError, "wanda-sp"),
        (lambda s: s.run([Magnitude()], judges=s.leaky("held_out")), cl.MismatchError, None),
        (lambda s: s.run([Magnitude()], judges=s.leaky("test")), cl.MismatchError, None),
        (lambda s: s.run([Magnitude()], judges=s.same()), cl.MismatchError, None),
        (lambda _: Comparison([]).dense(), cl.InputError, "dense"),
        (lambda _: Comparison([cell("A", 0.1)]).leads("D", ["A"]), cl.InputError, "'D'"),
        (lambda _: Contender(()), cl.InputError, "method"),
        (lambda _: Contender((Magnitude(),), "mend"), cl.InputError, "'mend'"),
        (lambda _: Contender((Magnitude(),), evaluations=-1), cl.InputError, "-1"),
        (lambda _: CompareOptions(repaired=0), cl.InputError, "repaired is 0"),
    ],
)
def test_bad_input_is_refused(setting: Setting, call: Any, error: Any, named: str | None) -> None:
    with pytest.raises(error, match=named):
        call(setting)


def test_diagonal_and_cocurve_share_one_h(setting: Setting, tmp_path: Path) -> None:
    setting.run([CoCurve(top_r=16), Diagonal(top_r=16)], tmp_path, ratios=(0.2,))
    assert len(list(tmp_path.glob("H_*.pkl"))) == 2  # one per calibration
    assert replace(CoCurve(top_r=16)).name == "cocurve"
