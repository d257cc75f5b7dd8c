"""Edge benefit against FFN redundancy, model by model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import permutation_test, spearmanr

import cocurve_lab as cl
from cocurve_lab.base.errors import MismatchError
from cocurve_lab.extensions.judging.agreement import random_set
from cocurve_lab.measuring.risk import PlanTable
from cocurve_studies.tables import Table, column, pick
from cocurve_studies.trust import redundancy
from cocurve_studies.trust.redundancy import (
    RedundancyOptions,
    Subject,
    plot_redundancy,
    redundancy_study,
    redundancy_trend,
)
from helpers.problems import make_units
from helpers.tiny_models import naive_risk, tiny_model, tiny_text

ASSETS = Path(__file__).resolve().parents[4] / "shared" / "assets"
THIRD, STORIES = ASSETS / "tinystories_260k", ASSETS / "text" / "tinystories.txt"
OPTIONS = RedundancyOptions(ratio=0.3, top_r=20)
TEXT, HELD_OUT = tiny_text(4), tiny_text(6, seed=1)


def subject(seed: int) -> Subject:
    return Subject(tiny_model(seed=seed), TEXT, HELD_OUT, ffn_groups=4)


def models() -> dict[str, Subject]:
    return {f"seed {seed}": subject(seed) for seed in range(3)}


@pytest.fixture(scope="module")
def table() -> Table:
    return redundancy_study(models(), OPTIONS, progress=False)


def test_a_row_is_what_is_found_the_slow_way(table: Table) -> None:
    assert [row["model"] for row in pick(table)] == ["seed 0", "seed 1", "seed 2"]
    model, row = tiny_model(seed=1), pick(table)[1]
    units = cl.enumerate_units(model, 4)
    build = cl.BuildOptions(groups=4)
    built = cl.estimate_curvature(model, units, TEXT, 20, progress=False, options=build)
    error = cl.jackknife(built, "ffn_redundancy").standard_error
    assert row["redundancy"] == pytest.approx(built.ffn_redundancy)
    assert row["redundancy_error"] == pytest.approx(float(error))
    assert row["corrected"] == pytest.approx(built.ffn_redundancy_corrected)
    assert row["noise_floor"] == pytest.approx(built.ffn_redundancy_noise_floor)
    ffn = built.saliency[units.kinds == "ffn"]
    assert row["ffn_cv"] == pytest.approx(ffn.std() / ffn.mean())
    found = {}
    for name, strength in (("0", 0.0), ("half", 0.5), ("1", 1.0)):
        plan = cl.solve_greedy(built, 0.3, strength)
        found[name] = naive_risk(model, [units[i] for i in plan.pruned], HELD_OUT)
        assert row[f"kl_{name}"] == pytest.approx(found[name].mean(), rel=1e-3)
    gap = found["0"] - found["1"]
    assert row["edge_benefit"] == pytest.approx(gap.mean(), rel=1e-2, abs=1e-5)
    assert row["edge_benefit_error"] == pytest.approx(
        gap.std(ddof=1) / np.sqrt(6), rel=1e-2, abs=1e-5
    )
    assert row["relative_benefit"] == pytest.approx(gap.mean() / found["0"].mean(), rel=1e-2)
    logs = np.log(row["perplexity_0"]) - np.log(row["perplexity_1"])
    assert row["nll_gain"] == pytest.approx(logs)


@pytest.mark.parametrize(
    ("redundant", "benefit", "right"),
    [(False, 1.0, True), (False, -1.0, False), (True, 1.0, False), (True, -1.0, True)],
)
def test_the_gate_is_judged_by_what_was_measured(
    redundant: bool, benefit: float, right: bool
) -> None:
    units = make_units()
    rho = 0.5 if redundant else 0.01
    matrix = rho * np.ones((len(units),) * 2) + (1 - rho) * np.eye(len(units))
    plans = tuple(cl.Selection.from_pruned(units, [i]) for i in range(3))
    noise = np.array([0.1, -0.1, 0.2, -0.2])
    for shift, expected in ((benefit, right), (0.01 * benefit, None)):
        kl = np.stack([5 + shift + noise, np.full(4, 9.0), np.full(4, 5.0)])
        value, error = PlanTable(plans, kl).paired(0, 2)
        measured = {"edge_benefit": value, "edge_benefit_error": error}
        row = redundancy._gated(cl.Curvature(matrix, units), measured)
        assert row["gate_lambda"] == (0.0 if redundant else 1.0)
        assert row["gate_right"] is expected


def test_adding_a_model_measures_only_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: Table
) -> None:
    two = dict(list(models().items())[:2])
    first = redundancy_study(two, OPTIONS, cache=tmp_path, progress=False)
    assert pick(first) == pick(table)[:2]
    loaded = []

    def lazy() -> Subject:
        loaded.append(1)
        return subject(2)

    wanted: dict[str, Subject | redundancy.Callable[[], Subject]] = {**two, "seed 2": lazy}
    found = redundancy_study(wanted, OPTIONS, cache=tmp_path, progress=False)
    assert pick(found) == pick(table)
    assert len(loaded) == 1
    monkeypatch.setattr(redundancy.Recipe, "build", None)
    renamed = {"other": subject(0)}
    (row,) = pick(redundancy_study(renamed, OPTIONS, cache=tmp_path, progress=False))
    assert row == pick(table)[0] | {"model": "other"}
    with pytest.raises(TypeError):  # another ratio: it wants to build
        redundancy_study(renamed, RedundancyOptions(ratio=0.2), cache=tmp_path, progress=False)


def rows(redundant: list[float], benefits: list[float | None]) -> Table:
    pairs = zip(redundant, benefits, strict=True)
    return [{"redundancy": x, "relative_benefit": y} for x, y in pairs]


def test_an_inverse_relation_is_found() -> None:
    found = redundancy_trend(rows([0.03, 0.07, 0.18], [0.9, 0.4, -0.2]))
    assert (found["spearman"], found["models"], found["left_out"]) == (-1.0, 3, 0)
    assert found["p_value"] == pytest.approx(1 / 3)  # 2 of 6 orders
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=6), rng.normal(size=6)
    found = redundancy_trend(rows(x.tolist(), y.tolist()))

    def statistic(y: np.ndarray) -> float:
        return float(spearmanr(x, y).statistic)

    exact = permutation_test((y,), statistic, permutation_type="pairings", n_resamples=np.inf)
    assert found["spearman"] == pytest.approx(statistic(y))
    assert found["p_value"] == pytest.approx(float(exact.pvalue), abs=1e-9)


def test_too_little_for_a_trend_is_said() -> None:
    found = redundancy_trend(rows([0.1, 0.2], [1.0, 0.5]))
    assert found["spearman"] is None
    assert "too few" in found["note"]
    found = redundancy_trend(rows([0.1, 0.2, np.nan, 0.3], [1.0, 0.5, 0.1, None]))
    assert (found["models"], found["left_out"], found["spearman"]) == (2, 2, None)
    found = redundancy_trend(rows([0.1, 0.2, 0.3], [1.0, 1.0, 1.0]))
    assert found["p_value"] is None
    assert "no order" in found["note"]
    with pytest.raises(cl.InputError, match="no column 'gain'"):
        redundancy_trend(rows([0.1], [0.2]), "gain")


def test_the_picture_names_the_models(table: Table) -> None:
    given = [
        row | {"gate_lambda": value}
        for row, value in zip(pick(table), (1.0, 0.0, 1.0), strict=True)
    ]
    figure = plot_redundancy(given)
    full, damped = figure.data
    assert (list(full.text), list(damped.text)) == (["seed 0", "seed 2"], ["seed 1"])
    assert damped.y[0] == pick(table)[1]["relative_benefit"]
    assert (
        list(full.error_x.array)
        == column([pick(table)[0], pick(table)[2]], "redundancy_error").tolist()
    )
    given[1]["gate_lambda"] = None
    assert [trace.name for trace in plot_redundancy(given).data][-1] == "the gate is undecided"


@pytest.mark.slow
@pytest.mark.skipif(
    not THIRD.is_dir() or not STORIES.is_file(),
    reason=f"the third-party checkpoint is not at {THIRD}",
)
def test_a_checkpoint_of_others_can_be_a_subject() -> None:
    model, tokenizer = cl.load_model(THIRD, device="cpu")
    text = cl.CalibrationSet.from_file(STORIES, tokenizer, num_sequences=16, seq_len=96)
    calibration, held_out = text.split(held_out=8)
    (row,) = pick(redundancy_study({"260k": Subject(model, calibration, held_out)}, progress=False))
    assert row["units"] == 5 * (4 + 16)
    assert 0 < row["redundancy"] < 1
    units = cl.enumerate_units(model)
    drawn = cl.Selection.from_pruned(units, random_set(units, 0.2, np.random.default_rng(0)))
    assert row["kl_1"] < cl.pruning_risk(model, drawn, held_out)
    assert row["perplexity_0"] > row["dense_perplexity"]


# Base and tuned -----------------------------------------------------------------------------------


def test_a_tuned_model_is_compared_with_its_base_on_the_same_rows() -> None:
    """Weights moved a little, as training would: mean |rho| pair by pair, and group by group."""
    base, tuned = tiny_model(seed=0), tiny_model(seed=0)
    with torch.no_grad():
        for weight in tuned.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    units, build = cl.enumerate_units(base, 4), cl.BuildOptions(groups=4)
    inputs, kept = (units, TEXT, 20), {"progress": False, "options": build}
    first, second = (cl.estimate_curvature(model, *inputs, **kept) for model in (base, tuned))
    row = redundancy.tuned_redundancy(first, second)

    def naive(h: cl.Curvature, leave: int | None = None) -> float:
        assert h.group_grams is not None
        grams = [gram for place, gram in enumerate(h.group_grams) if place != leave]
        matrix, ffn = sum(grams), np.flatnonzero(units.kinds == "ffn")
        rho = [
            abs(matrix[u, v]) / np.sqrt(matrix[u, u] * matrix[v, v])
            for u in ffn
            for v in ffn
            if u != v
        ]
        return float(np.mean(rho))

    assert row["base"] == pytest.approx(naive(first))
    assert row["tuned"] == pytest.approx(naive(second))
    assert row["difference"] == pytest.approx(naive(second) - naive(first))
    gaps = np.array([naive(second, leave) - naive(first, leave) for leave in range(4)])
    error = np.sqrt(3 / 4 * ((gaps - gaps.mean()) ** 2).sum())
    assert row["difference_error"] == pytest.approx(error)
    assert row["tuned_corrected"] == second.ffn_redundancy_corrected
    same = redundancy.tuned_redundancy(first, first)
    assert (same["difference"], same["difference_error"]) == (0, 0)
    other = cl.estimate_curvature(base, units, HELD_OUT.rows(0, 4), 20, **kept)
    with pytest.raises(MismatchError, match="same rows"):
        redundancy.tuned_redundancy(first, other)
    wider = cl.estimate_curvature(base, cl.enumerate_units(base, 2), *inputs[1:], **kept)
    with pytest.raises(MismatchError, match="tuned"):
        redundancy.tuned_redundancy(first, wider)


@pytest.mark.parametrize(
    ("difference", "error", "agrees"),
    [(0.001, 0.001, True), (0.02, 0.002, False), (-0.02, 0.002, False), (0.005, 0.01, None)],
)
def test_post_training_is_judged_by_a_tenth_of_the_base(
    difference: float, error: float, agrees: bool | None
) -> None:
    row = {"base": 0.074, "tuned": 0.074 + difference}
    row |= {"difference": difference, "difference_error": error}
    assert redundancy.tuning_finding(row).agrees is agrees
