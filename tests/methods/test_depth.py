"""Methods that take whole layers or blocks, against their definitions: one full pass per number."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.estimator.fisher import kl_divergence
from cocurve_lab.methods.base import Evidence
from cocurve_lab.methods.cbo import gated
from cocurve_lab.methods.filling import blocks
from cocurve_lab.models.architectures import describe
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
    # transformers norms the last of these states, so the last layer's output is taken by a hook
    seen = []
    handle = model.model.layers[-1].register_forward_hook(
        lambda _, args, output: seen.append(output if torch.is_tensor(output) else output[0])
    )
    states = list(
        model(TEXT.input_ids, output_hidden_states=True, use_cache=False).hidden_states[:-1]
    )
    handle.remove()
    states.append(seen[0])
    for layer, (before, after) in enumerate(pairwise(states)):
        dot = (before.double() * after.double()).sum(-1)
        cosine = dot / before.double().norm(dim=-1) / after.double().norm(dim=-1)
        mine = evidence.scores[evidence.units.layers == layer]
        assert mine == pytest.approx(1 - float(cosine.mean()), abs=1e-6)


def test_shortgpt_takes_layers_one_after_the_other() -> None:
    evidence = measured("shortgpt", "llama", "gqa")
    plan = cl.get_method("shortgpt").select(evidence, evidence.units, 0.5)
    layers = [evidence.units[u].layer for u in plan.pruned]
    influence = [float(evidence.scores[evidence.units.layers == n][0]) for n in range(3)]
    first, second = np.argsort(influence)[:2].tolist()
    whole = int((evidence.units.layers == first).sum())
    assert layers[:whole] == [first] * whole
    assert set(layers[whole:]) == {second}


@pytest.mark.parametrize(("name", "column"), [("blockpruner", "nll"), ("finercut", "kl")])
def test_the_block_that_is_missed_least_goes(name: str, column: str) -> None:
    model = tiny_model("llama", "gqa")
    evidence = measured(name, "llama", "gqa", rows=3)
    units = evidence.units

    def cost(chosen: list[int]) -> float:
        if column == "kl":
            return float(naive_risk(model, [units[u] for u in chosen], TEXT).mean())
        with masked_by_hand(model, [units[u] for u in chosen]), torch.no_grad():
            logits = full_logits(model, TEXT.input_ids)[:, :-1]
        picked = torch.log_softmax(logits, -1).gather(-1, TEXT.input_ids[:, 1:, None])
        return -float(picked.mean())

    left = [(layer, kind) for layer in range(3) for kind in ("attention", "ffn")]
    gone: list[int] = []
    for step in range(6):
        sets = {
            block: [*gone, *(i for i, u in enumerate(units) if (u.layer, u.kind) == block)]
            for block in left
        }
        values = {block: cost(chosen) for block, chosen in sets.items()}
        best = min(left, key=values.__getitem__)
        assert evidence.arrays[column][step] == pytest.approx(values[best], abs=1e-5)
        assert set(np.flatnonzero(evidence.scores == step)) == set(sets[best]) - set(gone)
        gone = sets[best]
        left.remove(best)


def test_blockpruner_reads_the_first_rows_only() -> None:
    model = tiny_model("llama", "gqa")
    units = cl.enumerate_units(model, GROUPS)
    one = cl.get_method("blockpruner", rows=1).measure(model, units, TEXT, progress=False)
    first = cl.CalibrationSet(TEXT.input_ids[:1])
    alone = cl.get_method("blockpruner").measure(model, units, first, progress=False)
    assert one.arrays["nll"].tolist() == alone.arrays["nll"].tolist()


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


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_drawn_labels_give_the_fisher_of_all_labels(family: str) -> None:
    model, passes = tiny_double(tiny_model(family, "mha", layers=2)), 1600
    units = cl.enumerate_units(model, GROUPS)
    method = cl.get_method("cbo", passes=passes)
    found, again, other = (
        method.measure(model, units, SHORT, seed=seed, progress=False) for seed in (0, 0, 1)
    )
    expected = enumerated_fisher(model)
    diagonal = expected.diagonal()
    error = np.sqrt((np.outer(diagonal, diagonal) + expected**2) / passes)
    assert (np.abs(found.arrays["fisher"] - expected) < 5 * error).all()
    for place, members in enumerate(blocks(units).values()):
        assert (found.scores[members] == found.arrays["fisher"][place, place] / 2).all()
    assert np.array_equal(found.arrays["fisher"], again.arrays["fisher"])
    assert not np.array_equal(found.arrays["fisher"], other.arrays["fisher"])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gpt_neox", "opt"])
def test_the_quadratic_is_the_kl_of_gates_near_one(family: str) -> None:
    model = tiny_double(tiny_model(family, "mha"))
    units, weights = cl.enumerate_units(model, GROUPS), np.array([1.0, -0.5, 2.0, 0.3, 0.0, 1.5])
    dense = gated_log_p(model, np.ones(6))

    def kl(values: np.ndarray) -> float:
        gates = dict(zip(blocks(units), torch.from_numpy(values), strict=True))
        with gated(describe(model), gates):
            logits = full_logits(model, SHORT.input_ids)[:, :-1]
        return float(kl_divergence(dense.exp(), torch.log_softmax(logits, -1) - dense).mean())

    expected = weights @ enumerated_fisher(model) @ weights / 2
    assert kl(1 - 1e-4 * weights) / 1e-8 == pytest.approx(expected, rel=2e-3)
    gone = [unit for unit in units if (unit.layer, unit.kind) in ((0, "ffn"), (2, "attention"))]
    removed = kl(np.array([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]))
    assert removed == pytest.approx(naive_risk(model, gone, SHORT).mean(), rel=1e-9)


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
