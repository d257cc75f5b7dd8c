"""The exact H* against finite differences and small removals, and the study that compares it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.estimator.estimate import exact_curvature
from cocurve_lab.extensions.analysis import exact as infinitesimal
from cocurve_lab.solver.guards import FREE
from cocurve_studies.trust.infinitesimal import (
    PlanGrid,
    compare_curvatures,
    compare_plans,
    measure_infinitesimal,
    plot_infinitesimal,
)
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import (
    FAMILIES,
    GROUPS,
    full_logits,
    masked_by_hand,
    relative_error,
    tiny_model,
    tiny_text,
    units_by_hand,
)


def exact(model: Any, text: cl.CalibrationSet, top_r: int = 13) -> cl.Curvature:
    units = cl.enumerate_units(model, GROUPS)
    return exact_curvature(model, units, text, top_r, progress=False)


def wide(model: Any) -> Any:
    """The same model with its norms in float64: transformers runs them in float32 always."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):

            def norm(x: torch.Tensor, m: Any = module) -> torch.Tensor:
                square = x.pow(2).mean(-1, keepdim=True)
                return m.weight * (x * torch.rsqrt(square + m.variance_epsilon))

            module.forward = norm
    return model


def differences(
    model: Any, text: cl.CalibrationSet, top_r: int, step: float, central: bool = True
) -> np.ndarray:
    """Gram [M, M] of (z(1 + step) - z(1 - step)) / (2 step), or of (z(1) - z(1 - step)) / step."""
    features: list[list[torch.Tensor]] = [[] for _ in units_by_hand(model)]
    for ids, positions in zip(text.input_ids, text.scored, strict=True):
        teacher = full_logits(model, ids[None])[0, positions]
        support = teacher.topk(top_r, dim=-1).indices
        p = torch.softmax(teacher.gather(-1, support), dim=-1)
        for index, unit in enumerate(units_by_hand(model)):
            ends = []
            for gain in (1 + step if central else 1.0, 1 - step):
                with masked_by_hand(model, [], {unit: gain}):
                    ends.append(full_logits(model, ids[None])[0, positions].gather(-1, support))
            slope = (ends[0] - ends[1]) / (2 * step if central else step)
            mean = (p * slope).sum(dim=-1, keepdim=True)
            features[index].append((p.sqrt() * (slope - mean)).flatten())
    stacked = torch.stack([torch.cat(parts) for parts in features])
    return (stacked @ stacked.T / text.scored.numel()).numpy()


# The matrix -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "heads"),
    [(family, "gqa") for family in FAMILIES] + [("llama", "mha"), ("llama", "mqa")],
)
def test_it_is_the_limit_of_central_differences(family: str, heads: str) -> None:
    model = wide(tiny_model(family, heads, layers=2, dtype=torch.float64))
    text = tiny_text(2, 10, scored=4)
    expected = differences(model, text, 13, step=1e-4)
    found = exact(model, text)
    assert relative_error(found.matrix, expected) < 1e-6
    assert np.allclose(np.diagonal(found.matrix), np.diagonal(expected), rtol=1e-6, atol=0)


def test_removing_less_and_less_leads_there() -> None:
    """Features of a removal by a share, over that share: the distance falls with the share."""
    model, text = wide(tiny_model(layers=2, dtype=torch.float64)), tiny_text(1, 12)
    found = exact(model, text).matrix
    apart = [
        relative_error(differences(model, text, 13, step, central=False), found)
        for step in (1.0, 0.1, 0.01)
    ]
    assert apart[0] > 0.05  # whole removals are something else
    assert apart[1] / apart[2] == pytest.approx(10, rel=0.2)  # first order in the share


def test_the_plain_attention_is_covered() -> None:
    fused, plain = (
        exact(tiny_model(layers=2, dtype=torch.float64, attention=kind), tiny_text(1, 12)).matrix
        for kind in ("sdpa", "eager")
    )
    assert relative_error(plain, fused) < 1e-5  # its softmax is float32


def test_a_bias_of_the_head_moves_the_teacher_not_the_derivative() -> None:
    model, text = wide(tiny_model(layers=2, dtype=torch.float64)), tiny_text(1, 12)
    without = exact(model, text).matrix
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(model.lm_head.out_features, generator=generator, dtype=torch.float64)
    model.lm_head.bias = torch.nn.Parameter(bias, requires_grad=False)
    found = exact(model, text).matrix
    assert relative_error(found, differences(model, text, 13, step=1e-4)) < 1e-6
    assert relative_error(found, without) > 0.01


def test_batches_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = tiny_model(layers=2, dtype=torch.float64), tiny_text(1, 12)
    whole = exact(model, text).matrix
    monkeypatch.setattr(infinitesimal, "_BATCH_TOKENS", 1)
    assert relative_error(exact(model, text).matrix, whole) < 1e-12


def test_what_comes_back(tmp_path: Path) -> None:
    model, text = tiny_model(), tiny_text(3)
    model.requires_grad_(True)
    model.train()
    found = exact(model, text)
    assert model.training
    assert all(weight.requires_grad for weight in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert found.provenance["method"] == "infinitesimal"
    assert not found.is_preview
    assert found.single_unit_risk is None
    assert found.group_positions is not None
    assert found.group_positions.tolist() == [23, 23, 23]
    again = cl.Curvature.load(found.save(tmp_path / "H.pkl"))
    assert np.array_equal(again.matrix, found.matrix)
    assert np.linalg.eigvalsh(found.matrix).min() > -1e-6 * found.saliency.max()


def test_attention_without_a_derivative_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(infinitesimal, "sdpa_kernel", lambda _: nullcontext())  # left to be fused
    model = tiny_model()
    with pytest.raises(cl.InputError, match="no forward derivative"):
        exact(model, tiny_text(1))
    assert not any(module._forward_pre_hooks for module in model.modules())
    monkeypatch.undo()
    assert np.isfinite(exact(model, tiny_text(1)).matrix).all()


# Two matrices and their plans -------------------------------------------------------------------


def test_a_matrix_against_itself_and_against_a_multiple() -> None:
    one = random_curvature(make_units(), groups=4)
    assert one.group_grams is not None
    double = cl.Curvature(
        2 * one.matrix, one.units, one.provenance, 2 * one.group_grams, one.group_positions
    )
    found = compare_curvatures(one, double)
    assert found["frobenius_distance"] == pytest.approx(1.0)
    assert found["diagonal_ratio"] == pytest.approx(2.0)
    assert found["log_diagonal_correlation"] == pytest.approx(1.0)
    assert found["edge_spearman"] == pytest.approx(1.0)
    assert found["diagonal_ratio_error"] == pytest.approx(0.0, abs=1e-12)
    assert found["dead_units"] == 0
    for row in compare_plans(one, double, PlanGrid())[0]:
        assert row["overlap"] == 1.0
        assert row["risk_of_exact_by_exact"] == pytest.approx(2 * row["risk_of_exact_by_finite"])


def test_numbers_of_a_case_worked_by_hand() -> None:
    units = make_units(1, 1, 2, attention_cost=10, ffn_cost=10)
    finite = cl.Curvature(np.diag([1.0, 2.0, 4.0]), units)
    other = cl.Curvature(np.diag([3.0, 1.0, 0.0]), units)
    found = compare_curvatures(finite, other)
    assert found["frobenius_distance"] == pytest.approx(np.sqrt((4 + 1 + 16) / 21))
    assert found["diagonal_ratio"] == pytest.approx((3 + 0.5) / 2)
    assert found["log_diagonal_correlation"] == pytest.approx(-1)
    assert found["dead_units"] == 1
    assert np.isnan(found["edge_spearman"])  # all edges are 0
    assert found["frobenius_distance_error"] is None  # no groups
    (row,), _ = compare_plans(finite, other, PlanGrid((0.6,), (1.0,), FREE))
    # H prunes units 0 and 1; H* prunes 2 and 1
    assert row["overlap"] == pytest.approx(1 / 3)
    assert row["risk_of_finite_by_finite"] == pytest.approx(1.5)
    assert row["risk_of_finite_by_exact"] == pytest.approx(2.0)
    assert row["risk_of_exact_by_finite"] == pytest.approx(3.0)
    assert row["risk_of_exact_by_exact"] == pytest.approx(0.5)


def test_errors_of_the_matrices_are_the_jackknife() -> None:
    """Groups of equal size, each a multiple of one matrix, so ratios are means of the factors."""
    units, groups = make_units(), 8
    features = np.random.default_rng(1).normal(size=(len(units), 20))
    gram, factors = features @ features.T, np.arange(1.0, 1 + groups)
    counts, facts = np.full(groups, 20), {"row_fingerprints": ["a"]}
    even = cl.Curvature(gram / 20, units, facts, np.stack([gram] * groups), counts)
    grams = factors[:, None, None] * gram
    uneven = cl.Curvature(grams.mean(axis=0) / 20, units, facts, grams, counts)
    found = compare_curvatures(even, uneven)
    assert found["diagonal_ratio"] == pytest.approx(factors.mean())
    expected = factors.std(ddof=1) / np.sqrt(groups)  # the standard error of a mean
    assert found["diagonal_ratio_error"] == pytest.approx(expected)
    assert found["frobenius_distance_error"] == pytest.approx(expected)
    elsewhere = uneven.with_provenance(row_fingerprints=["b"])
    assert compare_curvatures(even, elsewhere)["diagonal_ratio_error"] is None


def test_a_plan_that_stalls_is_left_out_and_named() -> None:
    units = make_units()
    one, other = random_curvature(units), random_curvature(units, 1)
    guards = cl.Guards(protect_first=1, protect_last=1)
    rows, pairs = compare_plans(one, other, PlanGrid((0.1, 0.9), (1.0,), guards))
    assert [row["stalled"] for row in rows] == [None, "finite"]
    assert rows[1]["overlap"] is None
    assert rows[0]["overlap"] is not None
    assert [len(pair) for pair in pairs] == [2, 0]


# Measured ---------------------------------------------------------------------------------------


def test_measured_plans_and_their_cache(tmp_path: Path) -> None:
    model, text, held_out = tiny_model(), tiny_text(3), tiny_text(3, seed=7)
    units = cl.enumerate_units(model, GROUPS)
    finite = cl.estimate_curvature(model, units, text, 13, progress=False)
    limit = exact(model, text)
    grid = PlanGrid((0.3,), (0.0, 1.0))

    def measure(grid: PlanGrid = grid) -> Any:
        return measure_infinitesimal(
            model, finite, limit, held_out, grid, cache=tmp_path, progress=False
        )

    table = measure()
    assert len(table) == 2
    for row in table:
        plans = [
            cl.solve_greedy(matrix, row["requested_ratio"], row["interaction_strength"])
            for matrix in (finite, limit)
        ]
        kl = cl.measure_plans(model, plans, held_out, progress=False)
        assert row["measured_finite"] == pytest.approx(kl.mean[0], rel=1e-5)
        assert row["measured_exact"] == pytest.approx(kl.mean[1], rel=1e-5)
        difference, error = kl.paired(1, 0)
        assert row["difference"] == pytest.approx(difference, abs=1e-6)
        assert row["difference_error"] == pytest.approx(error, abs=1e-6)
    plain, _ = compare_plans(finite, limit, grid)
    assert [{name: row[name] for name in plain[0]} for row in table] == plain

    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert measure() == table
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == files  # read back
    measure(PlanGrid((0.3,), (0.0,)))
    assert len(list(tmp_path.iterdir())) > len(files)
    assert plot_infinitesimal(table).data[1].error_y.array is not None


def test_what_was_calibrated_on_is_never_measured_on() -> None:
    model, text = tiny_model(), tiny_text(2)
    preview = cl.estimate_curvature(model, None, text, 13, method="probe", progress=False)
    other = preview.with_provenance(row_fingerprints=[])
    for pair in ((preview, other), (other, preview)):
        with pytest.raises(cl.MismatchError, match="held out"):
            measure_infinitesimal(model, *pair, text)


def test_with_every_plan_stalled_nothing_is_measured() -> None:
    model, text = tiny_model(), tiny_text(2)
    found = exact(model, text)
    grid = PlanGrid((0.9,), (1.0,), cl.Guards(protect_first=2))
    (row,) = measure_infinitesimal(model, found, found, tiny_text(1, seed=3), grid, progress=False)
    assert row["stalled"] == "finite"
    assert row["measured_finite"] is None
    assert plot_infinitesimal([row]).data[0].x == ()
