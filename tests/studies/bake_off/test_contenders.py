"""Contenders: their plans are chosen as they are judged, and their work is counted."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.extensions.choosing.gains import choose_gains
from cocurve_lab.extensions.choosing.search import SearchOptions
from cocurve_lab.extensions.repairing.repair import RepairOptions
from cocurve_lab.measuring.risk import model_risk
from cocurve_lab.methods.base import Method
from cocurve_lab.methods.cocurve import CoCurve, Diagonal
from cocurve_lab.methods.magnitude import Magnitude
from cocurve_lab.methods.random_units import Random
from cocurve_lab.models.architectures import describe
from cocurve_lab.solver.guards import Guards
from cocurve_studies.bake_off.bench import Bench
from cocurve_studies.bake_off.compare import compare
from cocurve_studies.bake_off.comparison import Comparison
from cocurve_studies.bake_off.contenders import (
    OURS_CHOSEN,
    REPAIRS,
    Contender,
    alike,
    treated,
)
from cocurve_studies.bake_off.costs import build_evaluations, counted
from cocurve_studies.bake_off.settings import CompareOptions, Judges
from cocurve_studies.tables import pick
from helpers.comparisons import cell
from helpers.tiny_models import GROUPS, tiny_model, tiny_text

GRID = (Guards(), Guards(protect_first=1), Guards(layer_cap=0.5))
RATIO = 0.4
QUIET = RepairOptions(progress=False)


class Setting:
    """A tiny model and texts that share no row."""

    def __init__(self) -> None:
        self.model: PreTrainedModel = tiny_model()
        text = tiny_text(24, 20, 5)
        self.calibration = text.rows(0, 8)
        self.judges = Judges(text.rows(8, 16), text.rows(16, 24))
        self.units = cl.enumerate_units(self.model, GROUPS)

    def run(self, methods: Any, folder: Path | None = None, **options: Any) -> Comparison:
        settings = CompareOptions(folder, GRID, GROUPS, progress=False, **options)
        tokenizer: Any = None  # without questions none is needed
        return compare(
            self.model, tokenizer, methods, (RATIO,), self.calibration, self.judges, settings
        )

    def cells(self, contender: Contender, **options: Any) -> dict[str, dict[str, Any]]:
        rows = self.run({"it": contender}, **options).rows[1:]
        assert not any(row["failed"] for row in rows)
        return {row["search"]: row for row in rows}

    def plans(self, method: Method, grid: Any = GRID) -> list[cl.Selection]:
        evidence = method.measure(self.model, self.units, self.calibration, progress=False)
        return [method.select(evidence, self.units, RATIO, guards) for guards in grid]

    def refitted(self, plan: cl.Selection, sequential: bool = True) -> PreTrainedModel:
        return cl.repair(self.model, plan, self.calibration, sequential=sequential, options=QUIET)


@pytest.fixture(scope="module")
def setting() -> Setting:
    return Setting()


# Plans and repairs -------------------------------------------------------------------------------


@pytest.mark.parametrize("repair", ["refit", "dense refit"])
def test_guards_are_chosen_on_the_refitted_model(setting: Setting, repair: Any) -> None:
    row = setting.cells(Contender((Magnitude(),), repair))["searched"]
    plans = setting.plans(Magnitude())
    models = [setting.refitted(plan, repair == "refit") for plan in plans]
    found = [model_risk(setting.model, model, setting.judges.held_out).mean() for model in models]
    best = models[int(np.argmin(found))]
    expected = model_risk(setting.model, best, setting.judges.test)
    assert json.loads(row["kl_rows"]) == pytest.approx(expected, rel=1e-4)
    assert row["kl"] == pytest.approx(expected.mean(), rel=1e-4)
    free = setting.cells(Contender((Magnitude(),), repair))["none"]
    assert free["kl"] == pytest.approx(
        model_risk(setting.model, models[0], setting.judges.test).mean(), rel=1e-4
    )


def test_the_choice_after_a_repair_can_differ_from_the_choice_before(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    distinct = {tuple(sorted(plan.pruned)): plan for plan in reversed(setting.plans(Magnitude()))}
    plans = list(distinct.values())
    assert len(plans) > 1
    kl = cl.measure_plans(setting.model, plans, setting.judges.held_out, progress=False).mean
    order = kl.argsort(kind="stable")
    # a repair that turns the order round, so that the worst plan as pruned is the best repaired
    fake = {tuple(sorted(plans[place].pruned)): -rank for rank, place in enumerate(order)}
    monkeypatch.setattr(
        Bench, "_held_out_risk", lambda _, entry: fake[tuple(sorted(entry.plan.pruned))]
    )
    contender = Contender((Magnitude(),), "refit")
    guards = [str(plans[place].guards) for place in order]
    assert setting.cells(contender)["searched"]["guards"] == guards[-1]
    # which plans are refitted on all rows is decided after a refit on some, too
    assert setting.cells(contender, repaired=1)["searched"]["guards"] == guards[-1]
    # other repairs are of the plans that are best as pruned
    gains = Contender((Magnitude(),), "gains")
    assert setting.cells(gains, repaired=2)["searched"]["guards"] == guards[1]


def test_training_follows_the_refit_and_is_no_part_of_the_race(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    from cocurve_studies.bake_off import bench

    calls: list[tuple[int, int]] = []

    def watched(model: Any, refitted: Any, text: Any, held_out: Any, **options: Any) -> Any:
        assert refitted.cocurve_manifest["repair"]["method"] == "refit"
        calls.append((len(text), len(held_out)))
        return copy.deepcopy(model)

    monkeypatch.setattr(bench, "recover", watched)
    trained = Contender((Magnitude(),), "refit and training")
    assert trained.repairs
    found = setting.cells(trained, repaired=1)["searched"]
    plain = setting.cells(Contender((Magnitude(),), "refit"), repaired=1)["searched"]
    # one model of each search, on all rows
    assert calls == [(len(setting.calibration), len(setting.judges.held_out))] * 2
    assert found["guards"] == plain["guards"]
    assert found["kl"] == pytest.approx(0, abs=1e-9)
    assert plain["kl"] > 0.01
    assert treated("Magnitude", "refit and training") == "Magnitude, refitted, trained"


def test_plans_race_on_a_quarter_of_the_rows(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    real = Bench._repaired

    def counting(self: Any, contender: Any, candidate: Any, seen: Any) -> Any:
        rows.append(len(seen.calibration))
        return real(self, contender, candidate, seen)

    monkeypatch.setattr(Bench, "_repaired", counting)
    plans = len({tuple(sorted(plan.pruned)) for plan in setting.plans(Magnitude())})
    setting.cells(Contender((Magnitude(),), "refit"), repaired=1)
    every = len(setting.calibration)
    assert plans > 1
    raced = [max(1, round(every / 4))] * plans
    assert rows == [every, *raced, every]  # without guards there is one plan


def test_the_best_of_several_methods_is_taken(setting: Setting) -> None:
    methods = (CoCurve(top_r=16), Diagonal(top_r=16), Random())
    row = setting.cells(Contender(methods))["searched"]
    plans = [plan for method in methods for plan in setting.plans(method)]
    kl = cl.measure_plans(setting.model, plans, setting.judges.held_out, progress=False).mean
    expected = cl.pruning_risk(setting.model, plans[int(kl.argmin())], setting.judges.test)
    assert row["kl"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("refit", [False, True])
def test_any_plan_takes_gains(setting: Setting, refit: bool) -> None:
    repair: Any = "gains and refit" if refit else "gains"
    row = setting.cells(Contender((Magnitude(),), repair))["none"]
    (plan,) = setting.plans(Magnitude(), [Guards()])
    h = cl.estimate_curvature(setting.model, setting.units, setting.calibration, progress=False)
    held_out = setting.judges.held_out
    quiet = cl.ChoiceOptions(progress=False)
    best = choose_gains(setting.model, h, plan, held_out, options=quiet).best
    if refit:
        without, other = (
            cl.repair(setting.model, each, setting.calibration, options=QUIET)
            for each in (plan, best)
        )
        risks = [model_risk(setting.model, each, held_out) for each in (other, without)]
        gap = risks[0] - risks[1]
        helps = gap.mean() < -gap.std(ddof=1) / np.sqrt(len(gap))
        model = other if helps else without
        expected = model_risk(setting.model, model, setting.judges.test).mean()
    else:
        expected = cl.pruning_risk(setting.model, best, setting.judges.test)
    assert row["kl"] == pytest.approx(expected, rel=1e-3)


def test_a_measured_search_starts_from_the_plan(setting: Setting, tmp_path: Path) -> None:
    row = setting.cells(Contender((Random(),), evaluations=80), folder=tmp_path)["none"]
    (plan,) = setting.plans(Random(), [Guards()])
    found = cl.search_plan(
        setting.model,
        plan,
        setting.calibration,
        held_out=setting.judges.held_out,
        evaluations=80,
        progress=False,
        options=SearchOptions(seed=0),
    )
    expected = cl.pruning_risk(setting.model, found.selection, setting.judges.test)
    assert row["kl"] == pytest.approx(expected, rel=1e-4)
    assert row["evaluations"] == found.evaluations  # random scores run nothing


def test_rows_without_guards_can_be_left_out(setting: Setting) -> None:
    rows = setting.run([Magnitude()], unguarded=False).rows
    assert {row["search"] for row in rows} == {"dense", "searched"}


# Costs -------------------------------------------------------------------------------------------


def test_a_forward_of_one_row_is_one_evaluation(setting: Setting) -> None:
    ids = setting.calibration.input_ids
    architecture = describe(setting.model)
    with counted(architecture, ids.shape[1]) as cost, torch.no_grad():
        setting.model(input_ids=ids[:3])
        architecture.layers[0](
            torch.zeros(1, ids.shape[1], setting.model.config.hidden_size),
            position_embeddings=rotary(setting.model, ids),
        )
    assert cost.evaluations == pytest.approx(3 + 1 / len(architecture.layers))
    assert cost.seconds > 0
    with torch.no_grad():
        setting.model(input_ids=ids[:3])  # the hook is gone
    assert cost.evaluations == pytest.approx(3 + 1 / len(architecture.layers))


def rotary(model: Any, ids: torch.Tensor) -> Any:
    positions = torch.arange(ids.shape[1])[None]
    hidden = torch.zeros(1, ids.shape[1], model.config.hidden_size)
    return model.model.rotary_emb(hidden, positions)


def test_h_costs_the_layers_behind_each_unit(setting: Setting) -> None:
    layers = len(describe(setting.model).layers)
    with counted(describe(setting.model), setting.calibration.seq_len) as cost:
        cl.estimate_curvature(setting.model, setting.units, setting.calibration, 16, progress=False)
    expected = build_evaluations(setting.units, layers, len(setting.calibration))
    # less, because the last layer runs at the scored positions alone
    assert 0.8 * expected < cost.evaluations <= expected


def test_one_h_counts_once(setting: Setting) -> None:
    alone = setting.cells(Contender((CoCurve(top_r=16),)))["none"]
    several = Contender((CoCurve(top_r=16), Diagonal(top_r=16), CoCurve(2.0, top_r=16)))
    layers = len(describe(setting.model).layers)
    expected = build_evaluations(setting.units, layers, len(setting.calibration))
    assert alone["evaluations"] == pytest.approx(expected)
    assert setting.cells(several)["none"]["evaluations"] == pytest.approx(expected)
    assert setting.cells(Contender((Magnitude(),)))["none"]["evaluations"] == 0


# Leads -------------------------------------------------------------------------------------------


def test_a_lead_is_paired_over_rows_and_calibrations() -> None:
    random = np.random.default_rng(0)
    own, other = random.random((3, 8)), random.random((3, 8)) + 1
    rows = [
        cell(name, float(kl.mean()), calibration=n, kl_rows=json.dumps(kl.tolist()))
        for name, values in (("A", own), ("B", other))
        for n, kl in enumerate(values)
    ]
    (row,) = pick(Comparison(rows).leads("A", ["B", "C"]))
    gap = other - own
    by_row, by_draw = gap.mean(axis=0), gap.mean(axis=1)
    error = np.hypot(by_row.std(ddof=1) / np.sqrt(8), by_draw.std(ddof=1) / np.sqrt(3))
    assert (row["method"], row["calibrations"]) == ("B", 3)
    assert row["behind"] == pytest.approx(gap.mean())
    assert row["behind_error"] == pytest.approx(error)
    searched = [*rows, cell("A", None, search="searched", failed="why")]
    with pytest.raises(cl.InputError, match="no cells of 'A'"):
        Comparison(searched).leads("A", ["B"])
    assert len(Comparison(searched).leads("B", ["A"], "none")) == 1


# Line-ups and bad input --------------------------------------------------------------------------


def test_all_rows_of_a_line_up_are_treated_alike() -> None:
    plain, repaired = alike(top_r=32), alike("refit", evaluations=7, top_r=32)
    assert len(plain) == len(repaired) == 15
    assert list(repaired) == [treated(label, "refit", 7) for label in plain]
    for label, contender in plain.items():
        other = repaired[treated(label, "refit", 7)]
        assert (other.repair, other.evaluations) == ("refit", 7)
        assert other.methods == contender.methods
    ours = plain[OURS_CHOSEN].methods
    assert {method.name for method in ours} == {"cocurve", "diagonal"}
    assert all(method.top_r == 32 for method in ours)  # type: ignore[attr-defined]
    assert len({treated("A", repair, n) for repair in REPAIRS for n in (0, 5)}) == 12
