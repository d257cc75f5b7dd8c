"""The bake-off on a tiny model: cells are what one would measure by hand, kept, and never fatal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.extensions.choosing.settings import choose_guards
from cocurve_lab.extensions.repairing.repair import RepairOptions
from cocurve_lab.measuring.risk import model_risk
from cocurve_lab.methods.base import Method
from cocurve_lab.methods.cocurve import CoCurve, Diagonal
from cocurve_lab.methods.magnitude import Magnitude
from cocurve_lab.methods.random_units import Random
from cocurve_lab.models.architectures import describe
from cocurve_lab.solver.guards import Guards
from cocurve_studies.bake_off import findings, frontier
from cocurve_studies.bake_off.bench import Bench, build_evaluations
from cocurve_studies.bake_off.compare import compare
from cocurve_studies.bake_off.comparison import Comparison
from cocurve_studies.bake_off.contenders import CompareOptions, Contender, Judges
from cocurve_studies.tables import pick, shown
from helpers.tiny_models import GROUPS, tiny_model, tiny_text


def cell(method: str, kl: float | None, **changes: Any) -> dict[str, Any]:
    """One row: a method at 20 %, with a KL and what follows from it."""
    row = {
        "method": method,
        "search": "none",
        "calibration": 0,
        "requested_ratio": 0.2,
        "failed": "",
        "guards": "cap none protect 0/0",
        "realized_ratio": 0.201,
        "comparable": True,
        "kl": kl,
        "perplexity": None if kl is None else 2 + kl,
        "accuracy all": None if kl is None else 1 - kl,
    }
    row |= changes
    if row["kl"] is not None:  # two test rows with this mean and standard error
        error = row.get("kl_error", 0.0)
        row.setdefault("kl_rows", json.dumps([row["kl"] - error, row["kl"] + error]))
    return row


# The bake-off on a tiny model ---------------------------------------------------------------------


GRID = (Guards(), Guards(protect_first=1), Guards(layer_cap=0.5))
RATIO = 0.4
QUIET = RepairOptions(progress=False)


class Setting:
    """A tiny model and texts that share no row."""

    def __init__(self) -> None:
        self.model: PreTrainedModel = tiny_model()
        text = tiny_text(24, 20, 5)
        self.calibration, self.judges = text.rows(0, 8), Judges(text.rows(8, 16), text.rows(16, 24))
        self.units = cl.enumerate_units(self.model, GROUPS)

    def run(self, methods: Any, folder: Path | None = None, **options: Any) -> Comparison:
        settings = CompareOptions(folder, GRID, GROUPS, progress=False, **options)
        inputs = methods, (RATIO,), self.calibration, self.judges, settings
        return compare(self.model, None, *inputs)  # type: ignore[arg-type]

    def cells(self, contender: Contender, **options: Any) -> dict[str, dict[str, Any]]:
        rows = self.run({"it": contender}, **options).rows[1:]
        assert not any(row["failed"] for row in rows)
        return {row["search"]: row for row in rows}

    def plans(self, method: Method, grid: Any = GRID) -> list[cl.Selection]:
        evidence = method.measure(self.model, self.units, self.calibration, progress=False)
        return [method.select(evidence, self.units, RATIO, guards) for guards in grid]

    def built(self) -> cl.Curvature:
        return cl.estimate_curvature(self.model, self.units, self.calibration, 16, progress=False)


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting()


def test_cells_are_what_one_measures_by_hand(setting: Setting) -> None:
    h = setting.built()
    result = setting.run([CoCurve(top_r=16), Magnitude()], curvatures=(h,))
    (row,), plan = result.cells("CoCurve"), cl.solve_greedy(h, RATIO)
    expected = cl.pruning_risk(setting.model, plan, setting.judges.test)
    assert row["kl"] == pytest.approx(expected, rel=1e-4)
    assert row["realized_ratio"] == plan.realized_ratio
    dense = result.dense()
    assert (dense["kl"], dense["realized_ratio"]) == (0, 0)
    options = cl.ChoiceOptions(progress=False)
    whole = CompareOptions(None, ffn_groups=GROUPS, progress=False, curvatures=(h,))
    inputs = [CoCurve(top_r=16)], (RATIO,), setting.calibration, setting.judges, whole
    searched = compare(setting.model, None, *inputs).rows[-1]  # type: ignore[arg-type]
    chosen = choose_guards(setting.model, h, RATIO, setting.judges.held_out, options=options)
    assert searched["guards"] == str(chosen.guards)
    expected = cl.pruning_risk(setting.model, chosen.best, setting.judges.test)
    assert searched["kl"] == pytest.approx(expected, rel=1e-4)
    assert (searched["settings_tried"], searched["settings_out"]) == (15, len(chosen.infeasible))


def test_a_killed_run_goes_on_and_a_failure_stays_in_its_cells(
    setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = {"one": CoCurve(top_r=16), "two": Magnitude(), "three": Random()}
    real, calls = Bench.enter, []

    def watched(self: Any, *arguments: Any) -> Any:
        calls.append(arguments[0].methods[0].name)
        if len(calls) == 4:
            raise KeyboardInterrupt
        if calls[-1] == "random":
            raise RuntimeError("the accelerator went away")
        return real(self, *arguments)

    monkeypatch.setattr(Bench, "enter", watched)
    with pytest.raises(KeyboardInterrupt):
        setting.run(methods, tmp_path)
    first = setting.run(methods, tmp_path)
    assert len(calls) == 4 + (6 - 3)  # three finished cells are read
    failed = [row for row in first.rows if row["method"] == "three"]
    assert all("the accelerator went away" in row["failed"] for row in failed)
    assert pick(first.summary(RATIO), method="three")[0]["kl"] is None
    monkeypatch.setattr(Bench, "enter", None)  # nothing is measured again
    again = setting.run({"renamed": Magnitude()}, tmp_path)
    assert again.rows[1]["kl"] == first.cells("two")[0]["kl"]
    assert len(shown(first.summary(RATIO), first.columns("searched")).data) == 3


def test_guards_are_chosen_on_the_refitted_model(setting: Setting) -> None:
    row = setting.cells(Contender((Magnitude(),), "refit"))["searched"]
    models = [
        cl.repair(setting.model, plan, setting.calibration, options=QUIET)
        for plan in setting.plans(Magnitude())
    ]
    found = [model_risk(setting.model, model, setting.judges.held_out).mean() for model in models]
    expected = model_risk(setting.model, models[int(np.argmin(found))], setting.judges.test)
    assert json.loads(row["kl_rows"]) == pytest.approx(expected, rel=1e-4)


def test_the_best_of_several_methods_is_taken_and_one_h_counts_once(setting: Setting) -> None:
    methods = (CoCurve(top_r=16), Diagonal(top_r=16), Random())
    row = setting.cells(Contender(methods))["searched"]
    plans = [plan for method in methods for plan in setting.plans(method)]
    kl = cl.measure_plans(setting.model, plans, setting.judges.held_out, progress=False).mean
    expected = cl.pruning_risk(setting.model, plans[int(kl.argmin())], setting.judges.test)
    assert row["kl"] == pytest.approx(expected, rel=1e-4)
    layers = len(describe(setting.model).layers)
    price = build_evaluations(setting.units, layers, len(setting.calibration))
    assert row["evaluations"] == pytest.approx(price)


# The table ----------------------------------------------------------------------------------------


def test_ranks_leave_out_rows_off_the_ratio_and_spread_is_over_calibrations() -> None:
    result = Comparison(
        [
            cell("Dense", 0.0, search="dense", requested_ratio=0.0, realized_ratio=0.0),
            *(cell("A", kl, calibration=n) for n, kl in enumerate((0.1, 0.2, 0.6))),
            cell("B", 0.1),
            cell("B", 0.05, search="searched"),
            cell("cheat", 0.01, realized_ratio=0.15, comparable=False),
        ]
    )
    rows = {row["method"]: row for row in pick(result.summary(0.2))}
    assert (rows["B"]["kl_rank"], rows["A"]["kl_rank"], rows["cheat"]["kl_rank"]) == (1, 2, None)
    assert rows["B"]["accuracy all_rank"] == 1  # high accuracy, low KL
    assert rows["cheat"]["mark"] == "†"
    assert rows["A"]["kl"] == pytest.approx(0.3)
    assert rows["A"]["kl_spread"] == pytest.approx(np.std([0.1, 0.2, 0.6], ddof=1))
    searched = {row["method"]: row["kl"] for row in pick(result.summary(0.2, "searched"))}
    assert searched["B"] == 0.05
    assert searched["cheat"] == 0.01  # a method without guards stands in both


def test_a_lead_is_paired_over_rows_and_calibrations() -> None:
    random = np.random.default_rng(0)
    own, other = random.random((3, 8)), random.random((3, 8)) + 1
    rows = [
        cell(name, float(kl.mean()), calibration=n, kl_rows=json.dumps(kl.tolist()))
        for name, values in (("CoCurve", own), ("B", other))
        for n, kl in enumerate(values)
    ]
    (row,) = pick(Comparison(rows).leads("CoCurve", ["B", "C"]))
    gap = other - own
    by_row, by_draw = gap.mean(axis=0), gap.mean(axis=1)
    error = np.hypot(by_row.std(ddof=1) / np.sqrt(8), by_draw.std(ddof=1) / np.sqrt(3))
    assert row["behind"] == pytest.approx(gap.mean())
    assert row["behind_error"] == pytest.approx(error)
    assert findings.recovery_finding(Comparison(rows), 0.2, "B").agrees is True
    with pytest.raises(cl.InputError, match="no cells of 'D'"):
        Comparison(rows).leads("D", ["B"])


def test_the_order_is_judged_on_the_same_rows(setting: Setting) -> None:
    methods: dict[str, Any] = {"CoCurve": CoCurve(top_r=16), "Magnitude": Magnitude()}
    inputs = methods, RATIO, setting.calibration, setting.judges
    plans = frontier.chosen_plans(
        setting.model, *inputs, CompareOptions(None, GRID, GROUPS, curvatures=(setting.built(),))
    )
    table = frontier.paired_table(setting.model, plans, "CoCurve", setting.judges.test)
    nll = cl.measure_plans(
        setting.model, list(plans.values()), setting.judges.test, progress=False
    ).nll
    gap = nll[1] - nll[0]
    (row,) = pick(table, method="Magnitude")
    assert row["nll_behind"] == pytest.approx(gap.mean(), abs=1e-7)
    assert row["nll_behind_error"] == pytest.approx(gap.std(ddof=1) / np.sqrt(8), abs=1e-7)
    shares = frontier.layer_shares(plans["CoCurve"])
    costs = np.bincount(setting.units.layers, setting.units.costs)
    assert shares @ costs == pytest.approx(plans["CoCurve"].pruned_cost)
    assert len(frontier.plot_layers(plans).data[0].z) == 2
