"""LLM-Pruner, SlimGPT, SlimLLM and 2SSP against their formulas computed the slow way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.methods.base import Evidence, Method
from cocurve_lab.methods.llm_pruner import LlmPruner
from cocurve_lab.methods.slimgpt import SlimGpt, incremental_weights, refit
from cocurve_lab.methods.slimllm import SlimLlm
from cocurve_lab.methods.two_ssp import TwoSsp, num_attention_blocks
from helpers.activations import TEXT, model_of, output_weight, seen
from helpers.problems import llama_8b_units, make_units
from helpers.tiny_models import (
    GROUPS,
    Columns,
    full_logits,
    masked_by_hand,
    tiny_double,
    units_by_hand,
)

LAYERS = 3


PAIRS = [("llama", "gqa"), ("mistral", "mqa"), ("qwen2", "mha"), ("phi3", "gqa")]


every_model = pytest.mark.parametrize(("family", "heads"), PAIRS)


def measure(method: Method, model: PreTrainedModel, text: cl.CalibrationSet = TEXT) -> Evidence:
    return method.measure(model, cl.enumerate_units(model, GROUPS), text, progress=False)


def planted(units: cl.UnitSet, method: Method, **arrays: Any) -> Evidence:
    return Evidence(method.name, units, {k: np.asarray(v) for k, v in arrays.items()})


def blocks_by_hand(model: PreTrainedModel) -> Iterator[tuple[int, str, list[int], list[Columns]]]:
    """(layer, kind, unit numbers, their columns) of every block."""
    everything = units_by_hand(model)
    for layer in range(LAYERS):
        for kind in ("attention", "ffn"):
            numbers = [n for n, u in enumerate(everything) if (u.layer, u.kind) == (layer, kind)]
            yield layer, kind, numbers, [everything[n] for n in numbers]


# LLM-Pruner ---------------------------------------------------------------------------------------


def unit_entries(model: PreTrainedModel, unit: Columns) -> list[tuple[Any, list[int] | slice, Any]]:
    """(weight, rows, columns) of everything that goes with a unit, from the configuration."""
    config, layer, every = model.config, model.model.layers[unit.layer], slice(None)
    channels = list(range(unit.start, unit.stop))
    if unit.kind == "ffn":
        entries: list[Any] = [(layer.mlp.down_proj.weight, every, channels)]
        if hasattr(layer.mlp, "gate_up_proj"):
            up = [config.intermediate_size + c for c in channels]
            return [*entries, (layer.mlp.gate_up_proj.weight, channels + up, every)]
        return [
            *entries,
            (layer.mlp.gate_proj.weight, channels, every),
            (layer.mlp.up_proj.weight, channels, every),
        ]
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    group = unit.start // (head_dim * heads // groups)
    shared = [group * head_dim + c for c in range(head_dim)]
    entries = [(layer.self_attn.o_proj.weight, every, channels)]
    if hasattr(layer.self_attn, "qkv_proj"):
        keys = [heads * head_dim + r for r in shared]
        values = [(heads + groups) * head_dim + r for r in shared]
        return [*entries, (layer.self_attn.qkv_proj.weight, channels + keys + values, every)]
    return [
        *entries,
        (layer.self_attn.q_proj.weight, channels, every),
        (layer.self_attn.k_proj.weight, shared, every),
        (layer.self_attn.v_proj.weight, shared, every),
    ]


def naive_taylor(model: PreTrainedModel, taylor: str) -> np.ndarray:
    """Importance [M] from the gradient of every row, all weights at once, in float64."""
    wide = tiny_double(model).requires_grad_(True)
    gradients: list[dict[int, Tensor]] = []
    for ids in TEXT.input_ids:
        wide.zero_grad()
        log_p = torch.log_softmax(wide(input_ids=ids[None]).logits[0, :-1], dim=-1)
        (-log_p[torch.arange(len(ids) - 1), ids[1:]].mean()).backward()
        gradients.append({id(p): p.grad.clone() for p in wide.parameters()})
    scores = []
    for unit in units_by_hand(wide):
        score = 0.0
        for weight, rows, columns in unit_entries(wide, unit):
            stacked = torch.stack([g[id(weight)] for g in gradients])
            first = weight * stacked.mean(dim=0)
            second = weight**2 * stacked.square().mean(dim=0)
            formulas = {
                "param_first": first,
                "param_second": second,
                "param_mix": first - second / 2,
            }
            score += float(formulas[taylor].detach().abs()[rows][:, columns].sum())
        scores.append(score)
    return np.array(scores)


@pytest.mark.parametrize(
    ("family", "heads", "taylor"),
    [
        *((*pair, "param_mix") for pair in PAIRS),
        *(("qwen2", "gqa", f"param_{n}") for n in ("first", "second")),
    ],
)
def test_llm_pruner_scores_every_weight_of_a_unit(family: str, heads: str, taylor: Any) -> None:
    model = model_of(family, heads)
    found = measure(LlmPruner(taylor=taylor), model).scores
    np.testing.assert_allclose(found, naive_taylor(model, taylor), rtol=1e-4)


@pytest.mark.parametrize("method", [LlmPruner, SlimGpt, SlimLlm])
def test_layers_may_be_measured_in_any_portions(method: Any) -> None:
    model = model_of("llama", "gqa")
    first, *others = (measure(method(layers_per_pass=n), model).arrays for n in (1, 2, 3))
    for other in others:
        for name, array in first.items():
            np.testing.assert_allclose(other[name], array, rtol=1e-10)


# SlimGPT ------------------------------------------------------------------------------------------


def naive_obs(
    inputs: np.ndarray, weight: np.ndarray, groups: list[list[int]], downdate: bool
) -> tuple[list[int], np.ndarray]:
    """Greedy order and scores; H restricted to the columns left is inverted anew every time."""
    h = inputs.T @ inputs / len(inputs)
    h = h + 0.01 * np.diag(h).mean() * np.eye(len(h))

    def error(group: list[int], gone: list[int]) -> float:
        total = 0.0
        for place, column in enumerate(group):  # d_p: 1/H^-1 with the columns before p gone as well
            left = [c for c in range(len(h)) if c not in gone and c not in group[:place]]
            inverse = np.linalg.inv(h[np.ix_(left, left)])
            where = left.index(column)
            total += float((weight[:, column] ** 2).sum() / inverse[where, where])
        return total

    scores, order, gone = np.zeros(len(groups)), [], []
    for _ in groups:
        left = [g for g in range(len(groups)) if g not in order]
        errors = [error(groups[g], gone if downdate else []) for g in left]
        chosen = left[int(np.argmin(errors))]
        scores[chosen] = min(errors)
        order.append(chosen)
        gone += groups[chosen]
    return order, scores


@every_model
@pytest.mark.parametrize("downdate", [True, False])
def test_slimgpt_removes_greedily_by_obs_error(family: str, heads: str, downdate: bool) -> None:
    model = model_of(family, heads)
    found = measure(SlimGpt(downdate=downdate), model).scores
    for layer, kind, numbers, units in blocks_by_hand(model):
        inputs = seen(family, heads).tokens(layer, kind)
        groups = [list(range(u.start, u.stop)) for u in units]
        weight = output_weight(model, layer, kind)
        order, expected = naive_obs(inputs, weight, groups, downdate)
        np.testing.assert_allclose(found[numbers], expected, rtol=1e-3)
        assert np.argsort(found[numbers], kind="stable").tolist() == order


def test_repair_at_damping_zero_is_the_least_squares_fit_of_the_columns_left() -> None:
    model, method = model_of("mistral", "gqa"), SlimGpt(damping=0, reconstruct=True)
    evidence = measure(method, model)
    plan = method.select(evidence, evidence.units, 0.4)
    repaired, cut = method.repair(model, plan, evidence), cl.prune(model, plan)
    changed = 0
    for layer, kind, numbers, units in blocks_by_hand(model):
        left = [u for n, u in zip(numbers, units, strict=True) if not plan.indicator[n]]
        kept = [c for u in left for c in range(u.start, u.stop)]
        inputs = seen("mistral", "gqa").tokens(layer, kind)
        weight = output_weight(model, layer, kind)
        fit = np.linalg.lstsq(inputs[:, kept], inputs @ weight.T, rcond=None)[0].T
        np.testing.assert_allclose(output_weight(repaired, layer, kind), fit, atol=1e-3)
        changed += not np.allclose(fit, output_weight(cut, layer, kind), atol=1e-2)
    assert changed >= LAYERS


def test_refit_is_the_obs_update_of_the_paper() -> None:
    rng = np.random.default_rng(0)
    inputs, weight = rng.normal(size=(50, 9)), rng.normal(size=(4, 9))
    gone, kept = [1, 2, 6], [0, 3, 4, 5, 7, 8]
    moments = inputs.T @ inputs / 50
    h = moments + 0.1 * np.diag(moments).mean() * np.eye(9)
    inverse = np.linalg.inv(h)
    step = np.linalg.inv(inverse[np.ix_(gone, gone)]) @ inverse[np.ix_(gone, kept)]
    expected = weight[:, kept] - weight[:, gone] @ step
    found = refit(torch.tensor(weight), torch.tensor(moments), torch.tensor(kept), 0.1)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9)


def test_only_reconstruct_repairs_and_the_plan_is_the_same() -> None:
    model = model_of("mistral", "gqa")
    plain, whole = cl.get_method("slimgpt"), cl.get_method("slimgpt", reconstruct=True)
    without, with_moments = measure(plain, model), measure(whole, model)
    units = without.units
    plan = plain.select(without, units, 0.3)
    assert whole.select(with_moments, units, 0.3).pruned == plan.pruned
    cl.check_equivalence(model, plain.repair(model, plan, without), plan, TEXT)
    with pytest.raises(cl.MismatchError):
        whole.repair(model, plan, without)
    kept_ffn = next(i for i in plan.kept if units.kinds[i] == "ffn")
    with pytest.raises(cl.InputError):
        whole.repair(model, plan.with_gains({kept_ffn: 1.1}), with_moments)


def test_slimgpt_takes_more_of_later_layers() -> None:
    units = make_units(4, attention=10, ffn=10, attention_cost=10, ffn_cost=10)
    by_layer = [0.5 + 0.5 * math.log(i + 1) / math.log(4) for i in range(4)]
    np.testing.assert_allclose(incremental_weights(units, 0.5, 1.0), np.repeat(by_layer, 20))
    scores = np.tile(np.arange(10.0), 8)
    # shares 0.5, 0.75, 0.896 and 1 of half a block: 2.5, 3.75, 4.5 and 5 of ten
    rising = ([0.25, 0.375, 0.45, 0.5], 0.06)
    for method, ratio, (budget, error) in (
        (SlimGpt(), 0.388, rising),
        (SlimGpt(first=1, last=1), 0.3, ([0.3] * 4, 1e-9)),
    ):
        plan = method.select(planted(units, method, scores=scores), units, ratio)
        for kind in ("attention", "ffn"):
            np.testing.assert_allclose(plan.layer_budget()[kind], budget, atol=error)


# SlimLLM ------------------------------------------------------------------------------------------


def group_outputs(family: str, heads: str, layer: int, units: list[Columns]) -> np.ndarray:
    """o_g of every group [G, tokens, d]."""
    weight = output_weight(model_of(family, heads), layer, "attention")
    inputs = seen(family, heads).tokens(layer, "attention")
    return np.stack([inputs[:, u.start : u.stop] @ weight[:, u.start : u.stop].T for u in units])


def naive_similarity(part: np.ndarray, whole: np.ndarray) -> float:
    """Sum over output dimensions of |Pearson| of two [tokens, d]."""
    return sum(abs(np.corrcoef(part[:, i], whole[:, i])[0, 1]) for i in range(whole.shape[1]))


def naive_ffn(family: str, heads: str, layer: int) -> np.ndarray:
    """s_j of every channel, one by one."""
    mlp, saw = model_of(family, heads).model.layers[layer].mlp, seen(family, heads)
    if hasattr(mlp, "gate_up_proj"):
        gate, up = mlp.gate_up_proj.weight.detach().double().numpy().reshape(2, -1, 32)
    else:
        gate, up = (m.weight.detach().double().numpy() for m in (mlp.gate_proj, mlp.up_proj))
    size = saw.ffn_in[layer].flatten(0, 1).square().mean(dim=0).sqrt().numpy()
    active = np.sqrt((saw.tokens(layer, "ffn") ** 2).mean(axis=0))
    values, vectors = np.linalg.eigh(np.cov(saw.ffn_out[layer].flatten(0, 1).numpy().T, bias=True))
    importance = 1 / (1 + np.exp(-np.abs(values) / np.abs(values).mean()))
    down = output_weight(model_of(family, heads), layer, "ffn")
    return np.array(
        [
            np.linalg.norm(gate[j] * size)
            + np.linalg.norm(up[j] * size)
            + np.linalg.norm(np.abs(down[:, j] @ vectors) * importance) * active[j]
            for j in range(len(gate))
        ]
    )


@every_model
def test_slimllm_scores_and_cosines(family: str, heads: str) -> None:
    model, saw = model_of(family, heads), seen(family, heads)
    evidence = measure(SlimLlm(), model)
    for layer, kind, numbers, units in blocks_by_hand(model):
        if kind == "ffn":
            channels = naive_ffn(family, heads, layer)
            expected = [channels[u.start : u.stop].sum() for u in units]
        else:
            outputs = group_outputs(family, heads, layer, units)
            whole = outputs.sum(axis=0)
            # of a single group nothing is left to correlate with
            left = [naive_similarity(whole - o, whole) if len(outputs) > 1 else 0 for o in outputs]
            expected = 32.0 - np.array(left)
        np.testing.assert_allclose(evidence.scores[numbers], expected, rtol=2e-4)
    for layer, cosine in enumerate(evidence.arrays["cosine"]):
        before, after = saw.layer_in[layer], saw.layer_out[layer]
        # a token whose embedding is zero has cosine 0
        assert cosine == pytest.approx(
            float(torch.cosine_similarity(before, after, dim=-1).mean()), rel=1e-4
        )


def test_swapped_sets_are_as_large_as_asked_and_no_swap_improves_them() -> None:
    model = model_of("llama", "mha")
    swapped = measure(SlimLlm(), model).arrays["swapped"]
    for layer, kind, numbers, units in blocks_by_hand(model):
        if kind == "ffn":
            assert not swapped[:, numbers].any()
            continue
        outputs = group_outputs("llama", "mha", layer, units)

        def quality(lost: list[int], outputs: np.ndarray = outputs) -> float:
            left = [g for g in range(4) if g not in lost]
            return naive_similarity(outputs[left].sum(axis=0), outputs.sum(axis=0))

        for count in range(1, 4):
            gone = np.flatnonzero(swapped[count, numbers]).tolist()
            assert len(gone) == count
            near = [s for s in combinations(range(4), count) if len({*s} - {*gone}) == 1]
            assert max(quality(list(other)) for other in near) <= quality(gone) + 1e-3


def test_slimllm_takes_more_of_layers_that_change_little() -> None:
    """Three layers of 4 + 4 units of cost 10; the lowest index scores lowest, swaps reverse it."""
    units = make_units(3, attention=4, ffn=4, attention_cost=10, ffn_cost=10)
    swapped = np.zeros((5, 24), dtype=bool)
    for layer in range(3):
        for count in range(5):
            swapped[count, 8 * layer + 4 - count : 8 * layer + 4] = True
    arrays = {"scores": np.tile(np.arange(4.0), 6), "swapped": swapped, "cosine": [0.0, 1.0, 0.0]}
    plain, swaps = (SlimLlm(alpha=math.log(3), swaps=s) for s in (False, True))  # shares 1 to 3
    plan, other = (
        method.select(planted(units, method, **arrays), units, 10 / 24) for method in (plain, swaps)
    )
    assert [int(x * 8) for x in plan.layer_budget()["ffn"]] == [2, 6, 2]
    assert (plan.ordered, other.ordered) == (True, False)
    assert other.pruned_cost == plan.pruned_cost
    assert [set(p.pruned) & {0, 1, 2, 3} for p in (plan, other)] == [{0}, {3}]
    ffn = set(np.flatnonzero(units.kinds == "ffn"))
    assert set(plan.pruned) & ffn == set(other.pruned) & ffn


# 2SSP ---------------------------------------------------------------------------------------------


def naive_nll(model: PreTrainedModel, units: list[Columns]) -> float:
    ids = TEXT.input_ids[:1]
    with masked_by_hand(model, units):
        log_p = torch.log_softmax(full_logits(model, ids)[0, :-1], dim=-1)
    return -float(log_p[torch.arange(ids.shape[1] - 1), ids[0, 1:]].mean())


def naive_removals(model: PreTrainedModel) -> tuple[list[int], list[float]]:
    """Greedy order of attention blocks on the first row, one pass per candidate."""
    attention = [u for u in units_by_hand(model) if u.kind == "attention"]
    order: list[int] = []
    reached: list[float] = []
    while len(order) < LAYERS:
        found = {
            layer: naive_nll(model, [u for u in attention if u.layer in [*order, layer]])
            for layer in range(LAYERS)
            if layer not in order
        }
        order.append(min(found, key=lambda layer: found[layer]))
        reached.append(found[order[-1]])
    return order, reached


@every_model
def test_2ssp_norms_and_removal_order(family: str, heads: str) -> None:
    model = model_of(family, heads)
    evidence = measure(TwoSsp(), model)
    for layer, kind, numbers, units in blocks_by_hand(model):
        if kind == "ffn":
            rows = seen(family, heads).columns[layer, kind].numpy()  # [rows, T, f]
            norms = np.mean([np.linalg.norm(row, axis=0) for row in rows], axis=0)
            expected = [np.linalg.norm(norms[u.start : u.stop]) for u in units]
            np.testing.assert_allclose(evidence.scores[numbers], expected, rtol=1e-4)
    order, nll = naive_removals(model)
    assert evidence.arrays["removal_order"].tolist() == order
    np.testing.assert_allclose(evidence.arrays["nll"], nll, rtol=1e-4)


LLAMA_8B = llama_8b_units()
LLAMA_3B = make_units(28, 8, 16, attention_cost=3_145_728, ffn_cost=4_718_592)


@pytest.mark.parametrize(
    ("units", "counts"), [(LLAMA_8B, [0, 0, 1, 2, 5]), (LLAMA_3B, [0, 1, 3, 4, 7])]
)
def test_2ssp_attention_blocks_at_each_ratio(units: cl.UnitSet, counts: list[int]) -> None:
    ratios = [0.1, 0.2, 0.3, 0.4, 0.5]
    assert [num_attention_blocks(units, r, cl.Guards(), 1.5) for r in ratios] == counts


def test_2ssp_never_overshoots_with_attention_and_obeys_kinds() -> None:
    units = make_units(4, attention=2, ffn=4, attention_cost=40, ffn_cost=5)  # P_ffn/P_attn = 1/4
    scores = np.tile([0.0, 0, 1, 2, 3, 4], 4)
    evidence = planted(units, TwoSsp(), scores=scores, removal_order=[2, 0, 1, 3], nll=np.zeros(4))
    assert num_attention_blocks(units, 0.2, cl.Guards(), 1.5) == 3  # 240 of 400, asked for 80
    attention = {"L2.attention[0]", "L2.attention[1]"}
    for ratio, more in ((0.2, set()), (0.25, {f"L{i}.ffn[0]" for i in range(4)})):
        # a second block is too dear at 0.25: FFN makes up 20
        plan = TwoSsp().select(evidence, units, ratio)
        assert {units.units[i].name for i in plan.pruned} == attention | more
    plan = TwoSsp().select(evidence, units, 0.15, cl.Guards(kinds=("ffn",)))
    assert set(units.kinds[list(plan.pruned)]) == {"ffn"}
    plan = TwoSsp().select(evidence, units, 0.5, cl.Guards(kinds=("attention",)))
    np.testing.assert_array_equal(plan.layer_budget()["attention"], [1, 0.5, 1, 0])
