"""The memory and the hours of `cocurve paper`, said before it begins."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from cocurve_lab.calibration import CalibrationSet
from cocurve_lab.estimator.batches import memory_needed
from cocurve_lab.evaluation.task_files import TaskFile
from cocurve_lab.extensions.big_models.forecast import row_operations
from cocurve_lab.methods.llm_pruner import LlmPruner
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.identity import model_device
from cocurve_lab.models.layers import bytes_of
from cocurve_lab.models.runtime import measuring
from cocurve_lab.models.units import UnitSet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH = 16  # prompts per forward, as in `TaskOptions`


class Load(NamedTuple):
    """The work of a task: requests, tokens of each, and tokens of each reply."""

    requests: int
    tokens: int
    reply: int = 0


# Requests are the questions of the public splits times their choices; of a text, its windows of
# 2,048 tokens. The tokens of a request are guesses, so hours are right to a factor of two or so.
LOADS = {
    "wikitext2": Load(560 + 140, 2048),  # stride 512, and windows apart
    "ptb": Load(230, 2048),
    "c4": Load(540, 2048),
    "arc_easy": Load(4 * 2376, 40),
    "arc_challenge": Load(4 * 1172, 45),
    "hellaswag": Load(4 * 10042, 100),
    "winogrande": Load(2 * 1267, 30),
    "piqa": Load(2 * 1838, 50),
    "openbookqa": Load(4 * 500, 25),
    "boolq": Load(2 * 3270, 150),
    "gsm8k_5shot": Load(1319, 900, 256),
    "mmlu": Load(4 * 14042, 100),
    "mmlu_letters": Load(4 * 14042, 130),
    "gsm8k": Load(1319, 100, 256),
    "humaneval": Load(164, 150, 512),
    "mbpp": Load(500, 500, 512),
}


class Speed(NamedTuple):
    """Seconds of the dense model, timed: per token of a text, and per token of `BATCH` replies."""

    token: float
    reply: float


def load_of(name: str, made: TaskFile | None) -> Load:
    """Return the work of a task: of the paper's as in `LOADS`, of a file from its records."""
    if made is None:
        return LOADS[name]
    asked = sum(
        len(row.get("choices") or row.get("context_options") or "1") for row in made.records
    )
    letters = sum(len(str(row)) for row in made.records) / max(len(made.records), 1)
    reply = made.config.get("generation_kwargs", {}).get("max_gen_toks", 0)
    return Load(asked, round(letters / 4), reply)  # about 4 letters a token


def memory_words(
    shapes: PreTrainedModel,
    units: UnitSet,
    rows: CalibrationSet,
    top_r: int,
    ratios: list[float],
    gradients: bool = False,
) -> tuple[float, str]:
    """Return the bytes that a run needs on the device at once, and a sentence.

    The dense model stays while a pruned one is measured, so the largest pruned model counts.

    Args:
        shapes: the dense model in its dtype, on the meta device.
        units, rows, top_r: of the build of H; of `rows` only the size counts.
        ratios: shares of removable parameters that will be removed.
        gradients: whether a method takes them, as LLM-Pruner does.
    """
    weights = bytes_of(shapes.parameters())
    each = next(shapes.parameters()).element_size()
    pruned = weights - min(ratios) * units.total_cost * each
    build = memory_needed(describe(shapes), units, rows, top_r, 1)
    back = gradient_bytes(shapes, rows.seq_len) if gradients else 0.0
    logits = BATCH * rows.seq_len * shapes.config.vocab_size * each
    most = weights + max(pruned, build, back)
    taking = f"about {back / 1e9:.3g} for gradients, " if gradients else ""
    return most, (
        f"Needs about {most / 1e9:.3g} GB: {weights / 1e9:.3g} for the dense model, and beside it "
        f"{build / 1e9:.3g} for the build of H, later {taking}{pruned / 1e9:.3g} for a pruned "
        f"model; the longest prompts of tasks, {BATCH} at a time, take up to {logits / 1e9:.3g} "
        "more."
    )


def gradient_bytes(shapes: PreTrainedModel, length: int) -> float:
    """Estimate the bytes of LLM-Pruner: two float32 buffers of a few layers, and a row's graph.

    The graph keeps the inputs of projections, norms and activation: about 8 times the hidden size
    and 4 times the width of the FFN for each token and layer, and two copies of the logits.
    """
    config, architecture = shapes.config, describe(shapes)
    count = len(architecture.layers)
    layer = sum(p.numel() for part in architecture.layers for p in part.parameters()) / count
    width = max(architecture.width(place, "ffn") for place in range(count))
    each = next(shapes.parameters()).element_size()
    kept = count * (8 * config.hidden_size + 4 * width) * each + 8 * config.vocab_size
    return 8 * min(LlmPruner().layers_per_pass, count) * layer + length * kept


def timed(model: PreTrainedModel, length: int) -> Speed:
    """Time one row of `length` tokens, and one more token of `BATCH` replies."""
    found = []
    with measuring(model, torch.get_num_threads()):
        for rows, tokens in ((1, length), (BATCH, 1)):
            ids = torch.zeros(rows, tokens, dtype=torch.int64, device=model_device(model))
            for _ in range(2):  # the first is slower
                begun = time.perf_counter()
                model(ids, use_cache=False).logits[0, -1, 0].item()  # waits for a GPU
                seconds = time.perf_counter() - begun
            found.append(seconds)
    return Speed(found[0] / length, found[1])


def suite_hours(
    speed: Speed, tasks: Mapping[str, TaskFile | None], limit: int | None = None
) -> float:
    """Estimate the hours of tasks on one model of the dense model's speed.

    Args:
        speed: of `timed`.
        tasks: from `suite_tasks`.
        limit: only so many questions of each task.
    """
    seconds = 0.0
    for load in map(load_of, tasks.keys(), tasks.values()):
        requests = load.requests if limit is None else min(load.requests, 4 * limit)
        seconds += requests * (load.tokens * speed.token + load.reply / BATCH * speed.reply)
    return seconds / 3600


def build_hours(
    model: PreTrainedModel, units: UnitSet, rows: CalibrationSet, top_r: int, speed: Speed
) -> float:
    """Estimate the hours of a build of H, at the operations per second of the timed row."""
    rate = 2 * model.num_parameters() / speed.token
    return len(rows) * row_operations(describe(model), units, rows, top_r) / rate / 3600
