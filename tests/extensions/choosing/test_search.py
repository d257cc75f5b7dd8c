"""Search by measured KL: against all plans of a small problem, and against planted tables of KL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.extensions.choosing import search
from cocurve_lab.extensions.choosing.search import PlanSearch, SearchOptions
from cocurve_lab.measuring import risk
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import GROUPS, tiny_model, tiny_text

ROWS, HELD_OUT = tiny_text(6, 12, seed=7), tiny_text(5, 12, seed=8)
UNITS = make_units(6, 2, 4)
START = cl.solve_greedy(random_curvature(UNITS, seed=2), 0.2)


@cache
def small() -> tuple[PreTrainedModel, cl.Curvature]:
    """A model of two layers, 12 units, and the H of other rows."""
    model = tiny_model(layers=2)
    units = cl.enumerate_units(model, GROUPS)
    return model, cl.estimate_curvature(model, units, tiny_text(2, 12, seed=9), 16, progress=False)


def found(plan: cl.Selection, evaluations: int = 600, **settings: Any) -> PlanSearch:
    model = settings.pop("model", None) or small()[0]
    given = {"held_out": HELD_OUT, "progress": False, **settings}
    return cl.search_plan(model, plan, given.pop("rows", ROWS), evaluations=evaluations, **given)


class Planted:
    """Stands in for a Meter: KL of a plan on the rows of a text by a function."""

    def __init__(self, kl: Callable[[cl.Selection, str], np.ndarray]) -> None:
        self.kl = kl
        self.asked: list[tuple[str, int]] = []  # plan and row, on the rows of the search

    def __call__(self, model: Any, text: Any, *_: Any, **__: Any) -> Any:
        return _PlantedMeter(self, text)


class _PlantedMeter:
    def __init__(self, planted: Planted, text: Any) -> None:
        self.planted, self.text, self.memory = planted, text, self
        self.name = "rows" if text is ROWS else "held_out"
        self.values: dict[str, np.ndarray] = {}

    def measure(
        self, plans: list[cl.Selection], rows: list[int] | None = None, progress: Any = False
    ) -> np.ndarray:
        wanted = list(range(len(self.text)) if rows is None else rows)
        for plan in plans:
            kl = self.planted.kl(plan, self.name)
            kept = self.values.setdefault(plan.fingerprint, np.full((len(kl), 2), np.nan))
            kept[wanted] = kl[wanted, None]
            if self.name == "rows":
                self.planted.asked += [(plan.fingerprint, row) for row in wanted]
        return np.array([self.values[plan.fingerprint][wanted] for plan in plans])


def planted(
    monkeypatch: pytest.MonkeyPatch, kl: Callable[[cl.Selection, str], np.ndarray]
) -> Planted:
    fake = Planted(kl)
    monkeypatch.setattr(search, "Meter", fake)
    return fake


def by_quality(plan: cl.Selection, name: str) -> np.ndarray:
    """KL that grows with the indices of the units, with a spread over rows that plans share."""
    spread = np.linspace(0.5, 1.5, 6 if name == "rows" else 5)
    return spread * sum(0.001 * (u + 1) for u in plan.pruned)


# What it finds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("guided", [False, True])
def test_it_finds_the_best_of_all_plans_of_a_small_problem(guided: bool) -> None:
    model, curvature = small()
    start = cl.Selection.from_pruned(
        curvature.units, [0, 1], requested_ratio=0.2, guards=cl.Guards(layer_cap=0.5)
    )
    costs, layers = curvature.units.costs, curvature.units.layers

    def is_allowed(units: tuple[int, ...]) -> bool:
        chosen = list(units)
        gone = np.bincount(layers[chosen], costs[chosen], minlength=2)
        over = costs[chosen].sum() - 0.2 * costs.sum() * (1 - 1e-12)
        fits = (gone <= np.bincount(layers, costs) / 2).all()
        return bool(fits and over >= 0 and (costs[chosen] > over).all())

    sets = [s for size in (1, 2, 3, 4) for s in combinations(range(12), size) if is_allowed(s)]
    plans = [cl.Selection.from_pruned(curvature.units, units) for units in sets]
    table = cl.measure_plans(model, plans, ROWS, progress=False)
    assert len(plans) > 100
    result = found(start, 1500, surrogate=curvature if guided else None)
    assert result.searched.mean[1] == pytest.approx(table.mean.min(), rel=1e-5)
    best = plans[int(table.mean.argmin())]
    assert set(result.searched.selections[1].pruned) == set(best.pruned)
    assert result.evaluations < len(plans) * len(ROWS)
    held_out = cl.measure_plans(model, result.held_out.selections, HELD_OUT, progress=False)
    np.testing.assert_allclose(result.held_out.kl, held_out.kl, rtol=1e-5, atol=1e-9)


def test_what_it_reports_is_of_the_chosen_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, by_quality)
    result, again = found(START, 2000), found(START, 2000)
    assert result.history == again.history  # the seed decides
    kl = by_quality(result.selection, "held_out")
    difference = kl - by_quality(START, "held_out")
    assert result.chosen > 0
    assert result.kl == pytest.approx(kl.mean())
    assert result.standard_error == pytest.approx(kl.std(ddof=1) / np.sqrt(5))
    expected = (difference.mean(), difference.std(ddof=1) / np.sqrt(5))
    assert result.difference == pytest.approx(expected)
    assert result.distance == len(set(result.selection.pruned) ^ set(START.pruned)) > 0
    assert result.held_out.selections[0] is START
    spent, means = zip(*result.history, strict=True)
    assert list(spent) == sorted(spent)
    assert list(means) == sorted(means, reverse=True)
    assert means[-1] == result.searched.mean[1]
    chosen = result.table[result.table["chosen"]].iloc[0]
    assert (chosen["kl"], chosen["difference"]) == (result.kl, result.difference[0])
    assert result.selection.requested_ratio == START.requested_ratio


def test_plans_that_only_fit_the_rows_of_the_search_are_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lower there, higher on held-out rows: the result is the start, and says so."""
    signs = {"rows": 1, "held_out": -1}
    planted(monkeypatch, lambda plan, name: 1 + signs[name] * by_quality(plan, name))
    result = found(START)
    assert (result.selection, result.chosen, result.difference[0]) == (START, 0, 0)
    assert result.searched.mean[1] < result.searched.mean[0]


def test_the_finalist_that_is_best_on_held_out_rows_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noise = np.random.default_rng(0)
    draws: dict[str, float] = {}

    def uncertain(plan: cl.Selection, name: str) -> np.ndarray:
        shift = draws.setdefault(plan.fingerprint, noise.uniform(0, 0.05))
        return by_quality(plan, name) + (shift if name == "held_out" else 0)

    planted(monkeypatch, uncertain)
    results = [found(START, options=SearchOptions(seed=seed)) for seed in range(6)]
    assert {result.chosen for result in results} > {1}
    assert all(result.kl == result.held_out.mean.min() for result in results)


@pytest.mark.parametrize("guided", [False, True])
def test_the_plan_keeps_its_rules(monkeypatch: pytest.MonkeyPatch, guided: bool) -> None:
    planted(monkeypatch, by_quality)
    curvature = random_curvature(UNITS, seed=2)
    target = cl.Target(ratio=0.2, costs=range(1, 37))
    guards = cl.Guards(layer_cap=0.6, protect_first=1)
    start = cl.solve_greedy(curvature, target, guards=guards, include=[30, 33], exclude=[7, 8])
    surrogate = curvature if guided else None
    result = found(start, surrogate=surrogate, options=SearchOptions(exclude=[7, 8]))
    plan = result.selection
    assert result.chosen > 0
    assert plan.pruned[:2] == (30, 33)
    assert not {7, 8} & set(plan.pruned)
    assert UNITS.layers[list(plan.pruned)].min() >= 1
    assert target.budget(UNITS).reached(plan.pruned)
    assert (plan.predicted_risk is not None) == guided


# The budget -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("evaluations", "beyond"), [(1, 1.0), (11, 1.0), (12, 1.0), (37, 1.0), (333, 1.0), (58, 1e9)]
)
def test_no_more_is_measured_than_the_budget(
    evaluations: int, beyond: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = planted(monkeypatch, by_quality)
    monkeypatch.setattr(search, "_STOP_BEYOND", beyond)  # beyond 1e9 half of the plans run on
    result = found(START, evaluations)
    assert result.evaluations == len(fake.asked) == len(set(fake.asked)) <= evaluations
    if evaluations < 12:  # the start and one plan on six rows
        assert (result.evaluations, result.selection) == (0, START)
    rows = Counter(plan for plan, _ in fake.asked)
    if evaluations == 333:  # a plan that is clearly behind is not measured on all rows
        assert sum(count == 4 for count in rows.values()) > len(rows) / 2


# Resuming ---------------------------------------------------------------------------------------


def test_a_killed_search_ends_as_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, curvature = small()
    start = cl.solve_greedy(curvature, 0.3)
    real, calls, stops = risk._Engine.measure, [0], [3, 9, 14, 21]

    def search_at(name: str) -> PlanSearch:
        return found(start, 200, surrogate=curvature, checkpoint=tmp_path / name)

    def interrupted(self: Any, number: int, plans: Any) -> np.ndarray:
        calls[0] += 1
        if stops and calls[0] == stops[0]:
            stops.pop(0)
            raise KeyboardInterrupt
        return real(self, number, plans)

    expected = search_at("whole")
    monkeypatch.setattr(risk._Engine, "measure", interrupted)
    while stops:
        with pytest.raises(KeyboardInterrupt):
            search_at("search")
    result = search_at("search")
    again = calls[0]
    search_at("search")
    assert calls[0] == again  # nothing is left to measure
    assert result.selection.fingerprint == expected.selection.fingerprint
    assert np.array_equal(result.held_out.kl, expected.held_out.kl)
    assert (result.evaluations, result.history) == (expected.evaluations, expected.history)


# Repair -----------------------------------------------------------------------------------------


def test_the_repaired_model_is_what_is_judged() -> None:
    """A repair that heals one plan, and no other, makes it the best; each plan is repaired once."""
    _, curvature = small()
    start = cl.solve_greedy(curvature, 0.2)
    worst = curvature.units.index("L0.ffn[0]")
    alike = next(u for u in start.pruned if curvature.units[u].cost == curvature.units[worst].cost)
    healed, made = set(start.pruned) ^ {alike, worst}, []

    def repair(dense: PreTrainedModel, plan: cl.Selection) -> PreTrainedModel:
        made.append(plan.fingerprint)
        return deepcopy(dense) if set(plan.pruned) == healed else cl.prune(dense, plan)

    result = found(start, 400, repair=repair)
    assert set(result.selection.pruned) == healed
    assert (result.kl, result.repaired) == (pytest.approx(0, abs=1e-9), True)
    judged = len(made) - len(result.held_out.selections)
    assert len(set(made[:judged])) == judged > 1


def test_a_repair_may_be_a_context() -> None:
    """Here one that changes the weights of the dense model itself, and undoes it."""
    model, curvature = small()

    @contextmanager
    def in_place(dense: PreTrainedModel, plan: cl.Selection) -> Iterator[None]:
        before = deepcopy(dense.state_dict())
        for unit in (plan.units[u] for u in plan.pruned):
            layer = dense.model.layers[unit.layer]
            output = layer.self_attn.o_proj if unit.kind == "attention" else layer.mlp.down_proj
            output.weight[:, unit.start : unit.stop] = 0
        yield
        dense.load_state_dict(before)

    with torch.no_grad():
        placed = found(cl.solve_greedy(curvature, 0.3), 60, repair=in_place)
    assert placed.kl == pytest.approx(cl.pruning_risk(model, placed.selection, HELD_OUT), rel=1e-5)


def test_a_file_of_another_repair_is_refused(tmp_path: Path) -> None:
    start, path = cl.solve_greedy(small()[1], 0.3), tmp_path / "search"
    expected, resumed = (found(start, 30, repair=cl.prune, checkpoint=path) for _ in range(2))
    assert resumed.history == expected.history

    def gains(dense: PreTrainedModel, plan: cl.Selection) -> Any:
        return cl.ablate(dense, plan.with_gains({u: 1.5 for u in plan.kept if u % 6 > 2}))

    with pytest.raises(cl.MismatchError):
        found(start, 30, repair=gains, checkpoint=path)
    with pytest.raises(cl.FileFormatError):
        found(start, 30, checkpoint=path)


# Progress and bad input -------------------------------------------------------------------------


SEEN = tiny_text(2, 12, seed=9)  # what `small` was built on


def near(**settings: Any) -> Any:
    return found(cl.solve_greedy(small()[1], 0.2), settings.pop("evaluations", 30), **settings)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *((lambda n=n: near(evaluations=n), cl.InputError) for n in (0, -3, 2.5)),
        (lambda: near(rows=ROWS.rows(0, 1)), cl.InputError),
        (lambda: near(held_out=HELD_OUT.rows(0, 1)), cl.InputError),
        (lambda: near(held_out=ROWS.rows(0, 3)), cl.MismatchError),
        (lambda: near(held_out=SEEN, surrogate=small()[1]), cl.MismatchError),
        (lambda: near(rows=tiny_text(2, 65)), cl.InputError),
        (lambda: found(START), cl.MismatchError),  # of another model
        (lambda: found(START, repair=cl.prune), cl.MismatchError),
        *((lambda r=r: near(repair=lambda *_: r), cl.InputError) for r in (None, START)),
        (lambda: near(repair=lambda dense, _: dense), cl.InputError),
        *(
            (lambda name=name, value=value: SearchOptions(**{name: value}), cl.InputError)
            for name, value in {
                "swaps": 0,
                "seed": -1,
                "random_share": 1.5,
            }.items()
        ),
    ],
)
def test_bad_input_is_refused(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


def test_the_ends_of_a_search() -> None:
    _, curvature = small()
    assert near(surrogate=curvature, rows=SEEN).evaluations <= 30  # to search on, they may be seen
    empty = found(cl.solve_greedy(curvature, 0.0))
    assert (empty.selection.pruned, empty.evaluations, empty.kl) == ((), len(ROWS), 0)
