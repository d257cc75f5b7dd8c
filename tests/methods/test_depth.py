"""Methods that take whole layers or blocks, against their definitions: one full pass per number."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import combinations

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.methods.base import Evidence
from cocurve_lab.methods.filling import blocks
from helpers.problems import make_units
from helpers.tiny_models import (
    GROUPS,
    LLAMA_PLACES,
    PLACES,
    full_logits,
    masked_by_hand,
    naive_risk,
    tiny_double,
    tiny_model,
    tiny_text,
)

TEXT = tiny_text(3)


def measured(name: str, family: str, heads: str, **options: int) -> Evidence:
    model = tiny_model(family, heads)
    units = cl.enumerate_units(model, GROUPS)
    return cl.get_method(name, **options).measure(model, units, TEXT, progress=False)


@pytest.mark.parametrize(("family", "heads"), [("llama", "gqa"), ("gemma2", "mha")])
def test_block_influence_is_one_minus_the_cosine(family: str, heads: str) -> None:
    model = tiny_model(family, heads)
    evidence = measured("shortgpt", family, heads)
    seen: list[tuple[torch.Tensor, ...]] = []

    def hook(_: object, args: tuple, output: object) -> None:
        after = output if torch.is_tensor(output) else output[0]
        seen.append((args[0].double(), after.double()))

    handles = [layer.register_forward_hook(hook) for layer in model.model.layers]
    full_logits(model, TEXT.input_ids)
    for handle in handles:
        handle.remove()
    for layer, (before, after) in enumerate(seen):
        cosine = torch.cosine_similarity(before, after, dim=-1)
        mine = evidence.scores[evidence.units.layers == layer]
        assert mine == pytest.approx(1 - float(cosine.mean()), abs=1e-6)


def test_shortgpt_takes_layers_one_after_the_other() -> None:
    evidence = measured("shortgpt", "llama", "gqa")
    layers, scores = evidence.units.layers, evidence.scores
    plan = cl.get_method("shortgpt").select(evidence, evidence.units, 0.5)
    first, second = np.argsort([scores[layers == n][0] for n in range(3)])[:2].tolist()
    whole = int((layers == first).sum())
    assert set(layers[list(plan.pruned[:whole])]) == {first}
    assert set(layers[list(plan.pruned[whole:])]) == {second}


@pytest.mark.parametrize(("name", "column"), [("blockpruner", "nll"), ("finercut", "kl")])
def test_the_block_that_is_missed_least_goes(name: str, column: str) -> None:
    model = tiny_model("llama", "gqa")
    evidence, first = measured(name, "llama", "gqa", rows=2), TEXT.rows(0, 2)
    units = evidence.units

    def cost(chosen: list[int]) -> float:
        if column == "kl":
            return float(naive_risk(model, [units[u] for u in chosen], first).mean())
        with masked_by_hand(model, [units[u] for u in chosen]):
            logits = full_logits(model, first.input_ids)[:, :-1]
        picked = torch.log_softmax(logits, -1).gather(-1, first.input_ids[:, 1:, None])
        return -float(picked.mean())

    left = blocks(units)
    gone: list[int] = []
    for step in range(6):
        values = {block: cost([*gone, *members]) for block, members in left.items()}
        best = min(left, key=values.__getitem__)
        members = left.pop(best)
        assert evidence.arrays[column][step] == pytest.approx(values[best], abs=1e-5)
        assert np.flatnonzero(evidence.scores == step).tolist() == sorted(members)
        gone.extend(members)


# CBO ----------------------------------------------------------------------------------------------

NORMS = ("model.layers", "post_attention_layernorm", "post_feedforward_layernorm")  # Gemma 2
SHORT = tiny_text(2, 4)


def gated_log_p(model: torch.nn.Module, gates: np.ndarray) -> torch.Tensor:
    """log p(y | x) [rows, T - 1, V] with the write of each block times its gate, by own hooks."""
    kind = model.config.model_type
    layers, *names = NORMS if kind == "gemma2" else PLACES.get(kind, LLAMA_PLACES)
    with ExitStack() as stack:
        for place, gate in enumerate(gates):
            module = model.get_submodule(f"{layers}.{place // 2}.{names[place % 2]}")
            bias = getattr(module, "bias", None)  # of no block
            bias = 0 if bias is None else bias

            def scale(_: object, __: object, out: torch.Tensor, g=gate, b=bias) -> torch.Tensor:
                return g * (out - b) + b

            stack.callback(module.register_forward_hook(scale).remove)
        return torch.log_softmax(full_logits(model, SHORT.input_ids)[:, :-1], -1)


def enumerated_fisher(model: torch.nn.Module) -> np.ndarray:
    """F [B, B], summed over all labels of the vocabulary, from central differences."""
    step, ones = 1e-4, np.ones(2 * model.config.num_hidden_layers)
    slopes = [
        (gated_log_p(model, ones + move) - gated_log_p(model, ones - move)) / (2 * step)
        for move in step * np.eye(len(ones))
    ]
    stacked, p = torch.stack(slopes).flatten(1, 2), gated_log_p(model, ones).exp().flatten(0, 1)
    return (torch.einsum("bty,cty,ty->bc", stacked, stacked, p) / len(p)).numpy()


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "gpt_neox", "opt"])
def test_drawn_labels_give_the_fisher_of_all_labels(family: str) -> None:
    model = tiny_double(tiny_model(family, "mha", layers=2))
    units = cl.enumerate_units(model, GROUPS)

    def drawn(passes: int, seed: int = 0) -> Evidence:
        method = cl.get_method("cbo", passes=passes)
        return method.measure(model, units, SHORT, seed=seed, progress=False)

    found, expected = drawn(800), enumerated_fisher(model)
    fisher, diagonal = found.arrays["fisher"], expected.diagonal()
    error = np.sqrt((np.outer(diagonal, diagonal) + expected**2) / 800)
    assert (np.abs(fisher - expected) < 5 * error).all()
    for place, members in enumerate(blocks(units).values()):
        assert (found.scores[members] == fisher[place, place] / 2).all()
    assert not np.array_equal(drawn(8).arrays["fisher"], drawn(8, seed=1).arrays["fisher"])


def test_cbo_takes_a_set_that_no_exchange_improves_and_the_last_in_part() -> None:
    units, guards, optimal = make_units(layers=6), cl.Guards(kinds=("ffn",)), 0
    for seed in range(20):
        factor = np.random.default_rng(seed).normal(size=(12, 8))
        fisher = factor @ factor.T
        evidence = Evidence("cbo", units, {"scores": np.zeros(len(units)), "fisher": fisher})
        plan = cl.get_method("cbo").select(evidence, units, 80 / units.total_cost, guards)
        pruned = [len([u for u in plan.pruned if units[u].layer == n]) for n in range(6)]
        assert sorted(pruned) == [0, 0, 0, 2, 3, 3]

        def risk(blocks: tuple[int, ...], fisher: np.ndarray = fisher) -> float:
            return float(fisher[np.ix_(blocks, blocks)].sum())

        three = tuple(2 * n + 1 for n in range(6) if pruned[n])
        others = list(combinations(range(1, 12, 2), 3))
        near = [risk(other) for other in others if len(set(other) - set(three)) == 1]
        assert risk(three) < min(near)
        optimal += risk(three) == min(map(risk, others))
        cost = {n: 2 * fisher[n, list(three)].sum() - fisher[n, n] for n in three}
        assert pruned[max(three, key=cost.__getitem__) // 2] == 2
    assert optimal >= 15
