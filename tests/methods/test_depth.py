"""ShortGPT and BlockPruner against their definitions, one full pass per number."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.methods.base import Evidence
from helpers.tiny_models import GROUPS, full_logits, masked_by_hand, tiny_model, tiny_text

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


def test_blockpruner_removes_the_block_that_is_missed_least() -> None:
    model = tiny_model("llama", "gqa")
    evidence = measured("blockpruner", "llama", "gqa", rows=3)
    units = evidence.units

    def nll(chosen: list[int]) -> float:
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
        values = {block: nll(chosen) for block, chosen in sets.items()}
        best = min(left, key=values.__getitem__)
        assert evidence.arrays["nll"][step] == pytest.approx(values[best], abs=1e-5)
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
