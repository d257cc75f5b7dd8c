"""Scores of the methods that read weights and activations, against loops over full activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.methods.base import Evidence, Method
from cocurve_lab.methods.cocurve import CoCurve, curvature_of
from cocurve_lab.methods.inputs import collect_statistics
from helpers.activations import model_of, output_weight, seen
from helpers.builds import require_same_bits
from helpers.problems import make_units, naive_greedy, random_curvature
from helpers.tiny_models import (
    GROUPS,
    naive_build,
    relative_error,
    tiny_model,
    tiny_text,
    units_by_hand,
)

PAIRS = [("llama", "gqa"), ("mistral", "mqa"), ("qwen2", "mha"), ("phi3", "gqa")]
every_model = pytest.mark.parametrize(("family", "heads"), PAIRS)


@every_model
def test_magnitude_and_wanda_are_norms_of_columns(family: str, heads: str) -> None:
    def wanda(x: np.ndarray, w: np.ndarray) -> float:
        energy = np.mean([(row**2).sum() for row in x])
        return float(np.abs(w).mean() * np.sqrt(energy))

    columns = {"magnitude": lambda _, w: float(np.sqrt((w**2).sum())), "wanda-sp": wanda}
    for name, column in columns.items():
        found = scores_of(cl.get_method(name), model_of(family, heads))
        np.testing.assert_allclose(found, naive_scores(family, heads, column), rtol=1e-4)


def scores_of(method: Method, model: PreTrainedModel, seed: int = 0) -> np.ndarray:
    units = cl.enumerate_units(model, GROUPS)
    return method.measure(model, units, tiny_text(), seed=seed, progress=False).scores


def naive_scores(
    family: str, heads: str, column: Callable[[np.ndarray, np.ndarray], float]
) -> np.ndarray:
    """Sum over each unit's columns j of column(X_j [N, T], W_:j [d])."""
    model, scores = model_of(family, heads), []
    for unit in units_by_hand(model):
        x = seen(family, heads).columns[unit.layer, unit.kind].numpy()
        weight = output_weight(model, unit.layer, unit.kind)
        scores.append(sum(column(x[..., j], weight[:, j]) for j in range(unit.start, unit.stop)))
    return np.array(scores)


# Scores -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "heads", "metric"),
    [(*case, "wifv") for case in PAIRS] + [("qwen2", "gqa", "ifv"), ("phi3", "mha", "wifn")],
)
def test_flap_standardizes_fluctuation_by_block(family: str, heads: str, metric: str) -> None:
    model, saw = model_of(family, heads), seen(family, heads)
    units, expected = units_by_hand(model), []
    for unit in units:
        x, weight = saw.tokens(unit.layer, unit.kind), output_weight(model, unit.layer, unit.kind)
        columns = {
            "wifv": np.var(x, axis=0) * (weight**2).sum(axis=0),
            "ifv": np.var(x, axis=0),
            "wifn": np.abs(weight).mean(axis=0) * np.sqrt((x**2).sum(axis=0)),
        }[metric]
        columns = columns**2 if unit.kind == "attention" else columns
        z = (columns - np.mean(columns)) / np.std(columns)
        expected.append(z[unit.start : unit.stop].mean())
    found = scores_of(cl.get_method("flap", metric=metric), model)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
    if heads == "mqa":  # one unit per block: ties must not be broken by rounding
        assert [found[i] for i, u in enumerate(units) if u.kind == "attention"] == [0.0] * 3


@every_model
def test_amp_sums_head_outputs_and_activations(family: str, heads: str) -> None:
    model, saw = model_of(family, heads), seen(family, heads)
    size = 12 if family == "mistral" else model.config.hidden_size // 4
    expected = []
    for unit in units_by_hand(model):
        tokens = saw.tokens(unit.layer, unit.kind)
        weight = output_weight(model, unit.layer, unit.kind)
        if unit.kind == "attention":
            starts = range(unit.start, unit.stop, size)
            outputs = [tokens[:, s : s + size] @ weight[:, s : s + size].T for s in starts]
            expected.append(sum(np.abs(output).sum(axis=1).mean() for output in outputs))
        else:
            expected.append(np.abs(tokens[:, unit.start : unit.stop]).mean(axis=0).sum())
    np.testing.assert_allclose(scores_of(cl.get_method("amp"), model), expected, rtol=1e-4)


def test_random_draws_by_its_seed_alone() -> None:
    model, method = tiny_model(layers=1), cl.get_method("random")
    draws = np.array([scores_of(method, model, seed=seed) for seed in range(100)])
    assert len(np.unique(draws)) == draws.size
    assert 0 <= draws.min() < draws.max() < 1
    assert abs(draws.mean(axis=0) - 0.5).max() < 0.15  # five standard errors: no unit is favored


@pytest.mark.parametrize("name", ["magnitude", "wanda-sp", "flap", "amp"])
def test_broken_weights_are_named(name: str) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(cl.NumericalError):
        scores_of(cl.get_method(name), model)


# Statistics ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "heads"), [("mistral", "mqa"), ("phi3", "gqa")])
def test_statistics_are_sums_over_all_tokens(family: str, heads: str) -> None:
    text, saw = tiny_text(scored=3), seen(family, heads)  # the tokens of TEXT
    found = collect_statistics(model_of(family, heads), text, moments=True, progress=False)
    assert (found.rows, found.tokens) == (4, 96)
    for block, rows in saw.columns.items():
        x, flat = rows.numpy(), saw.tokens(*block)
        for one, other in (
            (found.sums[block], flat.sum(axis=0)),
            (found.squares[block], (flat**2).sum(axis=0)),
            (found.row_norms[block], sum(np.linalg.norm(row, axis=0) for row in x)),
            (found.moments[block], flat.T @ flat),
            (found.mean(block), flat.mean(axis=0)),
            (found.variance(block), flat.var(axis=0)),
        ):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


# Allocation ---------------------------------------------------------------------------------------


def planted(name: str, units: cl.UnitSet, scores: list[float]) -> Evidence:
    return Evidence(name, units, {"scores": np.array(scores)})


TWO = make_units(layers=2, attention=2, ffn=3)  # costs 5 and 11, 86 in all
SCORES = [2.0, 1.0, 9.0, 8.0, 7.0, 4.0, 3.0, 0.4, 0.5, 0.6]  # A0 A1 F0 F1 F2 of layer 0, then 1


@pytest.mark.parametrize("name", ["magnitude", "wanda-sp", "amp"])
def test_uniform_methods_empty_all_blocks_evenly(name: str) -> None:
    """Turns are 1/6 (first FFN), 1/4 (first attention), 1/2 (second FFN): 11 + 11 + 5 >= 25.8."""
    evidence = planted(name, TWO, SCORES)
    assert cl.get_method(name).select(evidence, TWO, 0.3).pruned == (7, 4, 1)
    # the last attention units have turn 3/4, the last FFN groups 5/6
    assert cl.get_method(name).select(evidence, TWO, 0.7).pruned[-2:] == (5, 0)


# CoCurve ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "strength", "kinds"),
    [
        ("cocurve", {}, 1.0, ("attention", "ffn")),
        ("cocurve", {"interaction_strength": 0.3}, 0.3, ("attention", "ffn")),
        ("diagonal", {}, 0.0, ("attention", "ffn")),
        ("head-only", {}, 1.0, ("attention",)),
        ("ffn-only", {}, 1.0, ("ffn",)),
    ],
)
def test_cocurve_and_its_controls_read_one_matrix(
    name: str, options: dict[str, Any], strength: float, kinds: Any
) -> None:
    units = make_units(layers=4, attention=6, ffn=4)
    curvature, method = random_curvature(units, seed=3, shared=0.8), cl.get_method(name, **options)
    plan = method.select(method.adopt(curvature), units, 0.2)
    assert list(plan.pruned) == naive_greedy(curvature, 0.2, strength, cl.Guards(kinds=kinds))
    assert plan.interaction_strength == strength
    assert plan.predicted_risk == pytest.approx(curvature.risk(plan.pruned))


def test_measured_matrix_is_that_of_single_unit_ablations() -> None:
    model, text = tiny_model(layers=2), tiny_text(rows=2, length=12, scored=4)
    units = cl.enumerate_units(model, GROUPS)
    evidence = cl.get_method("cocurve", top_r=20).measure(model, units, text, progress=False)
    expected, _ = naive_build(model, text, 20)
    assert relative_error(evidence.arrays["matrix"], expected) < 1e-4
    assert evidence.provenance["top_r"] == 20


def test_the_curvature_comes_back_bit_for_bit() -> None:
    model, text = tiny_model(layers=2), tiny_text()
    units = cl.enumerate_units(model, GROUPS)
    built = cl.estimate_curvature(model, units, text, 97, progress=False)
    again = curvature_of(cl.get_method("ffn-only").adopt(built))
    assert (again.fingerprint, again.provenance) == (built.fingerprint, built.provenance)
    require_same_bits(again, built)
    with pytest.raises(cl.FileFormatError):
        curvature_of(planted("magnitude", TWO, SCORES))


def test_compensation_carries_gains_into_the_weights() -> None:
    model, text = tiny_model(), tiny_text()
    units, method = cl.enumerate_units(model, GROUPS), cl.get_method("cocurve", compensate=True)
    evidence = method.measure(model, units, text, progress=False)
    plan, plain = (each.select(evidence, units, 0.3) for each in (method, CoCurve()))
    assert (plan.pruned, plain.gains) == (plain.pruned, {})
    assert plan.gains == cl.solve_gains(curvature_of(evidence), plain)
    repaired = method.repair(model, plan, evidence)
    cl.check_equivalence(model, repaired, plan, tiny_text(2, seed=5))
    with pytest.raises(cl.EquivalenceError):
        cl.check_equivalence(model, repaired, plain, tiny_text(2, seed=5))


@pytest.mark.parametrize(("shared", "strength"), [(0.0, 1.0), (3.0, 0.0)])
def test_the_gate_sets_lambda(shared: float, strength: float) -> None:
    units = make_units()
    curvature = random_curvature(units, shared=shared, positions=4000)
    method = cl.get_method("cocurve", interaction_strength="gate")
    plan = method.select(method.adopt(curvature), units, 0.3)
    assert plan.interaction_strength == strength
