"""Predicted and measured risk by position: the four risks against naive passes, bins, causes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.extensions.judging import gap
from cocurve_lab.extensions.judging.gap import RiskSplit
from cocurve_lab.measuring import logits
from helpers.tiny_models import (
    GROUPS,
    VOCAB,
    full_logits,
    masked_by_hand,
    tiny_double,
    tiny_model,
    tiny_text,
    units_by_hand,
)

PLAN = [1, 2, 8, 13, 17]
TEXT = tiny_text(3, 20, 9)
RISKS = (
    "quadratic_of_sum",
    "kl_of_sum",
    "quadratic_of_joint",
    "kl_of_joint",
    "units_predicted",
    "units_measured",
)


def plan_of(model: PreTrainedModel, chosen: list[int] = PLAN) -> cl.Selection:
    return cl.Selection.from_pruned(cl.enumerate_units(model, GROUPS), chosen)


def sharp(factor: float) -> PreTrainedModel:
    """A tiny model whose logits are multiplied by a factor: the larger, the surer."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(factor)
    return model


def split(
    model: PreTrainedModel, chosen: list[int] = PLAN, text: cl.CalibrationSet = TEXT
) -> RiskSplit:
    return cl.split_risk(model, plan_of(model, chosen), text, progress=False)


def naive(model: PreTrainedModel, chosen: list[int]) -> dict[str, np.ndarray]:
    """All arrays from full passes in float64, masks of our own, and F written out."""
    wide, units = tiny_double(model), units_by_hand(model)
    out: dict[str, list[Any]] = {name: [] for name in ("p_max", *RISKS)}
    for ids, positions in zip(TEXT.input_ids, TEXT.positions, strict=True):
        z_0 = full_logits(wide, ids[None])[0, positions]
        shifts = []
        for members in [[u] for u in chosen] + [chosen]:
            with masked_by_hand(wide, [units[u] for u in members]):
                shifts.append(full_logits(wide, ids[None])[0, positions] - z_0)
        *alone, joint = shifts
        summed = torch.stack(alone).sum(dim=0)
        p = torch.softmax(z_0, dim=-1)
        fisher = torch.diag_embed(p) - p[:, :, None] * p[:, None]

        def form(dz: torch.Tensor, fisher: torch.Tensor = fisher) -> np.ndarray:
            return torch.einsum("ti,tij,tj->t", dz, fisher, dz).numpy() / 2

        def exact(dz: torch.Tensor, z_0: torch.Tensor = z_0) -> np.ndarray:
            log_p, log_q = torch.log_softmax(z_0, -1), torch.log_softmax(z_0 + dz, -1)
            return (log_p.exp() * (log_p - log_q)).sum(dim=-1).numpy()

        out["p_max"].append(p.amax(dim=-1).numpy())
        for name, shift in (("sum", summed), ("joint", joint)):
            out[f"quadratic_of_{name}"].append(form(shift))
            out[f"kl_of_{name}"].append(exact(shift))
        out["units_predicted"].append(sum(map(form, alone)))
        out["units_measured"].append(sum(map(exact, alone)))
    return {name: np.array(values) for name, values in out.items()}


@pytest.mark.parametrize("model", [sharp(20), tiny_model("gemma2"), tiny_model("opt", "mha")])
def test_every_risk_is_that_of_naive_full_passes(model: PreTrainedModel) -> None:
    found, expected = split(model), naive(model, PLAN)
    for name, values in expected.items():
        assert values.shape == (3, 9)
        np.testing.assert_allclose(getattr(found, name), values, rtol=2e-3, atol=2e-5, err_msg=name)
        assert getattr(found, name).mean() == pytest.approx(values.mean(), rel=1e-4), name


def test_on_the_calibration_rows_a_is_the_prediction_of_h() -> None:
    model = tiny_model()
    units = cl.enumerate_units(model, GROUPS)
    curvature = cl.estimate_curvature(model, units, TEXT, VOCAB, progress=False)
    plan = cl.solve_greedy(curvature, 0.4)
    found = cl.split_risk(model, plan, TEXT, progress=False)
    assert found.predicted == pytest.approx(plan.predicted_risk, rel=1e-5)
    assert found.units_predicted.mean() == pytest.approx(plan.node_risk, rel=1e-5)
    alone = curvature.single_unit_risk[list(plan.pruned)].sum()
    assert found.units_measured.mean() == pytest.approx(alone, rel=1e-4)
    table = cl.measure_plans(model, [plan], TEXT, progress=False)
    np.testing.assert_allclose(found.kl_of_joint.mean(axis=1), table.kl[0], rtol=1e-4)


@pytest.mark.parametrize(
    ("by", "edges"), [("p_max", (0.5, 0.9, 0.99)), ("shift", (1e-3, 1e-2, 1e-1, 1.0))]
)
def test_bins_add_up_to_the_whole(by: Any, edges: tuple[float, ...]) -> None:
    found = split(sharp(20))
    rows = found.bins(by).to_dict("records")
    values = found.p_max if by == "p_max" else found.quadratic_of_sum
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    names = {name: name for name in RISKS[1:] if name != "kl_of_joint"}
    names |= {"predicted": "quadratic_of_sum", "measured": "kl_of_joint"}
    for name, array in names.items():
        whole = getattr(found, array).mean()
        assert sum(row[name] for row in rows) == pytest.approx(whole), name
    for row, low, high in zip(rows, (-1, *edges), (*edges, np.inf), strict=True):
        inside = (values > low) & (values <= high)
        assert row["share"] == pytest.approx(inside.mean())
        by_row = np.where(inside, found.kl_of_joint, 0).mean(axis=1)
        assert row["measured"] == pytest.approx(by_row.mean())
        assert row["measured_error"] == pytest.approx(by_row.std(ddof=1) / np.sqrt(3))


def test_one_unit_adds_up_and_none_costs_nothing() -> None:
    one = split(tiny_model(), [4])
    np.testing.assert_allclose(one.quadratic_of_sum, one.quadratic_of_joint, rtol=1e-3, atol=1e-9)
    np.testing.assert_allclose(one.kl_of_sum, one.kl_of_joint, rtol=1e-3, atol=1e-9)
    empty = split(tiny_model(), [])
    assert empty.predicted == empty.measured == 0
    assert empty.table["measured_over_predicted"].isna().all()


def test_parts_joined_are_the_whole_and_batches_do_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    whole = split(model)
    joined = RiskSplit.join([split(model, PLAN, TEXT.rows(n, n + 1)) for n in range(3)])
    monkeypatch.setattr(gap, "_BATCH_TOKENS", 1)
    monkeypatch.setattr(logits, "LOGIT_BYTES", 4 * VOCAB * 3 * 2)  # two positions at a time
    small = split(model)
    for name in ("p_max", *RISKS):
        np.testing.assert_array_equal(getattr(joined, name), getattr(whole, name))
        np.testing.assert_allclose(getattr(small, name), getattr(whole, name), rtol=1e-3, atol=1e-8)
    with pytest.raises(cl.InputError):
        RiskSplit.join([whole, split(model, [3])])


def test_the_causes_multiply_to_the_gap_and_are_told_apart() -> None:
    found = split(sharp(20))
    ratio = found.measured / found.predicted
    assert found.expansion * found.adding_up == pytest.approx(ratio)
    a, b, c, d = np.full((4, 1, 2), [[[1.0]], [[10.0]], [[1.2]], [[20.0]]])
    names = ("quadratic_of_sum", "kl_of_sum", "quadratic_of_joint", "kl_of_joint")
    for values, cause in (
        ((a, b, c, d), "expansion"),
        ((a, c, b, d), "adding up"),
        ((a, b, b, 10 * b), "both"),
        ((a, c, c, 1.9 * a), "none"),
        ((0 * a, 0 * b, 0 * c, 0 * d), "none"),
    ):
        made = replace(found, **dict(zip(names, values, strict=True)))
        made = replace(made, **{n: np.ones((1, 2)) for n in ("p_max", *RISKS[4:])})
        assert made.cause == cause


def test_what_cannot_be_split_is_refused() -> None:
    model = tiny_model()
    plan = plan_of(model)
    with pytest.raises(cl.InputError):
        cl.split_risk(model, plan.with_gains({3: 1.1}), TEXT)
    with pytest.raises(cl.MismatchError):
        cl.split_risk(tiny_model(layers=2), plan, TEXT)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(cl.NumericalError):
        split(model)
