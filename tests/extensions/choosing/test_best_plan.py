"""The whole flow in one call: what it promises, on a tiny model and its own text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.cli import DONE, FAILED, main
from cocurve_lab.measuring.risk import compare_models
from cocurve_lab.models.identity import model_name
from helpers.tiny_models import tiny_model, tiny_text, word_tokenizer

LENGTH, SEQUENCES = 16, 8


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    documents = [" ".join(f"w{n}" for n in rng.integers(90, size=20)) for _ in range(60)]
    path.write_text("\n".join(json.dumps({"text": document}) for document in documents))
    return path


def found(text: Path, target: Any = 0.3, minutes: float = 0.1, **options: Any) -> Any:
    return cl.best_plan(
        *(tiny_model(), word_tokenizer(64), target, minutes),
        num_sequences=SEQUENCES,
        text_file=text,
        seq_len=LENGTH,
        progress=False,
        **options,
    )


def test_the_report_is_measured_on_rows_that_nothing_else_has_seen(text: Path) -> None:
    model, tokenizer = tiny_model(), word_tokenizer(64)
    best = found(text, refit=False)
    assert best.selection.realized_ratio >= 0.3
    assert best.model.num_parameters() < model.num_parameters()
    assert not best.repaired
    _, others = cl.default_calibration(
        model_name(model), tokenizer, SEQUENCES, 32, text, positions_per_sequence="all",
        seq_len=LENGTH,
    )  # fmt: skip
    test = others.rows(16, 32)
    assert best.kl == pytest.approx(cl.pruning_risk(model, best.selection, test), rel=1e-3)
    assert best.search.held_out.kl.shape[1] == 16
    lines = repr(best).splitlines()
    assert len(lines) == 8
    assert f"KL(dense || result) {best.kl:.4f}" in lines[1]


def test_without_time_to_search_the_start_is_the_plan(text: Path) -> None:
    best = found(text, minutes=1e-6, refit=False)
    assert best.search.history == ()
    assert best.selection is best.search.start
    assert "Search: 0 row evaluations" in repr(best)


def test_a_refit_is_taken_only_where_it_is_better(text: Path) -> None:
    best = found(text)
    assert best.refitted is not None
    side = best.refitted if best.repaired else best.pruned
    assert best.kl == pytest.approx(side.kl.mean())
    assert (best.model.cocurve_manifest.get("repair") is not None) == best.repaired
    assert ("refit taken" in repr(best)) == best.repaired
    kl = best.pruned.kl.mean(), best.refitted.kl.mean()  # of the test rows, not of the judging rows
    assert f"(on the rows of this report {kl[0]:.4f} without, {kl[1]:.4f} with)" in repr(best)


def test_models_are_compared_by_their_definitions() -> None:
    one, other = tiny_model(seed=1), tiny_model(seed=2)
    rows = cl.CalibrationSet(torch.randint(0, 90, (3, LENGTH)))
    side = compare_models(one, other, rows)
    with torch.no_grad():
        p, q = (m(input_ids=rows.input_ids).logits[:, :-1].log_softmax(-1) for m in (one, other))
    kl = (p.exp() * (p - q)).sum(-1).mean(-1)
    np.testing.assert_allclose(side.kl, kl, rtol=1e-4)
    wanted = rows.input_ids[:, 1:, None]
    np.testing.assert_allclose(side.loss, -q.gather(-1, wanted)[..., 0].mean(-1), rtol=1e-5)
    np.testing.assert_allclose(side.dense_loss, -p.gather(-1, wanted)[..., 0].mean(-1), rtol=1e-5)
    assert side.kept == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))
    assert compare_models(one, one, rows).kept == 1


def test_the_same_call_goes_on_from_what_was_measured(text: Path, tmp_path: Path) -> None:
    first = found(text, checkpoint=tmp_path, refit=False)
    assert (tmp_path / "H.ckpt").exists()
    before = (tmp_path / "H.ckpt").read_bytes()
    again = found(text, checkpoint=tmp_path, refit=False)
    assert (tmp_path / "H.ckpt").read_bytes() == before
    np.testing.assert_array_equal(again.curvature.matrix, first.curvature.matrix)
    assert again.search.held_out.mean[0] == pytest.approx(first.search.held_out.mean[0])


def test_a_target_and_guards_are_kept(text: Path) -> None:
    total = tiny_model().num_parameters()
    target, guards = cl.Target(parameters=int(0.85 * total)), cl.Guards(protect_first=1)
    best = found(text, target, guards=guards, refit=False)
    assert best.model.num_parameters() <= 0.85 * total
    assert all(best.selection.units[u].layer > 0 for u in best.selection.pruned)


def test_what_cannot_be_done_is_said_before_the_work(text: Path) -> None:
    for minutes in (0, -1, float("nan"), "5"):
        with pytest.raises(cl.InputError):
            found(text, minutes=minutes)  # type: ignore[arg-type]
    with pytest.raises(cl.InfeasibleError):
        found(text, 0.9, guards=cl.Guards(protect_first=2))


def test_compress_writes_a_folder_and_a_report(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    word_tokenizer(64).save_pretrained(tmp_path / "model")
    command = ["compress", str(tmp_path / "model"), "--ratio", "0.3", "--minutes", "0.1"]
    command += ["--text", str(text), "--length", str(LENGTH), "--sequences", str(SEQUENCES)]
    command += ["--out", str(tmp_path / "smaller"), "--device", "cpu"]
    assert main(command) == DONE
    said = capsys.readouterr().out
    assert "nats per token, on 16 rows that no step before has seen" in said
    assert cl.load_pruned(tmp_path / "smaller").num_parameters() < tiny_model().num_parameters()
    assert "no step of the search has seen" in (tmp_path / "smaller" / "README.md").read_text()
    assert main(command) == FAILED
    assert "smaller" in capsys.readouterr().err


def test_whole_layers_are_measured_where_time_allows() -> None:
    model = tiny_model(layers=3)
    units, rows = cl.enumerate_units(model, 4), tiny_text(2)
    inputs = (model, units, rows)
    layers = cl.best_plan._layers(*inputs, cl.best_plan._Clock(60.0), None, False)
    assert layers is not None
    assert (len(layers.parts), layers.pool) == (3, (0, 1, 2))
    assert cl.best_plan._layers(*inputs, cl.best_plan._Clock(1e-9), None, False) is None
    curvature = cl.estimate_curvature(model, units, rows, 16, progress=False)
    plans = cl.best_plan._candidates(curvature, layers, 0.3, cl.Guards())
    assert {"KL of each unit alone", "measured layers, lambda 0.5"} <= plans.keys()
    whole = plans["measured layers, lambda 0.5"]
    assert {units.layers[u] for u in whole.pruned} == {whole.units.layers[whole.pruned[0]]}
    capped = cl.best_plan._candidates(curvature, layers, 0.3, cl.Guards(protect_first=1))
    assert not any(name.startswith("measured") for name in capped)
