"""Choosing lambda and guards: against direct measurements, and against planted tables of KL."""

from __future__ import annotations

import html
import itertools
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.extensions.choosing import best_plan as best_plans
from cocurve_lab.extensions.choosing import racing
from cocurve_lab.extensions.choosing.gains import GainsChoice, choose_gains
from cocurve_lab.extensions.choosing.report import Samples
from cocurve_lab.extensions.choosing.settings import choose_guards
from cocurve_lab.measuring.risk import PlanTable, compare_models
from cocurve_lab.models.identity import model_name
from helpers.problems import STALLING, gram_curvature, make_units, random_curvature
from helpers.tiny_models import (
    GROUPS,
    naive_build,
    naive_risk,
    tiny_model,
    tiny_text,
    word_tokenizer,
)

QUIET = cl.ChoiceOptions(progress=False)
EVERYTHING = cl.ChoiceOptions(progress=False, stop_beyond=math.inf, max_candidates=10**6)
TEXT, TEST = tiny_text(32, seed=7), tiny_text(6, seed=8)
UNITS = make_units(8, 2, 8)
CURVATURE = random_curvature(UNITS, seed=1, shared=1.0)  # at 0.3: 16 segments, 12 sets


@cache
def real() -> tuple[PreTrainedModel, cl.Curvature]:
    """A tiny model and the H of four rows of it."""
    model = tiny_model()
    units = cl.enumerate_units(model, GROUPS)
    return model, cl.estimate_curvature(model, units, tiny_text(4), 16, progress=False)


class Planted:
    """Stands in for `measure_plans`: KL of a plan on a row by a function, and what was asked.

    The loss on the text is 10 - KL, so that judging by it turns every order around.
    """

    def __init__(
        self, kl: Callable[[cl.Selection], np.ndarray], text: cl.CalibrationSet = TEXT
    ) -> None:
        self.kl = kl
        self.places = {mark: place for place, mark in enumerate(text.row_fingerprints)}
        self.asked: list[tuple[str, int]] = []

    def __call__(
        self, model: object, plans: Sequence[cl.Selection], text: cl.CalibrationSet, **_: Any
    ) -> PlanTable:
        rows = [self.places[mark] for mark in text.row_fingerprints]
        self.asked += [(plan.fingerprint, row) for plan in plans for row in rows]
        kl = np.array([self.kl(plan)[rows] for plan in plans])
        return PlanTable(tuple(plans), kl, nll=10 - kl)


def planted(
    monkeypatch: pytest.MonkeyPatch,
    kl: Callable[[cl.Selection], np.ndarray],
    text: cl.CalibrationSet = TEXT,
) -> Planted:
    fake = Planted(kl, text)
    monkeypatch.setattr(racing, "measure_plans", fake)
    return fake


def table_by_strength(means: dict[float, np.ndarray]) -> Callable[[cl.Selection], np.ndarray]:
    """KL [rows] by the lambda whose plan of CURVATURE it is; those plans must differ."""
    rows = {
        cl.solve_greedy(CURVATURE, 0.3, strength).fingerprint: values
        for strength, values in means.items()
    }
    assert len(rows) == len(means)
    return lambda plan: rows[plan.fingerprint]


def choose(candidates: Any = "path", options: cl.ChoiceOptions = QUIET, **more: Any) -> Any:
    """On CURVATURE and TEXT, where `measure_plans` is planted and no model is needed."""
    return cl.choose_interaction_strength(
        None, CURVATURE, 0.3, TEXT, candidates=candidates, options=options, **more
    )


def wave(seed: int, size: float = 1.0) -> np.ndarray:
    """Noise over the rows with mean exactly 0 and standard error exactly `size`."""
    noise = np.random.default_rng(seed).normal(size=len(TEXT))
    noise -= noise.mean()
    return noise * size * math.sqrt(len(TEXT)) / noise.std(ddof=1)


# The curve ----------------------------------------------------------------------------------------


def test_the_path_is_measured_whole_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = planted(monkeypatch, lambda plan: np.ones(32) + 0.01 * len(plan) + wave(1))
    choice = choose(options=EVERYTHING)
    path = cl.lambda_path(CURVATURE, 0.3)
    assert len(choice.candidates) == path.distinct_sets > 5
    assert len(fake.asked) == len(set(fake.asked)) == 32 * path.distinct_sets
    pieces = sorted(span for candidate in choice.candidates for span in candidate.intervals)
    assert pieces == [(segment.start, segment.stop) for segment in path]
    for candidate in choice.candidates:
        for start, stop in candidate.intervals:
            middle = cl.solve_greedy(CURVATURE, 0.3, (start + stop) / 2)
            assert set(middle.pruned) == set(candidate.selection.pruned)
    strengths = [c.selection.interaction_strength for c in choice.candidates]
    assert strengths == sorted(strengths)
    assert (strengths[0], strengths[-1]) == (0, 1)


@pytest.mark.parametrize("limit", [2, 3, 5])
def test_a_truncated_path_keeps_its_ends_and_is_spread(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    planted(monkeypatch, lambda plan: wave(len(plan)) + 2)
    whole = [candidate.selection.fingerprint for candidate in choose(options=EVERYTHING).candidates]
    choice = choose(options=replace(QUIET, max_candidates=limit))
    places = sorted(whole.index(one.selection.fingerprint) for one in choice.candidates)
    assert (len(set(places)), choice.left_out) == (limit, len(whole) - limit)
    for strength in (0.0, 1.0):
        assert whole.index(cl.solve_greedy(CURVATURE, 0.3, strength).fingerprint) in places
    assert np.diff([*places, len(whole)]).max() <= 2 * len(whole) / (limit - 1) + 1


def test_a_grid_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, lambda plan: wave(len(plan)) + 2)
    grid = np.array([1.5, 0.0, 1e-9, 0.5])
    choice = choose(grid, replace(QUIET, max_candidates=2))
    assert [c.intervals for c in choice.candidates] == [
        ((0.0, 0.0), (1e-9, 1e-9)),  # one set, but nothing is claimed in between
        ((0.5, 0.5),),
        ((1.5, 1.5),),
    ]
    assert choice.left_out == 0


# The race -----------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(0, 40), min_size=2, max_size=8),
    st.integers(0, 10**6),
    st.sampled_from([2, 3, 8, 32, 99]),
)
@settings(max_examples=60, deadline=None)
def test_stopping_early_loses_no_plan_that_is_close(
    gaps: list[float], seed: int, first_rows: int
) -> None:
    """With row-wise noise of size 1 in every plan, but 1000 shared by all, and gaps of any size."""
    rng = np.random.default_rng(seed)
    kl = 1e4 + 1e3 * rng.normal(size=32) + rng.uniform(-1, 1, (len(gaps), 32))
    kl += np.array(gaps)[:, None]
    plans = [
        racing.Contender(cl.Selection.from_pruned(UNITS, [number]), ((0.0, 0.0),), (cl.Guards(),))
        for number in range(len(gaps))
    ]
    by_plan = {plan.selection.fingerprint: row for plan, row in zip(plans, kl, strict=True)}
    fake = Planted(lambda plan: by_plan[plan.fingerprint])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(racing, "measure_plans", fake)
        curve = racing.race_plans(None, plans, TEXT, replace(QUIET, first_rows=first_rows))
    assert len(fake.asked) == len(set(fake.asked)) == sum(c.rows for c in curve)
    assert any(not candidate.stopped_early for candidate in curve)
    for candidate, row in zip(curve, kl, strict=True):
        assert candidate.stopped_early == (candidate.rows < 32)
        assert candidate.kl == pytest.approx(row[: candidate.rows].mean())
        # it really was that far behind some plan on the rows it was measured on
        behind = row[: candidate.rows] - kl[:, : candidate.rows]
        error = behind.std(axis=1, ddof=1) / math.sqrt(candidate.rows)
        far = (behind.mean(axis=1) > 4 * error * (1 - 1e-9)).any()
        assert far or not candidate.stopped_early


def test_the_true_winner_survives_a_bad_start_and_losers_save_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """lambda 0.5 is ahead on the first 8 rows, within noise; 0.2 and 1 are hopeless throughout."""
    noise = np.tile([0.3, -0.3], 16)
    shared = 50 * wave(5)
    start = np.where(np.arange(32) < 8, -0.2, 0.1)
    table = {
        0.0: shared + 5,  # the true winner
        0.5: shared + 5 + start + noise,
        0.2: shared + 9 + noise,
        1.0: shared + 30 - noise,
    }
    fake = planted(monkeypatch, table_by_strength(table))
    choice = choose(list(table))
    assert [candidate.rows for candidate in choice.candidates] == [32, 8, 32, 8]
    assert len(fake.asked) == 32 + 8 + 32 + 8
    assert choice.interaction_strength == 0
    dropped = choice.candidates[1]
    assert (dropped.stopped_early, dropped.tied) == (True, False)
    gap = (table[0.2] - table[0.0])[:8]  # to the winner, over the rows both were measured on
    assert dropped.difference == pytest.approx(gap.mean())
    assert dropped.difference_error == pytest.approx(gap.std(ddof=1) / math.sqrt(8))
    assert choose(list(table), EVERYTHING).curve["rows"].sum() == 4 * 32


def test_a_dropped_plan_never_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped for its first 8 rows although the others would have made it the best of all."""
    turn = np.where(np.arange(32) < 8, 1.0, -5.0)
    planted(monkeypatch, table_by_strength({0.0: np.full(32, 9.0), 1.0: 9 + turn}))
    assert choose([0.0, 1.0]).interaction_strength == 0
    assert choose([0.0, 1.0], EVERYTHING).interaction_strength == 1


def test_a_dropped_plan_is_no_tie_with_a_winner_it_was_close_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0 is dropped against 0.5, yet on those rows it is as good as the later winner, 1."""
    early = np.arange(32) < 8
    noise = np.where(early, np.tile([3.0, -3.0], 16) + 0.9, -5.0)
    table = {0.0: np.full(32, 10.0), 0.5: np.full(32, 9.0), 1.0: 9 + noise}
    planted(monkeypatch, table_by_strength(table))
    choice = choose(list(table))
    dropped = choice.candidates[0]
    assert dropped.difference < dropped.difference_error
    assert (dropped.stopped_early, dropped.tied) == (True, False)
    assert choice.interaction_strength == 1


# The rule -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gap", "strength"), [(0.99, 0.0), (1.01, 0.5)])
def test_ties_go_to_the_smallest_lambda(
    monkeypatch: pytest.MonkeyPatch, gap: float, strength: float
) -> None:
    """The winner is lambda 1; 0.5 is 0.3 paired errors behind it, 0 is just inside or outside."""
    shared = 9 + 30 * wave(1)  # far larger than the paired errors of 1
    table = {0.0: shared + gap + wave(2), 0.5: shared + 0.3 + wave(3), 1.0: shared}
    planted(monkeypatch, table_by_strength(table))
    choice = choose([1.0, 0.5, 0.0])
    assert choice.winner.selection.interaction_strength == 1
    assert choice.interaction_strength == choice.best.interaction_strength == strength
    behind = choice.candidates[0]
    assert (behind.difference, behind.difference_error) == pytest.approx((gap, 1))
    assert [candidate.tied for candidate in choice.candidates] == [gap < 1, True, True]


# The lambda that fits -----------------------------------------------------------------------------


@given(st.integers(0, 200), st.floats(0, 1), st.floats(1e-6, 1e2))
@settings(max_examples=80, deadline=None)
def test_the_fitting_lambda_closes_the_gap(seed: int, strength: float, measured: float) -> None:
    """R_lambda(s) = 1/2 sum of H_uu + lambda E, summed here pair by pair, meets R(s) at 1 + b/E."""
    curvature = random_curvature(UNITS, seed)
    plan = cl.solve_greedy(curvature, 0.3, strength)
    numbers = (measured, 0.0, measured, 2, "kl", 0.0, 0.0, False)
    fit = racing.Candidate(plan, ((strength, strength),), (cl.Guards(),), *numbers).fit
    matrix = curvature.matrix
    node = sum(matrix[u, u] / 2 for u in plan.pruned)
    edges = sum(matrix[u, v] for u in plan.pruned for v in plan.pruned if u < v)
    close = {"rel": 1e-6, "abs": 1e-9}
    assert fit.edge_mass == pytest.approx(edges, **close)
    assert fit.remainder == pytest.approx(measured - node - edges, **close)
    assert node + fit.interaction_strength * edges == pytest.approx(measured, **close)
    # the printed sign misses by twice the remainder
    assert node + fit.printed * edges == pytest.approx(measured - 2 * fit.remainder, abs=1e-6)


# The report ---------------------------------------------------------------------------------------


# Guards -------------------------------------------------------------------------------------------


def choose_from(caps: Any, protections: Any, ratio: float = 0.3, **more: Any) -> Any:
    return choose_guards(
        None,  # type: ignore[arg-type]
        CURVATURE,
        ratio,
        TEXT,
        layer_caps=caps,
        protections=protections,
        options=more.pop("options", QUIET),
        **more,
    )


@pytest.mark.parametrize("own", [False, True])
def test_every_pair_of_guards_is_tried_and_measured_once(own: bool) -> None:
    """Of greedy plans, and of a method of one's own that takes the last units allowed."""
    model, curvature = real()
    text = tiny_text(4, seed=9)

    def last(guards: cl.Guards) -> cl.Selection:
        if guards.protect_last:
            raise cl.InfeasibleError("no plan", requested_ratio=0.3, reachable_ratio=0.2)
        free = [u for u, unit in enumerate(curvature.units) if unit.layer >= guards.protect_first]
        return cl.Selection.from_pruned(
            curvature.units, free[-4:] if guards.layer_cap else free[:4]
        )

    choice = choose_guards(
        *(model, curvature, 0.3, text),
        layer_caps=(None, "1.5x", 0.8),
        protections=((0, 0), (1, 0), (1, 1)),
        interaction_strength=0.5,
        report_on=None if own else TEST,
        make=last if own else None,
        options=EVERYTHING,
    )
    assert len(choice.candidates) > 1
    assert choice.winner is min(choice.candidates, key=lambda candidate: candidate.kl)
    for candidate in choice.candidates:
        for guards in candidate.guards:
            plan = last(guards) if own else cl.solve_greedy(curvature, 0.3, 0.5, guards)
            assert set(plan.pruned) == set(candidate.selection.pruned)
    tried = [guards for candidate in choice.candidates for guards in candidate.guards]
    tried += [entry.guards for entry in choice.infeasible]
    assert len(set(map(repr, tried))) == len(tried) == 9
    if not own:
        assert choice.report["no guards"].selection.guards == cl.Guards()


@pytest.mark.parametrize(
    ("judge", "gap", "protected"), [("kl", 0.9, 0), ("kl", 1.1, 1), ("nll", 3.0, 0)]
)
def test_ties_go_to_the_loosest_guards(
    monkeypatch: pytest.MonkeyPatch, judge: Any, gap: float, protected: int
) -> None:
    loose, tight = (
        cl.solve_greedy(CURVATURE, 0.3, 1.0, cl.Guards(protect_first=p)) for p in (0, 1)
    )
    rows = {loose.fingerprint: 5 + gap + wave(1), tight.fingerprint: np.full(32, 5.0)}
    planted(monkeypatch, lambda plan: rows[plan.fingerprint])
    choice = choose_from((None,), ((1, 0), (0, 0)), options=replace(QUIET, judge=judge))
    assert [candidate.guards[0].protect_first for candidate in choice.candidates] == [0, 1]
    assert choice.guards.protect_first == choice.best.guards.protect_first == protected
    assert choice.winner.judged == (5.0 if judge == "kl" else pytest.approx(10 - 5 - gap))


def test_guards_that_do_not_bind_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = planted(monkeypatch, lambda plan: np.ones(32))
    (only,) = choose_from((1.0, None, "5x"), ((0, 0),)).candidates
    assert (len(only.guards), len(fake.asked)) == (3, 32)


# Bad input ----------------------------------------------------------------------------------------


def on_real(chooser: Any, held_out: cl.CalibrationSet, report_on: Any = None) -> Any:
    return chooser(*real(), 0.3, held_out, report_on=report_on)


SEEN = tiny_text(4)  # what `real` was built on
SHARED = [(SEEN, None), (SEEN, TEST), (TEST, SEEN), (TEST, TEST.rows(5, 6))]
BAD_GUARDS: list[tuple[Any, Any]] = [
    *(((), ((0, 0),)), ((None,), ())),
    *(((cap,), ((0, 0),)) for cap in (1.5, "-1x")),
    *(((None,), (protection,)) for protection in ((0, -1),)),
]
BAD_OPTIONS: list[dict[str, Any]] = [
    *({"max_candidates": 1}, {"first_rows": 1}, {"stop_beyond": 0.5}, {"stop_beyond": math.nan}),
    {"judge": "accuracy"},
]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *(
            (lambda c=candidates: choose(c), cl.InputError)
            for candidates in ("grid", [], [0.5, -0.1], [math.nan], [math.inf], ["a"])
        ),
        *((lambda g=guards: choose_from(*g), cl.InputError) for guards in BAD_GUARDS),
        *((lambda o=options: cl.ChoiceOptions(**o), cl.InputError) for options in BAD_OPTIONS),
        (
            lambda: cl.choose_interaction_strength(None, CURVATURE, 0.3, TEXT.rows(0, 1)),  # type: ignore[arg-type]
            cl.InputError,
        ),
        (
            lambda: cl.choose_interaction_strength(None, CURVATURE, 1.0, TEXT),  # type: ignore[arg-type]
            cl.InputError,
        ),
        (lambda: choose_from((None,), ((0, 0),), interaction_strength=-1.0), cl.InputError),
        # a curvature of other units than the model's
        (lambda: cl.choose_interaction_strength(real()[0], CURVATURE, 0.3, TEXT), cl.MismatchError),
        *(
            (lambda c=chooser, rows=rows: on_real(c, *rows), cl.MismatchError)
            for chooser in (cl.choose_interaction_strength, choose_guards)
            for rows in SHARED
        ),
    ],
)
def test_bad_input_is_refused(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


@pytest.mark.parametrize("candidates", ["path", [0.0, 1.0]])
def test_lambdas_at_which_greedy_stalls_are_listed(
    monkeypatch: pytest.MonkeyPatch, candidates: Any
) -> None:
    """Room for 4 of 7 per layer: at lambda 0 cheap attention (3) blocks the FFN pair (2 + 2)."""
    # layer 1 goes first; it is correlated with the attention unit
    features = np.array([[1.0, 0, 0], [0, 1.2, 0], [0, 0, 1.2], [0.9, 0, 0], [0, 9.0, 9.0]])
    planted(monkeypatch, lambda plan: np.ones(32))
    given = (None, gram_curvature(STALLING, features), 0.55, TEXT, cl.Guards(layer_cap=4 / 7))
    choice = cl.choose_interaction_strength(*given, candidates=candidates, options=QUIET)
    (stall,) = choice.infeasible
    assert stall.interval[0] == 0
    assert set(choice.best.pruned) == {1, 2, 3}
    with pytest.raises(cl.InfeasibleError):
        cl.choose_interaction_strength(*given, candidates=[0.0, 0.01], options=QUIET)


@pytest.mark.parametrize("candidates", ["path", [1.0, 0.0, 0.5, 0.5]])
def test_the_curve_and_the_report_are_measured_risks(candidates: Any) -> None:
    model, curvature = real()
    text = tiny_text(7, 20, 5, seed=7)
    choice = cl.choose_interaction_strength(
        model, curvature, 0.3, text, candidates=candidates, report_on=TEST,
        options=replace(EVERYTHING, first_rows=2),
    )  # fmt: skip
    assert len(choice.candidates) > 1

    def rows(plan: cl.Selection, text: cl.CalibrationSet) -> np.ndarray:
        return naive_risk(model, [plan.units[u] for u in plan.pruned], text)

    measured = [rows(candidate.selection, text) for candidate in choice.candidates]
    least = min(measured, key=np.mean)
    assert choice.winner.kl == pytest.approx(least.mean(), rel=1e-5)
    for candidate, row in zip(choice.candidates, measured, strict=True):
        assert (candidate.rows, candidate.stopped_early) == (7, False)
        assert candidate.kl == pytest.approx(row.mean(), rel=1e-5)
        assert candidate.standard_error == pytest.approx(row.std(ddof=1) / 7**0.5, rel=1e-3)
    for name in ("kl", "difference_error"):
        assert choice.curve[name].tolist() == [getattr(one, name) for one in choice.candidates]
    plans = [choice.best, *(cl.solve_greedy(curvature, 0.3, s) for s in (0.0, 1.0))]
    assert list(choice.report) == ["best", "lambda 0", "lambda 1"]
    for entry, plan in zip(choice.report.values(), plans, strict=True):
        gap = rows(plan, TEST) - rows(choice.best, TEST)
        assert entry.kl == pytest.approx(rows(plan, TEST).mean(), rel=1e-5)
        assert entry.difference == pytest.approx(gap.mean(), abs=1e-6)
        assert entry.difference_error == pytest.approx(gap.std(ddof=1) / 6**0.5, abs=1e-6)


# Gains ----------------------------------------------------------------------------------------


def plan_of(curvature: cl.Curvature, pruned: list[int]) -> cl.Selection:
    return cl.Selection.from_pruned(curvature.units, pruned, curvature)


def twin_model(factor: float = 1.0) -> Any:
    """L1.ffn[0] and L1.ffn[1] compute alike; [0] writes `factor` times what [1] writes."""
    model = tiny_model()
    mlp = model.model.layers[1].mlp
    with torch.no_grad():
        for projection in (mlp.gate_proj, mlp.up_proj):
            projection.weight[:11] = projection.weight[11:22]
        mlp.down_proj.weight[:, :11] = factor * mlp.down_proj.weight[:, 11:22]
    return model


def built(model: Any) -> cl.Curvature:
    """H by the slow definition, with the rows it was built on."""
    matrix, _ = naive_build(model, BUILT, 97)
    units = cl.enumerate_units(model, 4)
    return cl.Curvature(matrix, units, {"row_fingerprints": BUILT.row_fingerprints})


BUILT, HELD_OUT, UNSEEN = tiny_text(10, 20).split(held_out=3, test=3)


def test_a_twin_on_a_real_model_takes_over_exactly() -> None:
    """The sign of the whole chain: masks, features, H, alpha, gain. With it wrong the KL grows."""
    model = twin_model()
    curvature = built(model)
    plan = plan_of(curvature, [curvature.units.index("L1.ffn[0]")])
    gains = cl.solve_gains(curvature, plan, 1e-7)
    assert gains.pop(curvature.units.index("L1.ffn[1]")) == pytest.approx(2, abs=1e-4)
    assert list(gains.values()) == pytest.approx([1] * len(gains), abs=1e-4)
    choice = choose_gains(
        model, curvature, plan, HELD_OUT, (1e-7, 1.0), (1.0,), UNSEEN, options=QUIET
    )
    assert choice.setting == (1e-7, 1.0)
    plain, chosen = choice.report.mean
    assert chosen < 1e-6 * plain < 1e-6
    row = choice.curve[choice.curve["chosen"]].iloc[0]
    assert (row["ridge"], row["clip"]) == (1e-7, 1.0)


def test_gains_that_hurt_are_not_applied() -> None:
    """H of a model whose twin writes the opposite sign: its gains push the wrong way."""
    wrong = built(twin_model(-1.0))
    given = (twin_model(), wrong, plan_of(wrong, [8]), HELD_OUT)
    choice = choose_gains(*given, report_on=UNSEEN, options=QUIET)
    assert choice.settings == tuple((r, c) for r in (1.0, 0.2, 0.05) for c in (1.0, 2.0))
    assert (choice.applied, choice.setting, choice.best.gains) == (False, None, {})
    assert choice.curve["difference"][1] > 0
    assert choice.curve["chosen"].tolist() == [True] + [False] * 6
    assert choice.report.mean[0] == choice.report.mean[1]


def test_the_table_is_what_the_plans_really_cost_and_is_kept(tmp_path: Path) -> None:
    model = tiny_model()
    curvature = built(model)
    plan, units = cl.solve_greedy(curvature, 0.3), curvature.units
    given = (model, curvature, plan, HELD_OUT, (0.2,), (1.0,), UNSEEN)
    choice, again = (
        choose_gains(*given, options=replace(QUIET, checkpoint=tmp_path / "gains"))
        for _ in range(2)
    )
    gains = {units[u]: gain for u, gain in cl.solve_gains(curvature, plan, 0.2, 1.0).items()}
    by_hand = naive_risk(model, [units[u] for u in plan.pruned], HELD_OUT, gains)
    np.testing.assert_allclose(choice.measured.kl[1], by_hand, rtol=1e-4)
    assert choice.measured.selections[0].gains == {}
    assert choice.predicted[1] < choice.predicted[0] == pytest.approx(plan.predicted_risk)
    assert {path.name for path in tmp_path.iterdir()} == {"gains.held_out", "gains.report"}
    np.testing.assert_array_equal(choice.measured.kl, again.measured.kl)


# The rule -----------------------------------------------------------------------------------------


def choice_of(*kl: list[float]) -> GainsChoice:
    """The rule on given KL rows: plain first, then settings named (n, 1)."""
    plan = cl.Selection.from_pruned(UNITS, [0])
    table = PlanTable((plan,) * len(kl), np.array(kl))
    return GainsChoice(tuple((float(n), 1.0) for n in range(1, len(kl))), table, np.zeros(len(kl)))


def test_the_rule() -> None:
    assert choice_of([1.0, 2.0, 3.0], [0.8, 1.9, 2.7]).setting == (1.0, 1.0)
    unclear = choice_of([1.0, 1.0, 1.0], [1.3, 1.1, 0.5])  # -0.033 +- 0.24
    assert not unclear.applied
    assert unclear.curve["difference"][1] == pytest.approx(-0.1 / 3)
    # ties go to the most cautious setting that helps by itself
    plain = [1.0, 1.0, 1.0, 1.0]
    cautious, winner = [0.72, 0.78, 0.70, 0.80], [0.68, 0.80, 0.66, 0.82]
    helpless = [0.0, 1.4, 0.2, 1.4]  # ties with the winner, but not better than plain
    assert choice_of(plain, helpless, cautious, winner).setting == (2.0, 1.0)
    assert choice_of(plain, winner, cautious).setting == (1.0, 1.0)


@pytest.mark.parametrize(
    ("rows", "report_on", "ridges", "error"),
    [
        (BUILT, None, (0.2,), cl.MismatchError),
        (HELD_OUT, HELD_OUT, (0.2,), cl.MismatchError),
        (HELD_OUT, BUILT, (0.2,), cl.MismatchError),
        (HELD_OUT.rows(0, 1), UNSEEN, (0.2,), cl.InputError),
        (HELD_OUT, UNSEEN, (), cl.InputError),
    ],
)
def test_shared_rows_too_few_rows_and_empty_grids_are_refused(
    rows: Any, report_on: Any, ridges: Any, error: type[Exception]
) -> None:
    model = tiny_model()
    units, marks = cl.enumerate_units(model, 4), {"row_fingerprints": BUILT.row_fingerprints}
    curvature = cl.Curvature(np.eye(len(units)), units, marks)
    with pytest.raises(error):
        choose_gains(
            model, curvature, plan_of(curvature, [3]), rows, ridges=ridges, report_on=report_on
        )


# The whole flow in one call -----------------------------------------------------------------------

LENGTH, SEQUENCES = 16, 8


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n\n".join(words(rng.integers(90, size=20)) for _ in range(60)))
    return path


def words(numbers: Any) -> str:
    return " ".join(f"w{number}" for number in numbers)


def found(text: Path, target: Any = 0.3, minutes: float = 0.02, **options: Any) -> Any:
    given = (tiny_model(), word_tokenizer(64), target, minutes)
    settings = {"num_sequences": SEQUENCES, "text_file": text, "seq_len": LENGTH, "refit": False}
    return cl.best_plan(*given, progress=False, **settings | options)


def test_the_report_is_measured_on_rows_that_nothing_else_has_seen(text: Path) -> None:
    model = tiny_model()
    best = found(text)
    assert best.selection.realized_ratio >= 0.3
    assert best.model.num_parameters() < model.num_parameters()
    _, others = cl.default_calibration(
        model_name(model), word_tokenizer(64), SEQUENCES, 32, text, positions_per_sequence="all",
        seq_len=LENGTH,
    )  # fmt: skip
    risk = cl.pruning_risk(model, best.selection, others.rows(16, 32))
    assert best.kl == pytest.approx(risk, rel=1e-3)
    assert best.search.held_out.kl.shape[1] == 16


def test_without_time_to_search_the_start_is_the_plan(text: Path) -> None:
    best = found(text, minutes=1e-6)
    assert best.search.history == ()
    assert best.selection is best.search.start


@pytest.mark.parametrize(
    ("minutes", "guards", "whole"),
    [
        (1.0, cl.Guards(), True),
        (1e-6, cl.Guards(), False),
        (1.0, cl.Guards(protect_first=1), False),
    ],
)
def test_whole_layers_are_candidates_where_time_and_guards_allow(
    text: Path, monkeypatch: pytest.MonkeyPatch, minutes: float, guards: cl.Guards, whole: bool
) -> None:
    asked: list[Sequence[cl.Selection]] = []

    def measured(
        model: Any, plans: Sequence[cl.Selection], *rest: Any, **options: Any
    ) -> PlanTable:
        asked.append(plans)
        return cl.measure_plans(model, plans, *rest, **options)

    monkeypatch.setattr(best_plans, "measure_plans", measured)
    monkeypatch.setattr(best_plans, "search_plan", lambda *_, **__: sys.exit())
    with pytest.raises(SystemExit):  # before the search
        found(text, minutes=minutes, guards=guards)
    ends = [set(plan.units.layers[list(plan.pruned)]) for plan in asked[-1]]
    layers = asked[-1][0].units.layers
    filled = [
        len(plan.pruned) == sum(np.isin(layers, list(end)))
        for plan, end in zip(asked[-1], ends, strict=True)
    ]
    assert any(filled) == whole
    assert all(plan.realized_ratio >= 0.3 for plan in asked[-1])


def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a millisecond whenever it is read."""
    ticks = (tick / 1000 for tick in itertools.count())
    monkeypatch.setattr(best_plans, "time", SimpleNamespace(monotonic=lambda: next(ticks)))


@pytest.mark.parametrize("minutes", [1e-6, 1e-3])
def test_of_the_refitted_plans_the_best_one_is_taken(
    text: Path, minutes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticking(monkeypatch)
    best = found(text, minutes=minutes, refit=True)
    assert (len(best.refits) > 1) == (minutes > 1e-6)  # at least one, others while there is time
    assert not best.repaired or best.refits[best.made_by] == min(best.refits.values())
    side = best.refitted if best.repaired else best.pruned
    assert best.kl == pytest.approx(side.kl.mean())
    assert (best.model.cocurve_manifest.get("repair") is not None) == best.repaired
    smaller = cl.prune(tiny_model(), best.selection)
    assert best.model.num_parameters() == smaller.num_parameters()


@pytest.mark.parametrize("harm", [0.0, 2.0])
def test_a_refit_that_harms_another_text_is_not_taken(
    text: Path, harm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refit is made to help on the model's text, and by `harm` less on the eight other rows."""
    ticking(monkeypatch)

    def measured(model: Any, student: Any, rows: Any) -> Any:
        side = compare_models(model, student, rows)
        gain = student.cocurve_manifest.get("repair") is not None
        return replace(side, kl=side.kl - gain + harm * gain * (len(rows) == 8))

    monkeypatch.setattr(best_plans, "compare_models", measured)
    best = found(text, refit=True, minutes=1e-6)
    assert best.repaired == (harm == 0)
    assert best.selection is best.search.selection


def test_the_page_shows_what_was_found_and_runs_nothing(text: Path) -> None:
    best = found(text, minutes=1e-6)
    (_, dense, smaller), *others = best.samples.texts
    assert len(others) == 9
    shown = replace(
        best, samples=Samples((("<script>alert(1)</script>", dense, smaller),), (1.0, 2.0))
    )
    page = html.unescape(shown.page)
    for wanted in (f"{best.selection.realized_ratio:.2%}", f"{best.kl:.4f}", dense, smaller):
        assert wanted in page
    assert "<script" not in shown.page
    assert not re.search(r"(src|href)=|url\(|@import", shown.page)
    gone = np.bincount(best.selection.units.layers[list(best.selection.pruned)], minlength=3)
    left = [sum(map(int, re.findall(r"(\d+) of \d+</td>", row))) for row in page.split("<tr>")]
    whole = np.bincount(best.selection.units.layers)
    assert [n for n in left if n] == (whole - gone).tolist()


@pytest.mark.parametrize(("minutes", "length"), [(1e-6, 256), (1e6, None)])
def test_rows_are_as_long_as_the_time_allows(minutes: float, length: int | None) -> None:
    model = tiny_model(max_position_embeddings=4096)
    clock = best_plans.Clock(60 * minutes)
    assert best_plans.row_length(model, word_tokenizer(4096), 24, clock) == length


def test_models_are_compared_by_their_definitions() -> None:
    one, other = tiny_model(seed=1), tiny_model(seed=2)
    rows = cl.CalibrationSet(torch.randint(0, 90, (3, LENGTH)))
    side = compare_models(one, other, rows)
    with torch.no_grad():
        p, q = (m(input_ids=rows.input_ids).logits[:, :-1].log_softmax(-1) for m in (one, other))
    kl = (p.exp() * (p - q)).sum(-1).mean(-1)
    np.testing.assert_allclose(side.kl, kl, rtol=1e-4)
    wanted = rows.input_ids[:, 1:, None]
    for found, logs in ((side.loss, q), (side.dense_loss, p)):
        np.testing.assert_allclose(found, -logs.gather(-1, wanted)[..., 0].mean(-1), rtol=1e-5)
    assert side.kept == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))


def test_the_same_call_goes_on_from_what_was_measured(text: Path, tmp_path: Path) -> None:
    """And keeps a target and guards."""
    target = cl.Target(parameters=int(0.85 * tiny_model().num_parameters()))
    guards, kept = cl.Guards(protect_first=1), tmp_path / "H.ckpt"
    first = found(text, target, 0.1, guards=guards, checkpoint=tmp_path)
    before = kept.read_bytes()
    again = found(text, target, 0.1, guards=guards, checkpoint=tmp_path)
    assert kept.read_bytes() == before
    assert again.search.held_out.mean[0] == pytest.approx(first.search.held_out.mean[0])
    assert first.model.num_parameters() <= target.parameters
    assert all(first.selection.units[u].layer > 0 for u in first.selection.pruned)


def test_what_cannot_be_done_is_said_before_the_work(text: Path) -> None:
    for minutes in (0, -1, float("nan"), "5"):
        with pytest.raises(cl.InputError):
            found(text, minutes=minutes)
    with pytest.raises(cl.InfeasibleError):
        found(text, 0.9, guards=cl.Guards(protect_first=2))
