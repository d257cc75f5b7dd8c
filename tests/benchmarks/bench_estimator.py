"""What the estimator gains over naive full passes, and what calibration settings are worth.

Everything is measured in one run on one machine. Ratios travel between machines, seconds do not.

    python tests/benchmarks/bench_estimator.py              # the tables of README.md beside it
    python tests/benchmarks/bench_estimator.py --quick      # a minute, for checking the script
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

import cocurve_lab as cl
from cocurve_lab.models.runtime import measuring

PARTS = ["speed", "vocabulary", "quality", "precision", "memory", "solver"]


def main() -> None:
    options = parser().parse_args()
    if options.quick:
        options.repeats = options.draws = 2
        options.judge_rows, options.speed_rows, options.memory_rows = 8, 2, 2
        options.precision_rows = 1
    if options.child_rows:
        print(json.dumps(peak_memory(options.child_rows)))
        return
    torch.set_num_threads(options.threads)
    model, tokenizer = cl.load_model(options.model)
    units = cl.enumerate_units(model)
    print(
        f"{options.model}: {units}; {torch.get_num_threads()} threads, torch {torch.__version__}\n"
    )
    if "speed" in options.parts:
        for tokens in options.speed_tokens:
            compare_speed(model, tokenizer, units, options, tokens)
    if "vocabulary" in options.parts:
        compare_vocabulary(model, tokenizer, units, options)
    if "quality" in options.parts:
        compare_settings(model, tokenizer, units, options)
    if "precision" in options.parts:
        compare_precision(tokenizer, units, options)
    if "memory" in options.parts:
        compare_memory(options)
    if "solver" in options.parts:
        time_solver(options)


# Speed -------------------------------------------------------------------------------------------


def compare_speed(model, tokenizer, units, options, tokens: int) -> None:
    """Naive passes one sequence at a time, naive passes over a batch of sequences, the estimator.

    The naive ways are timed on a subset of the units, spread evenly, and extrapolated to all.
    """
    rows = options.speed_rows
    whole, _ = cl.default_calibration(
        options.model, tokenizer, rows, 1, positions_per_sequence="all"
    )
    calibration = cl.CalibrationSet(whole.input_ids[:, :tokens])
    subset = list(range(0, len(units), max(1, len(units) // options.naive_units)))
    print(
        f"Speed: {rows} rows x {calibration.seq_len} tokens, all positions, r = {options.top_r}. "
        f"Naive: {len(subset)} of {len(units)} units timed, extrapolated to all."
    )

    def built(text: cl.CalibrationSet) -> np.ndarray:
        return cl.estimate_curvature(model, units, text, options.top_r, progress=False).matrix

    ways: dict[str, Callable[[], tuple[np.ndarray, float]]] = {
        "naive, one sequence": lambda: naive(model, units, subset, calibration, options.top_r, 1),
        "naive, batched": lambda: naive(model, units, subset, calibration, options.top_r, rows),
        "estimator": lambda: (built(calibration), 0.0),
    }
    for way in ways.values():  # warm up every code path
        way()
    seconds = {name: [] for name in ways}
    matrices = {}
    for _ in range(options.repeats):  # interleaved, so that a slow minute hits all three
        for name, way in ways.items():
            begun = time.perf_counter()
            matrices[name], teacher = way()
            taken = time.perf_counter() - begun
            if name.startswith("naive"):  # the teacher runs once, however many units there are
                taken = teacher + (taken - teacher) * len(units) / len(subset)
            seconds[name].append(taken)
    exact = matrices["estimator"][np.ix_(subset, subset)]
    print(f"{'':<22}{'seconds (min, median, max)':>30}{'estimator is faster by':>34}{'error':>12}")
    for name, times in seconds.items():
        spread = f"{min(times):.1f}, {np.median(times):.1f}, {max(times):.1f}"
        if name == "estimator":
            print(f"{name:<22}{spread:>30}")
            continue
        ratio = np.array(times) / np.array(seconds["estimator"])
        error = np.linalg.norm(matrices[name] - exact) / np.linalg.norm(exact)
        faster = f"{np.median(ratio):.1f}x ({ratio.min():.1f} to {ratio.max():.1f})"
        print(f"{name:<22}{spread:>30}{faster:>34}{error:>12.1e}")
    one = cl.CalibrationSet(calibration.input_ids[:1])
    few, more = (
        operations(lambda part=part: naive(model, units, part, one, options.top_r, 1))
        for part in (subset[:1], subset)
    )
    per_unit = (more - few) / (len(subset) - 1)
    fewer = (few + per_unit * (len(units) - 1)) / operations(lambda: built(one))
    print(f"Operations torch counts, naive over estimator: {fewer:.2f}\n")


def compare_vocabulary(model, tokenizer, units, options) -> None:
    """What a build costs more where single-unit risks are over the full vocabulary."""
    text, _ = cl.default_calibration(
        options.model, tokenizer, options.speed_rows, 1, positions_per_sequence="all"
    )
    seconds: dict[bool, list[float]] = {False: [], True: []}
    risks = {}
    for _ in range(options.repeats + 1):  # the first one warms up
        for full, times in seconds.items():
            knobs = {"progress": False, "options": cl.BuildOptions(full_vocabulary=full)}
            begun = time.perf_counter()
            built = cl.estimate_curvature(model, units, text, options.top_r, **knobs)
            times.append(time.perf_counter() - begun)
            risks[full] = built.single_unit_risk
    ratio = np.array(seconds[True][1:]) / np.array(seconds[False][1:])
    apart = risks[False] / risks[True]
    print(
        f"Single-unit risks over the full vocabulary, {len(text)} rows: a build takes "
        f"{np.median(ratio):.2f} times as long ({ratio.min():.2f} to {ratio.max():.2f}); on the "
        f"top-{options.top_r} support the sum is {risks[False].sum() / risks[True].sum():.3f} of "
        f"that, single ones {apart.min():.3f} to {apart.max():.3f}\n"
    )


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
            begun = time.perf_counter()
            teacher = model(input_ids=ids).logits[:, :-1]
            support = teacher.topk(top_r, dim=-1).indices
            z0 = teacher.gather(-1, support)
            p0 = torch.softmax(z0, dim=-1)
            teacher_seconds += time.perf_counter() - begun
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


# Quality -----------------------------------------------------------------------------------------


def compare_settings(model, tokenizer, units, options) -> None:
    """Selections from differently spent calibration budgets, judged by one large independent H.

    The judge is 1/2 s^T H s on H of `--judge-rows` held-out rows with all positions; 1.00 is the
    plan solved on the judge itself. Draws come from a pool of `--pool-rows` calibration rows.
    """
    context = min(2048, tokenizer.model_max_length)
    judge_rows, draws = options.judge_rows, options.draws
    pool_set, judge_text = cl.default_calibration(
        options.model, tokenizer, options.pool_rows, judge_rows, positions_per_sequence="all"
    )
    pool = pool_set.input_ids
    judge = cl.estimate_curvature(model, units, judge_text, options.top_r, progress=False)
    plans = {}
    for ratio in options.ratios:
        plans[ratio] = judge.risk(cl.solve_greedy(judge, ratio, 1.0).pruned)
    print(
        f"Selection quality at lambda 1: surrogate risk on {judge_rows} held-out rows relative to "
        f"the plan solved on them; mean +- standard error over {draws} draws"
    )
    header = "".join(f"{f'{ratio:.0%} removed':>18}" for ratio in options.ratios)
    print(f"{'rows':>6}{'tokens':>8}{'scored':>8}{'seconds':>9}{header}")
    for rows, length, scored in SETTINGS:
        results, seconds = {ratio: [] for ratio in options.ratios}, []
        for seed in range(draws):
            text = draw(pool, rows, min(length, context), scored, seed)
            begun = time.perf_counter()
            curvature = cl.estimate_curvature(model, units, text, options.top_r, progress=False)
            seconds.append(time.perf_counter() - begun)
            for ratio in options.ratios:
                chosen = cl.solve_greedy(curvature, ratio, 1.0).pruned
                results[ratio].append(judge.risk(chosen) / plans[ratio])
        cells = "".join(f"{mean_error(results[ratio]):>18}" for ratio in options.ratios)
        print(f"{rows:>6}{min(length, context):>8}{scored!s:>8}{np.median(seconds):>9.1f}{cells}")
    print()


# (rows, tokens per row, scored positions per row); the first six compute the same number of tokens
SETTINGS = (
    (96, 64, "all"),
    (48, 128, "all"),
    (24, 256, "all"),
    (24, 256, 64),
    (24, 256, 16),
    (24, 256, 4),
    (12, 256, "all"),
    (96, 256, 4),
)


def draw(pool: torch.Tensor, rows: int, length: int, scored, seed: int) -> cl.CalibrationSet:
    """Rows from the pool, cut to a length; the seed draws the rows and the positions."""
    generator = torch.Generator().manual_seed(seed)
    pieces = pool.reshape(-1, length)
    chosen = pieces[torch.randperm(len(pieces), generator=generator)[:rows]]
    if scored == "all":
        return cl.CalibrationSet(chosen)
    positions = [torch.randperm(length - 1, generator=generator)[:scored] for _ in range(rows)]
    return cl.CalibrationSet(chosen, torch.stack(positions))


def mean_error(values: list[float]) -> str:
    error = np.std(values, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else float("nan")
    return f"{np.mean(values):.3f} +- {error:.3f}"


# Precision ---------------------------------------------------------------------------------------


def compare_precision(tokenizer, units, options) -> None:
    """H from float32, bfloat16 and float16 weights and layers against float64 on the same weights.

    The embedded model ships in float16, so its weights are exact in all but bfloat16; that row is
    compared with float64 on the bfloat16 weights, so that only arithmetic differs.
    """
    text, _ = cl.default_calibration(
        options.model, tokenizer, options.precision_rows, 1, positions_per_sequence="all"
    )
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


def compare_memory(options) -> None:
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


# Solver ------------------------------------------------------------------------------------------


def time_solver(options) -> None:
    """One solve at the sizes of an 8B and a 70B; bench_solver.py has more ratios and the path."""
    from bench_solver import LAYERS, problem, seconds, show  # sets thread counts, so imported last

    print("Solver, lambda 1, on a random Gram matrix")
    for size in LAYERS:
        curvature = problem(size, 0)
        assert curvature.fingerprint  # computed once per matrix, and kept
        for ratio in (0.2, 0.6):
            times = seconds(
                lambda: cl.solve_greedy(curvature, ratio, 1.0),  # noqa: B023  (called here)
                3 * options.repeats,
            )
            print(f"  M = {size:>4}, ratio {ratio:.1f}: {show(times)}")
    print()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--top-r", type=int, default=256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--speed-rows", type=int, default=8)
    parser.add_argument("--speed-tokens", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--naive-units", type=int, default=12)
    parser.add_argument("--judge-rows", type=int, default=64)
    parser.add_argument("--pool-rows", type=int, default=160)
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.2, 0.4])
    parser.add_argument("--precision-rows", type=int, default=12)
    parser.add_argument("--memory-rows", type=int, default=16)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--child-rows", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="small numbers, to check the script")
    return parser


if __name__ == "__main__":
    main()
