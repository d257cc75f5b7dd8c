"""Saved folders in stock vLLM: the log-probabilities and the greedy text of transformers.

It runs on the CPU, in an environment of its own that `make vllm` makes, and in a subprocess;
COCURVE_VLLM says where (default ~/.cache/cocurve-lab/vllm). Without it the tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import cocurve_lab as cl
from helpers.tiny_models import VOCAB, tiny_model

ENVIRONMENT = Path(os.environ.get("COCURVE_VLLM") or "~/.cache/cocurve-lab/vllm").expanduser()
_SCRIPT = """
import json, sys
import numpy as np
job = json.load(sys.stdin)
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

settings = SamplingParams(
    temperature=0.0, max_tokens=job["greedy"], prompt_logprobs=-1, detokenize=False, ignore_eos=True
)
prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
out = {}
for number, (folder, own_code) in enumerate(job["folders"]):
    model = LLM(
        folder, trust_remote_code=own_code, dtype="float32", skip_tokenizer_init=True,
        max_model_len=job["context"], max_logprobs=-1, enforce_eager=True, disable_log_stats=True,
    )
    for index, answer in enumerate(model.generate(prompts, settings, use_tqdm=False)):
        rows = answer.prompt_logprobs[1:]  # the first token has none
        rows = [[row[token].logprob for token in range(len(row))] for row in rows]
        out[f"{number}.{index}"] = np.array(rows)
        out[f"{number}.{index}.greedy"] = np.array(answer.outputs[0].token_ids)
    del model
    cleanup_dist_env_and_memory()
np.savez(job["out"], **out)
"""


@dataclass(frozen=True)
class Answer:
    """What vLLM computed for one folder.

    Attributes:
        log_probabilities: of every next token within a prompt, [T - 1, V] per prompt, nats.
        greedy: ids it continues each prompt with.
    """

    log_probabilities: list[np.ndarray]
    greedy: list[list[int]]


def run_vllm(
    folders: Sequence[tuple[Path, bool]],
    prompts: Sequence[Sequence[int]],
    out: Path,
    *,
    greedy: int,
    context: int,
) -> list[Answer]:
    """Serve one folder after the other; fails with vLLM's output if it cannot.

    Args:
        folders: each with whether vLLM may run the folder's own code.
        prompts: token ids, at least two each.
        out: a file to write, *.npz.
        greedy: ids to add to each prompt.
        context: the longest prompt and answer together.
    """
    job = {
        "folders": [(str(folder), own_code) for folder, own_code in folders],
        "prompts": [list(map(int, ids)) for ids in prompts],
        "greedy": greedy,
        "context": context,
        "out": str(out),
    }
    own = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(installed()), "-c", _SCRIPT],
        input=json.dumps(job),
        env=environment | own,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=1200,
    )
    assert done.returncode == 0, f"vLLM: exit {done.returncode}\n{done.stderr[-3000:]}"
    with np.load(out) as found:
        return [
            Answer(
                [found[f"{number}.{index}"] for index in range(len(prompts))],
                [found[f"{number}.{index}.greedy"].tolist() for index in range(len(prompts))],
            )
            for number in range(len(folders))
        ]


def installed() -> Path:
    """The interpreter of the environment; skips where there is none."""
    python = ENVIRONMENT / "bin" / "python"
    if not (ENVIRONMENT / "installed").exists():
        pytest.skip(f"vLLM is not installed in {ENVIRONMENT}. Install it with: make vllm")
    return python


# Saved folders in stock vLLM ----------------------------------------------------------------------


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
    installed()
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
