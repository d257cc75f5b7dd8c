"""Targets: quantities as people write them, what they cost in units, and what a plan realizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import cocurve_lab as cl
from cocurve_lab.solver.targets import flop_costs, read_quantity
from helpers.problems import make_units, naive_greedy, random_curvature
from helpers.tiny_models import GROUPS, tiny_model, tiny_text

SMALL = make_units()  # 15 units, layer cost 43, total 129
WHOLE = cl.UnitSet(SMALL.units, 3, total_parameters=200)  # 71 parameters that cannot go
# families whose FFN is not gated, or whose heads go together: costs alone do not tell head_dim
SETTINGS = settings(max_examples=100, derandomize=True, deadline=None)


# Quantities ---------------------------------------------------------------------------------------


def test_quantities_as_people_write_them() -> None:
    for text, amount in (
        ("6B", 6 * 10**9), ("6b", 6 * 10**9), (" 6.74 B ", 6_740_000_000), ("350M", 350_000_000),
        ("1.5k", 1500), ("6,738,415,616", 6_738_415_616), ("6e9", 6 * 10**9), (6e9, 6 * 10**9),
        (268_672, 268_672), (np.int64(7), 7), ("0.0000000019T", 1900), ("0.1M", 100_000),
        (np.float32(6e9), 6 * 10**9),
    ):  # fmt: skip
        assert read_quantity(text, "parameters") == amount
    for text, amount in (
        ("12 GB", 12 * 10**9), ("12GiB", 12 * 2**30), ("96 KiB", 96 * 1024), ("96 kB", 96_000),
        ("1.5 MiB", 3 * 2**19), ("2 TB", 2 * 10**12), ("100", 100), ("100 b", 100), (4096, 4096),
    ):  # fmt: skip
        assert read_quantity(text, "size") == amount


# Parameters and bytes -----------------------------------------------------------------------------


@SETTINGS
@given(seed=st.integers(0, 10_000), left=st.integers(72, 210), strength=st.sampled_from([0.0, 1.0]))
def test_parameters_left_are_at_most_what_was_asked(seed: int, left: int, strength: float) -> None:
    plan = cl.solve_greedy(random_curvature(WHOLE, seed), cl.Target(parameters=left), strength)
    found = 200 - plan.pruned_cost
    assert plan.realized_target == found <= max(left, 0)
    if plan.pruned:
        assert found + WHOLE[plan.pruned[-1]].cost > left  # no unit too many
        assert plan.requested_ratio == pytest.approx((200 - left) / 129)
    else:
        assert left >= 200


@SETTINGS
@given(seed=st.integers(0, 10_000), left=st.integers(73, 150))
def test_a_target_of_parameters_is_a_ratio_in_other_words(seed: int, left: int) -> None:
    curvature = random_curvature(WHOLE, seed)
    guards = cl.Guards(layer_cap_factor=1.9)
    plan = cl.solve_greedy(curvature, cl.Target(parameters=left), guards=guards)
    assert plan.pruned == cl.solve_greedy(curvature, plan.requested_ratio, guards=guards).pruned
    assert cl.refine(plan, curvature).realized_target <= left
    assert cl.solve_greedy(curvature, cl.Target(parameters=left)).prefix(0.0).made.target is None


def test_bytes_are_parameters_times_their_width() -> None:
    curvature = random_curvature(WHOLE)
    for dtype, item in (("bfloat16", 2), ("fp32", 4), (torch.float16, 2), ("float8_e4m3fn", 1)):
        plan = cl.solve_greedy(curvature, cl.Target(size=item * 150 + item - 1, dtype=dtype))
        assert plan.pruned == cl.solve_greedy(curvature, cl.Target(parameters=150)).pruned
        assert plan.realized_target == item * (200 - plan.pruned_cost)


def test_the_realized_size_is_that_of_the_pruned_model() -> None:
    model = tiny_model(tie_word_embeddings=True).to(torch.bfloat16)
    units = cl.enumerate_units(model, GROUPS)
    plan = cl.solve_greedy(random_curvature(units), cl.Target(size="60 kB", dtype=model.dtype))
    weights = cl.prune(model, plan).parameters()
    assert sum(p.numel() * p.element_size() for p in weights) == plan.realized_target <= 60_000


def test_the_smallest_reachable_value_is_a_plan() -> None:
    curvature = random_curvature(WHOLE)
    with pytest.raises(cl.InfeasibleError) as caught:
        cl.solve_greedy(curvature, cl.Target(parameters="0.07k"))
    assert caught.value.reachable_ratio == 1
    assert caught.value.requested_ratio == pytest.approx(130 / 129)
    assert len(cl.solve_greedy(curvature, cl.Target(parameters="0.071k"))) == 15


# Operations ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", ["mha", "gqa"])
def test_operations_are_those_that_torch_counts(heads: str) -> None:
    """The operations of the model less those without the unit, for a row of 20 tokens."""
    model = tiny_model("llama", heads, attention="eager")  # whose products torch counts on a CPU
    units, ids = cl.enumerate_units(model, GROUPS), tiny_text(1, length=20).input_ids

    def counted(of: Any) -> int:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            of(input_ids=ids, use_cache=False)
        return int(counter.get_total_flops())

    costs = flop_costs(units, 20)
    for place in (units.index("L0.attention[0]"), units.index("L2.ffn[3]")):
        smaller = cl.prune(model, cl.Selection.from_pruned(units, [place]))
        assert counted(model) - counted(smaller) == 20 * costs[place]
    longer = flop_costs(units, 2000) > costs
    assert longer.tolist() == (units.kinds == "attention").tolist()
    with pytest.raises(cl.InputError):
        flop_costs(units, 0)


# KV cache -----------------------------------------------------------------------------------------


def cached_bytes(model: Any) -> int:
    """Bytes that transformers caches per token, from the cache itself."""
    cache = model(tiny_text(1, length=3).input_ids, use_cache=True).past_key_values
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return sum(t.numel() * t.element_size() for t in tensors) // 3


@pytest.mark.parametrize(
    ("family", "heads"),
    [("llama", "mqa"), ("mistral", "gqa"), ("gpt2", "mha"), ("gemma3_text", "gqa"), ("opt", "mha")],
)
def test_kv_bytes_are_what_the_cache_holds(family: str, heads: str) -> None:
    model = tiny_model(family, heads)
    units = cl.enumerate_units(model, GROUPS)
    costs = cl.kv_cache_costs(units, "float32")
    assert costs.sum() == cached_bytes(model)
    assert not costs[units.kinds == "ffn"].any()
    np.testing.assert_array_equal(2 * cl.kv_cache_costs(units, "bf16"), costs)


def test_a_kv_budget_is_met_by_heads_alone() -> None:
    model = tiny_model("qwen2", "mha")
    units = cl.enumerate_units(model, GROUPS)  # 12 heads of 64 bytes
    curvature = random_curvature(units)
    target, guards = cl.Target(kv_cache="0.4 KiB", dtype="float32"), cl.Guards(layer_cap=0.75)
    plan = cl.solve_greedy(curvature, target, guards=guards)
    assert plan.realized_target == 6 * 64 == cached_bytes(cl.prune(model, plan))
    # heads are all alike, so this is the greedy that counts heads: three of four per layer at most
    heads = np.where(units.kinds == "attention", 1, 0)
    assert list(plan.pruned) == naive_greedy(curvature, 0.5, guards=guards, costs=heads)
    with pytest.raises(cl.InfeasibleError):
        cl.solve_greedy(curvature, cl.Target(kv_cache="0.1 KiB", dtype="float32"), guards=guards)


# Costs of one's own -------------------------------------------------------------------------------


@SETTINGS
@given(
    seed=st.integers(0, 10_000),
    share=st.floats(0, 0.9),
    strength=st.sampled_from([0.0, 0.5, 1.0]),
    cap=st.sampled_from([None, 0.5]),
    whole=st.booleans(),
)
def test_own_costs_replace_parameters_throughout(
    seed: int, share: float, strength: float, cap: float | None, whole: bool
) -> None:
    rng, curvature = np.random.default_rng(seed), random_curvature(WHOLE, seed)
    costs = rng.integers(0, 5, 15).astype(float) if whole else rng.uniform(0.1, 3, 15)
    costs[0] = max(costs[0], 1)
    guards, target = cl.Guards(layer_cap=cap), cl.Target(ratio=share, costs=costs.tolist())
    expected = naive_greedy(curvature, share, strength, guards, costs=costs)
    if expected is None:
        with pytest.raises(cl.InfeasibleError):
            cl.solve_greedy(curvature, target, strength, guards)
        return
    plan = cl.solve_greedy(curvature, target, strength, guards)
    assert plan.pruned == tuple(expected)
    assert plan.realized_target == pytest.approx(costs[expected].sum() / costs.sum())
    # parameters are still parameters
    assert plan.realized_ratio == plan.requested_ratio == SMALL.costs[expected].sum() / 129


def test_an_included_unit_may_cost_nothing() -> None:
    costs = np.where(SMALL.kinds == "ffn", 0, 3)
    plan = cl.solve_greedy(
        random_curvature(SMALL), cl.Target(ratio=0.3, costs=costs), include=["L1.ffn[0]"]
    )
    assert plan.pruned[0] == SMALL.index("L1.ffn[0]")
    assert {SMALL[u].kind for u in plan.pruned[1:]} == {"attention"}


# What a targeted plan may not become --------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    [cl.Target(parameters="0.15k"), cl.Target(size="300 B", dtype=torch.bfloat16),
     cl.Target(ratio=0.3, costs=np.arange(15) / 7)],
    ids=lambda target: target.goal,
)  # fmt: skip
def test_a_targeted_plan_survives_json(target: cl.Target) -> None:
    plan = cl.solve_greedy(random_curvature(WHOLE), target)
    again = cl.Selection.from_json(plan.to_json())
    assert again.made.target == target
    assert again.realized_target == plan.realized_target
