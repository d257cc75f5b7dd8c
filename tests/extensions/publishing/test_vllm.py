"""Saved folders in stock vLLM: the log-probabilities and the greedy text of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import cocurve_lab as cl
from helpers import vllm
from helpers.tiny_models import VOCAB, tiny_model
from helpers.vllm import Answer, run_vllm

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


CASES = {
    "llama": Case("llama", UNEVEN, {}),
    "llama, uniform": Case("llama", EVEN, {}, "stock"),
    "llama with biases, a layer gone": Case("llama", NO_LAYER, BIASES),
    "mistral, a layer without heads": Case("mistral", NO_HEADS, {}),
    "qwen2": Case("qwen2", UNEVEN, {}),
    "qwen3, a layer without heads": Case("qwen3", NO_HEADS, {}),
    "phi3, a layer without FFN": Case("phi3", NO_FFN, {}),
    "gemma3, a layer gone": Case("gemma3_text", NO_LAYER, {}),
}


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
