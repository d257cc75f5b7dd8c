"""Edges by activation correlation: against hooks and numpy, planted sets, plans and verdicts."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr
from torch import Tensor

import cocurve_lab as cl
from cocurve_studies.structure import activations, findings
from cocurve_studies.structure.edges import ACTIVATIONS, EdgeOptions, edge_study
from cocurve_studies.tables import pick
from helpers.problems import make_units, random_curvature
from helpers.studies import Problem
from helpers.tiny_models import naive_risk, tiny_text, units_by_hand

NAMES = (activations.NORMS, activations.WRITES)


@pytest.fixture(scope="module")
def correlations(problem: Problem) -> dict[str, np.ndarray]:
    inputs = (problem.model, problem.units, problem.calibration)
    return activations.activation_correlations(*inputs, progress=False)


def test_activations_are_correlated_token_by_token(
    problem: Problem, correlations: dict[str, np.ndarray]
) -> None:
    """What each unit puts into its output projection, by hand, for all tokens at once."""
    model, seen = problem.model, defaultdict(list)
    layers = model.model.layers
    projections = {
        (number, kind): layer.self_attn.o_proj if kind == "attention" else layer.mlp.down_proj
        for number, layer in enumerate(layers)
        for kind in ("attention", "ffn")
    }

    def keep(key: tuple[int, str]) -> Any:
        def hook(_: Any, inputs: tuple[Tensor, ...]) -> None:
            seen[key].append(inputs[0].flatten(0, 1).detach().double().numpy())

        return hook

    handles = [part.register_forward_pre_hook(keep(key)) for key, part in projections.items()]
    model(problem.calibration.input_ids)
    for handle in handles:
        handle.remove()
    norms, writes = [], []
    for unit in problem.units:
        key = (unit.layer, unit.kind)
        columns = slice(unit.start, unit.stop)
        inputs = np.concatenate(seen[key])[:, columns]
        weight = projections[key].weight.detach().double().numpy()[:, columns]
        norms.append([np.sqrt(sum(value**2 for value in token)) for token in inputs])
        written = inputs @ weight.T
        writes.append((written - written.mean(axis=0)).ravel())
    assert correlations[activations.NORMS] == pytest.approx(np.corrcoef(norms), abs=1e-5)
    products = np.array(writes) @ np.array(writes).T
    scale = np.sqrt(np.diagonal(products))
    expected = products / np.outer(scale, scale)
    assert correlations[activations.WRITES] == pytest.approx(expected, abs=1e-5)


def test_an_edge_set_agrees_with_itself_alone() -> None:
    curvature = random_curvature(make_units(3, 2, 4), seed=3, groups=6, positions=120)
    rho = curvature.correlation()
    rng = np.random.default_rng(0)
    noise = rng.normal(size=rho.shape)
    table = activations.edge_agreement(curvature, {"same": 0.5 * rho, "noise": noise + noise.T})
    for block in ("all", "attention", "cross", "ffn"):
        (row,) = pick(table, variant="same", block=block)
        assert row["pearson"] == pytest.approx(1)
        assert row["spearman"] == pytest.approx(1)
        assert row["mean_absolute"] == pytest.approx(row["mean_absolute_h"] / 2)
        assert row["pearson_error"] > 0  # other text has another H
    upper = np.triu_indices(len(rho), 1)
    (row,) = pick(table, variant="noise", block="all")
    assert row["pairs"] == len(upper[0])
    other = (noise + noise.T)[upper]
    assert row["pearson"] == pytest.approx(np.corrcoef(rho[upper], other)[0, 1])
    assert row["spearman"] == pytest.approx(spearmanr(rho[upper], other).statistic)
    assert sum(r["pairs"] for r in pick(table, variant="noise")) == 2 * row["pairs"]
    (first,) = findings.activation_findings([], table)
    assert first.agrees is False  # one of the two is H itself
    assert first.lab


def test_plans_on_activations_are_measured_against_the_plan_on_h(
    problem: Problem, correlations: dict[str, np.ndarray]
) -> None:
    h, held_out = problem.curvature, tiny_text(3, 16, seed=7)
    options = EdgeOptions(ratios=(0.4,), correlations=correlations)
    table = edge_study(problem.model, h, held_out, options, progress=False, draws=2)
    plain = edge_study(problem.model, h, held_out, EdgeOptions((0.4,)), progress=False, draws=2)
    assert [row for row in pick(table) if row["axis"] != ACTIVATIONS] == pick(plain)
    full = cl.solve_greedy(h, 0.4)
    hand = units_by_hand(problem.model)
    for name in NAMES:
        (row,) = pick(table, axis=ACTIVATIONS, variant=name)
        matrix = np.empty(h.matrix.shape)
        for u in range(len(matrix)):
            for v in range(len(matrix)):
                edge = correlations[name][u, v] * np.sqrt(h.matrix[u, u] * h.matrix[v, v])
                matrix[u, v] = h.matrix[u, u] if u == v else edge
        made = activations.with_correlations(h, correlations[name]).matrix
        np.testing.assert_allclose(made, matrix, rtol=1e-12)
        plan = cl.solve_greedy(cl.Curvature(matrix, h.units), 0.4)
        mine, other = (
            naive_risk(problem.model, [hand[u] for u in p.pruned], held_out) for p in (plan, full)
        )
        assert row["difference"] == pytest.approx((mine - other).mean(), abs=1e-5)
        assert row["predicted_risk"] == pytest.approx(h.risk(plan.pruned))
        assert row["difference_draws"] == 2
    (cost,) = findings.activation_findings(table, [])
    assert cost.ours.count(" at 40%") == 2
