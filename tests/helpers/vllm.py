"""Stock vLLM on the CPU, to serve saved folders in: an environment of its own, and a subprocess.

`make vllm` makes the environment; COCURVE_VLLM says where (default ~/.cache/cocurve-lab/vllm).
Without it the tests are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

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
