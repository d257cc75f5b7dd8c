"""The estimator on a GPU, on random weights in the shapes of real models (nothing is downloaded).

Prints two Markdown tables. The first is of builds: seconds per row, the speed-up over naive
passes, memory, and the projected time of 128 rows (the paper reports 12.9 h on an A6000 for
Llama-3.1-8B). The second is of what comes after a build: a solve, pruning, and the equivalence
check. What fails is said in its row, and the next one goes on. Progress
goes to the error stream.

    python tests/benchmarks/bench_gpu.py --shapes llama-3.2-3b llama-3.1-8b
    python tests/benchmarks/bench_gpu.py --shapes tiny --device cpu     # checks the script anywhere
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.estimator.build import Build
from cocurve_lab.estimator.teacher import row
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.runtime import measuring
from cocurve_lab.models.units import Unit
from helpers.benchmarks import arguments, flag, head, seconds
from helpers.benchmarks import row as table_row

BUILDS = (
    "shape",
    "units",
    "scored positions",
    "s per row",
    "naive passes / estimator",
    "peak GB",
    "128 rows",
)
AFTERWARDS = ("shape", "removed", "solve", "prune", "check_equivalence", "result")
BEGUN = time.monotonic()

SHAPES = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
    },
    "llama-3.2-3b": {
        "vocab_size": 128_256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    },
    "llama-3.1-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
    },
}


def main() -> None:
    options = arguments(
        __doc__,
        shapes=flag(["llama-3.2-3b", "llama-3.1-8b"], choices=list(SHAPES)),
        device=None,
        dtype="bfloat16",
        tokens=flag(2048, "tokens per row"),
        rows=flag(3, "most rows timed per setting"),
        seconds=flag(60.0, "per setting; no row begins after them"),
        minutes=flag(8.0, "of the script; no measurement begins after them"),
        naive_units=flag(8, "about how many are timed"),
        ratio=flag(0.2, "removed before the check"),
        top_r=256,
        units_per_batch=flag(type=int),
    )
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (script check only)"
    )
    print(
        f"{name}, torch {torch.__version__}, {options.dtype}, rows of at most {options.tokens} "
        f"tokens, r = {options.top_r}.\n"
    )
    head(*BUILDS)
    found = []
    for shape in options.shapes:
        found.append(of_shape(shape, device, options))
        free_memory()
    print()
    head(*AFTERWARDS)
    for cells in found:
        table_row(*cells, *[""] * (len(AFTERWARDS) - len(cells)))
    tell("done")


def of_shape(shape: str, device: torch.device, options) -> list[str]:
    """Print the builds of a shape; return the cells of what comes after."""
    tell(f"{shape}: making random weights")
    model, failed = attempt(lambda: random_model(shape, device, options.dtype), options)
    if model is None:
        table_row(shape, failed, *[""] * (len(BUILDS) - 2))
        return [shape, failed]
    units = cl.enumerate_units(model)
    length = min(options.tokens, model.config.max_position_embeddings)
    curvature = None
    for scored in (min(64, length - 1), "all"):
        text = random_text(model, length, scored, options)
        tell(f"{shape}: building with {scored} scored positions")
        found, failed = attempt(
            lambda text=text: measured_build(model, units, text, options), options
        )
        free_memory()
        if found is None:
            table_row(shape, len(units), scored, failed, *[""] * (len(BUILDS) - 4))
        else:
            curvature = found[0]
            table_row(shape, len(units), scored, *found[1])
    if curvature is None:
        return [shape, "no H"]
    cells, failed = attempt(lambda: afterwards(model, curvature, text, options), options)
    return [shape, *(cells or [failed])]


# Measurements -------------------------------------------------------------------------------------


def measured_build(
    model, units, text: cl.CalibrationSet, options
) -> tuple[cl.Curvature, list[str]]:
    """Build H; return it and the cells of its row from the fourth on. The first row warms up."""
    device = model.device
    naive = naive_seconds(model, units, text, options)
    free_memory()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    begun = time.monotonic()

    def stop_in_time(_: Build) -> str | None:
        return "The time is spent." if time.monotonic() - begun > options.seconds else None

    knobs = cl.BuildOptions(units_per_batch=options.units_per_batch, on_sequence=stop_in_time)
    with redirect_stdout(sys.stderr):  # an early stop is told in the middle of the table
        curvature = cl.estimate_curvature(
            model, units, text, options.top_r, progress=False, options=knobs
        )
    taken = curvature.provenance["sequence_seconds"]
    timed_rows = taken[1:] or taken
    one = median(timed_rows)
    cells = [
        f"{one:.2f} ({min(timed_rows):.2f} to {max(timed_rows):.2f}; {len(timed_rows)} rows)",
        f"{naive / one:.2f}x",
        f"{torch.cuda.max_memory_allocated() / 1e9:.1f}" if device.type == "cuda" else "-",
        duration(128 * one),
    ]
    return curvature, cells


def naive_seconds(model, units, text: cl.CalibrationSet, options) -> float:
    """Seconds of a row by one full pass per unit: timed on a few units, scaled up to all.

    Each pass computes logits at the scored positions only, which favors the naive way.
    """
    step = max(1, len(units) // options.naive_units)
    times = []
    with measuring(model, torch.get_num_threads()):
        ids, positions = row(describe(model), text, 0)

        def logits() -> torch.Tensor:
            return model(input_ids=ids, use_cache=False, logits_to_keep=positions).logits[0]

        teacher = logits()
        support = teacher.topk(options.top_r, dim=-1).indices
        z_0 = teacher.gather(-1, support).float()
        p_0 = torch.softmax(z_0, dim=-1)
        del teacher

        def column(unit: Unit) -> torch.Tensor:
            with cl.ablate(model, [unit]):
                shift = z_0 - logits().gather(-1, support).float()
            return p_0.sqrt() * (shift - (p_0 * shift).sum(-1, keepdim=True))

        for unit in [units[0], *units[::step]]:  # the first one warms up
            times.append(seconds(lambda: column(unit))[0])  # noqa: B023
    return (len(units) + 1) * median(times[1:])


def afterwards(model, curvature: cl.Curvature, text: cl.CalibrationSet, options) -> list[str]:
    """Solve, prune and check; what was removed, the times, and the largest difference."""
    # the first solve computes the fingerprint of H, which is kept
    solved = [seconds(lambda: cl.solve_greedy(curvature, options.ratio, 1.0)) for _ in range(6)]
    plan = solved[0][1]
    solving = median(taken for taken, _ in solved[1:])
    tell(f"solved in {1000 * solving:.1f} ms")
    pruning, pruned = seconds(lambda: cl.prune(model, plan))
    tell(f"pruned in {pruning:.1f} s")  # which includes reading all weights twice
    checking, result = seconds(lambda: cl.check_equivalence(model, pruned, plan, text))
    return [
        f"{plan.realized_ratio:.1%}",
        f"{1000 * solving:.1f} ms",
        f"{pruning:.1f} s",
        f"{checking:.1f} s",
        f"largest difference {result.max_abs_difference:.1e}",
    ]


def attempt(action: Callable[[], object], options) -> tuple[object, str]:
    """The result and "", or None and why there is none: the rows after it still count."""
    if time.monotonic() - BEGUN > 60 * options.minutes:
        return None, f"left out after {options.minutes:g} minutes"
    try:
        return action(), ""
    except (RuntimeError, cl.CocurveError) as error:  # memory that runs out is a RuntimeError
        tell(f"{type(error).__name__}: {error}")
        return None, f"failed: {type(error).__name__}"


def random_model(shape: str, device: torch.device, dtype: str) -> PreTrainedModel:
    """Random weights in the shape, made on the device."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPES[shape]), dtype=dtype)
    return model.eval().requires_grad_(False)


def random_text(model, length: int, scored, options) -> cl.CalibrationSet:
    """Random rows; `scored` positions of each, or "all"."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (options.rows, length), generator=generator)
    if scored == "all":
        return cl.CalibrationSet(ids)
    draws = [torch.randperm(length - 1, generator=generator)[:scored] for _ in ids]
    return cl.CalibrationSet(ids, torch.stack(draws).sort(dim=1).values)


def tell(what: str) -> None:
    print(f"[{time.monotonic() - BEGUN:.0f} s] {what}", file=sys.stderr, flush=True)


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


if __name__ == "__main__":
    main()
