"""Refit against least squares written out on a masked float64 copy, and what is told about it."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import cocurve_lab as cl
from cocurve_lab.extensions.repairing import least_squares_refit as refitting
from cocurve_lab.extensions.repairing.repair import RIDGES, RepairOptions
from cocurve_lab.measuring.risk import model_risk
from cocurve_lab.models.identity import MANIFEST
from helpers.tiny_models import (
    GROUPS,
    LLAMA_PLACES,
    PLACES,
    full_logits,
    tiny_model,
    tiny_text,
)

TEXT, OTHER = tiny_text(12, 24, seed=3), tiny_text(8, 24, seed=4)
# the last FFN loses all, the second attention nothing; OLMo2's attention is one unit
NAMES = ["L0.attention[0]", "L0.ffn[1]", "L1.ffn[0]", "L1.ffn[3]", "L2.attention[1]"]
NAMES += [f"L2.ffn[{group}]" for group in range(GROUPS)]
ADDITIVE = ["mistral", "phi3", "gpt2", "gpt_neox", "opt"]
NORMED = ["gemma2", "olmo2"]  # an RMS norm between each block and the stream
NORMS = {"attention": "post_attention_layernorm", "ffn": "post_feedforward_layernorm"}
QUIET = RepairOptions(progress=False)


def model_of(family: str, **changes: Any) -> PreTrainedModel:
    grouped = family not in ("gpt2", "gpt_neox", "opt", "opt_350m", "olmo2")
    return tiny_model(family, "gqa" if grouped else "mha", **changes)


def plan_of(model: PreTrainedModel, names: list[str] | None = None) -> cl.Selection:
    units = cl.enumerate_units(model, GROUPS)
    wanted = NAMES if names is None else names
    return cl.Selection.from_pruned(units, [unit.name for unit in units if unit.name in wanted])


def projection(model: PreTrainedModel, layer: int, kind: str) -> Any:
    layers, *outputs = PLACES.get(model.config.model_type, LLAMA_PLACES)
    return model.get_submodule(f"{layers}.{layer}.{outputs[kind == 'ffn']}")


def weight(model: PreTrainedModel, layer: int, kind: str) -> Tensor:
    """[d, W], as a view."""
    module = projection(model, layer, kind)
    return module.weight.T if hasattr(module, "nf") else module.weight


def norm_behind(model: PreTrainedModel, layer: int, kind: str) -> Any:
    """The norm of a block's write, or what leaves it as it is."""
    inside = f"model.layers.{layer}.{NORMS[kind]}"
    normed = model.config.model_type in NORMED
    return model.get_submodule(inside) if normed else torch.nn.Identity()


def seen(model: PreTrainedModel, layer: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Columns [n, W] of a block, its write and the stream after it [n, d], in a whole pass."""
    found: dict[str, Tensor] = {}
    place = PLACES.get(model.config.model_type, LLAMA_PLACES)[0]
    block, module = projection(model, layer, kind), model.get_submodule(f"{place}.{layer}")

    def entered(_: Any, args: Any, kwargs: Any) -> None:
        found["in"] = args[0] if args else kwargs["hidden_states"]

    hooks = [
        module.register_forward_pre_hook(entered, with_kwargs=True),
        module.register_forward_hook(
            lambda _, __, out: found.update(out=out if isinstance(out, Tensor) else out[0])
        ),
        block.register_forward_hook(lambda _, x, out: found.update(x=x[0], write=out)),
    ]
    full_logits(model, TEXT.input_ids)
    for hook in hooks:
        hook.remove()
    stream = found["out"]
    if kind == "attention":
        write = norm_behind(model, layer, kind)(found["write"])
        stream = found["in"] + write.reshape(found["in"].shape)
    return tuple(found.flatten(0, -2) for found in (found["x"], found["write"], stream))


def naive(model: PreTrainedModel, plan: cl.Selection, target: str, ridge: float) -> PreTrainedModel:
    """A float64 copy with masked columns, the others refitted block by block with lstsq."""
    dense = copy.deepcopy(model).double()
    student = copy.deepcopy(dense)
    kept = {}
    for layer in range(model.config.num_hidden_layers):
        for kind in cl.KINDS:
            keep = torch.ones(weight(dense, layer, kind).shape[1], dtype=torch.bool)
            for unit in (plan.units[i] for i in plan.pruned):
                if (unit.layer, unit.kind) == (layer, kind):
                    keep[unit.start : unit.stop] = False
            kept[layer, kind] = keep
            weight(student, layer, kind)[:, ~keep] = 0
    order = list(kept)
    for place, ((layer, kind), keep) in enumerate(kept.items()):
        end = layer, kind  # behind the blocks that are gone, up to the next one that stays
        for later in order[place + 1 :] if target == "gap" else []:
            if kept[later].any():
                break
            end = later
        if not keep.any() or (keep.all() and end == (layer, kind)):
            continue
        all_of_it, old = weight(dense, layer, kind), weight(student, layer, kind)
        columns, _, wanted = seen(dense, layer, kind)
        size = torch.ones(len(columns), 1)
        lacking = columns @ (all_of_it - old).T
        if target != "dense":
            columns, write, _ = seen(student, layer, kind)  # a masked block still has all columns
            wanted = seen(dense, *end)[-1]
            lacking = wanted - seen(student, *end)[-1]
            if target == "gap":
                size = 1 / wanted.square().mean(dim=1, keepdim=True)
            if model.config.model_type in NORMED:  # norm(write) = write / rms(write) * g
                g = norm_behind(dense, layer, kind)(torch.ones(write.shape[1]))
                rms = write.square().mean(dim=1, keepdim=True).sqrt()
                lacking, size = lacking * rms / g, size / rms.square()
        x = columns[:, keep]
        bias = projection(student, layer, kind).bias
        if bias is not None:
            mean_x, mean_lacking = ((size * y).sum(dim=0) / size.sum() for y in (x, lacking))
            x, lacking = x - mean_x, lacking - mean_lacking
        moments = (size * x.square()).sum(dim=0)
        gamma = ridge * (moments if target == "gap" else moments.mean().expand(len(moments)))
        rows = torch.cat([size.sqrt() * x, gamma.sqrt().diag()])
        zeros = torch.zeros(x.shape[1], lacking.shape[1])
        wide = torch.cat([size.sqrt() * lacking, zeros])
        update = torch.linalg.lstsq(rows, wide).solution.T
        old[:, keep] += update
        if bias is not None:
            bias += mean_lacking - update @ mean_x
    return student


# Against the formula ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "target"),
    [
        *((family, "gap") for family in (*ADDITIVE, *NORMED)),
        *((family, "stream") for family in (*ADDITIVE[::2], *NORMED)),
        *((family, "dense") for family in ("llama", "gpt2", "opt_350m")),
    ],
)
def test_the_refit_is_the_least_squares_fit(
    family: str, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a norm's epsilon is left out of the fit; the writes of tiny models are hardly larger
    changes = {"rms_norm_eps": 1e-12} if family in NORMED else {}
    model = model_of(family, dtype=torch.float64, **changes)
    # the layer norms of OPT-350m lie on the stream itself, so its refit is that of "dense"
    sequential = target != "dense" or family == "opt_350m"
    plan = plan_of(model)
    if target == "gap":  # all of layer 1 goes
        layer = [unit.name for unit in plan.units if unit.layer == 1]
        plan = plan_of(model, [*NAMES, *layer])
    aim = "gap" if target == "gap" else "stream"
    options = RepairOptions(0.02, progress=False, target=aim)  # type: ignore[arg-type]
    repaired: Any = cl.repair(model, plan, TEXT, sequential=sequential, options=options)
    record = repaired.cocurve_manifest["repair"]
    assert (record["target"], record["sequential"]) == (target, target != "dense")
    expected = naive(model, plan, target, 0.02)
    for ids in (TEXT.input_ids, OTHER.input_ids):
        wanted = full_logits(expected, ids)
        torch.testing.assert_close(full_logits(repaired, ids), wanted, atol=1e-5, rtol=1e-5)
        assert float((full_logits(cl.prune(model, plan), ids) - wanted).abs().max()) > 0.05
    monkeypatch.setattr(refitting, "TOKENS_PER_BATCH", 5 * 24)
    parts = cl.repair(model, plan, TEXT, sequential=sequential, options=options)
    torch.testing.assert_close(weight(parts, 0, "ffn"), weight(repaired, 0, "ffn"))


def test_held_out_text_chooses_the_ridge_or_no_refit() -> None:
    model = model_of("llama")
    plan = plan_of(model)
    chosen: Any = cl.repair(model, plan, TEXT, held_out=[OTHER], options=QUIET)
    least = model_risk(model, chosen, OTHER).mean()
    assert chosen.cocurve_manifest["repair"]["ridge"] in RIDGES
    for ridge in RIDGES:
        other = cl.repair(model, plan, TEXT, options=RepairOptions(ridge, progress=False))
        assert model_risk(model, other, OTHER).mean() >= least
    # two tokens to fit a width of 32: worse on other text than what was pruned
    few = RepairOptions(1e-6, progress=False)
    kept: Any = cl.repair(model, plan, tiny_text(1, 2), held_out=[OTHER], options=few)
    assert kept.cocurve_manifest["repair"] is None


def test_a_gain_is_where_the_refit_starts() -> None:
    model = model_of("llama", dtype=torch.float64)
    plan = plan_of(model)
    scaled = plan.with_gains({plan.units.index("L1.ffn[1]"): 1.5})

    def refitted(own: cl.Selection, ridge: float) -> Tensor:
        options = RepairOptions(ridge, progress=False)
        return weight(cl.repair(model, own, TEXT, options=options), 1, "ffn")

    # without a ridge, least squares forgets the start; with a very large one, nothing is refitted
    least, whole = 1e-9, 1e9
    torch.testing.assert_close(refitted(plan, least), refitted(scaled, least), atol=1e-4, rtol=1e-4)
    start = weight(cl.prune(model, scaled), 1, "ffn")
    torch.testing.assert_close(refitted(scaled, whole), start, atol=1e-6, rtol=1e-6)


# What it is good for ------------------------------------------------------------------------------


def test_half_precision_is_refitted_wide_and_rounded_once() -> None:
    model = model_of("llama", dtype=torch.bfloat16)
    plan = plan_of(model)
    options = RepairOptions(progress=False, target="stream")
    repaired, bare = cl.repair(model, plan, TEXT, options=options), cl.prune(model, plan)
    assert {value.dtype for value in repaired.state_dict().values()} == {torch.bfloat16}
    wide = naive(model, plan, "stream", 0.01)
    for layer, kind in ((0, "ffn"), (1, "ffn")):
        found, start = (weight(m, layer, kind).double() for m in (repaired, bare))
        keep = weight(wide, layer, kind).abs().sum(dim=0) > 0
        change = weight(wide, layer, kind)[:, keep] - start
        # activations are rounded too, so the change is that of float64 to a few percent
        assert float((found - start - change).norm()) < 0.1 * float(change.norm())


def test_the_dense_model_is_left_alone() -> None:
    model = model_of("llama")
    before = copy.deepcopy(model.state_dict())
    repaired = cl.repair(model, plan_of(model), TEXT, options=QUIET)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    own = {value.data_ptr() for value in model.state_dict().values()}
    assert own.isdisjoint(value.data_ptr() for value in repaired.state_dict().values())
    repaired.requires_grad_(True)  # no tensor of inference mode, which could not be trained
    repaired(input_ids=OTHER.input_ids[:1], labels=OTHER.input_ids[:1]).loss.backward()


def test_without_a_projection_before_a_gap_the_model_stays_as_pruned(tmp_path: Path) -> None:
    model = model_of("llama")
    units = cl.enumerate_units(model, GROUPS)
    plan = plan_of(model, [unit.name for unit in units if unit.layer == 0])
    repaired: Any = cl.repair(model, plan, TEXT, options=QUIET)
    assert repaired.cocurve_manifest == cl.prune(model, plan).cocurve_manifest
    written = cl.load_pruned(cl.repair(model, plan, TEXT, options=QUIET, out=tmp_path / "small"))
    for found in (repaired, written):
        cl.check_equivalence(model, found, plan, TEXT)


# What is told -------------------------------------------------------------------------------------


def test_a_saved_folder_tells_of_the_refit(tmp_path: Path) -> None:
    model = model_of("llama")
    repaired: Any = cl.repair(model, plan_of(model), TEXT, options=QUIET)
    loaded: Any = cl.load_pruned(cl.save_pruned(repaired, tmp_path / "small"))
    assert torch.equal(full_logits(loaded, OTHER.input_ids), full_logits(repaired, OTHER.input_ids))
    manifest, card = told(tmp_path / "small")
    assert manifest["weights_since_pruning"] == "refitted"
    assert manifest["repair"] == {
        "method": "refit",
        "sequential": True,
        "target": "gap",
        "kinds": ["attention", "ffn"],
        "ridge": 0.3,
        "calibration": TEXT.source,
        "calibration_fingerprint": TEXT.fingerprint,
        "sequences": 12,
        "positions": 12 * 24,
    }
    assert "pruning_risk" not in card  # H predicts nothing of refitted weights
    with pytest.raises(cl.EquivalenceError):
        cl.check_equivalence(model, loaded, plan_of(model), TEXT)
    cl.save_pruned(repaired.to(torch.bfloat16), tmp_path / "half")
    assert told(tmp_path / "half")[0]["weights_since_pruning"] == "converted"


def told(folder: Path) -> tuple[dict[str, Any], str]:
    """The manifest and the card of a folder."""
    return json.loads((folder / MANIFEST).read_text()), (folder / "README.md").read_text()


# Bad input ----------------------------------------------------------------------------------------


MODEL = model_of("llama")
PLAN = plan_of(MODEL)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *((lambda r=r: RepairOptions(ridge=r), cl.InputError) for r in (-0.1, math.nan, "0.1")),
        (lambda: cl.repair(MODEL, [1, 2], TEXT), cl.InputError),
        (lambda: cl.repair(MODEL, PLAN, tiny_text(2, 80)), cl.InputError),
        (lambda: cl.repair(model_of("llama", layers=2), PLAN, TEXT), cl.MismatchError),
        (
            lambda: cl.repair(MODEL, PLAN, tiny_text(1, 4), options=RepairOptions(0.0)),
            cl.NumericalError,
        ),
        *(
            (lambda p=p: cl.repair(broken(p), PLAN, TEXT), cl.NumericalError)
            for p in ("up", "down")
        ),
    ],
)
def test_bad_input_is_told(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call()


def broken(place: str) -> PreTrainedModel:
    """A model that is not finite before the columns of a block, or after them."""
    model = model_of("llama")
    getattr(model.model.layers[0].mlp, f"{place}_proj").weight.data[0, 0] = math.nan
    return model
