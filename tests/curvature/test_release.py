"""The authors' release: a whole folder with the published totals, its masks, and what opens it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_lab.base.errors import FileFormatError, InputError, MismatchError
from cocurve_lab.solver.selection import Selection
from cocurve_widgets import BridgeExplorer, LambdaExplorer, Session
from cocurve_widgets.packing import pack_problem
from helpers.problems import random_curvature
from helpers.release import Shape, mask_path, write_json, write_release
from helpers.tiny_models import (
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
    full_logits,
    masked_by_hand,
    tiny_model,
    tiny_text,
)

# of llm/llama-3.1-8b-instruct/registry.json in the published manifest
PUBLISHED_REGISTRY = "0cb526eb1ec8aff36da28b53d0718debdfca82a22b01bf8bde99bd7727c21db1"
TINY = Shape(
    key="tiny", layers=3, hidden=HIDDEN, head_dim=HIDDEN // 4, heads=4, kv_heads=HEADS["gqa"][1],
    width=FFN, groups=GROUPS,
)  # fmt: skip


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of Llama-3.1-8B; read only."""
    folder = tmp_path_factory.mktemp("release")
    write_release(folder)
    return folder


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder for the tiny GQA Llama of models.py, whose FFN groups are uneven."""
    write_release(tmp_path, TINY, (20, 40))
    return tmp_path


def edit(path: Path, **changes: Any) -> None:
    write_json(path, json.loads(path.read_text()) | changes)


# The folder ---------------------------------------------------------------------------------------


def test_the_synthetic_folder_has_the_published_registry_and_totals(released: Path) -> None:
    registry = (released / "registry.json").read_bytes()
    assert hashlib.sha256(registry).hexdigest() == PUBLISHED_REGISTRY
    assert (released / "matrices" / "H.npy").stat().st_size == 2_359_424  # likewise
    units = cl.Curvature.from_release(released).units
    assert (len(units), units.total_cost) == (768, 6_979_321_856)
    costs = {kind: {u.cost for u in units if u.kind == kind} for kind in ("attention", "ffn")}
    assert costs == {"attention": {5_242_880}, "ffn": {11_010_048}}
    assert units.total_parameters is None


@pytest.mark.parametrize("percent", [10, 20, 30, 40, 50])
def test_a_published_mask_is_a_plan_without_an_order(released: Path, percent: int) -> None:
    mask = json.loads(mask_path(released, percent).read_text())
    plan = Selection.from_release(released, percent / 100)
    assert list(plan.pruned) == mask["pruned_units"]
    assert list(plan.kept) == mask["selected_units"]
    assert plan.pruned_cost == mask["pruned_cost"]
    assert plan.realized_ratio == pytest.approx(mask["actual_prune_ratio"])
    assert (plan.requested_ratio, plan.ordered) == (percent / 100, False)
    assert plan.interaction_strength == 0.0108
    assert plan.params_removed_fraction is None
    s = plan.indicator.astype(float)
    curvature = cl.Curvature.from_release(released)
    assert plan.predicted_risk == pytest.approx(s @ curvature.matrix @ s / 2)
    assert plan.curvature_fingerprint == curvature.fingerprint
    with pytest.raises(InputError, match="no removal order"):
        plan.prefix(0.05)


@pytest.mark.parametrize("state", ["absent", "pointer"])
def test_a_mask_needs_no_matrix(tiny: Path, state: str) -> None:
    matrix = tiny / "matrices" / "H.npy"
    matrix.unlink()
    if state == "pointer":
        matrix.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    plan = Selection.from_release(tiny, 0.2)
    assert plan.predicted_risk is None
    assert plan.curvature_fingerprint is None
    assert len(plan) > 0


def test_a_missing_ratio_lists_those_there_are(tiny: Path) -> None:
    for ratio in (0.3, 0.205, 20):
        with pytest.raises(FileNotFoundError, match=r"it has 0\.2, 0\.4"):
            Selection.from_release(tiny, ratio)
    with pytest.raises(FileNotFoundError, match="it has none"):
        Selection.from_release(tiny / "matrices", 0.2)


# What contradicts itself --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pruned_cost": 1.0}, r"pruned_cost is 1\.0, but its pruned units come to \d"),
        (
            {"total_cost": 1.0},
            r"total_cost is 1\.0, but the units of registry\.json come to 21,312",
        ),
        ({"actual_prune_ratio": 0.9}, r"actual_prune_ratio is 0\.9, but"),
        ({"actual_prune_ratio": float("nan")}, "actual_prune_ratio is nan, but"),
        ({"target_prune_ratio": 0.4}, r"target_prune_ratio is 0\.4, but its folder r20 says 0\.2"),
        ({"pruned_units": []}, "not the 18 units of registry.json, each once"),
        ({"pruned_units": [0, 0]}, "once"),
        ({"pruned_units": [99]}, r"damaged entry \(99\)"),
        ({"pruned_units": [[0]]}, "damaged entry"),
        ({"pruned_units": "012"}, "a list of units"),
        ({"selected_units": None}, "a list of units"),
        ({"pruned_cost": "much"}, "damaged entry"),
        ({"pruned_cost": 10**400}, "damaged entry"),
        ({"interaction_strength": None}, "damaged entry"),
    ],
)
def test_a_mask_that_contradicts_itself_is_refused(
    tiny: Path, changes: dict[str, Any], message: str
) -> None:
    edit(mask_path(tiny, 20), **changes)
    with pytest.raises(FileFormatError, match=message):
        Selection.from_release(tiny, 0.2)


@pytest.mark.parametrize(
    "text",
    [
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "",
        "[]",
        "{",
        "[" * 100_000,
        '{"pruned_units": []}',
        "\udcff",
    ],
    ids=["pointer", "empty", "list", "cut", "deep", "lacking", "bytes"],
)
@pytest.mark.parametrize("name", ["registry.json", "r20/masks/prune_solution.json"])
def test_files_that_are_no_release_are_refused(tiny: Path, name: str, text: str) -> None:
    (tiny / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    expected = "git lfs pull" if text.startswith("version") else "ownload it again"
    with pytest.raises(FileFormatError, match=expected):
        Selection.from_release(tiny, 0.2)


def test_a_json_file_of_absurd_size_is_not_read(tiny: Path) -> None:
    with (tiny / "registry.json").open("r+b") as file:
        file.truncate(1 << 40)  # sparse: takes no room
    with pytest.raises(FileFormatError, match="1,099,511,627,776 bytes"):
        Selection.from_release(tiny, 0.2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cost", -5.0),
        ("cost", 1.5),
        ("cost", 1e300),
        ("cost", float("nan")),
        ("cost", "5"),
        ("layer_idx", 1 << 70),
        ("layer_idx", 9),
        ("unit_type", "expert"),
        ("metadata", []),
    ],
)
def test_a_registry_with_odd_units_is_refused(tiny: Path, field: str, value: object) -> None:
    registry = json.loads((tiny / "registry.json").read_text())
    registry["units"][3][field] = value
    write_json(tiny / "registry.json", registry)
    with pytest.raises(FileFormatError, match=r"registry\.json"):
        cl.Curvature.from_release(tiny)


def test_vision_language_releases_are_named_as_such(tiny: Path) -> None:
    registry = json.loads((tiny / "registry.json").read_text())
    registry["units"][0]["tower"] = "vision"
    write_json(tiny / "registry.json", registry)
    with pytest.raises(FileFormatError, match="vision-language"):
        cl.Curvature.from_release(tiny)


@pytest.mark.parametrize("shape", [(10**7, 10**7), (-1, 4)])
def test_a_header_that_claims_a_huge_matrix_is_refused(tiny: Path, shape: tuple[int, int]) -> None:
    with (tiny / "matrices" / "H.npy").open("wb") as file:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(FileFormatError, match="not a numpy array"):
        cl.Curvature.from_release(tiny)


def test_a_matrix_of_text_is_refused(tiny: Path) -> None:
    np.save(tiny / "matrices" / "H.npy", np.full((18, 18), "a"))
    with pytest.raises(FileFormatError, match="not floats"):
        cl.Curvature.from_release(tiny)


# On a model ---------------------------------------------------------------------------------------


def test_a_mask_is_applied_to_its_model(tiny: Path) -> None:
    model, text = tiny_model(), tiny_text(2)
    plan = Selection.from_release(tiny, 0.4)
    pruned = cl.prune(model, plan)
    with masked_by_hand(model, [plan.units.units[i] for i in plan.pruned]):
        expected = full_logits(model, text.input_ids)
    with cl.ablate(model, plan):
        torch.testing.assert_close(full_logits(model, text.input_ids), expected)
    torch.testing.assert_close(full_logits(pruned, text.input_ids), expected, atol=1e-4, rtol=0)
    assert pruned.num_parameters() == model.num_parameters() - plan.pruned_cost


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"heads": "mha"}, r"L0\.attention\[0\]: columns 0:8, cost 1,024 against .* 0:16"),
        ({"intermediate_size": 44}, r"L0\.ffn\[1\]: columns 11:22.* against .* 11:22|L0\.ffn\[2\]"),
        ({"layers": 4}, "the model has 24 units, the selection has 18"),
    ],
)
def test_another_model_is_refused_naming_the_first_difference(
    tiny: Path, changes: dict[str, Any], first: str
) -> None:
    model, plan = tiny_model(**changes), Selection.from_release(tiny, 0.2)
    for apply in (cl.prune, lambda m, s: cl.ablate(m, s).__enter__()):
        with pytest.raises(MismatchError, match=first):
            apply(model, plan)


# The explorers ------------------------------------------------------------------------------------


def test_the_lambda_explorer_opens_on_it(released: Path) -> None:
    curvature = cl.Curvature.from_release(released)
    explorer = LambdaExplorer(curvature, session=Session(curvature))
    settings = [
        {"ratio": 0.3, "interaction_strength": 0.0108},
        {"layer_cap": 0.5, "protect_first": 2, "protect_last": 2},
        {"layer_cap": None, "layer_cap_factor": 1.5},
        {"kinds": ["ffn"], "ratio": 0.2},
    ]
    for values in settings:
        for name, value in values.items():
            setattr(explorer, name, value)
        assert explorer.error == ""
        expected = cl.solve_greedy(
            curvature, explorer.ratio, explorer.interaction_strength, explorer.guards
        )
        assert explorer.selection.pruned == expected.pruned
    solved = explorer.selection
    explorer.session.selection = Selection.from_release(released, 0.2)
    assert "cannot make" in explorer.status  # a mask whose guards are not known
    assert explorer.selection is solved
    explorer.close()


def test_the_share_of_all_parameters_is_not_stated_without_a_model(released: Path) -> None:
    assert pack_problem(cl.Curvature.from_release(released))["parameters"] is None
    units = cl.enumerate_units(tiny_model(), GROUPS)
    assert pack_problem(random_curvature(units))["parameters"] == units.total_parameters


def test_the_bridge_explorer_opens_on_it(released: Path) -> None:
    curvature = cl.Curvature.from_release(released)
    explorer = BridgeExplorer(curvature, session=Session(curvature))
    explorer.threshold = 0.2
    explorer.selected_unit = 65
    assert explorer.error == ""
    assert explorer.nodes["name"] == [unit.name for unit in curvature.units]
    assert explorer.selected_unit == 65
    explorer.close()
