"""The estimator on a GPU, on random weights in the shapes of real models (nothing is downloaded).

Prints seconds per row, the fraction of this GPU's own measured matrix-product rate that the build
achieves, and the projected time of the paper's setting (the paper reports 12.9 h on an A6000 for
Llama-3.1-8B) and of dense scoring.

    python tests/benchmarks/bench_gpu.py --shapes llama-3.2-3b llama-3.1-8b
    python tests/benchmarks/bench_gpu.py --shapes tiny --device cpu     # checks the script anywhere
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import cocurve_lab as cl
from cocurve_lab.models.architectures import describe

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
    options = parser().parse_args()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    name = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU (script check only)"
    )
    rate = matrix_rate(device, options.dtype)
    print(f"{name}, torch {torch.__version__}, {options.dtype}")
    print(f"measured matrix-product rate: {rate / 1e12:.1f} TFLOP/s\n")
    print(
        f"{'shape':<14}{'M':>6}{'scored':>8}{'s per row':>20}{'of rate':>9}{'peak GB':>9}"
        f"{'128 rows':>11}{'12 rows':>10}"
    )
    for shape in options.shapes:
        model = random_model(shape, device, options.dtype)
        units = cl.enumerate_units(model)
        length = min(options.tokens, model.config.max_position_embeddings)
        for scored in (min(64, length - 1), "all"):
            measure(shape, model, units, length, scored, rate, options)
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print("\n128 rows of 2048 tokens with 64 scored positions is the paper's setting.")


def measure(shape, model, units, length: int, scored, rate: float, options) -> None:
    """Rows one at a time; the first, which warms up, is not counted."""
    generator = torch.Generator().manual_seed(0)
    rows = options.rows + 1
    ids = torch.randint(0, model.config.vocab_size, (rows, length), generator=generator)
    draws = (
        [torch.randperm(length - 1, generator=generator)[:scored] for _ in range(rows)]
        if (scored != "all")
        else []
    )
    text = cl.CalibrationSet(ids, torch.stack(draws).sort(dim=1).values if draws else "all")
    if model.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    knobs = cl.BuildOptions(units_per_batch=options.units_per_batch)
    curvature = cl.estimate_curvature(
        model, units, text, options.top_r, progress=False, options=knobs
    )
    seconds = curvature.provenance["sequence_seconds"][1:]
    peak = torch.cuda.max_memory_allocated() / 1e9 if model.device.type == "cuda" else float("nan")
    count = scored if scored != "all" else length - 1
    achieved = row_flops(model, units, length, count, options.top_r) / median(seconds) / rate
    spread = f"{median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"
    print(
        f"{shape:<14}{len(units):>6}{scored!s:>8}{spread:>20}{achieved:>9.0%}{peak:>9.1f}"
        f"{duration(128 * median(seconds)):>11}{duration(12 * median(seconds)):>10}",
        flush=True,
    )


def row_flops(model, units, length: int, scored: int, top_r: int) -> float:
    """Multiply-adds x 2 that one row needs: teacher, ablations from their own write on, Gram."""
    architecture, config = describe(model), model.config
    layers, hidden = len(architecture.layers), config.hidden_size
    width = architecture.width(0, "attention")
    attention = 2 * length * hidden * (2 * width + 2 * width // architecture.queries_per_group(0))
    attention += 2 * length * length * width  # causal scores and values: half of 4 T^2 W
    ffn_per_token = 2 * 3 * hidden * architecture.width(0, "ffn")
    layer_cost = attention + length * ffn_per_token
    read = scored if scored <= length // 2 else length
    last = attention + read * ffn_per_token
    head = 2 * scored * hidden * top_r
    total = 2 * layers * layer_cost  # teacher, and each layer's trace
    for unit in units:
        later = max(0, layers - 2 - unit.layer) * layer_cost
        final = last if unit.layer < layers - 1 else 0
        own = ffn_per_token * (scored if unit.layer == layers - 1 else length)
        total += later + final + (own if unit.kind == "attention" else 0) + head
    return total + 2 * len(units) ** 2 * scored * top_r


def matrix_rate(device: torch.device, dtype: str, size: int = 8192) -> float:
    """FLOP/s of one large matrix product on random data, median of 20."""
    size = size if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device, dtype=getattr(torch, dtype))
    b = torch.randn(size, size, device=device, dtype=getattr(torch, dtype))
    times = []
    for _ in range(25):
        synchronize(device)
        begun = time.perf_counter()
        a @ b
        synchronize(device)
        times.append(time.perf_counter() - begun)
    return 2 * size**3 / median(times[5:])


def random_model(shape: str, device: torch.device, dtype: str) -> LlamaForCausalLM:
    """Random weights in the shape, made on the device."""
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with device:
            model = LlamaForCausalLM(LlamaConfig(**SHAPES[shape]))
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def duration(seconds: float) -> str:
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", nargs="+", default=["llama-3.2-3b", "llama-3.1-8b"], choices=list(SHAPES)
    )
    parser.add_argument("--device", default=None)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per row")
    parser.add_argument("--rows", type=int, default=3, help="timed rows per setting")
    parser.add_argument("--top-r", type=int, default=256)
    parser.add_argument("--units-per-batch", type=int, default=None)
    return parser


if __name__ == "__main__":
    main()
