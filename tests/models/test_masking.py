"""Masks: a unit's own write disappears, nothing else changes, and other threads see none."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.models.architectures import describe
from cocurve_lab.models.masking import column_scales, scaled, stack_rows
from helpers.tiny_models import EVERY, GROUPS, full_logits, tiny_model, tiny_text


def watch(model: PreTrainedModel, ids: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Input and output of every linear layer in one pass, by name."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):

            def hook(_: Any, args: Any, out: Tensor, name: str = name) -> None:
                seen[name] = (args[0].clone(), out.clone())

            handles.append(module.register_forward_hook(hook))
    full_logits(model, ids)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("kind", ["attention", "ffn"])
@pytest.mark.parametrize(("family", "heads"), EVERY)
def test_mask_takes_away_exactly_the_units_write(family: str, heads: str, kind: str) -> None:
    model = tiny_model(family, heads)
    units = cl.enumerate_units(model, GROUPS)
    ids = tiny_text(2).input_ids
    dense = watch(model, ids)
    unit = next(u for u in units if u.kind == kind and u.layer == 1)
    with cl.ablate(model, [unit]):
        masked = watch(model, ids)
    name = f"model.layers.1.{'self_attn.o_proj' if kind == 'attention' else 'mlp.down_proj'}"
    context, write = dense[name]
    columns = slice(unit.start, unit.stop)
    own = context[..., columns] @ model.get_submodule(name).weight[:, columns].T
    torch.testing.assert_close(masked[name][1], write - own, rtol=0, atol=1e-5)
    inside = masked[name][0]  # as the projection saw it
    assert not inside[..., columns].any()
    kept = torch.ones(context.shape[-1], dtype=torch.bool)
    kept[columns] = False
    assert torch.equal(inside[..., kept], context[..., kept])


def test_units_names_indices_and_selections_mean_the_same() -> None:
    model, ids = tiny_model(intermediate_size=48), tiny_text(1).input_ids
    units = cl.enumerate_units(model)  # 16 groups, what names and indices refer to
    plan, found = cl.Selection.from_pruned(units, [1, 5]), []
    for form in ([units[1], units[5]], [1, 5], [units[1].name, units[5].name], plan):
        with cl.ablate(model, form):
            found.append(full_logits(model, ids))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_weights_and_hooks_are_restored_after_an_exception() -> None:
    model = tiny_model()
    ids = tiny_text(1).input_ids
    dense = full_logits(model, ids)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    units = cl.enumerate_units(model, GROUPS)
    with pytest.raises(ZeroDivisionError), cl.ablate(model, units):
        raise ZeroDivisionError
    assert torch.equal(full_logits(model, ids), dense)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_per_row_masks_are_separate_masks(family: str) -> None:
    model = tiny_model(family)
    units = cl.enumerate_units(model, GROUPS)
    plans = [[units[0]], [units[2], units[9]], [], list(units), [units[17]]]
    ids = tiny_text(1).input_ids
    architecture = describe(model)
    masks = stack_rows(architecture, [column_scales(architecture, plan) for plan in plans])
    with scaled(architecture, masks):
        together = full_logits(model, ids.expand(len(plans), -1))
    for row, plan in enumerate(plans):
        with cl.ablate(model, plan):
            alone = full_logits(model, ids)[0]
        torch.testing.assert_close(together[row], alone, rtol=0, atol=1e-5)


def test_wrong_units_are_refused() -> None:
    model, other = tiny_model(layers=2), tiny_model("mistral", "mha", layers=3)
    theirs = cl.enumerate_units(other, GROUPS)
    cases: list[tuple[Any, type[cl.CocurveError]]] = [
        ([theirs["L2.ffn[0]"]], cl.MismatchError),
        ([theirs["L0.attention[3]"]], cl.MismatchError),
        ([len(cl.enumerate_units(model))], cl.InputError),
        (["L0.ffn[99]"], cl.InputError),
        (cl.Selection.from_pruned(theirs, [0]), cl.MismatchError),
    ]
    for wrong, kind in cases:
        with pytest.raises(kind), cl.ablate(model, wrong):
            pytest.fail("the block must not run")


# A model that one thread measures is whole for all others -----------------------------------------


@pytest.mark.parametrize("family", ["llama", "opt", "mixtral"])
def test_other_threads_may_use_a_model_while_it_is_measured(family: str) -> None:
    model, text = tiny_model(family), tiny_text(6)
    units = cl.enumerate_units(model, 4)
    with torch.inference_mode():
        dense = model(text.input_ids[:2]).logits
    expected = cl.pruning_risk(model, [units[1]], text)
    alone = cl.estimate_curvature(model, units, text, progress=False)
    over, right = threading.Event(), []

    def use() -> None:
        while not over.is_set():
            with torch.inference_mode():
                right.append(torch.equal(model(text.input_ids[:2]).logits, dense))

    thread = threading.Thread(target=use)
    thread.start()
    try:
        risks = [cl.pruning_risk(model, [units[1]], text) for _ in range(5)]
        built = cl.estimate_curvature(model, units, text, progress=False)
    finally:
        over.set()
        thread.join()
    assert right
    assert all(right)
    assert risks == [expected] * 5
    assert (built.matrix == alone.matrix).all()
