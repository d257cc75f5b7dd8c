"""The mixture of experts that ships: its training loss, and what a mixture must be to be shown."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from data.make import train_demo


def test_routers_are_balanced_layer_by_layer() -> None:
    torch.manual_seed(0)
    layers = tuple(torch.randn(50, 4) for _ in range(3))
    by_hand = []
    for logits in layers:
        chances = [[float(x) for x in torch.softmax(token, 0)] for token in logits]
        shares = [0.0] * 4
        for chance in chances:
            for expert in sorted(range(4), key=lambda e: -chance[e])[:2]:
                shares[expert] += 1 / (2 * 50)
        means = [sum(chance[e] for chance in chances) / 50 for e in range(4)]
        by_hand.append(4 * sum(s * m for s, m in zip(shares, means, strict=True)))
    assert float(train_demo.balance(layers, 2)) == pytest.approx(sum(by_hand) / 3, rel=1e-5)
    # two layers that each leave half of their experts idle, together none
    one = torch.tensor([[9.0, 9.0, -9.0, -9.0]] * 20)
    assert float(train_demo.balance((one, one.flip(1)), 2)) == pytest.approx(2, rel=1e-3)
    even = torch.cat([one, one.flip(1)])
    assert float(train_demo.balance((even,), 2)) == pytest.approx(1, rel=1e-3)


def test_the_mixture_uses_every_expert_and_is_cut_as_it_is_masked() -> None:
    model, tokenizer = cl.load_model("mixture")
    assert model.dtype == torch.float32
    text, held_out = cl.default_calibration("mixture", tokenizer, 16, 8)
    chosen = {layer: np.zeros(16) for layer in range(4)}

    def count(layer: int, indices: torch.Tensor) -> None:
        chosen[layer] += np.bincount(indices.flatten().numpy(), minlength=16)

    hooks = [
        block.mlp.gate.register_forward_hook(lambda _, __, out, at=at: count(at, out[2]))
        for at, block in enumerate(model.model.layers)
    ]
    loss = np.mean(
        [float(model(ids[None], labels=ids[None]).loss.detach()) for ids in held_out.input_ids]
    )
    for hook in hooks:
        hook.remove()
    assert loss < 2.3  # an untrained one has 8.3, the demo model 1.8
    # a share of 1 / 16 each would be even
    assert all(counts.min() > 0.01 * counts.sum() for counts in chosen.values())
    units = cl.enumerate_units(model)
    assert list(units.kinds).count("expert") == 64
    plan = cl.Selection.from_pruned(units, [units.index(name) for name in ("L0.expert[3]",)])
    ids = text.input_ids[:2]
    with cl.ablate(model, plan):
        masked = model(ids).logits
    assert torch.allclose(masked, cl.prune(model, plan)(ids).logits, atol=1e-3)
