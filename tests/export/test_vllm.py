"""Saved folders in stock vLLM: the log-probabilities and the greedy text of transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

import cocurve_lab as cl
from helpers import vllm, wheels
from helpers.tiny_models import VOCAB, tiny_model
from helpers.vllm import Answer, run_vllm

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.vllm]

GREEDY, CONTEXT = 24, 64
# vLLM's attention on the CPU takes a head_dim of 32 or more
OWN = {"head_dim": 32, "intermediate_size": 64}
UNEVEN = ["L0.ffn[0]", "L1.attention[0]", "L2.ffn[1]", "L2.ffn[3]"]
NO_HEADS = [*UNEVEN, "L1.attention[1]"]
NO_FFN = [*UNEVEN[:2], *(f"L2.ffn[{index}]" for index in range(4))]
NO_LAYER = [*NO_HEADS, *(f"L1.ffn[{index}]" for index in range(4))]
EVEN = [f"L{layer}.{unit}" for layer in range(3) for unit in ("attention[0]", "ffn[0]")]
BIASES = {"attention_bias": True, "mlp_bias": True}


@dataclass(frozen=True)
class Case:
    """A tiny model, the units it loses, and what loads its folder."""

    family: str
    names: list[str]
    changes: dict[str, Any]
    loader: str = "own code"
    weights: str = "as saved"


CASES = {
    "llama": Case("llama", UNEVEN, {}),
    "llama, uniform": Case("llama", EVEN, {}, "stock"),
    "llama with biases, a layer gone": Case("llama", NO_LAYER, BIASES),
    "mistral, a layer without heads": Case("mistral", NO_HEADS, {}),
    "qwen2": Case("qwen2", UNEVEN, {}),
    "qwen3, a layer without heads": Case("qwen3", NO_HEADS, {}),
    "qwen3, uniform": Case("qwen3", EVEN, {}, "stock"),
    "phi3, a layer without FFN": Case("phi3", NO_FFN, {}),
    "gemma3": Case("gemma3_text", UNEVEN, {}),
    "gemma3, a layer gone": Case("gemma3_text", NO_LAYER, {}),
}
QUANTIZED = {
    "llama in INT8": Case("llama", UNEVEN, {}, weights="INT8"),
    "qwen3 in FP8, a layer gone": Case("qwen3", NO_LAYER, {}, weights="FP8"),
}
# in a process of its own, because torchao is not in the environment of the tests
_QUANTIZE = """
import sys
import cocurve_lab as cl
for job in sys.argv[1:]:
    folder, kind = job.split(":")
    cl.quantize_folder(folder, folder + kind, kind)
"""


def pruned(case: Case) -> PreTrainedModel:
    model = tiny_model(case.family, **(OWN | case.changes))
    return cl.prune(model, cl.Selection.from_pruned(cl.enumerate_units(model, 4), case.names))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in (2, 9, 30)]


def saved(case: Case, folder: Path) -> Path:
    model = pruned(case)
    cl.save_pruned(model, folder)
    assert cl.load_pruned(folder).cocurve_manifest["loads_with"] == case.loader
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]) -> dict[str, Answer]:
    """All cases in one process, because starting vLLM takes longer than serving them."""
    vllm.installed()
    folder = tmp_path_factory.mktemp("served")
    folders = [
        (saved(case, folder / str(number)), case.loader == "own code")
        for number, case in enumerate(CASES.values())
    ]
    answers = run_vllm(folders, prompts, folder / "out.npz", greedy=GREEDY, context=CONTEXT)
    return dict(zip(CASES, answers, strict=True))


def compare(model: PreTrainedModel, answer: Answer, prompts: list[list[int]]) -> None:
    """The log-probabilities and the greedy text of `model` in transformers."""
    largest = 0.0
    for prompt, found, text in zip(prompts, answer.log_probabilities, answer.greedy, strict=True):
        logits = model(torch.tensor([prompt]), use_cache=False).logits[0, :-1].double()
        expected = torch.log_softmax(logits, -1).numpy()
        assert found.shape == expected.shape
        largest = max(largest, float(np.abs(found - expected).max()))
        ids = list(prompt)
        for _ in range(GREEDY):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        assert text == ids[len(prompt) :]
    print(f"largest difference of a log-probability: {largest:.1e}")
    assert largest < 1e-4


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_it_computes_what_transformers_does(
    name: str, served: dict[str, Answer], prompts: list[list[int]]
) -> None:
    compare(pruned(CASES[name]), served[name], prompts)


@torch.no_grad()
def test_weights_in_8_bits(tmp_path: Path, prompts: list[list[int]]) -> None:
    """Against the models that have the rounded weights of the files."""
    vllm.installed()
    torchao = wheels.installed("torchao")
    cases = QUANTIZED.values()
    jobs = [f"{saved(c, tmp_path / str(n))}:{c.weights}" for n, c in enumerate(cases)]
    paths = os.pathsep.join([str(ROOT), str(torchao)])
    subprocess.run(
        [sys.executable, "-c", _QUANTIZE, *jobs],
        env=os.environ | {"PYTHONPATH": paths, "HF_HOME": str(tmp_path / "hub")},
        check=True,
        timeout=300,
    )
    folders = [Path(job.replace(":", "")) for job in jobs]
    answers = run_vllm(
        [(folder, True) for folder in folders],
        prompts,
        tmp_path / "out.npz",
        greedy=GREEDY,
        context=CONTEXT,
        packages=[torchao],
    )
    for case, folder, answer in zip(cases, folders, answers, strict=True):
        model, weights = pruned(case), load_file(folder / "model.safetensors")
        rounded = [name for name in weights if name.endswith("._weight_qdata")]
        assert rounded
        for name in rounded:
            scale = weights[name.replace("qdata", "scale")]
            module = model.get_submodule(name.removesuffix("._weight_qdata"))
            module.weight.copy_(weights[name].float() * scale)
        compare(model, answer, prompts)
