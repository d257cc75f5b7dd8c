"""Search by measured KL: against all plans of a small problem, and against planted tables of KL."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.extensions.choosing import search
from cocurve_lab.extensions.choosing.neighbors import Neighbors
from cocurve_lab.extensions.choosing.search import PlanSearch, SearchOptions
from cocurve_lab.extensions.interactions.measured import Interactions
from cocurve_lab.measuring import risk
from helpers.problems import gram_curvature, make_units, random_curvature
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
    kept = START.kept[:9]
    options = SearchOptions(exclude=kept)
    result, again = (found(START, 2000, options=options) for _ in range(2))
    assert result.history == again.history  # the seed decides
    kl = by_quality(result.selection, "held_out")
    difference = kl - by_quality(START, "held_out")
    assert not set(kept) & set(result.selection.pruned)
    assert result.kl == pytest.approx(kl.mean())
    assert result.standard_error == pytest.approx(kl.std(ddof=1) / np.sqrt(5))
    expected = (difference.mean(), difference.std(ddof=1) / np.sqrt(5))
    assert result.difference == pytest.approx(expected)
    assert result.distance == len(set(result.selection.pruned) ^ set(START.pruned)) > 0
    assert result.held_out.selections[0] is START
    spent, means = zip(*result.history, strict=True)
    assert list(spent) == sorted(spent)
    assert list(means) == sorted(means, reverse=True)
    chosen = result.table[result.table["chosen"]].iloc[0]
    assert (chosen["kl"], chosen["difference"]) == (result.kl, result.difference[0])
    assert result.selection.requested_ratio == START.requested_ratio


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

    result = found(start, 260, repair=repair)
    assert set(result.selection.pruned) == healed
    assert (result.kl, result.repaired) == (pytest.approx(0, abs=1e-9), True)
    judged = len(made) - len(result.held_out.selections)
    assert len(set(made[:judged])) == judged > 1


def test_a_search_is_resumed_and_a_file_of_another_repair_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own file is read again: the search goes the same way and measures nothing."""
    start, path = cl.solve_greedy(small()[1], 0.3), tmp_path / "search"
    expected = found(start, 30, repair=cl.prune, checkpoint=path)
    with monkeypatch.context() as patch:
        patch.setattr(risk._Engine, "measure", pytest.fail)
        resumed = found(start, 30, repair=cl.prune, checkpoint=path)
    assert resumed.history == expected.history
    assert np.array_equal(resumed.held_out.kl, expected.held_out.kl)

    def gains(dense: PreTrainedModel, plan: cl.Selection) -> Any:
        return cl.prune(dense, plan.with_gains({u: 1.5 for u in plan.kept if u % 6 > 2}))

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


# Plans near a plan ------------------------------------------------------------------------------

CURVATURE = random_curvature(UNITS, seed=2, shared=1.0)
GUARDS = [
    cl.Guards(),
    cl.Guards(layer_cap=0.5),
    cl.Guards(layer_cap_factor=1.5),
    cl.Guards(protect_first=1, protect_last=2),
    cl.Guards(layer_cap=0.6, kinds=("ffn",)),
]
LAYERS = [tuple(np.flatnonzero(UNITS.layers == layer).tolist()) for layer in range(6)]
CUSTOM = tuple(np.random.default_rng(5).integers(0, 9, len(UNITS)).tolist())


def of_layers(alone: Any, pool: Sequence[int] = range(6)) -> Interactions:
    """Layers that cost so much alone [6], without interactions."""
    alone = np.array([alone], float)
    own = alone[:, list(pool)]
    return Interactions(UNITS, tuple(LAYERS), tuple(pool), alone, own[:, :, None] + own[:, None])


def broken(plan: cl.Selection, start: cl.Selection, costs: np.ndarray, share: float) -> str:
    """The rule that a plan breaks, from the definitions; empty if none."""
    guards, layers, chosen = start.guards, UNITS.layers, list(plan.pruned)
    forced = start.pruned[: start.forced]
    removed, needed = costs[chosen].sum(), share * costs.sum() * (1 - 1e-12)
    gone = np.bincount(layers[chosen], costs[chosen], minlength=UNITS.num_layers)
    cap = guards.cap_at(share) * np.bincount(layers, costs) * (1 + 1e-12)
    inner = (layers >= guards.protect_first) & (layers < UNITS.num_layers - guards.protect_last)
    rules = {
        "a layer is over its cap": (gone <= cap).all(),
        "misses its target": removed >= needed,
        "has a superfluous unit": all(removed - costs[u] < needed for u in set(chosen) - {*forced}),
        "lost a forced unit": plan.pruned[: start.forced] == forced,
        "is of a kind that stays": all(guards.allows(UNITS[u].kind) for u in chosen),
        "has a unit that costs nothing": costs[chosen].all(),
        "has a unit of a protected layer": inner[chosen].all(),
    }
    return ", ".join(rule for rule, kept in rules.items() if not kept)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    guards=st.sampled_from(GUARDS),
    ratio=st.sampled_from([0.1, 0.2, 0.35]),
    guided=st.booleans(),
    custom=st.booleans(),
    included=st.booleans(),
    scales=st.booleans(),
)
def test_drawn_plans_keep_every_rule(
    seed: int,
    guards: cl.Guards,
    ratio: float,
    guided: bool,
    custom: bool,
    included: bool,
    scales: bool,
) -> None:
    goal: Any = cl.Target(ratio=ratio, costs=CUSTOM) if custom else ratio
    costs = np.array(CUSTOM) if custom else UNITS.costs
    include = [u for u in (14, 16) if included and costs[u]]
    try:
        start = cl.solve_greedy(CURVATURE, goal, guards=guards, include=include, exclude=[15])
    except (cl.InfeasibleError, cl.InputError):  # no such plan
        return
    parts = [of_layers([1, 2, 3, 4, 5, 6])] if scales else []
    surrogate = CURVATURE if guided else None
    around = Neighbors(start, [15], surrogate, random_share=0.2, scales=parts)
    rng, plan = np.random.default_rng(seed), start
    for _ in range(6):  # a walk, so that plans far from the start are reached too
        units = around.draw(plan.pruned, rng)
        if units is None:
            continue
        plan = around.selection(units)
        assert broken(plan, start, costs, ratio) == ""
        assert 15 not in plan.pruned
        for field in ("guards", "target", "forced"):
            assert getattr(plan.made, field) == getattr(start.made, field)
        assert cl.Selection.from_json(plan.to_json()).fingerprint == plan.fingerprint


@pytest.mark.parametrize("surrogate", [None, CURVATURE])
def test_a_uniform_plan_stays_uniform(surrogate: Any) -> None:
    start = cl.solve_greedy(CURVATURE, 0.3, uniform=True)
    around, rng = Neighbors(start, surrogate=surrogate), np.random.default_rng(0)
    draws = [around.draw(start.pruned, rng) or start.pruned for _ in range(30)]
    assert len(set(map(frozenset, draws))) > 10
    for plan in map(around.selection, draws):
        assert (plan.made.uniform, plan.pruned_cost) == (True, start.pruned_cost)
        cl.Selection.from_json(plan.to_json())  # refuses counts that differ between layers


def test_whole_layers_move_towards_those_that_cost_least() -> None:
    start = cl.Selection.from_pruned(UNITS, LAYERS[0] + LAYERS[1])
    scales = [of_layers([9, 8, 1, 2, 3, 4], [0, 1, 2, 3])]
    around = Neighbors(start, random_share=0.0, scales=scales)
    rng, counts = np.random.default_rng(0), np.zeros(6)
    for _ in range(200):
        units = around.draw(start.pruned, rng) or frozenset()
        whole = [layer for layer in range(6) if units.issuperset(LAYERS[layer])]
        counts[whole] += len(whole) == 2
    assert counts[2] > max(counts[3], 10)  # the cheaper one enters more often
    assert not counts[4:].any()  # only parts of the pool move as a whole
    assert counts[1] > counts[0]  # the worst leaves most often


def test_the_marginals_of_guided_draws_are_those_of_the_surrogate() -> None:
    """Without noise the worst unit leaves and the best one enters, by the definition."""
    units = make_units(6, 2, 4, attention_cost=11)  # equal costs, so that one stands for one
    features = np.random.default_rng(0).normal(size=(36, 40))
    # unit 2 is the largest, but its edge to unit 14 makes it cheaper than unit 8
    features[[2, 8, 14, 21]] = 0.0
    features[2, :2], features[14, :2], features[8, 2], features[21, 3] = (-9, 2), (8, 0), 5, 1
    curvature = gram_curvature(units, features)
    start = cl.Selection.from_pruned(units, [2, 8, 14, 21], interaction_strength=0.7)
    around = Neighbors(start, surrogate=curvature, most=1, random_share=0.0)

    class Still:
        """A generator that takes the first place."""

        integers = staticmethod(lambda low, high: low)
        random = staticmethod(lambda: 1.0)
        exponential = staticmethod(lambda scale: 0.0)

    matrix = curvature.matrix

    def marginal(u: int, others: set[int]) -> float:
        return float(matrix[u, u] / 2 + 0.7 * sum(matrix[u, v] for v in others))

    chosen = set(start.pruned)
    out = max(chosen, key=lambda u: marginal(u, chosen - {u}))
    left = chosen - {out}
    assert out == 8
    enter = min(set(range(len(units))) - chosen, key=lambda u: marginal(u, left))
    assert around.draw(start.pruned, Still()) == left | {enter}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("start", "gains", "given", "error"),
    [
        *(
            ({"guards": guards}, {}, {}, cl.InputError)
            for guards in (cl.Guards(layer_cap=0.1), cl.Guards(protect_first=1))
        ),
        ({"requested_ratio": 0.9}, {}, {}, cl.InputError),
        ({}, {9: 1.2}, {}, cl.InputError),
        ({}, {}, {"exclude": (2,)}, cl.InputError),
        ({}, {}, {"surrogate": random_curvature(make_units(5))}, cl.MismatchError),
    ],
)
def test_a_start_that_breaks_its_own_rules_is_refused(
    start: Any, gains: Any, given: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        Neighbors(cl.Selection.from_pruned(UNITS, [2, 3, 4], **start).with_gains(gains), **given)
