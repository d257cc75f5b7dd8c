"""Scores of the methods against their formulas computed the slow way, over full activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.methods.base import Evidence, Method
from cocurve_lab.methods.cocurve import CoCurve, curvature_of
from cocurve_lab.methods.inputs import collect_statistics
from cocurve_lab.methods.llm_pruner import LlmPruner
from cocurve_lab.methods.registry import method_names
from cocurve_lab.methods.slimgpt import SlimGpt, incremental_weights
from cocurve_lab.methods.slimllm import SlimLlm
from cocurve_lab.methods.two_ssp import TwoSsp, num_attention_blocks
from helpers.builds import require_same_bits
from helpers.contract import logit_difference
from helpers.problems import llama_8b_units, make_units, naive_greedy, random_curvature
from helpers.tiny_models import (
    EXPERTS,
    GROUPS,
    TOP_K,
    Columns,
    full_logits,
    masked_by_hand,
    route_by_hand,
    routers,
    tiny_double,
    tiny_model,
    tiny_text,
    units_by_hand,
)

TEXT = tiny_text(rows=4, length=24)


class Seen(NamedTuple):
    """What every layer saw, rows and tokens apart [rows, T, .], float64."""

    columns: dict[tuple[int, str], Tensor]  # inputs of W_O and W_down
    ffn_in: dict[int, Tensor]
    ffn_out: dict[int, Tensor]
    layer_in: dict[int, Tensor]
    layer_out: dict[int, Tensor]

    def tokens(self, layer: int, kind: str) -> np.ndarray:
        """The inputs of an output projection [rows x T, W]."""
        flat: np.ndarray = self.columns[layer, kind].flatten(0, 1).numpy()
        return flat


@lru_cache
def model_of(family: str, heads: str) -> PreTrainedModel:
    return tiny_model(family, heads)


@lru_cache
def seen(family: str, heads: str) -> Seen:
    """Full activations of a float64 copy of `model_of` on TEXT."""
    wide = tiny_double(model_of(family, heads))
    found = Seen({}, {}, {}, {}, {})

    def keep(into: dict[Any, Tensor], key: Any, what: str) -> Any:
        def hook(_: Any, args: Any, output: Any) -> None:
            value = args[0] if what == "in" else output
            into[key] = (value[0] if isinstance(value, tuple) else value).detach()

        return hook

    for number, layer in enumerate(wide.model.layers):
        attention = keep(found.columns, (number, "attention"), "in")
        layer.self_attn.o_proj.register_forward_hook(attention)
        layer.mlp.down_proj.register_forward_hook(keep(found.columns, (number, "ffn"), "in"))
        layer.mlp.register_forward_hook(keep(found.ffn_in, number, "in"))
        layer.mlp.register_forward_hook(keep(found.ffn_out, number, "out"))
        layer.register_forward_hook(keep(found.layer_in, number, "in"))
        layer.register_forward_hook(keep(found.layer_out, number, "out"))
    full_logits(wide, TEXT.input_ids)
    return found


def output_weight(model: PreTrainedModel, layer: int, kind: str) -> np.ndarray:
    """W_O or W_down [d, W], float64."""
    block = model.model.layers[layer]
    module = block.self_attn.o_proj if kind == "attention" else block.mlp.down_proj
    weight: np.ndarray = module.weight.detach().double().numpy()
    return weight


# Scores of the methods against their formulas computed the slow way, over full activations --------


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


def test_repair_is_the_obs_update_of_the_columns_left() -> None:
    """By blocks of the damped H: W_kept + W_gone H_gk H_kk^-1, which is eq. 3 of OBS."""
    model, method = model_of("mistral", "gqa"), SlimGpt(damping=0.1, reconstruct=True)
    evidence = measure(method, model)
    plan = method.select(evidence, evidence.units, 0.4)
    repaired, cut = method.repair(model, plan, evidence), cl.prune(model, plan)
    changed = 0
    for layer, kind, numbers, units in blocks_by_hand(model):
        left = [u for n, u in zip(numbers, units, strict=True) if not plan.indicator[n]]
        kept = [c for u in left for c in range(u.start, u.stop)]
        inputs = seen("mistral", "gqa").tokens(layer, kind)
        weight = output_weight(model, layer, kind)
        gone = [c for c in range(weight.shape[1]) if c not in kept]
        h = inputs.T @ inputs
        h = h + 0.1 * np.diag(h).mean() * np.eye(len(h))
        step = h[np.ix_(gone, kept)] @ np.linalg.inv(h[np.ix_(kept, kept)])
        fit = weight[:, kept] + weight[:, gone] @ step
        np.testing.assert_allclose(output_weight(repaired, layer, kind), fit, atol=1e-4)
        changed += not np.allclose(fit, output_weight(cut, layer, kind), atol=1e-2)
    assert changed >= LAYERS
    plain = SlimGpt()
    without = measure(plain, model)
    assert plain.select(without, without.units, 0.4).pruned == plan.pruned
    with pytest.raises(cl.MismatchError):
        method.repair(model, plan, without)
    kept_ffn = next(i for i in plan.kept if plan.units.kinds[i] == "ffn")
    with pytest.raises(cl.InputError):
        method.repair(model, plan.with_gains({kept_ffn: 1.1}), evidence)


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


# Magnitude, Wanda-sp, FLAP, AMP, CoCurve


@every_model
def test_magnitude_and_wanda_are_norms_of_columns(family: str, heads: str) -> None:
    def wanda(x: np.ndarray, w: np.ndarray) -> float:
        energy = np.mean([(row**2).sum() for row in x])
        return float(np.abs(w).mean() * np.sqrt(energy))

    columns = {"magnitude": lambda _, w: float(np.sqrt((w**2).sum())), "wanda-sp": wanda}
    for name, column in columns.items():
        found = scores_of(cl.get_method(name), model_of(family, heads))
        np.testing.assert_allclose(found, naive_scores(family, heads, column), rtol=1e-4)


def scores_of(method: Method, model: PreTrainedModel, seed: int = 0) -> np.ndarray:
    units = cl.enumerate_units(model, GROUPS)
    return method.measure(model, units, tiny_text(), seed=seed, progress=False).scores


def naive_scores(
    family: str, heads: str, column: Callable[[np.ndarray, np.ndarray], float]
) -> np.ndarray:
    """Sum over each unit's columns j of column(X_j [N, T], W_:j [d])."""
    model, scores = model_of(family, heads), []
    for unit in units_by_hand(model):
        x = seen(family, heads).columns[unit.layer, unit.kind].numpy()
        weight = output_weight(model, unit.layer, unit.kind)
        scores.append(sum(column(x[..., j], weight[:, j]) for j in range(unit.start, unit.stop)))
    return np.array(scores)


# Scores -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "heads", "metric"),
    [(*case, "wifv") for case in PAIRS] + [("qwen2", "gqa", "ifv"), ("phi3", "mha", "wifn")],
)
def test_flap_standardizes_fluctuation_by_block(family: str, heads: str, metric: str) -> None:
    model, saw = model_of(family, heads), seen(family, heads)
    units, expected = units_by_hand(model), []
    for unit in units:
        x, weight = saw.tokens(unit.layer, unit.kind), output_weight(model, unit.layer, unit.kind)
        columns = {
            "wifv": np.var(x, axis=0) * (weight**2).sum(axis=0),
            "ifv": np.var(x, axis=0),
            "wifn": np.abs(weight).mean(axis=0) * np.sqrt((x**2).sum(axis=0)),
        }[metric]
        columns = columns**2 if unit.kind == "attention" else columns
        z = (columns - np.mean(columns)) / np.std(columns)
        expected.append(z[unit.start : unit.stop].mean())
    found = scores_of(cl.get_method("flap", metric=metric), model)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
    if heads == "mqa":  # one unit per block: ties must not be broken by rounding
        assert [found[i] for i, u in enumerate(units) if u.kind == "attention"] == [0.0] * 3


@every_model
def test_amp_sums_head_outputs_and_activations(family: str, heads: str) -> None:
    model, saw = model_of(family, heads), seen(family, heads)
    size = 12 if family == "mistral" else model.config.hidden_size // 4
    expected = []
    for unit in units_by_hand(model):
        tokens = saw.tokens(unit.layer, unit.kind)
        weight = output_weight(model, unit.layer, unit.kind)
        if unit.kind == "attention":
            starts = range(unit.start, unit.stop, size)
            outputs = [tokens[:, s : s + size] @ weight[:, s : s + size].T for s in starts]
            expected.append(sum(np.abs(output).sum(axis=1).mean() for output in outputs))
        else:
            expected.append(np.abs(tokens[:, unit.start : unit.stop]).mean(axis=0).sum())
    np.testing.assert_allclose(scores_of(cl.get_method("amp"), model), expected, rtol=1e-4)


def test_random_draws_by_its_seed_alone() -> None:
    model, method = tiny_model(layers=1), cl.get_method("random")
    draws = np.array([scores_of(method, model, seed=seed) for seed in range(40)])
    assert len(np.unique(draws)) == draws.size
    assert 0 <= draws.min() < draws.max() < 1
    assert abs(draws.mean(axis=0) - 0.5).max() < 0.23  # five standard errors: no unit is favored


@pytest.mark.parametrize("name", ["magnitude", "wanda-sp", "flap", "amp"])
def test_broken_weights_are_named(name: str) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(cl.NumericalError):
        scores_of(cl.get_method(name), model)


# Allocation ---------------------------------------------------------------------------------------


TWO = make_units(layers=2, attention=2, ffn=3)  # costs 5 and 11, 86 in all
SCORES = [2.0, 1.0, 9.0, 8.0, 7.0, 4.0, 3.0, 0.4, 0.5, 0.6]  # A0 A1 F0 F1 F2 of layer 0, then 1


@pytest.mark.parametrize("name", ["magnitude", "wanda-sp", "amp"])
def test_uniform_methods_empty_all_blocks_evenly(name: str) -> None:
    """Turns are 1/6 (first FFN), 1/4 (first attention), 1/2 (second FFN): 11 + 11 + 5 >= 25.8."""
    evidence = planted(TWO, cl.get_method(name), scores=SCORES)
    assert cl.get_method(name).select(evidence, TWO, 0.3).pruned == (7, 4, 1)
    # the last attention units have turn 3/4, the last FFN groups 5/6
    assert cl.get_method(name).select(evidence, TWO, 0.7).pruned[-2:] == (5, 0)


# CoCurve ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "strength", "kinds"),
    [
        ("cocurve", {}, 1.0, ("attention", "ffn")),
        ("cocurve", {"interaction_strength": 0.3}, 0.3, ("attention", "ffn")),
        ("diagonal", {}, 0.0, ("attention", "ffn")),
        ("head-only", {}, 1.0, ("attention",)),
        ("ffn-only", {}, 1.0, ("ffn",)),
    ],
)
def test_cocurve_and_its_controls_read_one_matrix(
    name: str, options: dict[str, Any], strength: float, kinds: Any
) -> None:
    units = make_units(layers=4, attention=6, ffn=4)
    curvature, method = random_curvature(units, seed=3, shared=0.8), cl.get_method(name, **options)
    plan = method.select(method.adopt(curvature), units, 0.2)
    assert list(plan.pruned) == naive_greedy(curvature, 0.2, strength, cl.Guards(kinds=kinds))
    assert plan.interaction_strength == strength
    assert plan.predicted_risk == pytest.approx(curvature.risk(plan.pruned))


def test_the_curvature_comes_back_bit_for_bit() -> None:
    model, text = tiny_model(layers=2), tiny_text()
    units = cl.enumerate_units(model, GROUPS)
    built = cl.estimate_curvature(model, units, text, 97, progress=False)
    measured = cl.get_method("cocurve", top_r=97).measure(model, units, text, progress=False)
    require_same_bits(curvature_of(measured), built)
    again = curvature_of(cl.get_method("ffn-only").adopt(built))
    assert (again.fingerprint, again.provenance) == (built.fingerprint, built.provenance)
    require_same_bits(again, built)
    with pytest.raises(cl.FileFormatError):
        curvature_of(planted(TWO, cl.get_method("magnitude"), scores=SCORES))


def test_compensation_carries_gains_into_the_weights() -> None:
    model, text = tiny_model(), tiny_text()
    units, method = cl.enumerate_units(model, GROUPS), cl.get_method("cocurve", compensate=True)
    evidence = method.measure(model, units, text, progress=False)
    plan, plain = (each.select(evidence, units, 0.3) for each in (method, CoCurve()))
    assert (plan.pruned, plain.gains) == (plain.pruned, {})
    assert plan.gains == cl.solve_gains(curvature_of(evidence), plain)
    repaired = method.repair(model, plan, evidence)
    cl.check_equivalence(model, repaired, plan, tiny_text(2, seed=5))
    with pytest.raises(cl.EquivalenceError):
        cl.check_equivalence(model, repaired, plain, tiny_text(2, seed=5))


@pytest.mark.parametrize(("shared", "strength"), [(0.0, 1.0), (3.0, 0.0)])
def test_the_gate_sets_lambda(shared: float, strength: float) -> None:
    units = make_units()
    curvature = random_curvature(units, shared=shared, positions=4000)
    method = cl.get_method("cocurve", interaction_strength="gate")
    plan = method.select(method.adopt(curvature), units, 0.3)
    assert plan.interaction_strength == strength


# Families whose weights lie, or are called, otherwise than in Llama


METHODS = ("magnitude", "wanda-sp", "flap", "amp", "llm-pruner", "slimgpt", "slimllm", "2ssp")


@pytest.mark.parametrize("family", ["gemma2", "gpt_neox", "gpt2", "opt"])
def test_every_method_makes_a_plan(family: str) -> None:
    model = tiny_model(family, "gqa" if family == "gemma2" else "mha")
    units, text = cl.enumerate_units(model, GROUPS), tiny_text(8, 24)
    for name in METHODS:
        method = cl.get_method(name)
        evidence = method.measure(model, units, text, progress=False)
        scores = evidence.arrays["scores"]
        assert np.isfinite(scores).all(), name
        assert len(set(scores.tolist())) > 3, name
        plan = method.select(evidence, units, 0.25)
        assert 0.25 <= plan.realized_ratio < 0.7, name
        assert logit_difference(model, cl.prune(model, plan), plan) < 1e-5
        if (name, family) == ("magnitude", "gpt2"):  # whose weights are transposed
            for unit, score in zip(units, scores, strict=True):
                layer = model.transformer.h[unit.layer]
                stored = (layer.attn if unit.kind == "attention" else layer.mlp).c_proj.weight
                expected = stored[unit.start : unit.stop].double().norm(dim=1).sum()
                assert score == pytest.approx(float(expected), rel=1e-6)


@torch.enable_grad()
def test_llm_pruner_reads_transposed_weights() -> None:
    """First-order Taylor of GPT-2 by hand: |w g| over a unit's rows and columns."""
    model = tiny_model("gpt2", "mha")
    units, text = cl.enumerate_units(model, GROUPS), tiny_text(1, 24)
    method = cl.get_method("llm-pruner", taylor="param_first")
    scores = method.measure(model, units, text, progress=False).arrays["scores"]
    model.requires_grad_(True)
    logits = model(text.input_ids).logits[0, :-1]
    nn.functional.cross_entropy(logits, text.input_ids[0, 1:]).backward()
    for unit, score in zip(units, scores, strict=True):
        layer, own = model.transformer.h[unit.layer], slice(unit.start, unit.stop)
        inside, outside = (
            (layer.attn.c_attn, layer.attn.c_proj)
            if unit.kind == "attention"
            else (layer.mlp.c_fc, layer.mlp.c_proj)
        )
        parts = [(outside.weight * outside.weight.grad)[own]]
        for third in inside.weight.mul(inside.weight.grad).split(
            32 if unit.kind == "attention" else 42, 1
        ):
            parts.append(third[:, own])
        assert score == pytest.approx(
            float(sum(p.detach().abs().double().sum() for p in parts)), rel=1e-4
        )


def test_column_statistics_see_rows_also_where_the_layer_flattens_them() -> None:
    model, text = tiny_model("opt", "mha"), tiny_text(3, 12)
    found = collect_statistics(model, text, progress=False)
    seen: list[torch.Tensor] = []
    fc2 = model.model.decoder.layers[1].fc2
    handle = fc2.register_forward_pre_hook(lambda _, args: seen.append(args[0].double()))
    full_logits(model, text.input_ids)
    handle.remove()
    rows = seen[0].view(3, 12, -1)
    np.testing.assert_allclose(
        found.row_norms[1, "ffn"], rows.norm(dim=1).sum(dim=0).numpy(), rtol=1e-6
    )


# Experts

MORE = tiny_text(3, 20)
RANKINGS = method_names(experts=True)


def by_hand() -> dict[str, np.ndarray]:
    """Mean gate x |output| and share of tokens of every expert [layers, experts]."""
    model = tiny_model("qwen3_moe")
    found = {name: np.zeros((3, EXPERTS)) for name in RANKINGS}
    for layer, router in routers(model):
        seen: list[torch.Tensor] = []
        handle = router.register_forward_hook(lambda _, args, __, s=seen: s.append(args[0]))
        full_logits(model, MORE.input_ids)
        handle.remove()
        hidden = torch.cat(seen)
        _, gates, chosen = route_by_hand(model.config, router, hidden, [])
        experts = model.model.layers[layer].mlp.experts
        for number in range(EXPERTS):
            rows, places = torch.where(chosen == number)
            gate, up = (hidden[rows] @ experts.gate_up_proj[number].T).chunk(2, dim=-1)
            output = (torch.nn.functional.silu(gate) * up) @ experts.down_proj[number].T
            score = (gates[rows, places] * output.norm(dim=-1)).mean()
            found["reap"][layer, number] = float(score) if len(rows) else 0.0
            found["expert-frequency"][layer, number] = len(rows) / len(hidden)
    return found


@pytest.mark.parametrize("name", RANKINGS)
def test_scores_are_the_definition(name: str) -> None:
    model = tiny_model("qwen3_moe")
    units, method = cl.enumerate_units(model, GROUPS), cl.get_method(name)
    evidence = method.measure(model, units, MORE, progress=False)
    mine = units.kinds == "expert"
    expected = by_hand()[name].flatten()
    assert len(set(expected.tolist())) > EXPERTS
    np.testing.assert_allclose(evidence.scores[mine], expected, rtol=1e-4)
    assert not evidence.scores[~mine].any()
    for ratio in (0.0, 0.1, 0.3):
        plan = method.select(evidence, units, ratio)
        each = len(plan) // 3
        assert units.kinds[list(plan.pruned)].tolist() == ["expert"] * (3 * each)
        step = 3 * units[-1].cost / units.total_cost
        assert ratio <= plan.realized_ratio < ratio + step
        for layer, scores in enumerate(expected.reshape(3, EXPERTS)):
            gone = {units[i].index for i in plan.pruned if units[i].layer == layer}
            assert gone == set(np.argsort(scores, kind="stable")[:each].tolist())
    with pytest.raises(cl.InfeasibleError):
        method.select(evidence, units, (EXPERTS - TOP_K + 0.5) * step)


@pytest.mark.parametrize(
    ("name", "family", "error"),
    [
        *((name, "llama", cl.InputError) for name in RANKINGS),
        ("wanda-sp", "qwen3_moe", cl.ArchitectureError),  # it reads columns
    ],
)
def test_a_model_of_the_other_kind_is_refused(
    name: str, family: str, error: type[Exception]
) -> None:
    model = tiny_model(family)
    with pytest.raises(error):
        cl.get_method(name).measure(model, cl.enumerate_units(model, GROUPS), MORE, progress=False)
