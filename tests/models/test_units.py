"""Units: what is removable, in which order, and what it costs."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
)

import cocurve_lab as cl
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.units import require_units, split_width, units_like
from helpers.tiny_models import EVERY, FFN, GROUPS, HIDDEN, tiny_model, units_by_hand


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(("family", "heads"), EVERY)
def test_inventory_is_the_papers(family: str, heads: str) -> None:
    model = tiny_model(family, heads)
    found = cl.enumerate_units(model, ffn_groups=GROUPS)
    assert [(u.layer, u.kind, u.start, u.stop) for u in found] == units_by_hand(model)
    assert found.total_parameters == parameters(model)
    assert len(found) == 3 * (model.config.num_key_value_heads + GROUPS)


def test_units_are_divided_as_asked() -> None:
    model, other = tiny_model("llama", "gqa"), tiny_model("llama", "mha")
    units = cl.enumerate_units(model, 3)
    assert units_like(model, units) == units
    unknown = cl.UnitSet(units.units)  # by hand, which says nothing of groups
    assert units_like(model, unknown) == cl.enumerate_units(model, 16)
    require_units(model, units)
    with pytest.raises(cl.MismatchError):
        require_units(other, units)


@pytest.mark.parametrize(("family", "heads"), EVERY)
def test_costs_add_up_to_the_parameters_of_the_blocks(family: str, heads: str) -> None:
    model = tiny_model(family, heads)
    units = cl.enumerate_units(model, ffn_groups=GROUPS)
    for number, layer in enumerate(model.model.layers):
        for kind, block in (("attention", layer.self_attn), ("ffn", layer.mlp)):
            mine = (units.layers == number) & (units.kinds == kind)
            assert units.costs[mine].sum() == parameters(block)


def test_write_biases_belong_to_no_unit() -> None:
    model = tiny_model(attention_bias=True, mlp_bias=True)
    units = cl.enumerate_units(model, ffn_groups=GROUPS)
    blocks = sum(parameters(x.self_attn) + parameters(x.mlp) for x in model.model.layers)
    assert units.total_cost == blocks - 3 * 2 * HIDDEN  # o_proj.bias and down_proj.bias stay


@pytest.mark.parametrize(("family", "heads"), EVERY)
def test_cost_is_what_really_disappears(family: str, heads: str) -> None:
    model = tiny_model(family, heads, layers=1)
    units = cl.enumerate_units(model, ffn_groups=GROUPS)
    for unit in units:
        pruned = cl.prune(model, cl.Selection.from_pruned(units, [unit]))
        assert parameters(model) - parameters(pruned) == unit.cost, unit


@pytest.mark.parametrize("width", [42, 16, 47, 5])
@pytest.mark.parametrize("groups", [1, 4, 5])
def test_uneven_widths_differ_by_at_most_one(width: int, groups: int) -> None:
    blocks = split_width(width, groups)
    sizes = [stop - start for start, stop in blocks]
    assert max(sizes) - min(sizes) <= 1
    assert blocks[0][0] == 0
    assert blocks[-1][1] == width
    assert all(a[1] == b[0] for a, b in pairwise(blocks))


def test_llama_31_8b_has_the_published_totals() -> None:
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    units = cl.enumerate_units(model)
    assert len(units) == 768
    assert units.total_cost == 6_979_321_856
    assert set(units.costs[units.kinds == "attention"]) == {5_242_880}
    assert set(units.costs[units.kinds == "ffn"]) == {11_010_048}
    assert units.total_parameters == 8_030_261_248


def test_head_dim_may_differ_from_hidden_over_heads() -> None:
    config = MistralConfig(  # Nemo in miniature: 32 heads of 128 on a width of 5120
        hidden_size=5120,
        intermediate_size=14336,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=100,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    unit = cl.enumerate_units(model)[1]
    assert (unit.start, unit.stop) == (512, 1024)  # four heads of 128
    assert unit.cost == 5120 * 128 * (4 + 1 + 1 + 4)


def test_qwen_biases_are_counted() -> None:
    with_bias = cl.enumerate_units(tiny_model("qwen2", "gqa"), GROUPS)
    without = cl.enumerate_units(tiny_model("llama", "gqa"), GROUPS)
    assert with_bias[0].cost - without[0].cost == 8 * (2 + 1 + 1)  # two queries, a key, a value
    assert with_bias["L0.ffn[0]"].cost == without["L0.ffn[0]"].cost == 3 * 11 * HIDDEN


def test_names_and_indices_find_units() -> None:
    units = cl.enumerate_units(tiny_model("llama", "gqa"), GROUPS)
    assert units[2].name == "L0.ffn[0]"
    assert units["L2.attention[1]"] is units[13]
    assert units.index(units[7]) == units.index("L1.attention[1]") == units.index(7) == 7
    assert [u.index for u in units] == [0, 1, 0, 1, 2, 3] * 3
    assert units.indices(["L0.ffn[3]", 0, units[1]]) == (5, 0, 1)
    assert len({u.name for u in units}) == len(units)


def test_unknown_and_repeated_units_are_refused() -> None:
    units = cl.enumerate_units(tiny_model("llama", "gqa"), GROUPS)
    for wrong in ("L9.ffn[0]", 18, -1, cl.Unit("ffn", 0, 0, 0, 12, 3 * 12 * HIDDEN)):
        with pytest.raises(cl.InputError):
            units.index(wrong)
    with pytest.raises(cl.InputError):
        units.indices([2, "L0.ffn[0]"])


def test_arrays_are_frozen_and_plain_form_round_trips() -> None:
    units = cl.enumerate_units(tiny_model("phi3", "mqa"), GROUPS)
    with pytest.raises(ValueError, match="read-only"):
        units.costs[0] = 1
    assert cl.UnitSet.from_plain(units.to_plain()) == units
    assert units.costs.dtype == units.layers.dtype == np.int64


def test_order_and_costs_are_checked() -> None:
    units = cl.enumerate_units(tiny_model(), GROUPS)
    with pytest.raises(cl.InputError):
        cl.UnitSet(units.units[::-1])
    with pytest.raises(cl.InputError):
        cl.UnitSet((cl.Unit("ffn", 0, 0, 0, 4, 0),))


def test_first_difference_is_named() -> None:
    model = tiny_model()
    four, eight = cl.enumerate_units(model, 4), cl.enumerate_units(model, 8)
    with pytest.raises(cl.MismatchError):
        four.require_same(eight, mine="a", theirs="b")


@pytest.mark.parametrize("groups", [0, FFN + 1])
def test_impossible_group_counts_are_refused(groups: int) -> None:
    with pytest.raises(cl.InputError, match=f"ffn_groups is {groups}.*between 1 and {FFN}"):
        cl.enumerate_units(tiny_model(), groups)


def test_unknown_architecture_names_what_was_found_and_what_is_supported() -> None:
    model = AutoModelForCausalLM.from_config(BloomConfig(n_layer=1, hidden_size=8, n_head=2))
    with pytest.raises(cl.ArchitectureError):
        cl.enumerate_units(model)
    with pytest.raises(cl.ArchitectureError):
        describe(nn.Linear(2, 2))


def test_a_layer_without_its_projections_is_refused() -> None:
    model = tiny_model()
    model.model.layers[1].mlp = nn.ModuleList([model.model.layers[1].mlp])
    with pytest.raises(cl.ArchitectureError):
        cl.enumerate_units(model)


def test_a_decoder_without_its_head_is_refused() -> None:
    config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    with pytest.raises(cl.ArchitectureError):
        cl.enumerate_units(LlamaModel(config))


@pytest.mark.parametrize("name", ["o_proj", "q_proj"])
def test_quantized_weights_are_refused(name: str) -> None:
    model = tiny_model()
    projection = getattr(model.model.layers[1].self_attn, name)
    projection.weight = nn.Parameter(projection.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(cl.ArchitectureError):
        cl.enumerate_units(model)


def test_adapters_and_wrappers_are_refused() -> None:
    model = tiny_model()
    wrapper = nn.Module()
    wrapper.config, wrapper.lm_head, wrapper.model = model.config, model.lm_head, model
    with pytest.raises(cl.ArchitectureError):
        cl.enumerate_units(wrapper)  # type: ignore[arg-type]
    projection = model.model.layers[2].self_attn.v_proj
    projection.base_layer = nn.Linear(2, 2)  # what an unmerged low-rank adapter looks like
    with pytest.raises(cl.ArchitectureError):
        cl.enumerate_units(model)
