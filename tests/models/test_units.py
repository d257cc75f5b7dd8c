"""Units: what is removable, in which order, and what it costs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    LlamaConfig,
    LlamaModel,
)

import cocurve_lab as cl
from cocurve_lab.models.kinds import split_width
from cocurve_lab.models.units import require_units, units_like
from helpers.tiny_models import EVERY, FFN, GROUPS, HIDDEN, tiny_model, units_by_hand


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("family", "heads"), EVERY)
def test_inventory_and_costs_are_the_papers(family: str, heads: str) -> None:
    model = tiny_model(family, heads)
    found = cl.enumerate_units(model, ffn_groups=GROUPS)
    assert [(u.layer, u.kind, u.start, u.stop) for u in found] == units_by_hand(model)
    assert found.total_parameters == parameters(model)
    assert len(found) == 3 * (model.config.num_key_value_heads + GROUPS)
    for number, layer in enumerate(model.model.layers):
        for kind, block in (("attention", layer.self_attn), ("ffn", layer.mlp)):
            mine = (found.layers == number) & (found.kinds == kind)
            assert found.costs[mine].sum() == parameters(block)


def test_units_are_divided_as_asked() -> None:
    model, other = tiny_model("llama", "gqa"), tiny_model("llama", "mha")
    units = cl.enumerate_units(model, 3)
    assert units_like(model, units) == units
    unknown = cl.UnitSet(units.units)  # by hand, which says nothing of groups
    assert units_like(model, unknown) == cl.enumerate_units(model, 16)
    require_units(model, units)
    with pytest.raises(cl.MismatchError):
        require_units(other, units)
    for different in (cl.enumerate_units(model, 8), cl.UnitSet(units.units[:-1])):
        with pytest.raises(cl.MismatchError):
            units.require_same(different, mine="a", theirs="b")


@pytest.mark.parametrize("width", [42, 16, 47, 5])
@pytest.mark.parametrize("groups", [1, 4, 5])
def test_uneven_widths_differ_by_at_most_one(width: int, groups: int) -> None:
    blocks = split_width(width, groups)
    sizes = [stop - start for start, stop in blocks]
    assert max(sizes) - min(sizes) <= 1
    assert blocks[0][0] == 0
    assert blocks[-1][1] == width
    assert all(a[1] == b[0] for a, b in pairwise(blocks))


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_names_and_indices_find_units() -> None:
    units = cl.enumerate_units(tiny_model("llama", "gqa"), GROUPS)
    assert units[2].name == "L0.ffn[0]"
    assert units["L2.attention[1]"] is units[13]
    assert units.index(units[7]) == units.index("L1.attention[1]") == units.index(7) == 7
    assert [u.index for u in units] == [0, 1, 0, 1, 2, 3] * 3
    assert units.indices(["L0.ffn[3]", 0, units[1]]) == (5, 0, 1)
    assert len({u.name for u in units}) == len(units)


def test_arrays_are_frozen_and_plain_form_round_trips() -> None:
    units = cl.enumerate_units(tiny_model("phi3", "mqa"), GROUPS)
    with pytest.raises(ValueError, match="read-only"):
        units.costs[0] = 1
    assert cl.UnitSet.from_plain(units.to_plain()) == units
    assert units.costs.dtype == units.layers.dtype == np.int64


UNITS = cl.enumerate_units(tiny_model(), GROUPS)


@pytest.mark.parametrize(
    "call",
    [
        *(
            (lambda unit=unit: UNITS.index(unit))
            for unit in ("L9.ffn[0]", 18, -1, cl.Unit("ffn", 0, 0, 0, 12, 3 * 12 * HIDDEN))
        ),
        lambda: UNITS.indices([2, "L0.ffn[0]"]),
        lambda: cl.UnitSet(UNITS.units[::-1]),
        lambda: cl.UnitSet((cl.Unit("ffn", 0, 0, 0, 4, 0),)),
        lambda: cl.UnitSet((cl.Unit("ffn", 0, 0, 4, 4, 1),)),
        *(
            (lambda groups=groups: cl.enumerate_units(tiny_model(), groups))
            for groups in (0, FFN + 1)
        ),
    ],
)
def test_wrong_units_are_refused(call: Any) -> None:
    with pytest.raises(cl.InputError):
        call()


def broken(path: str, **values: Any) -> nn.Module:
    """A tiny model with attributes of one of its modules replaced."""
    model = tiny_model()
    for name, value in values.items():
        setattr(model.get_submodule(path), name, value)
    return model


def eight_bits(name: str) -> nn.Module:
    model = tiny_model()
    projection = getattr(model.model.layers[1].self_attn, name)
    projection.weight = nn.Parameter(projection.weight.to(torch.int8), requires_grad=False)
    return model


def wrapped() -> nn.Module:
    model, wrapper = tiny_model(), nn.Module()
    wrapper.config, wrapper.lm_head, wrapper.model = model.config, model.lm_head, model
    return wrapper


SMALL = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 9}


@pytest.mark.parametrize(
    "make",
    [
        lambda: on_meta(BloomConfig(n_layer=1, hidden_size=8, n_head=2)),
        lambda: nn.Linear(2, 2),
        lambda: LlamaModel(LlamaConfig(**SMALL)),  # no head
        lambda: broken("model.layers.1", mlp=nn.ModuleList([nn.Linear(2, 2)])),
        lambda: eight_bits("o_proj"),
        lambda: eight_bits("q_proj"),
        wrapped,
        # what an unmerged low-rank adapter looks like
        lambda: broken("model.layers.2.self_attn.v_proj", base_layer=nn.Linear(2, 2)),
    ],
)
def test_models_without_units_are_refused(make: Any) -> None:
    with pytest.raises(cl.ArchitectureError):
        cl.enumerate_units(make())
