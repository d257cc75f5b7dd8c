"""Ablations that the rest of their block makes up for (`BuildOptions.refit_ratio`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import cocurve_lab as cl
from cocurve_lab.extensions.surrogates.refit_aware import RIDGE
from helpers import tiny_models
from helpers.tiny_models import (
    LLAMA_PLACES,
    PLACES,
    Columns,
    full_logits,
    naive_build,
    relative_error,
    tiny_model,
    tiny_text,
    units_by_hand,
)

TEXT = tiny_text(4, 20, 6)


def build(model: Any = None, **options: Any) -> cl.Curvature:
    rest = {"checkpoint": options.pop("checkpoint", None), "progress": False}
    units = cl.enumerate_units(model or tiny_model(), ffn_groups=4)
    return cl.estimate_curvature(
        model or tiny_model(), units, TEXT, 32, options=cl.BuildOptions(**options), **rest
    )


def projection_of(model: Any, unit: Columns) -> Any:
    """The output projection of a unit's block."""
    layers, *outputs = PLACES.get(model.config.model_type, LLAMA_PLACES)
    return model.get_submodule(f"{layers}.{unit.layer}.{outputs[unit.kind == 'ffn']}")


def inputs_by_hand(model: Any, projection: Any) -> Tensor:
    """The columns x [tokens, W] float64 of a block on the text."""
    seen: list[Tensor] = []
    hook = projection.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    full_logits(model, TEXT.input_ids)
    hook.remove()
    return torch.cat([x.reshape(-1, x.shape[-1]) for x in seen]).double()


def prediction_by_hand(x: Tensor, unit: Columns, units: list[Columns], ratio: float) -> Tensor:
    """The expected prediction [W, w] of a unit's columns from all columns, by normal equations.

    The moments under masks are sums over all masks, each with its probability.
    """
    width, others = x.shape[1], [other for other in units if other != unit]
    moments, cross = torch.zeros(width, width).double(), torch.zeros(width, width).double()
    for size in range(len(others) + 1):
        for staying in combinations(others, size):
            mask = torch.zeros(width).double()
            for other in staying:
                mask[other.start : other.stop] = 1
            weight = (1 - ratio) ** size * ratio ** (len(others) - size)
            moments += weight * (x * mask).T @ (x * mask)
            cross += weight * x.T @ (x * mask)
    keep = 1 - ratio
    moments.diagonal().add_(keep * RIDGE * float((x * x).sum(dim=0).mean()))
    own = slice(unit.start, unit.stop)
    rest = torch.ones(width, dtype=torch.bool)
    rest[own] = False
    found = torch.zeros(width, unit.stop - unit.start).double()
    solved = torch.linalg.solve(moments[rest][:, rest], cross[own][:, rest].T)
    found[rest] = keep * solved  # a column that stays with probability `keep`
    return found


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma2"])
def test_h_is_that_of_refitted_ablations(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against full passes with hooks, and predictions summed over all masks of a block."""
    model = tiny_model(family) if family != "gpt2" else tiny_model(family, "mha")
    ratio = 0.3
    predictions, every = {}, units_by_hand(model)
    for unit in every:
        block = [other for other in every if other[:2] == unit[:2]]
        x = inputs_by_hand(model, projection_of(model, unit))
        predictions[unit] = prediction_by_hand(x, unit, block, ratio).float()

    @contextmanager
    def made_up(_: Any, units: list[Columns]) -> Iterator[None]:
        (unit,) = units

        def cut(_: Any, args: Any) -> Any:
            x = args[0].clone()
            x[..., unit.start : unit.stop] = args[0] @ predictions[unit]
            return (x,)

        hook = projection_of(model, unit).register_forward_pre_hook(cut)
        try:
            yield
        finally:
            hook.remove()

    monkeypatch.setattr(tiny_models, "masked_by_hand", made_up)
    expected, risks = naive_build(model, TEXT, 32)
    found = build(model, refit_ratio=ratio)
    assert relative_error(found.matrix, expected) <= 1e-4
    assert relative_error(found.single_unit_risk, risks) <= 1e-4  # type: ignore[arg-type]


def test_where_nothing_stays_nothing_is_made_up_for() -> None:
    assert relative_error(build(refit_ratio=1).matrix, build().matrix) <= 1e-5


def test_a_unit_with_a_twin_costs_next_to_nothing() -> None:
    """Its twin has the same columns, so a refit loses nothing: H of masks cannot know that."""
    model = tiny_model()
    mlp = model.model.layers[1].mlp
    size = 11  # of the first two of four groups of 42 channels
    with torch.no_grad():
        for projection in (mlp.gate_proj, mlp.up_proj):
            projection.weight[size : 2 * size - 1] = projection.weight[: size - 1]
            projection.weight[[size - 1, 2 * size - 1]] = 0
    twin = [unit.name for unit in cl.enumerate_units(model, ffn_groups=4)].index("L1.ffn[0]")
    masked, refitted = build(model), build(model, refit_ratio=0.1)
    assert refitted.saliency[twin] < 0.05 * masked.saliency[twin]


def test_h_says_what_its_ablations_are(tmp_path: Path) -> None:
    found = build(refit_ratio=0.4)
    assert "40%" in found.note()
    again = cl.Curvature.load(found.save(tmp_path / "H.pkl"))
    assert again.refit_ratio == 0.4
    assert build().refit_ratio == 0
    assert "refit_ratio" not in build().provenance


def test_the_sketch_has_the_same_shifts() -> None:
    found = build(refit_ratio=0.4, sketch_positions=1024, sketch_top=32)
    alone = [found.additive().predict([unit]) for unit in range(len(found.units))]
    np.testing.assert_allclose(alone, found.single_unit_risk, rtol=0.02, atol=1e-6)
    assert not np.allclose(alone, build().single_unit_risk, rtol=0.1)
