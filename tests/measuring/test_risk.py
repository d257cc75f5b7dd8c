"""Measured risk: the KL plans really cost, and the one engine that measures many of them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.estimator.fisher import center, kl_divergence
from cocurve_lab.measuring import plan_memory, risk
from cocurve_lab.measuring.risk import PlanTable
from helpers.tiny_models import GROUPS, naive_risk, nan_model, tiny_model, tiny_text

PLANS = [[0], [2, 9], [], [1, 4, 5, 12, 17], list(range(18))]


def plans_of(model: PreTrainedModel, plans: list[list[int]] = PLANS) -> list[cl.Selection]:
    units = cl.enumerate_units(model, GROUPS)
    return [cl.Selection.from_pruned(units, plan) for plan in plans]


def count_forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every masked or teacher pass from here on."""
    rows: list[int] = []
    real = risk._scored_hidden

    def counted(architecture: Any, ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        rows.append(len(ids))
        return real(architecture, ids, *rest)

    monkeypatch.setattr(risk, "_scored_hidden", counted)
    return rows


# The number -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype", "bound"),
    [
        ("mistral", torch.float32, 2e-5),
        ("phi3", torch.float32, 2e-5),
        ("llama", torch.float64, 1e-10),
    ],
)
def test_risk_is_the_full_vocabulary_divergence(
    family: str, dtype: torch.dtype, bound: float
) -> None:
    model, text = tiny_model(family, dtype=dtype), tiny_text(3, 20, 5)
    for plan in plans_of(model):
        expected = naive_risk(model, [plan.units[i] for i in plan.pruned], text).mean()
        assert cl.pruning_risk(model, plan, text) == pytest.approx(expected, rel=bound, abs=1e-12)


def test_gains_are_measured_whatever_autocast_is_around() -> None:
    model, text = tiny_model(), tiny_text(2, 20)
    plan = plans_of(model, [[0, 3]])[0].with_gains({2: 1.3, 10: 0.6})
    units = plan.units
    expected = naive_risk(model, [units[0], units[3]], text, {units[2]: 1.3, units[10]: 0.6}).mean()
    alone = cl.pruning_risk(model, plan, text)
    assert alone == pytest.approx(expected, rel=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert cl.pruning_risk(model, plan, text) == alone


@pytest.mark.parametrize("scale", [1e-2, 1e-3])
def test_the_risk_of_a_nearly_null_unit_keeps_its_digits(scale: float) -> None:
    """Logits shift by 1e-3 or 1e-4: differences of float32 log-probabilities would be noise."""
    model, text = tiny_model(), tiny_text(3, 20)
    model.model.layers[2].mlp.down_proj.weight[:, :11] *= scale
    (plan,) = plans_of(model, [[14]])
    expected = naive_risk(model, [plan.units["L2.ffn[0]"]], text).mean()
    assert 1e-10 < expected < 1e-5
    assert cl.pruning_risk(model, plan, text) == pytest.approx(expected, rel=2e-6 / scale)


# The two formulas -------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-6, 1e-4, 1e-2, 1.0, 10.0])
def test_divergence_keeps_its_digits_at_every_size(size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(8, 300, generator=generator)
    shift = size * torch.randn(8, 300, generator=generator)
    p0, p64 = torch.softmax(logits, -1), torch.softmax(logits.double(), -1)
    log_p = torch.log_softmax(logits.double(), -1)
    log_q = torch.log_softmax(logits.double() + shift.double(), -1)
    expected = (p64 * (log_p - log_q)).sum(-1)
    if size < 1e-3:  # float64 itself cancels: third-order expansion, exact to 1e-6
        d = shift.double() - (p64 * shift.double()).sum(-1, keepdim=True)
        expected = (p64 * (d**2 / 2 + d**3 / 6)).sum(-1)
    torch.testing.assert_close(kl_divergence(p0, shift).double(), expected, rtol=1e-5, atol=0)


def test_divergence_of_odd_shifts() -> None:
    p0 = torch.tensor([[0.7, 0.2, 0.1 - 1e-7, 1e-7]])
    for size in (40.0, 3000.0):
        shift = torch.tensor([[0.0, -1.0, 0.5, size]])
        log_p = p0.double().log()
        expected = (p0.double() * (log_p - torch.log_softmax(log_p + shift.double(), -1))).sum(-1)
        torch.testing.assert_close(kl_divergence(p0, shift).double(), expected, rtol=1e-5, atol=0)
    constant, impossible = torch.full((1, 3), 7.0), torch.tensor([[0.0, 0.0, 100.0]])
    for shift in (constant, impossible):
        assert kl_divergence(torch.tensor([[0.5, 0.5, 0.0]]), shift) < 1e-7


def test_whitened_products_are_fisher_products() -> None:
    p0 = torch.softmax(torch.randn(40, dtype=torch.float64), -1)
    a, b = torch.randn(2, 40, dtype=torch.float64)
    fisher = torch.diag(p0) - torch.outer(p0, p0)
    whitened = [p0.sqrt() * center(p0, shift) for shift in (a, b)]
    torch.testing.assert_close(whitened[0] @ whitened[1], a @ fisher @ b)


# The engine -------------------------------------------------------------------------------------


def test_a_table_holds_each_plans_risk_on_each_sequence() -> None:
    model, text = tiny_model("qwen2"), tiny_text(3, 20, 5)
    plans = plans_of(model)
    table = cl.measure_plans(model, plans, text, progress=False)
    for row, plan in zip(table.kl, plans, strict=True):
        chosen = [plan.units.units[i] for i in plan.pruned]
        np.testing.assert_allclose(row, naive_risk(model, chosen, text), 2e-5, 1e-12)
    rows = table.table
    assert rows["units"].tolist() == [len(plan) for plan in plans]
    assert rows["measured_risk"].tolist() == table.mean.tolist()
    assert rows["realized_ratio"].tolist() == [plan.realized_ratio for plan in plans]


@pytest.mark.parametrize("batch", [1, 2, 50])
def test_batch_size_replay_and_kept_states_do_not_matter(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = tiny_model(), tiny_text(3, 20, 5)
    plans = plans_of(model, [*PLANS, PLANS[1]])  # one twice
    expected = cl.measure_plans(model, plans, text, progress=False)
    meter = risk.Meter(model, text, plans_per_batch=batch, keep_teacher=True, replay=True)
    replayed = [meter.measure([plan])[0, :, 0] for plan in plans]  # back to every row
    np.testing.assert_allclose(replayed, expected.kl, rtol=1e-5, atol=1e-9)
    rows = count_forwards(monkeypatch)
    found = cl.measure_plans(model, plans, text, plans_per_batch=batch, progress=False)
    np.testing.assert_allclose(found.kl, expected.kl, rtol=1e-5, atol=1e-12)
    # the teacher once per sequence; the empty plan is the teacher, and equal plans are one
    assert (max(rows), sum(rows)) == (min(batch, 4), 3 * (1 + 4))


def test_paired_differences_and_errors() -> None:
    table = PlanTable((), np.array([[1.0, 2.0, 4.0, 2.5], [0.5, 2.5, 4.5, 3.5]]))
    difference = table.kl[1] - table.kl[0]
    assert table.paired(1, 0) == pytest.approx((difference.mean(), difference.std(ddof=1) / 2))
    np.testing.assert_allclose(table.standard_error, table.kl.std(axis=1, ddof=1) / 2)
    assert np.isnan(PlanTable((), table.kl[:, :1]).standard_error).all()


def test_interrupted_measurements_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text, path = tiny_model(), tiny_text(4, 20, 5), tmp_path / "plans.pkl"
    old, new = plans_of(model, [[0], [2, 9]])
    expected = cl.measure_plans(model, [old, new], text, progress=False)
    real = risk._Engine.measure

    def interrupted(self: Any, number: int, scales: Any) -> np.ndarray:
        if number == 2:
            raise KeyboardInterrupt
        return real(self, number, scales)

    def resumed(*plans: cl.Selection) -> Any:
        return cl.measure_plans(model, plans, text, checkpoint=path, progress=False)

    with monkeypatch.context() as patch:
        patch.setattr(risk._Engine, "measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resumed(old)
    rows = count_forwards(monkeypatch)
    found = resumed(old, new)
    assert rows == [1, 1, 1, 1, 1, 2, 1, 2]  # rows 0 and 1 need only the new plan
    np.testing.assert_allclose(found.kl, expected.kl, rtol=1e-5)
    rows.clear()
    for name in ("kl", "nll", "dense_nll"):
        assert np.array_equal(getattr(resumed(old, new), name), getattr(found, name))
    assert rows == []


def test_a_full_disk_does_not_stop_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(plan_memory, "write_atomically", full)
    table = cl.measure_plans(MODEL, PLAN, TEXT, checkpoint=tmp_path / "plans.pkl", progress=False)
    assert "No space left on device" in caplog.text
    assert np.isfinite(table.kl).all()


def test_out_of_memory_halves_the_batch_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = tiny_model(), tiny_text(3, 20, 5)
    plans = plans_of(model)
    expected = cl.measure_plans(model, plans, text, plans_per_batch=2, progress=False)
    real, tried, most = risk._scored_hidden, [], 2

    def tight(architecture: Any, ids: torch.Tensor, positions: Any, masks: Any) -> torch.Tensor:
        tried.append(len(ids))
        if masks and len(ids) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(architecture, ids, positions, masks)

    monkeypatch.setattr(risk, "_scored_hidden", tight)
    found = cl.measure_plans(model, plans, text, plans_per_batch=4, progress=False)
    assert np.array_equal(found.kl, expected.kl)
    assert [rows for rows in tried if rows > 2] == [4]
    most = 0
    with pytest.raises(cl.InputError):
        cl.measure_plans(model, plans, text, progress=False)


# Bad input --------------------------------------------------------------------------------------


def test_files_of_other_text_or_models_are_refused(tmp_path: Path) -> None:
    path, other = tmp_path / "plans.pkl", tiny_model(seed=1)
    cl.measure_plans(MODEL, PLAN, TEXT, checkpoint=path, progress=False)
    for model, text in ((MODEL, tiny_text(2, 20, 6)), (other, TEXT)):
        with pytest.raises(cl.MismatchError):
            cl.measure_plans(model, plans_of(model, [[0]]), text, checkpoint=path, progress=False)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(cl.FileFormatError):
        cl.measure_plans(MODEL, PLAN, TEXT, checkpoint=path, progress=False)


MODEL, TEXT = tiny_model(), tiny_text(4, 20, 5)
PLAN = plans_of(MODEL, [[0]])
FOREIGN = plans_of(tiny_model("llama", "mha"))[1]


def seen(rows: cl.CalibrationSet, built: bool) -> Any:
    """Rows that H was built on, or that H."""
    units = PLAN[0].units
    return cl.estimate_curvature(MODEL, units, rows, 16, progress=False) if built else rows


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: cl.pruning_risk(MODEL, FOREIGN, TEXT), cl.MismatchError),
        (lambda: cl.measure_plans(MODEL, [FOREIGN], TEXT), cl.MismatchError),
        (lambda: cl.measure_plans(MODEL, [], TEXT), cl.InputError),
        (lambda: cl.pruning_risk(MODEL, PLAN[0], tiny_text(1, 65)), cl.InputError),
        (lambda: cl.measure_plans(MODEL, PLAN, tiny_text(2, 20, vocab=500)), cl.InputError),
        (lambda: cl.pruning_risk(nan_model(), PLAN[0], TEXT), cl.NumericalError),
        (lambda: risk.model_risk(MODEL, tiny_model(vocab_size=98), TEXT), cl.MismatchError),
        *(
            (
                lambda built=built: cl.measure_plans(
                    MODEL, PLAN, TEXT, calibrated_on=seen(TEXT.rows(0, 2), built)
                ),
                cl.MismatchError,
            )
            for built in (False, True)
        ),
    ],
)
def test_bad_input_is_refused(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


def test_rows_that_h_has_not_seen_are_measured() -> None:
    plan, rest = PLAN[0], TEXT.rows(2, 4)
    table = cl.measure_plans(MODEL, [plan], rest, calibrated_on=seen(TEXT.rows(0, 2), True))
    assert table.kl.shape == (1, 2)


# Likelihood of the text itself -------------------------------------------------------------------


def test_nll_is_the_loss_of_the_masked_model() -> None:
    model, text = tiny_model(), tiny_text(3, 20, 5)
    plans = plans_of(model, [[0], [3, 1], []])
    table = cl.measure_plans(model, plans, text, progress=False)
    for plan, nll in zip(plans, table.nll, strict=True):
        with cl.ablate(model, plan), torch.no_grad():
            logs = torch.log_softmax(model(text.input_ids).logits.double(), -1)[:, :-1]
        losses = -logs.gather(-1, text.input_ids[:, 1:, None])[..., 0]
        naive = [row[at].mean() for row, at in zip(losses, text.scored, strict=True)]
        assert nll == pytest.approx(torch.stack(naive).numpy(), abs=1e-5)
    assert np.array_equal(table.dense_nll, table.nll[2])  # nothing pruned is the dense model
    assert table.kl[2].max() == 0
    assert table.table["perplexity"].tolist() == np.exp(table.nll.mean(axis=1)).tolist()


# Two models -------------------------------------------------------------------------------------


def test_the_risk_of_a_cut_model_is_that_of_its_mask() -> None:
    model, text = tiny_model(), tiny_text(3, 20, 5)
    for plan in plans_of(model, [[0], [1, 4, 5, 12, 17], []]):
        found = risk.model_risk(model, cl.prune(model, plan), text)
        masked = cl.measure_plans(model, [plan], text, progress=False).kl[0]
        np.testing.assert_allclose(found, masked, rtol=1e-4, atol=1e-10)
