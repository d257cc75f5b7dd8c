"""What the estimator gains over naive full passes, how exact it is, and its memory.

Everything is measured in one run on one machine. Ratios travel between machines, seconds do not.

    python tests/benchmarks/bench_estimator.py              # the tables of notebooks/results
    python tests/benchmarks/bench_estimator.py --quick      # a minute, for checking the script
"""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import SUPPRESS
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cocurve_lab as cl
from cocurve_lab.models.runtime import measuring
from helpers.benchmarks import arguments, flag, in_turn, seconds, spread


def main() -> None:
    options = arguments(
        __doc__,
        dict.fromkeys(("repeats", "speed_rows", "memory_rows"), 2) | {"precision_rows": 1},
        model="demo",
        top_r=256,
        threads=torch.get_num_threads(),
        repeats=5,
        speed_rows=8,
        speed_tokens=[64, 128, 256],
        naive_units=12,
        precision_rows=12,
        memory_rows=16,
        parts=flag(list(PARTS), choices=list(PARTS)),
        child_rows=flag(0, SUPPRESS),
    )
    if options.child_rows:
        print(json.dumps(peak_memory(options.child_rows)))
        return
    model, tokenizer = cl.load_model(options.model)
    units = cl.enumerate_units(model)
    print(
        f"{options.model}: {units}; {torch.get_num_threads()} threads, torch {torch.__version__}\n"
    )
    for part in options.parts:
        PARTS[part](model, tokenizer, units, options)


def all_scored(options, tokenizer, rows: int) -> cl.CalibrationSet:
    """Rows of the model's text, every position scored."""
    every = {"positions_per_sequence": "all"}
    return cl.default_calibration(options.model, tokenizer, rows, 1, **every)[0]


# Speed -------------------------------------------------------------------------------------------


def compare_speed(model, tokenizer, units, options) -> None:
    """Naive passes one sequence at a time, naive passes over a batch of sequences, the estimator.

    The naive ways are timed on a subset of the units, spread evenly, and extrapolated to all.
    """
    rows, whole = options.speed_rows, all_scored(options, tokenizer, options.speed_rows)
    subset = list(range(0, len(units), max(1, len(units) // options.naive_units)))
    for tokens in options.speed_tokens:
        calibration = cl.CalibrationSet(whole.input_ids[:, :tokens])
        print(
            f"Speed: {rows} rows x {calibration.seq_len} tokens, all positions, r = "
            f"{options.top_r}. Naive: {len(subset)} of {len(units)} units timed, extrapolated to "
            "all."
        )
        speed_of(model, units, subset, calibration, options)


def speed_of(model, units, subset, calibration, options) -> None:
    def built(text: cl.CalibrationSet) -> np.ndarray:
        return cl.estimate_curvature(model, units, text, options.top_r, progress=False).matrix

    def extrapolated(batch: int) -> tuple[float, np.ndarray]:
        taken, (matrix, teacher) = seconds(
            lambda: naive(model, units, subset, calibration, options.top_r, batch)
        )
        # the teacher runs once, however many units there are
        return teacher + (taken - teacher) * len(units) / len(subset), matrix

    ways: dict[str, Callable[[], tuple[float, np.ndarray]]] = {
        "naive, one sequence": lambda: extrapolated(1),
        "naive, batched": lambda: extrapolated(options.speed_rows),
        "estimator": lambda: seconds(lambda: built(calibration)),
    }
    found = in_turn(ways, options.repeats, warm=True)
    times = {name: np.array([taken for taken, _ in rounds]) for name, rounds in found.items()}
    exact = found["estimator"][-1][1][np.ix_(subset, subset)]
    print(f"{'':<22}{'seconds (min, median, max)':>30}{'estimator is faster by':>34}{'error':>12}")
    for name, taken in times.items():
        line = f"{taken.min():.1f}, {np.median(taken):.1f}, {taken.max():.1f}"
        line = f"{name:<22}{line:>30}"
        if name != "estimator":
            error = np.linalg.norm(found[name][-1][1] - exact) / np.linalg.norm(exact)
            line += f"{spread(taken / times['estimator'], 'x', 1):>34}{error:>12.1e}"
        print(line)
    one = cl.CalibrationSet(calibration.input_ids[:1])
    few, more = (
        operations(partial(naive, model, units, part, one, options.top_r, 1))
        for part in (subset[:1], subset)
    )
    per_unit = (more - few) / (len(subset) - 1)
    fewer = (few + per_unit * (len(units) - 1)) / operations(lambda: built(one))
    print(f"Operations torch counts, naive over estimator: {fewer:.2f}\n")


def operations(action: Callable[[], object]) -> int:
    """Floating-point operations of matrix products and attention, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        action()
    return counter.get_total_flops()


def naive(model, units, subset, calibration, top_r: int, batch: int) -> tuple[np.ndarray, float]:
    """H of a subset of units by full passes with full logits; seconds the teacher took of that."""
    teacher_seconds = 0.0
    gram = torch.zeros(len(subset), len(subset), dtype=torch.float64)
    with measuring(model, torch.get_num_threads()):
        for start in range(0, len(calibration), batch):
            ids = calibration.input_ids[start : start + batch]
            taken, (support, z0, p0) = seconds(lambda: teacher(model, ids, top_r))  # noqa: B023
            teacher_seconds += taken
            features = []
            for index in subset:
                with cl.ablate(model, [units[index]]):
                    z = model(input_ids=ids).logits[:, :-1].gather(-1, support)
                dz = z0 - z
                features.append((p0.sqrt() * (dz - (p0 * dz).sum(-1, keepdim=True))).flatten())
            stacked = torch.stack(features)
            gram += (stacked @ stacked.T).double()
    matrix = (gram / (len(calibration) * (calibration.seq_len - 1))).numpy()
    return matrix, teacher_seconds


def teacher(model, ids: torch.Tensor, top_r: int) -> tuple[torch.Tensor, ...]:
    """The support of the teacher, and its logits and probabilities there."""
    logits = model(input_ids=ids).logits[:, :-1]
    support = logits.topk(top_r, dim=-1).indices
    z0 = logits.gather(-1, support)
    return support, z0, torch.softmax(z0, dim=-1)


# Precision ---------------------------------------------------------------------------------------


def compare_precision(_model, tokenizer, units, options) -> None:
    """H from float32, bfloat16 and float16 weights and layers against float64 on the same weights.

    The embedded model ships in float16, so its weights are exact in all but bfloat16; that row is
    compared with float64 on the bfloat16 weights, so that only arithmetic differs.
    """
    text = all_scored(options, tokenizer, options.precision_rows)
    print(
        f"Arithmetic: H over {len(text)} rows, all positions, against float64 on the same weights"
    )
    print(
        f"{'':<10}{'Frobenius':>12}{'diagonal, median':>18}{'worst':>9}{'on the weakest 10 %':>21}"
    )
    for name in ("float32", "bfloat16", "float16"):
        model, _ = cl.load_model(options.model, dtype=name)
        half = cl.estimate_curvature(model, units, text, options.top_r, progress=False)
        exact = cl.estimate_curvature(model.double(), units, text, options.top_r, progress=False)
        total = np.linalg.norm(half.matrix - exact.matrix) / np.linalg.norm(exact.matrix)
        errors = np.abs(half.saliency / exact.saliency - 1)
        weakest = errors[np.argsort(exact.saliency)[: max(1, len(units) // 10)]]
        print(
            f"{name:<10}{total:>12.1e}{np.median(errors):>18.1e}{errors.max():>9.1e}"
            f"{weakest.mean():>21.1e}"
        )
    print()


# Memory ------------------------------------------------------------------------------------------


def compare_memory(_model, _tokenizer, _units, options) -> None:
    """Peak resident memory of whole processes at N and 4 N sequences."""
    print("Peak memory of a whole process (model and libraries included)")
    for rows in (options.memory_rows, 4 * options.memory_rows):
        command = [sys.executable, __file__, "--child-rows", str(rows)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        print(f"  {rows:>4} sequences: {json.loads(output.splitlines()[-1]) / 1e6:.0f} MB")
    print()


def peak_memory(rows: int) -> int:
    """Bytes this process needed at most while building H over `rows` sequences."""
    import resource

    model, tokenizer = cl.load_model("demo")
    text, _ = cl.default_calibration("demo", tokenizer, rows, 1, positions_per_sequence="all")
    cl.estimate_curvature(model, None, text, progress=False)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


PARTS = {
    "speed": compare_speed,
    "precision": compare_precision,
    "memory": compare_memory,
}

if __name__ == "__main__":
    main()
