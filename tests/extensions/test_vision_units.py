"""Units of the image tower: inventory, masks, H, plans and cuts against masks by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

import cocurve_lab as cl
from cocurve_lab.extensions.images.rows import ImageRows
from cocurve_lab.models.identity import MANIFEST
from cocurve_lab.solver.targets import flop_costs
from extensions.test_images import rows_of, seen_by_hand
from helpers import tiny_models
from helpers.bare_process import run_bare, save_expected
from helpers.contract import by_hand, removable_parameters
from helpers.tiny_models import (
    GROUPS,
    TOWERS,
    VISION_PLACES,
    masked_by_hand,
    naive_build,
    naive_risk,
    relative_error,
    tiny_model,
    tiny_text,
    units_by_hand,
    vision_by_hand,
)


def loud_model(family: str, **settings: Any) -> Any:
    """A model whose image tower and projector are so large that each head there matters."""
    model = tiny_model(family, layers=3 if family == "qwen3_vl" else 2, **settings)
    for name, weight in model.named_parameters():
        large = weight.dim() > 1 or "lambda" in name  # by which InternVL scales each write
        if large and any(part in name for part in ("visual", "vision", "projector")):
            weight.mul_(3)
    return model


def plans_of(units: cl.UnitSet) -> dict[str, cl.Selection]:
    """A third of all units; blocks without heads or channels in both towers; vision alone."""
    rng = np.random.default_rng(1)
    first = units.decoder_layers
    blocks = [(first, "vision-attention"), (first + 1, "vision-ffn"), (1, "attention")]
    third = rng.choice(len(units), len(units) // 3, replace=False).tolist()
    ones = [i for i, unit in enumerate(units) if units.of_vision[i] and unit.index == 1]
    whole = [i for i, unit in enumerate(units) if (unit.layer, unit.kind) in blocks]
    found = {"scattered": third, "whole blocks": whole, "vision alone": ones}
    return {name: cl.Selection.from_pruned(units, gone) for name, gone in found.items()}


@torch.no_grad()
def logits_of(model: Any, rows: ImageRows, number: int = 0) -> torch.Tensor:
    """Logits [T, V] of a row, whose images are given here, not by the library."""
    ids = rows.input_ids[number : number + 1]
    return model(input_ids=ids, use_cache=False, **rows.images[number]).logits[0]


def difference(model: Any, pruned: Any, plan: cl.Selection, rows: ImageRows) -> float:
    """Largest |logit| difference of a model masked by hand and a pruned one, with images."""
    with masked_by_hand(model, by_hand(plan)[0]):
        expected = logits_of(model, rows)
    return float((logits_of(pruned, rows) - expected).abs().max())


def parameters_by_name(model: Any) -> int:
    """Parameters of attention and FFN in the image tower, without output biases."""
    blocks, *outputs = VISION_PLACES[model.config.model_type][:3]
    kinds = {output.partition(".")[0] for output in outputs}
    total = 0
    for name, weight in model.named_parameters():
        part = name.removeprefix(f"{blocks}.").partition(".")[2]
        if name.startswith(f"{blocks}.") and part.partition(".")[0] in kinds:
            total += 0 if part in [f"{output}.bias" for output in outputs] else weight.numel()
    return total


@pytest.mark.parametrize("family", TOWERS)
def test_the_contract(family: str, tmp_path: Path) -> None:
    model, rows = loud_model(family), rows_of(family)
    units = cl.enumerate_units(model, GROUPS, vision=True)
    expected = units_by_hand(model) + vision_by_hand(model)
    assert [(u.layer, u.kind, u.start, u.stop) for u in units] == [tuple(u) for u in expected]
    assert units.total_cost == removable_parameters(model) + parameters_by_name(model)
    dense = logits_of(model, rows)
    for name, plan in plans_of(units).items():
        pruned = cl.prune(model, plan)
        assert difference(model, pruned, plan, rows) < 1e-4, name
        assert (logits_of(pruned, rows) - dense).abs().max() > 0.02, name
        gone = model.num_parameters() - pruned.num_parameters()
        assert gone == plan.pruned_cost
        folder = cl.save_pruned(pruned, tmp_path / name)
        removed = int(units.of_vision[list(plan.pruned)].sum())
        assert f"{removed} units of the image tower" in (folder / "README.md").read_text()
        again = cl.load_pruned(folder, device="cpu")
        assert torch.equal(logits_of(again, rows), logits_of(pruned, rows))
        assert cl.enumerate_units(again, GROUPS, vision=True) == cl.enumerate_units(
            pruned, GROUPS, vision=True
        )
    assert torch.equal(logits_of(model, rows), dense)
    assert not hasattr(model.config.vision_config, "cocurve_widths")


@pytest.mark.parametrize("family", TOWERS)
def test_h_of_both_towers_is_naive(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows = loud_model(family), rows_of(family)
    units = cl.enumerate_units(model, GROUPS, vision=True)
    found = cl.estimate_curvature(model, units, rows, 32, progress=False)
    plans = list(plans_of(units).values())
    table = cl.measure_plans(model, plans, rows, progress=False, plans_per_batch=2)
    alone = cl.pruning_risk(model, plans[0], rows)
    seen_by_hand(rows, monkeypatch)
    expected, risks = naive_build(loud_model(family), rows, 32, vision=True)
    assert relative_error(found.matrix, expected) < 1e-5
    # the corner of the image tower, and what it has with the language tower, by themselves
    of_vision = units.of_vision
    for rows_at, columns in ((of_vision, of_vision), (of_vision, ~of_vision)):
        part = np.ix_(rows_at, columns)
        assert relative_error(found.matrix[part], expected[part]) < 1e-3
        assert np.abs(expected[part]).max() > 1e-5
    np.testing.assert_allclose(found.single_unit_risk, risks, rtol=2e-3, atol=1e-7)
    for kl, plan in zip(table.kl, plans, strict=True):
        naive = naive_risk(loud_model(family), by_hand(plan)[0], rows, double=False)
        np.testing.assert_allclose(kl, naive, rtol=1e-3)
    assert alone == pytest.approx(table.mean[0], rel=1e-4)


def test_the_language_tower_alone_is_the_default() -> None:
    model = tiny_model("qwen2_5_vl", layers=2)
    units = cl.enumerate_units(model, GROUPS)
    assert not units.of_vision.any()
    both = cl.enumerate_units(model, GROUPS, vision=True)
    assert both.units[: len(units)] == units.units
    assert both.decoder_layers == units.num_layers == 2
    assert both.num_layers == 4
    plan = cl.Selection.from_pruned(units, [0])
    assert plan.to_json() == cl.Selection.from_json(plan.to_json()).to_json()
    assert json.loads(plan.to_json())["guards"]["kinds"] == ["attention", "ffn"]
    pruned = cl.prune(model, plan)
    assert not hasattr(pruned.config.vision_config, "cocurve_widths")
    weights = pruned.state_dict()
    for name, weight in model.state_dict().items():
        assert "visual" not in name or torch.equal(weights[name], weight)


@pytest.fixture(scope="module")
def built() -> tuple[Any, ImageRows, cl.Curvature]:
    model, rows = loud_model("qwen2_5_vl"), rows_of("qwen2_5_vl")
    units = cl.enumerate_units(model, GROUPS, vision=True)
    return model, rows, cl.estimate_curvature(model, units, rows, 32, progress=False)


def test_greedy_has_one_budget(built: Any, tmp_path: Path) -> None:
    _, _, curvature = built
    units = curvature.units
    plan = cl.solve_greedy(curvature, 0.4)
    half, costs = curvature.saliency / 2, units.costs
    order: list[int] = []
    while costs[order].sum() < 0.4 * costs.sum():  # Algorithm 2, written out
        score = (half + curvature.matrix[:, order].sum(axis=1)) / costs
        score[order] = np.inf
        order.append(int(score.argmin()))
    assert list(plan.pruned) == order
    assert {units.of_vision[u] for u in order} == {False, True}
    curvature.save(tmp_path / "h.npz")
    again = cl.Curvature.load(tmp_path / "h.npz")
    assert again.units == units
    assert cl.solve_greedy(again, 0.4).pruned == plan.pruned
    assert cl.Selection.from_json(plan.to_json()).pruned == plan.pruned


def test_guards_know_the_towers_apart(built: Any) -> None:
    curvature = built[2]
    units, layers = curvature.units, curvature.units.layers

    def gone(guards: cl.Guards, ratio: float = 0.3) -> np.ndarray:
        return cl.solve_greedy(curvature, ratio, guards=guards).indicator

    language = gone(cl.Guards(kinds=("attention", "ffn")))
    assert not (language & units.of_vision).any()
    tower = gone(cl.Guards(kinds=("vision-attention", "vision-ffn")), 0.1)
    assert tower.any()
    assert not (tower & ~units.of_vision).any()
    # the last layer of the decoder is protected, the last of the image tower is not
    guarded = gone(cl.Guards(protect_last=1))
    assert not guarded[layers == 1].any()
    assert guarded[layers == 3].any()
    capped = gone(cl.Guards(layer_cap=0.5))
    for layer in range(4):
        mine = layers == layer
        assert units.costs[mine & capped].sum() <= units.costs[mine].sum() / 2
    with pytest.raises(cl.InfeasibleError):
        gone(cl.Guards(protect_first=2, kinds=("attention", "ffn")))


def test_the_size_of_a_batch_changes_nothing(built: Any) -> None:
    model, rows, curvature = built
    one = cl.BuildOptions(units_per_batch=1)
    found = cl.estimate_curvature(model, curvature.units, rows, 32, options=one, progress=False)
    assert relative_error(found.matrix, curvature.matrix) < 1e-5


def test_parts_and_lambda_are_measured_in_both_towers(built: Any) -> None:
    model, rows, curvature = built
    units = curvature.units
    parts = [[0, len(units) - 1], [units.index("L1.ffn[0]")], [units.index("L2.vision-ffn[1]")]]
    found = cl.measure_interactions(model, parts, rows, units=units, progress=False)
    for part, kl in zip(parts, found.alone.mean(axis=0), strict=True):
        assert kl == pytest.approx(cl.pruning_risk(model, part, rows, unit_set=units), rel=1e-3)
    options = cl.ChoiceOptions(progress=False)
    others = rows_of("qwen2_5_vl", 4).rows(2, 4)
    choice = cl.choose_interaction_strength(model, curvature, 0.3, others, options=options)
    assert choice.chosen.selection.units == units


def test_a_model_is_pruned_in_two_rounds(tmp_path: Path) -> None:
    model, rows = loud_model("internvl"), rows_of("internvl")
    units = cl.enumerate_units(model, GROUPS, vision=True)
    once = cl.prune(model, cl.Selection.from_pruned(units, [units.index("L2.vision-ffn[0]")]))
    left = cl.enumerate_units(once, GROUPS)  # now of the language tower alone
    twice = cl.prune(once, cl.Selection.from_pruned(left, [0]))
    again = cl.load_pruned(cl.save_pruned(twice, tmp_path / "twice"), device="cpu")
    both = cl.Selection.from_pruned(units, [0, units.index("L2.vision-ffn[0]")])
    assert difference(model, again, both, rows) < 1e-4


def test_heads_that_share_a_norm_are_one_unit() -> None:
    config = tiny_model("internvl", layers=2).config
    config.vision_config.use_qk_norm = True  # as in the large tower of InternVL
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval().requires_grad_(False)
    units, rows = cl.enumerate_units(model, GROUPS, vision=True), rows_of("internvl")
    heads = [unit for unit in units if unit.kind == "vision-attention"]
    assert [(unit.layer, unit.start, unit.stop) for unit in heads] == [(2, 0, 8), (3, 0, 8)]
    plan = cl.Selection.from_pruned(units, [units.index(heads[1])])
    pruned = cl.prune(model, plan)
    assert difference(model, pruned, plan, rows) < 1e-4
    assert model.num_parameters() - pruned.num_parameters() == heads[1].cost


def test_half_precision_is_checked_bit_for_bit(tmp_path: Path) -> None:
    model, rows = loud_model("llava").to(torch.bfloat16), rows_of("llava")
    units = cl.enumerate_units(model, GROUPS, vision=True)
    plan = plans_of(units)["scattered"]
    pruned = cl.prune(model, plan, verify=rows)
    folder = cl.prune(model, plan, out=tmp_path / "small", verify=rows)
    loaded = cl.load_pruned(folder, device="cpu").state_dict()
    assert all(torch.equal(loaded[name], w) for name, w in pruned.state_dict().items())
    next(w for n, w in pruned.named_parameters() if "vision" in n and w.dim() == 2)[0, 0] += 1
    with pytest.raises(cl.EquivalenceError):
        cl.check_equivalence(model, pruned, plan, rows)


BY_US = ("qwen3_5",)  # no class of the modeling file
WITHOUT = [family for family in TOWERS if family not in BY_US]


@pytest.fixture(scope="module")
def saw(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process without the library sees of each family's folder, with images."""
    place, folders = tmp_path_factory.mktemp("vision"), []
    for family in WITHOUT:
        model, rows = loud_model(family), rows_of(family, 1)
        units = cl.enumerate_units(model, GROUPS, vision=True)
        plans = plans_of(units)
        whole = [u for u in plans["whole blocks"].pruned if units.of_vision[u]]
        gone = {*whole, *plans["vision alone"].pruned}
        plan = cl.Selection.from_pruned(units, sorted(gone))
        folders.append(cl.save_pruned(cl.prune(model, plan), place / family))
        ids = rows.input_ids
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **rows.images[0]}
        with masked_by_hand(model, by_hand(plan)[0]):
            save_expected(model, inputs, folders[-1])
    return {"place": place, **run_bare("read_it", folders, place / "home")}


@pytest.mark.parametrize("family", WITHOUT)
def test_transformers_reads_the_folder(saw: dict[str, Any], family: str) -> None:
    manifest = json.loads((saw["place"] / family / MANIFEST).read_text())
    assert manifest["loads_with"] == "own code"
    assert not any(saw[family]["info"].values()), "missing or unexpected weights"
    assert max(saw[family]["difference"], saw[family]["eager"]) < 1e-4
    assert saw[family]["generated"]


# What is refused ----------------------------------------------------------------------------------


def test_what_does_not_know_the_image_tower_says_so(built: Any, tmp_path: Path) -> None:
    model, rows, curvature = built
    units = curvature.units
    plan = cl.Selection.from_pruned(units, [len(units) - 1])
    blind = tiny_text(2, 16)
    with pytest.raises(cl.ArchitectureError, match="image tower"):
        cl.enumerate_units(tiny_model(), vision=True)
    with pytest.raises(cl.InputError, match="no row carries an image"):
        cl.estimate_curvature(model, units, blind, 32, progress=False)
    for verb in (
        lambda: cl.estimate_curvature(model, units, rows, 32, method="exact", progress=False),
        lambda: cl.estimate_curvature(model, units, rows, 32, method="probe", progress=False),
        lambda: cl.repair(model, plan, blind),
        lambda: cl.get_method("magnitude").measure(model, units, rows, progress=False),
        lambda: cl.solve_greedy(curvature, 0.2, uniform=True),
        lambda: flop_costs(units, 16),
    ):
        with pytest.raises(cl.InputError, match="language tower alone"):
            verb()
    with pytest.raises(cl.MismatchError):
        cl.prune(tiny_model("llava", layers=2), plan)


def test_an_unknown_image_tower_is_refused_with_the_reason() -> None:
    model = tiny_model("gemma3", layers=1)
    model.config.vision_config.model_type = "another"
    assert len(cl.enumerate_units(model, GROUPS))
    with pytest.raises(cl.ArchitectureError, match="another"):
        cl.enumerate_units(model, GROUPS, vision=True)


def test_a_streamed_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    tiny_model("llava", layers=2).save_pretrained(tmp_path)
    tiny_models.word_tokenizer().save_pretrained(tmp_path)
    streamed, _ = cl.load_model(tmp_path, device="cpu", stream=True)
    with pytest.raises(cl.ArchitectureError, match="stream"):
        cl.enumerate_units(streamed, GROUPS, vision=True)


@pytest.mark.parametrize("damage", [[8, 9999], ["x", 1], None, [-1, 4]])
def test_a_damaged_configuration_is_refused(damage: Any, tmp_path: Path) -> None:
    model = tiny_model("llava", layers=2)
    units = cl.enumerate_units(model, GROUPS, vision=True)
    plan = cl.Selection.from_pruned(units, [len(units) - 1])
    folder = cl.save_pruned(cl.prune(model, plan), tmp_path / "small")
    path = folder / "config.json"
    content = json.loads(path.read_text())
    widths = content["vision_config"]["cocurve_widths"]
    widths[next(iter(widths))] = damage
    path.write_text(json.dumps(content))
    with pytest.raises(cl.FileFormatError):
        cl.load_pruned(folder, device="cpu")
