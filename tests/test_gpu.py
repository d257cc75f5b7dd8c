"""What the library computes on a GPU is what it computes on the CPU.

    python -m pytest tests/test_gpu.py -m gpu -s        # -s shows the differences that were found

Model, text and options are the same on both sides, so a difference is of the device alone.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import cocurve_lab as cl
from cocurve_lab.estimator.batches import Room
from cocurve_lab.evaluation.efficiency import most_held
from cocurve_lab.extensions.judging.lockstep import Sampling, compare_text
from cocurve_lab.extensions.repairing.repair import RepairOptions
from cocurve_lab.methods.registry import get_method, method_names
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.identity import model_device, weight_marks
from helpers import builds
from helpers.builds import require_same_bits
from helpers.problems import interrupt_at
from helpers.tiny_models import GROUPS, relative_error, tiny_model, tiny_text

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no NVIDIA GPU"),
]

# Two float32 computations of H differ by up to 5e-6 (notebooks/results/README.md). TF32 keeps as
# many bits of a factor as float16, whose H is off by 2e-3. The bound lies between: a factor of ten
# above the first, and of forty below the second.
FLOAT32 = 5e-5
# A shift is a small difference of large logits, and its rounding adds up over the units of a plan:
# on one CPU, position by position, float32 is 3e-4 from float64 for a 20 % plan of the demo model.
SHIFTS = 1e-3
# twice the largest errors seen on a CPU (2.2e-3, 1.6e-2), because another device rounds elsewhere
HALF = {"float16": 2 * 2.2e-3, "bfloat16": 2 * 1.6e-2}
INVERTED = 1e-3  # some methods invert a matrix of inputs, which magnifies rounding
LAST_BITS = 1e-5  # sums in another order, which decides the last bits only
MODELS = [
    ("llama", "gqa"),
    ("mistral", "mqa"),
    ("qwen2", "gqa"),
    ("phi3", "mha"),
    ("gemma2", "gqa"),
    ("gemma3_text", "mqa"),
    ("olmo2", "mha"),
    ("gpt_neox", "mha"),
    ("gpt2", "mha"),
    ("opt_350m", "mha"),
]
each_model = pytest.mark.parametrize(("family", "heads"), MODELS)
some_models = pytest.mark.parametrize(("family", "heads"), [MODELS[0], MODELS[4], MODELS[8]])


def both(family: str, heads: str, **options: Any) -> tuple[PreTrainedModel, PreTrainedModel]:
    """The same tiny model on the CPU and on the GPU."""
    return tiny_model(family, heads, **options), tiny_model(family, heads, **options).to(DEVICE)


@cache
def demo(place: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return cl.load_model("demo", device=place)


@cache
def demo_text(rows: int) -> cl.CalibrationSet:
    text, _ = cl.default_calibration("demo", demo("cpu")[1], rows, 1, positions_per_sequence="all")
    return text


@cache
def demo_build(place: str) -> cl.Curvature:
    return cl.estimate_curvature(demo(place)[0], None, demo_text(2), progress=False)


def third(model: PreTrainedModel) -> cl.Selection:
    """A plan that removes every third unit."""
    units = cl.enumerate_units(model, GROUPS)
    return cl.Selection.from_pruned(units, range(0, len(units), 3))


def require_close(what: str, found: Any, expected: Any, bound: float) -> None:
    """Show and judge the relative error in the Frobenius norm."""
    found, expected = np.asarray(found, float), np.asarray(expected, float)
    error = relative_error(found, expected) if expected.any() else float(np.abs(found).max())
    print(f"\n  {what}: {error:.1e}, bound {bound:.1e}", end="")
    assert error <= bound


# H ------------------------------------------------------------------------------------------------


def test_h_of_the_demo_model_is_that_of_the_cpu() -> None:
    found, expected = demo_build(str(DEVICE)), demo_build("cpu")
    assert found.provenance["runtime"]["device_kind"] == DEVICE.type
    require_close("H", found.matrix, expected.matrix, FLOAT32)
    require_close("KL of single units", found.single_unit_risk, expected.single_unit_risk, FLOAT32)


@pytest.mark.parametrize(("scored", "full"), [("all", False), (5, True)])
@each_model
def test_h_of_a_family_is_that_of_the_cpu(
    family: str, heads: str, scored: int | str, full: bool
) -> None:
    text = tiny_text(2, 24, scored)
    expected, found = (
        builds.build(model, text, full_vocabulary=full) for model in both(family, heads)
    )
    require_close("H", found.matrix, expected.matrix, FLOAT32)
    require_close("KL", found.single_unit_risk, expected.single_unit_risk, FLOAT32)
    assert found.provenance["model_fingerprint"] == expected.provenance["model_fingerprint"]


def test_a_build_takes_no_tf32_where_the_session_allows_it() -> None:
    model, text = tiny_model().to(DEVICE), tiny_text(2)
    factor = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    full, expected = factor @ factor, builds.build(model, text)
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        short = factor @ factor
        found = builds.build(model, text)
    finally:
        matmul.fp32_precision = before
    assert not torch.equal(short, full)  # so TF32 would show
    require_same_bits(found, expected)


@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_within_the_published_error(dtype: str) -> None:
    model, _ = cl.load_model("demo", device=DEVICE, dtype=dtype)
    found = cl.estimate_curvature(model, None, demo_text(6), progress=False)
    assert found.provenance["model_dtype"] == dtype
    # on the same weights, so that only arithmetic differs
    expected = cl.estimate_curvature(model.float(), None, demo_text(6), progress=False)
    require_close(f"H in {dtype} against float32", found.matrix, expected.matrix, HALF[dtype])


@pytest.mark.parametrize("place", ["cpu", str(DEVICE)])
def test_an_interrupted_build_goes_on_here_and_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    gpu, text, path = tiny_model().to(DEVICE), tiny_text(4), tmp_path / "build"
    whole = builds.build(gpu, text, groups=2)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            builds.build(gpu, text, groups=2, checkpoint=path)
    resumed = builds.build(tiny_model().to(place), text, groups=2, checkpoint=path)
    if place == "cpu":
        assert resumed.provenance["events"]  # it says that it moved
        require_close("H", resumed.matrix, whole.matrix, FLOAT32)
    else:
        require_same_bits(resumed, whole)


# Memory -------------------------------------------------------------------------------------------


def middle_model(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Random weights, large enough that activations outweigh what the libraries hold."""
    changes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 16_000}
    changes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512}
    return tiny_model("llama", layers=4, dtype=dtype, **changes).to(DEVICE)


def held(model: PreTrainedModel, text: cl.CalibrationSet, size: int) -> int:
    """Most bytes that a build holds beside the model."""
    units = cl.enumerate_units(model)
    options = cl.BuildOptions(units_per_batch=size, groups=1)
    with most_held(model_device(model)) as most:
        cl.estimate_curvature(model, units, text, progress=False, options=options)
    return most[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scored", ["all", 64])
def test_a_build_holds_what_it_announces(dtype: torch.dtype, scored: int | str) -> None:
    model, text = middle_model(dtype), tiny_text(1, 512, scored, vocab=16_000)
    units = cl.enumerate_units(model)
    held(model, text, 1)  # cuBLAS takes its workspace with its first product, and keeps it
    for size in (1, 20):
        most = held(model, text, size)
        announced = Room.of(describe(model), units, text, 256).needed(size)
        print(f"\n  {size} ablations: {most / 1e6:.0f} of {announced / 1e6:.0f} MB", end="")
        # an estimate from shapes; a batch is chosen so that it takes half of what is free
        assert most <= 1.5 * announced


def test_a_batch_that_does_not_fit_is_halved(caplog: pytest.LogCaptureFixture) -> None:
    model, text = middle_model(), tiny_text(1, 512, 64, vocab=16_000)
    expected = cl.estimate_curvature(model, None, text, progress=False)
    least, most = held(model, text, 1), held(model, text, 20)
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved() + (least + most) // 2
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    try:
        options = cl.BuildOptions(units_per_batch=20)
        found = cl.estimate_curvature(model, None, text, progress=False, options=options)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "out of memory" in caplog.text
    assert found.provenance["runtime"]["units_per_batch"] in (10, 5, 2)
    require_close("H", found.matrix, expected.matrix, LAST_BITS)


# Plans --------------------------------------------------------------------------------------------


@some_models
def test_what_plans_cost_is_what_they_cost_on_the_cpu(family: str, heads: str) -> None:
    cpu, gpu = both(family, heads)
    plans, text = [third(cpu), cl.Selection.from_pruned(third(cpu).units, [1, 5])], tiny_text()
    expected, found = (cl.measure_plans(model, plans, text, progress=False) for model in (cpu, gpu))
    require_close("KL of plans", found.kl, expected.kl, FLOAT32)
    require_close("nll of plans", found.nll, expected.nll, FLOAT32)


def test_a_plan_of_the_demo_model_costs_and_writes_what_it_does_on_the_cpu() -> None:
    plan, places = cl.solve_greedy(demo_build("cpu"), 0.2), ("cpu", str(DEVICE))
    one, other = (
        cl.split_risk(demo(place)[0], plan, demo_text(2), progress=False) for place in places
    )
    bounds = {"quadratic_of_sum": SHIFTS, "kl_of_sum": SHIFTS}
    bounds |= {"quadratic_of_joint": FLOAT32, "kl_of_joint": FLOAT32}
    for name, bound in bounds.items():
        require_close(name, getattr(other, name), getattr(one, name), bound)
    prompt, sampling = cl.demo_questions(1)[0].prompt, Sampling(16, temperature=1.0, seed=3)
    pairs = [
        compare_text(model, tokenizer, prompt, plan, sampling)
        for model, tokenizer in map(demo, places)
    ]
    assert pairs[0] == pairs[1]


@pytest.mark.parametrize("name", method_names())
def test_a_method_measures_what_it_measures_on_the_cpu(name: str) -> None:
    method, text = get_method(name), tiny_text()
    expected, found = (
        method.measure(model, cl.enumerate_units(model, GROUPS), text, seed=0, progress=False)
        for model in both("llama", "gqa")
    )
    assert found.arrays.keys() == expected.arrays.keys()
    for key, array in expected.arrays.items():
        require_close(f"{name}, {key}", found.arrays[key], array, INVERTED)


# A smaller model ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@some_models
def test_pruned_is_masked(family: str, heads: str, dtype: torch.dtype) -> None:
    model = tiny_model(family, heads, dtype=dtype).to(DEVICE)
    pruned = cl.prune(model, third(model), verify=tiny_text())
    assert model_device(pruned).type == DEVICE.type
    wrong = cl.Selection.from_pruned(third(model).units, [0])
    with pytest.raises(cl.EquivalenceError):
        cl.check_equivalence(model, pruned, wrong, tiny_text())


@pytest.mark.parametrize("place", ["cpu", str(DEVICE)])
@some_models
def test_a_saved_model_comes_back(family: str, heads: str, place: str, tmp_path: Path) -> None:
    model = tiny_model(family, heads).to(DEVICE)
    pruned = cl.prune(model, third(model))
    loaded = cl.load_pruned(cl.save_pruned(pruned, tmp_path / "pruned"), device=place)
    assert model_device(loaded).type == torch.device(place).type
    assert weight_marks(loaded) == weight_marks(pruned)


@pytest.mark.parametrize("sequential", [True, False])
@some_models
def test_a_refit_is_that_of_the_cpu(family: str, heads: str, sequential: bool) -> None:
    options, text = RepairOptions(progress=False), tiny_text(12)
    one, other = (
        cl.repair(model, third(model), text, sequential=sequential, options=options)
        for model in both(family, heads)
    )
    assert model_device(other).type == DEVICE.type
    for name, weight in one.state_dict().items():
        found = other.state_dict()[name].cpu().numpy()
        assert relative_error(found, weight.numpy()) <= INVERTED, name
