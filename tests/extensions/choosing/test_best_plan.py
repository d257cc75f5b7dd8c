"""The whole flow in one call: what it promises, on a tiny model and its own text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.measuring.risk import compare_models
from cocurve_lab.models.identity import model_name
from helpers.tiny_models import tiny_model, word_tokenizer

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


def test_a_refit_is_taken_only_where_it_is_better(text: Path) -> None:
    best = found(text, refit=True)
    side = best.refitted if best.repaired else best.pruned
    assert best.kl == pytest.approx(side.kl.mean())
    assert (best.model.cocurve_manifest.get("repair") is not None) == best.repaired


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
