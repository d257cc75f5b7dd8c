"""Experts as units, and experts deleted by hand; tests/models has the contract of each family."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.solver.guards import reachable_ratio
from helpers.contract import SCORED, TEXT
from helpers.tiny_models import (
    EXPERT_FAMILIES,
    EXPERTS,
    GROUPS,
    MHA_ONLY,
    TOP_K,
    full_logits,
    routers,
    tiny_model,
    word_tokenizer,
    write_model,
)


def heads_of(family: str) -> str:
    return "mha" if family in MHA_ONLY else "gqa"


GONE = {0: (1, 4), 1: (0, 5), 2: (2, 3)}  # two experts of each layer


def plan_of(units: cl.UnitSet, gone: dict[int, Any] = GONE) -> cl.Selection:
    chosen = [
        i
        for i, unit in enumerate(units)
        if unit.kind == "expert" and unit.index in gone.get(unit.layer, ())
    ]
    return cl.Selection.from_pruned(units, chosen)


def deleted_by_hand(model: PreTrainedModel) -> PreTrainedModel:
    """The stock class with fewer experts, and the rows of those that stay."""
    config = copy.deepcopy(model.config)
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    name = next(n for n in names if n in config.to_dict())
    setattr(config, name, EXPERTS - 2)
    small = AutoModelForCausalLM.from_config(config).eval()
    mixed, weights = dict(routers(model)), {}
    for name, weight in model.state_dict().items():
        layer = int(name.split(".")[2]) if ".layers." in name else -1
        if layer in mixed and any(part in name for part in (".experts.", ".gate.", ".router.")):
            weight = weight[[e for e in range(EXPERTS) if e not in GONE[layer]]]
        weights[name] = weight
    small.load_state_dict(weights)
    return small


@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        *((family, "eager") for family in EXPERT_FAMILIES),
        *((family, "batched_mm") for family in ("qwen3_moe", "gpt_oss", "deepseek_v3")),
        *((family, "grouped_mm") for family in ("qwen2_moe", "gpt_oss", "granitemoe")),
    ],
)
def test_masked_is_pruned_is_deleted_by_hand(family: str, kernel: str) -> None:
    model = tiny_model(family, heads_of(family))
    model.set_experts_implementation(kernel)
    units = cl.enumerate_units(model, GROUPS)
    plan = plan_of(units)
    small = deleted_by_hand(model)
    small.set_experts_implementation(kernel)
    expected = full_logits(small, TEXT.input_ids)
    dense = full_logits(model, TEXT.input_ids)
    assert (expected - dense).abs().max() > 0.05
    with cl.ablate(model, plan):
        masked = full_logits(model, TEXT.input_ids)
    assert (masked - expected).abs().max() < 1e-5
    pruned = cl.prune(model, plan, verify=TEXT)
    assert (full_logits(pruned, TEXT.input_ids) - expected).abs().max() < 1e-5
    assert torch.equal(full_logits(model, TEXT.input_ids), dense)  # nothing of the mask is left
    kernels = [
        m.config for m in pruned.modules() if hasattr(m, "down_proj") and hasattr(m, "has_gate")
    ]
    assert len(kernels) == len(dict(routers(model)))
    assert all(config is pruned.config for config in kernels)
    assert model.num_parameters() - pruned.num_parameters() == plan.pruned_cost


@pytest.mark.parametrize(
    ("family", "gone"),
    [
        *((family, GONE) for family in EXPERT_FAMILIES),
        *((family, {0: (1,), 1: (0, 3, 5)}) for family in ("qwen3_moe", "mixtral", "deepseek_v3")),
    ],
)
def test_plain_transformers_loads_what_was_saved(family: str, gone: Any, tmp_path: Path) -> None:
    model = tiny_model(family, heads_of(family))
    pruned = cl.prune(model, plan_of(cl.enumerate_units(model, GROUPS), gone))
    cl.save_pruned(pruned, tmp_path / "small")
    stock = gone is GONE
    ours = cl.load_pruned(tmp_path / "small", device="cpu")
    assert ours.cocurve_manifest["loads_with"] == ("stock" if stock else "own code")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small", trust_remote_code=not stock)
    assert type(again).__name__ == ("" if stock else "Cocurve") + type(model).__name__
    expected = full_logits(pruned, TEXT.input_ids)
    for loaded in (ours, again):
        assert (full_logits(loaded, TEXT.input_ids) - expected).abs().max() < 1e-5
    assert cl.enumerate_units(ours, GROUPS) == cl.enumerate_units(pruned, GROUPS)


def test_h_under_a_mask_is_that_of_the_pruned_model() -> None:
    model = tiny_model("qwen3_moe")
    units = cl.enumerate_units(model, GROUPS)
    plan = plan_of(units, {0: (1,), 1: (0, 5)})
    pruned = cl.prune(model, plan)
    own = cl.enumerate_units(pruned, GROUPS)
    found = cl.estimate_curvature(pruned, own, SCORED, 32, progress=False).matrix
    with cl.ablate(model, plan):
        whole = cl.estimate_curvature(model, units, SCORED, 32, progress=False).matrix
    expected = whole[np.ix_(plan.kept, plan.kept)]
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_half_precision_is_checked_layer_by_layer() -> None:
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    plan = plan_of(cl.enumerate_units(model, GROUPS))
    assert cl.check_equivalence(model, cl.prune(model, plan), plan, TEXT).max_abs_difference < 1e-5


# Plans --------------------------------------------------------------------------------------------


def random_h(units: cl.UnitSet, seed: int = 0) -> cl.Curvature:
    root = np.random.default_rng(seed).normal(size=(len(units), len(units) + 8))
    return cl.Curvature(root @ root.T / len(units), units)


def left(plan: cl.Selection) -> list[int]:
    """Experts left in each layer."""
    kept = [plan.units[i] for i in plan.kept]
    layers = range(plan.units.num_layers)
    return [sum((u.layer, u.kind) == (n, "expert") for u in kept) for n in layers]


def test_a_plan_leaves_each_router_its_experts() -> None:
    units = cl.enumerate_units(tiny_model("qwen3_moe"), GROUPS)
    assert units.least == TOP_K
    assert cl.UnitSet.from_plain(units.to_plain()).least == TOP_K
    curvature, only = random_h(units), cl.Guards(kinds=("expert",))
    most = reachable_ratio(units, only, 0.5)
    assert most == 3 * (EXPERTS - TOP_K) * units[-1].cost / units.total_cost
    for uniform in ((), ("expert",)):
        plan = cl.solve_greedy(curvature, most, guards=only, uniform=uniform)
        assert left(plan) == [TOP_K] * 3
        with pytest.raises(cl.InfeasibleError):
            cl.solve_greedy(curvature, most + 0.01, guards=only, uniform=uniform)
    for segment in cl.lambda_path(curvature, 0.6).segments:
        assert min(left(segment.selection)) >= TOP_K
    scored = cl.get_method("random")
    evidence = scored.measure(tiny_model("qwen3_moe"), units, TEXT, progress=False)
    assert min(left(scored.select(evidence, units, 0.6))) >= TOP_K


def test_equal_counts_are_the_default_for_experts() -> None:
    units = cl.enumerate_units(tiny_model("qwen3_moe+dense"), GROUPS)
    curvature = random_h(units)
    for ratio in (0.1, 0.3, 0.5):
        plan = cl.solve_greedy(curvature, ratio)
        counts = left(plan)
        assert counts == [counts[0], 0, counts[0]], ratio
        assert plan.realized_ratio >= ratio
    assert cl.Selection.from_json(plan.to_json()).made.uniform == ("expert",)
    free = cl.solve_greedy(curvature, 0.3, uniform=())
    assert len(set(left(free)) - {0}) == 2
    included = [i for i, u in enumerate(units) if (u.layer, u.kind) == (0, "expert")][:2]
    plan = cl.solve_greedy(curvature, 0.01, include=included)
    assert left(plan) == [EXPERTS - 2, 0, EXPERTS - 2]


# What is refused ----------------------------------------------------------------------------------


def test_too_few_experts_are_refused_before_anything_runs() -> None:
    model = tiny_model("qwen3_moe")
    units = cl.enumerate_units(model, GROUPS)
    plan = plan_of(units, {1: range(5)})
    for use in (
        lambda: cl.pruning_risk(model, plan, TEXT),
        lambda: cl.prune(model, plan),
        lambda: cl.solve_greedy(random_h(units), 0.5, include=plan.pruned),
    ):
        with pytest.raises(cl.InputError):
            use()


def test_groups_of_experts_and_unknown_routers_are_refused() -> None:
    strange = tiny_model("qwen3_moe")
    scale = torch.nn.Parameter(torch.ones(3), requires_grad=False)
    strange.model.layers[1].mlp.gate.register_parameter("scale", scale)
    for model in (strange, tiny_model("deepseek_v3", "mha", n_group=2, topk_group=1)):
        with pytest.raises(cl.ArchitectureError):
            cl.enumerate_units(model)


def test_roads_that_need_columns_or_whole_tensors_are_refused(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    plan = plan_of(cl.enumerate_units(model, GROUPS))
    for call in (
        lambda: cl.repair(model, plan, TEXT),
        lambda: cl.prune(model, plan, out=tmp_path / "small"),
        lambda: cl.export_gguf(model, word_tokenizer(), tmp_path / "small.gguf"),
    ):
        with pytest.raises(cl.ArchitectureError):
            call()
    write_model(tmp_path / "dense", model)
    with pytest.raises(cl.ArchitectureError):
        cl.load_model(tmp_path / "dense", stream=True)
    loaded = cl.load_model(tmp_path / "dense", device="cpu")[0]
    assert cl.enumerate_units(loaded) == cl.enumerate_units(model)


def test_a_saved_mixture_streams(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    pruned = cl.prune(model, plan_of(cl.enumerate_units(model, GROUPS), {1: (0, 5)}))
    cl.save_pruned(pruned, tmp_path / "small")
    streamed = cl.load_pruned(tmp_path / "small", device="cpu", stream=True)
    units = cl.enumerate_units(pruned, GROUPS)
    found, expected = (
        cl.estimate_curvature(m, units, SCORED, 32, progress=False).matrix
        for m in (streamed, pruned)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-7)


def test_a_file_without_an_expert_is_refused(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    cl.save_pruned(cl.prune(model, plan_of(cl.enumerate_units(model, GROUPS))), tmp_path / "small")
    file = tmp_path / "small" / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(cl.FileFormatError):
        cl.load_pruned(tmp_path / "small", device="cpu")


# The mixture of experts that ships ----------------------------------------------------------------


def test_the_mixture_is_trained_and_cut_as_it_is_masked() -> None:
    model, tokenizer = cl.load_model("mixture")
    _, text = cl.default_calibration("mixture", tokenizer, 16, 8)
    losses = [float(model(ids[None], labels=ids[None]).loss) for ids in text.input_ids]
    assert sum(losses) / len(losses) < 2.3  # an untrained one has 8.3, the demo model 1.8
    units = cl.enumerate_units(model)
    assert list(units.kinds).count("expert") == 64
    plan = cl.Selection.from_pruned(units, ["L0.expert[3]"])
    cl.check_equivalence(model, cl.prune(model, plan), plan, text)
