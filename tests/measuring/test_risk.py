"""Measured risk: the KL plans really cost, and the one engine that measures many of them."""

from __future__ import annotations

import errno
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.estimator.fisher import center, kl_divergence
from cocurve_lab.extensions.judging.lockstep import forced_kl
from cocurve_lab.measuring import plan_memory, risk
from helpers.tiny_models import FAMILIES, GROUPS, naive_risk, tiny_model, tiny_text

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
    [*((family, torch.float32, 2e-5) for family in FAMILIES), ("llama", torch.float64, 1e-10)],
)
def test_risk_is_the_full_vocabulary_divergence(
    family: str, dtype: torch.dtype, bound: float
) -> None:
    model, text = tiny_model(family, dtype=dtype), tiny_text(3, 20, 5)
    for plan in plans_of(model):
        chosen = [plan.units.units[i] for i in plan.pruned]
        expected = naive_risk(model, chosen, text).mean()
        assert cl.pruning_risk(model, plan, text) == pytest.approx(expected, rel=bound, abs=1e-12)
    assert cl.pruning_risk(model, [], text) == 0


def test_autocast_around_a_measurement_does_not_matter() -> None:
    model, text = tiny_model(), tiny_text()
    (plan,) = plans_of(model, [[2, 9]])
    alone = cl.pruning_risk(model, plan, text)
    with torch.autocast("cpu", torch.bfloat16):
        assert cl.pruning_risk(model, plan, text) == alone


def test_names_and_indices_are_those_of_the_unit_set() -> None:
    """By default they are those of 16 FFN groups; here there are 4."""
    model, text = tiny_model(), tiny_text(2, 20, 5)
    units = cl.enumerate_units(model, GROUPS)
    place = units.index("L0.ffn[3]")
    wanted = cl.pruning_risk(model, [units[place]], text)
    row = text.input_ids[0]
    for said in (place, "L0.ffn[3]"):
        assert cl.pruning_risk(model, [said], text, unit_set=units) == wanted
        assert np.array_equal(
            forced_kl(model, [said], row, unit_set=units), forced_kl(model, [units[place]], row)
        )


def test_gains_are_measured() -> None:
    model, text = tiny_model(), tiny_text(2, 20)
    plan = plans_of(model, [[0, 3]])[0].with_gains({2: 1.3, 10: 0.6})
    units = plan.units
    expected = naive_risk(model, [units[0], units[3]], text, {units[2]: 1.3, units[10]: 0.6}).mean()
    assert cl.pruning_risk(model, plan, text) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("scale", [1e-2, 1e-3])
def test_the_risk_of_a_nearly_null_unit_keeps_its_digits(scale: float) -> None:
    """Logits shift by 1e-3 or 1e-4: differences of float32 log-probabilities would be noise."""
    model, text = tiny_model(), tiny_text(3, 20)
    model.model.layers[2].mlp.down_proj.weight[:, :11] *= scale
    plan = plans_of(model, [[14]])[0]
    assert plan.units[14].name == "L2.ffn[0]"
    expected = naive_risk(model, [plan.units[14]], text).mean()
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
    assert kl_divergence(p0, torch.full_like(p0, 7.0)) < 1e-10  # a constant changes nothing
    impossible = torch.tensor([[0.5, 0.5, 0.0]])
    assert kl_divergence(impossible, torch.tensor([[0.0, 0.0, 100.0]])) == pytest.approx(
        0, abs=1e-7
    )


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
    assert table.kl.shape == (5, 3)
    for row, plan in enumerate(plans):
        chosen = [plan.units.units[i] for i in plan.pruned]
        np.testing.assert_allclose(table.kl[row], naive_risk(model, chosen, text), 2e-5, 1e-12)
        assert table.mean[row] == pytest.approx(cl.pruning_risk(model, plan, text), rel=1e-5)
    rows = table.table
    assert rows["units"].tolist() == [len(plan) for plan in plans]
    assert rows["measured_risk"].tolist() == table.mean.tolist()
    assert rows["measured_risk_error"].tolist() == table.standard_error.tolist()
    assert rows["realized_ratio"].tolist() == [plan.realized_ratio for plan in plans]
    assert rows.to_string(float_format="{:.4g}".format) in repr(table)


@pytest.mark.parametrize("batch", [1, 2, 50])
def test_batch_size_does_not_matter(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = tiny_model(), tiny_text(3, 20, 5)
    plans = plans_of(model, [*PLANS, PLANS[1]])  # one twice
    expected = cl.measure_plans(model, plans, text, progress=False)
    rows = count_forwards(monkeypatch)
    found = cl.measure_plans(model, plans, text, plans_per_batch=batch, progress=False)
    np.testing.assert_allclose(found.kl, expected.kl, rtol=1e-5, atol=1e-12)
    assert max(rows) == min(batch, 4)
    # the teacher once per sequence; the empty plan is the teacher, and equal plans are one
    assert sum(rows) == 3 * (1 + 4)


def test_replay_and_kept_states_do_not_matter() -> None:
    model, text = tiny_model(), tiny_text(3, 20, 5)
    expected = cl.measure_plans(model, plans_of(model), text, progress=False).kl
    meter = risk.Meter(model, text, plans_per_batch=2, keep_teacher=True, replay=True)
    found = [meter.measure([plan])[0, :, 0] for plan in plans_of(model)]  # back to every row
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-9)


def test_paired_differences_and_errors() -> None:
    model, text = tiny_model(), tiny_text(4, 20, 5)
    table = cl.measure_plans(model, plans_of(model, [[0], [0, 3]]), text, progress=False)
    difference = table.kl[1] - table.kl[0]
    mean, error = table.paired(1, 0)
    assert mean == pytest.approx(difference.mean())
    assert error == pytest.approx(difference.std(ddof=1) / 2)
    assert table.paired(0, 1)[0] == pytest.approx(-mean)
    np.testing.assert_allclose(table.standard_error, table.kl.std(axis=1, ddof=1) / 2)
    single = cl.measure_plans(model, plans_of(model, [[0]]), text.rows(0, 1), progress=False)
    assert np.isnan(single.standard_error).all()


def test_interrupted_measurements_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text, path = tiny_model(), tiny_text(4, 20, 5), tmp_path / "plans.pkl"
    old, new = plans_of(model, [[0], [2, 9]])
    expected = cl.measure_plans(model, [old, new], text, progress=False)
    real = risk._Engine.measure

    def interrupted(self: Any, number: int, scales: Any) -> np.ndarray:
        if number == 2:
            raise KeyboardInterrupt
        return real(self, number, scales)

    with monkeypatch.context() as patch:
        patch.setattr(risk._Engine, "measure", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cl.measure_plans(model, [old], text, checkpoint=path, progress=False)
    rows = count_forwards(monkeypatch)
    found = cl.measure_plans(model, [old, new], text, checkpoint=path, progress=False)
    assert rows == [1, 1, 1, 1, 1, 2, 1, 2]  # rows 0 and 1 need only the new plan
    np.testing.assert_allclose(found.kl, expected.kl, rtol=1e-5)


def test_adding_plans_measures_only_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text, path = tiny_model(), tiny_text(3, 20, 5), tmp_path / "plans.pkl"
    first = cl.measure_plans(
        model, plans_of(model, [[0], [3]]), text, checkpoint=path, progress=False
    )
    rows = count_forwards(monkeypatch)
    more = plans_of(model, [[3], [5], [0]])
    table = cl.measure_plans(model, more, text, checkpoint=path, progress=False)
    assert rows == [1, 1] * 3  # teacher and the one new plan, per sequence
    assert np.array_equal(table.kl[[2, 0]], first.kl)
    rows.clear()
    cl.measure_plans(model, more, text, checkpoint=path, progress=False)
    assert rows == []


@pytest.mark.parametrize("progress", [True, "lines"])
def test_progress_counts_the_plans_that_are_measured(
    progress: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, text, path = tiny_model(), tiny_text(3, 20, 5), tmp_path / "plans.pkl"
    said = {"KL of 2 plans:": [[0], [3]], "KL of 1 plan:": [[3], [5]], "": [[5]]}
    for words, plans in said.items():
        cl.measure_plans(model, plans_of(model, plans), text, checkpoint=path, progress=progress)
        shown = capsys.readouterr().err
        assert words in shown
        assert bool(shown) == bool(words)


def test_a_full_disk_does_not_stop_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    model, text = tiny_model(), tiny_text(2, 20, 5)
    monkeypatch.setattr(plan_memory, "write_atomically", full)
    with caplog.at_level(logging.WARNING):
        table = cl.measure_plans(
            model, plans_of(model), text, checkpoint=tmp_path / "plans.pkl", progress=False
        )
    assert "No space left on device" in caplog.text
    assert np.isfinite(table.kl).all()


def test_out_of_memory_halves_the_batch_for_good(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, text = tiny_model(), tiny_text(3, 20, 5)
    expected = cl.measure_plans(model, plans_of(model), text, plans_per_batch=2, progress=False)
    real, tried, most = risk._scored_hidden, [], 2

    def tight(architecture: Any, ids: torch.Tensor, positions: Any, masks: Any) -> torch.Tensor:
        tried.append(len(ids))
        if masks and len(ids) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(architecture, ids, positions, masks)

    monkeypatch.setattr(risk, "_scored_hidden", tight)
    with caplog.at_level(logging.WARNING):
        found = cl.measure_plans(model, plans_of(model), text, plans_per_batch=4, progress=False)
    assert np.array_equal(found.kl, expected.kl)
    assert [rows for rows in tried if rows > 2] == [4]
    assert "measuring 2 plans at a time" in caplog.text
    most = 0
    with pytest.raises(cl.InputError, match="one plan on sequence 0"):
        cl.measure_plans(model, plans_of(model), text, progress=False)


# Bad input --------------------------------------------------------------------------------------


def test_files_of_other_text_or_models_are_refused(tmp_path: Path) -> None:
    model, text, path = tiny_model(), tiny_text(2, 20, 5), tmp_path / "plans.pkl"
    other, plans = tiny_model(seed=1), plans_of(model, [[0]])
    cl.measure_plans(model, plans, text, checkpoint=path, progress=False)
    with pytest.raises(cl.MismatchError, match="text_fingerprint"):
        cl.measure_plans(model, plans, tiny_text(2, 20, 6), checkpoint=path, progress=False)
    with pytest.raises(cl.MismatchError, match="model_fingerprint"):
        cl.measure_plans(other, plans_of(other, [[0]]), text, checkpoint=path, progress=False)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(cl.FileFormatError, match=r"plans\.pkl"):
        cl.measure_plans(model, plans, text, checkpoint=path, progress=False)


MODEL, TEXT = tiny_model(), tiny_text(4, 20, 5)
PLAN = plans_of(MODEL, [[0]])
FOREIGN = plans_of(tiny_model("llama", "mha"))[1]


def broken() -> PreTrainedModel:
    model = tiny_model()
    model.lm_head.weight[3] = float("nan")
    return model


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
        (lambda: cl.pruning_risk(broken(), PLAN[0], TEXT), cl.NumericalError),
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


def test_nll_is_the_loss_of_the_masked_model(tmp_path: Path) -> None:
    model, text, path = tiny_model(), tiny_text(3, 20, 5), tmp_path / "plans.pkl"
    plans = plans_of(model, [[0], [3, 1], []])
    table = cl.measure_plans(model, plans, text, checkpoint=path, progress=False)
    for plan, nll in zip(plans, table.nll, strict=True):
        for row, positions, found in zip(text.input_ids, text.scored, nll, strict=True):
            with cl.ablate(model, plan), torch.no_grad():
                logits = model(row[None]).logits[0].double()
            naive = [-torch.log_softmax(logits[t], -1)[row[t + 1]] for t in positions.tolist()]
            assert found == pytest.approx(float(torch.stack(naive).mean()), abs=1e-5)
    assert np.array_equal(table.dense_nll, table.nll[2])  # nothing pruned is the dense model
    assert table.kl[2].max() == 0
    assert table.perplexity == pytest.approx(np.exp(table.nll.mean(axis=1)))
    assert table.table["perplexity"].tolist() == table.perplexity.tolist()
    again = cl.measure_plans(model, plans, text, checkpoint=path, progress=False)
    assert np.array_equal(again.nll, table.nll)
    assert np.array_equal(again.dense_nll, table.dense_nll)


# Two models -------------------------------------------------------------------------------------


def test_the_risk_of_a_cut_model_is_that_of_its_mask() -> None:
    model, text = tiny_model(), tiny_text(3, 20, 5)
    for plan in plans_of(model, [[0], [1, 4, 5, 12, 17], []]):
        found = risk.model_risk(model, cl.prune(model, plan), text)
        masked = cl.measure_plans(model, [plan], text, progress=False).kl[0]
        np.testing.assert_allclose(found, masked, rtol=1e-4, atol=1e-10)
