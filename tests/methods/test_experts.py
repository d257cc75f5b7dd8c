"""Rankings of experts against their definitions written out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.methods.registry import method_names
from helpers.tiny_models import (
    EXPERTS,
    GROUPS,
    TOP_K,
    full_logits,
    route_by_hand,
    routers,
    tiny_model,
    tiny_text,
)

TEXT = tiny_text(3, 20)
NAMES = method_names(experts=True)


def by_hand() -> dict[str, np.ndarray]:
    """Mean gate x |output| and share of tokens of every expert [layers, experts]."""
    model = tiny_model("qwen3_moe")
    found = {name: np.zeros((3, EXPERTS)) for name in NAMES}
    for layer, router in routers(model):
        seen: list[torch.Tensor] = []
        handle = router.register_forward_hook(lambda _, args, __, s=seen: s.append(args[0]))
        full_logits(model, TEXT.input_ids)
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


@pytest.mark.parametrize("name", NAMES)
def test_scores_are_the_definition(name: str) -> None:
    model = tiny_model("qwen3_moe")
    units, method = cl.enumerate_units(model, GROUPS), cl.get_method(name)
    evidence = method.measure(model, units, TEXT, progress=False)
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


@pytest.mark.parametrize("name", NAMES)
def test_a_model_without_experts_is_refused(name: str) -> None:
    model = tiny_model()
    with pytest.raises(cl.InputError):
        cl.get_method(name).measure(model, cl.enumerate_units(model, GROUPS), TEXT, progress=False)


def test_methods_that_read_columns_are_refused() -> None:
    model = tiny_model("qwen3_moe")
    units = cl.enumerate_units(model, GROUPS)
    with pytest.raises(cl.ArchitectureError):
        cl.get_method("wanda-sp").measure(model, units, TEXT, progress=False)
