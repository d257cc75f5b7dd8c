"""Pruned, quantized, and both: the table against KL computed from whole logits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.base.errors import InputError
from cocurve_lab.base.tables import shown
from cocurve_lab.cli import DONE, FAILED, evaluating, main
from cocurve_lab.extensions.gguf import quantization_table as quantized
from cocurve_lab.extensions.gguf.quantization_table import quantization_table
from helpers.tiny_models import tiny_model, tiny_text

pytest.importorskip("gguf")


def in_q8_0(model: Any) -> dict[str, torch.Tensor]:
    """The model's weights, matrix by matrix, rounded by the package gguf itself."""
    from gguf import GGMLQuantizationType, quants

    state = {name: weight.clone() for name, weight in model.state_dict().items()}
    for name, weight in state.items():
        if weight.dim() == 2 and weight.shape[1] % 32 == 0:
            blocks = quants.quantize(weight.numpy(), GGMLQuantizationType.Q8_0)
            state[name] = torch.tensor(quants.dequantize(blocks, GGMLQuantizationType.Q8_0))
        elif weight.dim() == 2:
            state[name] = weight.half().float()
    return state


def log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(ids).logits[:, :-1].double(), -1)


def test_the_table_is_kl_of_rounded_models_row_by_row() -> None:
    dense, text = tiny_model(), tiny_text(5)
    units = cl.enumerate_units(dense, ffn_groups=4)
    pruned = cl.prune(dense, cl.Selection.from_pruned(units, [0, 3, 9]))
    (row,) = quantization_table(dense, pruned, text)
    teacher, values = log_probabilities(dense, text.input_ids), {}
    values["pruned"] = log_probabilities(pruned, text.input_ids)
    for name, model in (("quantized", dense), ("both", pruned)):
        before = {key: weight.clone() for key, weight in model.state_dict().items()}
        model.load_state_dict(in_q8_0(model))
        values[name] = log_probabilities(model, text.input_ids)
        model.load_state_dict(before)
    kl = {
        name: (teacher.exp() * (teacher - found)).sum(-1).mean(-1).numpy()
        for name, found in values.items()
    }
    kl["sum"] = kl["pruned"] + kl["quantized"]
    kl["excess"] = kl["both"] - kl["sum"]
    for name, found in kl.items():
        assert row[name] == pytest.approx(found.mean(), rel=1e-2, abs=2e-7), name
        error = found.std(ddof=1) / np.sqrt(5)
        assert row[f"{name}_error"] == pytest.approx(error, rel=2e-2, abs=2e-7), name
    assert row["weights"] == "Q8_0"
    assert 0 < row["quantized"] < row["pruned"]


@pytest.mark.parametrize(
    ("excess", "answer"),
    [([0.1, -0.1, 0.05], "yes"), ([0.1, 0.2, 0.1], "more"), ([-1, -1.1], "less")],
)
def test_the_answer_needs_two_standard_errors(
    excess: list[float], answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = 3.0 + np.array(excess)
    given = iter([np.full(len(excess), 1.0), np.full(len(excess), 2.0), both])
    monkeypatch.setattr(quantized, "model_risk", lambda *_, **__: next(given))
    monkeypatch.setattr(quantized, "_with_weights", lambda model, _: model)
    model = tiny_model()
    table = quantization_table(model, model, tiny_text(1))
    assert table[0]["is_sum"] == answer
    (read,) = shown(table, quantized.QUANTIZED_COLUMNS)
    assert read["KL pruned"] == "1 ± 0"
    assert read["is it the sum?"] == answer


def test_one_row_of_text_has_no_error() -> None:
    dense = tiny_model()
    units = cl.enumerate_units(dense, ffn_groups=4)
    pruned = cl.prune(dense, cl.Selection.from_pruned(units, [0]))
    (row,) = quantization_table(dense, pruned, tiny_text(1))
    assert (row["excess_error"], row["is_sum"]) == (None, None)


def test_bad_input_is_told_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "model_risk", None)
    with pytest.raises(InputError, match=r"kind is 'Q9'. Use one of INT8, FP8, Q8_0, Q6_K"):
        quantization_table(tiny_model(), tiny_model(), tiny_text(2), ["Q8_0", "Q9"])
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(InputError, match=r"pip install cocurve-lab\[quantize\]"):
        quantization_table(tiny_model(), tiny_model(), tiny_text(2), ["INT8"])


@pytest.mark.slow
def test_the_command_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = cl.load_model("demo", device="cpu")
    units = cl.enumerate_units(model)
    pruned = cl.prune(model, cl.Selection.from_pruned(units, [1, 40, 90]))
    folder = str(cl.save_pruned(pruned, tmp_path / "smaller", tokenizer=tokenizer))
    text = tmp_path / "text.txt"
    text.write_text("Mia goes to the shop and buys a red apple for her friend. " * 60)
    command = ["evaluate", folder, "--against", "demo", "--quantized", "Q8_0", "--sequences", "2"]
    command += ["--text", str(text)]
    assert main(command) == DONE
    said = capsys.readouterr().out.splitlines()
    assert said[-3].startswith(
        "| weights | KL pruned | KL quantized | KL of both | sum of the two |"
    )
    assert said[-1].startswith("| Q8_0 | ")
    assert main([*command, "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert found["quantized"][0]["pruned"] == found["kl"]["mean"]
    assert main(["evaluate", "demo", "--quantized", "Q8_0"]) == FAILED
    assert "--quantized needs --against" in capsys.readouterr().err


@pytest.mark.parametrize(("kind", "message"), [("Q9", "kind is 'Q9'"), ("FP8", "[quantize]")])
def test_the_command_tells_bad_kinds_at_once(
    kind: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    monkeypatch.setattr(evaluating, "read_any_model", None)
    command = ["evaluate", "demo", "--against", "demo", "--quantized", "Q8_0", kind]
    assert main(command) == FAILED
    assert message in capsys.readouterr().err
