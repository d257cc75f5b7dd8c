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
from cocurve_lab.base.errors import InfeasibleError
from cocurve_lab.extensions.judging.generation import last_logits
from cocurve_lab.models.units import UnitSet
from cocurve_lab.solver.guards import Guards
from cocurve_lab.solver.selection import Selection
from cocurve_lab.solver.solve import solve_greedy
from cocurve_lab.solver.targets import Target, flop_costs, kv_cache_costs, read_quantity
from cocurve_widgets import LambdaExplorer, Session
from helpers.problems import llama_8b_units, make_units, naive_greedy, random_curvature
from helpers.tiny_models import EVERY_FAMILY, GROUPS, tiny_model, tiny_text

SMALL = make_units()  # 15 units, layer cost 43, total 129
WHOLE = UnitSet(SMALL.units, 3, total_parameters=200)  # 71 parameters that cannot go
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
    plan = solve_greedy(random_curvature(WHOLE, seed), Target(parameters=left), strength)
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
    guards = Guards(layer_cap_factor=1.9)
    plan = solve_greedy(curvature, Target(parameters=left), guards=guards)
    by_ratio = solve_greedy(curvature, plan.requested_ratio, guards=guards)
    assert plan.pruned == by_ratio.pruned
    assert plan.realized_ratio == by_ratio.realized_ratio
    refined = cl.refine(plan, curvature)
    assert refined.realized_target is not None
    assert refined.realized_target <= left
    assert solve_greedy(curvature, Target(parameters=left)).prefix(0.0).made.target is None


def test_bytes_are_parameters_times_their_width() -> None:
    curvature = random_curvature(WHOLE)
    for dtype, item in (("bfloat16", 2), ("fp32", 4), (torch.float16, 2), ("float8_e4m3fn", 1)):
        plan = solve_greedy(curvature, Target(size=item * 150 + item - 1, dtype=dtype))
        assert plan.pruned == solve_greedy(curvature, Target(parameters=150)).pruned
        assert plan.realized_target == item * (200 - plan.pruned_cost)


def test_the_realized_size_is_that_of_the_pruned_model() -> None:
    model = tiny_model(tie_word_embeddings=True).to(torch.bfloat16)
    units = cl.enumerate_units(model, GROUPS)
    plan = solve_greedy(random_curvature(units), Target(size="60 kB", dtype=model.dtype))
    weights = cl.prune(model, plan).parameters()
    assert sum(p.numel() * p.element_size() for p in weights) == plan.realized_target <= 60_000


def test_llama_8b_at_six_billion() -> None:
    units = UnitSet(llama_8b_units().units, 16, total_parameters=8_030_261_248)
    curvature = random_curvature(units)
    plan = solve_greedy(curvature, Target(parameters="6B"))
    assert 6e9 - 11_010_048 < plan.realized_target <= 6e9
    assert "at most 6,000,000,000 parameters asked, 5,99" in repr(plan)
    same = solve_greedy(curvature, Target(size="12 GB", dtype="bf16"))
    assert same.pruned == plan.pruned
    assert "at most 12,000,000,000 bytes of weights in bfloat16 asked, 11,9" in repr(same)


def test_the_smallest_reachable_value_is_named() -> None:
    curvature = random_curvature(WHOLE)
    with pytest.raises(InfeasibleError) as caught:
        solve_greedy(curvature, Target(parameters="0.07k"))
    assert "71 parameters" in str(caught.value)
    assert caught.value.reachable_ratio == 1
    assert caught.value.requested_ratio == pytest.approx(130 / 129)
    assert len(solve_greedy(curvature, Target(parameters="0.071k"))) == 15


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
    for place in (0, len(units) - 1):
        smaller = cl.prune(model, Selection.from_pruned(units, [place]))
        assert counted(model) - counted(smaller) == 20 * costs[place]
    assert {units[place].kind for place in (0, len(units) - 1)} == {"attention", "ffn"}
    long = flop_costs(units, 2000) - costs
    assert not long[units.kinds == "ffn"].any()
    assert (long > 0)[units.kinds == "attention"].all()
    with pytest.raises(cl.InputError, match="context is 0"):
        flop_costs(units, 0)


# KV cache -----------------------------------------------------------------------------------------


def cached_bytes(model: Any) -> int:
    """Bytes that transformers caches per token, from the cache itself."""
    text = tiny_text(1, length=3)  # within every sliding window
    (cache,) = last_logits(model, text.input_ids, {})[1].values()
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values)]
    return sum(t.numel() * t.element_size() for t in tensors) // 3


@pytest.mark.parametrize(("family", "heads"), EVERY_FAMILY)
def test_kv_bytes_are_what_the_cache_holds(family: str, heads: str) -> None:
    model = tiny_model(family, heads)
    units = cl.enumerate_units(model, GROUPS)
    costs = kv_cache_costs(units, "float32")
    assert costs.sum() == cached_bytes(model)
    assert not costs[units.kinds == "ffn"].any()
    np.testing.assert_array_equal(2 * kv_cache_costs(units, "bf16"), costs)


def test_a_kv_budget_is_met_by_heads_alone() -> None:
    model = tiny_model("qwen2", "mha")
    units = cl.enumerate_units(model, GROUPS)  # 12 heads of 64 bytes
    curvature = random_curvature(units)
    target, guards = Target(kv_cache="0.4 KiB", dtype="float32"), Guards(layer_cap=0.75)
    plan = solve_greedy(curvature, target, guards=guards)
    assert {units[u].kind for u in plan.pruned} == {"attention"}
    assert plan.realized_target == 6 * 64 == cached_bytes(cl.prune(model, plan))
    # heads are all alike, so this is the greedy that counts heads: three of four per layer at most
    heads = np.where(units.kinds == "attention", 1, 0)
    half = Target(ratio=0.5, costs=heads)
    assert plan.pruned == solve_greedy(curvature, half, guards=guards).pruned
    assert list(plan.pruned) == naive_greedy(curvature, 0.5, guards=guards, costs=heads)
    with pytest.raises(InfeasibleError):
        solve_greedy(curvature, Target(kv_cache="0.1 KiB", dtype="float32"), guards=guards)


# Costs of one's own -------------------------------------------------------------------------------


@SETTINGS
@given(
    seed=st.integers(0, 10_000),
    share=st.floats(0, 0.9),
    strength=st.sampled_from([0.0, 0.5, 1.0]),
    cap=st.sampled_from([1.0, 0.5]),
    whole=st.booleans(),
)
def test_own_costs_replace_parameters_throughout(
    seed: int, share: float, strength: float, cap: float, whole: bool
) -> None:
    rng, curvature = np.random.default_rng(seed), random_curvature(WHOLE, seed)
    costs = rng.integers(0, 5, 15).astype(float) if whole else rng.uniform(0.1, 3, 15)
    costs[0] = max(costs[0], 1)
    guards = Guards(layer_cap=None if cap == 1 else cap)
    expected = naive_greedy(curvature, share, strength, guards, costs=costs)
    if expected is None:
        with pytest.raises(InfeasibleError):
            solve_greedy(curvature, Target(ratio=share, costs=costs), strength, guards)
        return
    plan = solve_greedy(curvature, Target(ratio=share, costs=costs.tolist()), strength, guards)
    assert plan.pruned == tuple(expected)
    gone = costs[list(plan.pruned)].sum() / costs.sum()
    assert plan.realized_target == pytest.approx(gone)
    # parameters are still parameters
    assert plan.realized_ratio == plan.requested_ratio == plan.pruned_cost / 129
    assert plan.pruned_cost == SMALL.costs[list(plan.pruned)].sum()


def test_an_included_unit_may_cost_nothing() -> None:
    costs = np.where(SMALL.kinds == "ffn", 0, 3)
    plan = solve_greedy(
        random_curvature(SMALL), Target(ratio=0.3, costs=costs), include=["L1.ffn[0]"]
    )
    assert plan.pruned[0] == SMALL.index("L1.ffn[0]")
    assert {SMALL[u].kind for u in plan.pruned[1:]} == {"attention"}


# What a targeted plan may not become --------------------------------------------------------------


def test_other_budgets_are_not_silently_dropped() -> None:
    curvature = random_curvature(SMALL)
    plan = solve_greedy(curvature, Target(ratio=0.3, costs=np.arange(1, 16)))
    explorer = LambdaExplorer(curvature, session=Session(curvature))
    shown = explorer.selection
    explorer.session.selection = plan
    assert "cannot make" in explorer.status
    assert explorer.selection is shown
    explorer.close()


@pytest.mark.parametrize(
    "target",
    [Target(parameters="0.15k"), Target(size="300 B", dtype=torch.bfloat16),
     Target(ratio=0.3, costs=np.arange(15) / 7)],
    ids=lambda target: target.goal,
)  # fmt: skip
def test_a_targeted_plan_survives_json(target: Target) -> None:
    plan = solve_greedy(random_curvature(WHOLE), target)
    again = Selection.from_json(plan.to_json())
    assert again.made.target == plan.made.target == target
    assert again.realized_target == plan.realized_target
    assert repr(again) == repr(plan)
