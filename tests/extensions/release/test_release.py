"""The authors' release: a whole folder with the published totals, its masks, and what opens it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_widgets.packing import pack_problem
from helpers.problems import llama_8b_units
from helpers.release import Shape, mask_path, write_json, write_release
from helpers.tiny_models import (
    FFN,
    GROUPS,
    HEADS,
    HIDDEN,
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
    curvature = cl.Curvature.from_release(released)
    units = curvature.units
    np.testing.assert_array_equal(units.costs, llama_8b_units().costs)
    assert units["L31.ffn[15]"].stop == 14336
    assert (units.total_parameters, units.ffn_groups) == (None, 16)
    assert (curvature.provenance["source"], curvature.group_grams) == ("release", None)
    assert pack_problem(curvature)["parameters"] is None


@pytest.mark.parametrize(
    "shape",
    [
        Shape("Qwen2.5-7B", 2, 3584, 128, 28, 4, 18944, biases=True),
        Shape("Falcon3-7B", 2, 3072, 256, 12, 4, 23040),
        Shape("Nemo", 2, 5120, 128, 32, 8, 14336),
        Shape("MHA", 2, 64, 8, 8, 8, 160),
    ],
    ids=lambda shape: shape.key,
)
def test_the_release_is_read_into_our_units(tmp_path: Path, shape: Shape) -> None:
    matrix = write_release(tmp_path, shape)
    curvature = cl.Curvature.from_release(tmp_path)
    np.testing.assert_allclose(curvature.matrix, matrix, atol=1e-6)
    attention = [u for u in curvature.units if u.kind == "attention" and u.layer == 0]
    assert attention[-1].stop == shape.heads * shape.head_dim  # head_dim follows from the costs
    assert attention[0].stop == shape.heads // shape.kv_heads * shape.head_dim


@pytest.mark.parametrize("percent", [10, 50])
def test_a_published_mask_is_a_plan_without_an_order(released: Path, percent: int) -> None:
    mask = json.loads(mask_path(released, percent).read_text())
    plan = cl.Selection.from_release(released, percent / 100)
    assert list(plan.pruned) == mask["pruned_units"]
    assert list(plan.kept) == mask["selected_units"]
    assert plan.pruned_cost == mask["pruned_cost"]
    assert plan.realized_ratio == pytest.approx(mask["actual_prune_ratio"])
    made = (plan.requested_ratio, plan.interaction_strength, plan.ordered)
    assert made == (percent / 100, 0.0108, False)
    curvature = cl.Curvature.from_release(released)
    assert plan.predicted_risk == pytest.approx(curvature.risk(plan.pruned))
    assert plan.curvature_fingerprint == curvature.fingerprint
    with pytest.raises(cl.InputError):
        plan.prefix(0.05)


@pytest.mark.parametrize("state", ["absent", "pointer"])
def test_a_mask_needs_no_matrix(tiny: Path, state: str) -> None:
    matrix = tiny / "matrices" / "H.npy"
    matrix.unlink()
    if state == "pointer":
        matrix.write_bytes(POINTER)
    plan = cl.Selection.from_release(tiny, 0.2)
    assert (plan.predicted_risk, plan.curvature_fingerprint) == (None, None)
    assert len(plan) > 0


# What contradicts itself --------------------------------------------------------------------------

MASK = "r20/masks/prune_solution.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def registry(**changes: Any) -> Any:
    """Change fields of the registry."""
    return lambda folder: edit(folder / "registry.json", **changes)


def unit(number: int, **changes: Any) -> Any:
    """Change fields of a unit in the registry."""

    def change(folder: Path) -> None:
        content = json.loads((folder / "registry.json").read_text())
        content["units"][number] |= changes
        write_json(folder / "registry.json", content)

    return change


def mask(**changes: Any) -> Any:
    """Change fields of the mask for 20 %."""
    return lambda folder: edit(mask_path(folder, 20), **changes)


def file(name: str, content: bytes) -> Any:
    return lambda folder: (folder / name).write_bytes(content)


def header(*shape: int) -> Any:
    """A matrix whose header claims another shape."""

    def change(folder: Path) -> None:
        with (folder / "matrices" / "H.npy").open("wb") as target:
            claim = {"descr": "<f4", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(target, claim)

    return change


def array(values: Any) -> Any:
    return lambda folder: np.save(folder / "matrices" / "H.npy", values, allow_pickle=True)


def absurd(folder: Path) -> None:
    with (folder / "registry.json").open("r+b") as target:
        target.truncate(1 << 40)  # sparse: takes no room


BAD = [
    *(mask(**{name: value}) for name, value in {
        "pruned_cost": 1.0, "total_cost": 1.0, "actual_prune_ratio": 0.9,
        "target_prune_ratio": 0.4, "selected_units": None, "interaction_strength": None,
    }.items()),
    mask(actual_prune_ratio=float("nan")),
    mask(pruned_cost="much"),
    mask(pruned_cost=10**400),
    *(mask(pruned_units=units) for units in ([], [0, 0], [99], [[0]], "012")),
    *(file(name, content) for name in ("registry.json", MASK)
      for content in (POINTER, b"", b"[]", b"{", b"[" * 100_000, b'{"pruned_units": []}', b"\xff")),
    absurd,
    registry(schema_version=2),
    registry(units=None),
    *(unit(3, **{name: value}) for name, value in (
        ("cost", -5.0), ("cost", 1.5), ("cost", 1e300), ("cost", float("nan")), ("cost", "5"),
        ("layer_idx", 1 << 70), ("layer_idx", 9), ("unit_type", "expert"), ("metadata", []),
    )),
    unit(0, cost=1025),  # fits no head_dim
    unit(0, tower="vision"),
    unit(1, metadata={"query_head_indices": []}),
    unit(5, metadata={"group_size": 10}),
    *(file("matrices/H.npy", content) for content in (
        POINTER, b"", b"PK\x03\x04", b"\x93NUMPY\x01\x00v\x00{'descr'",
    )),
    header(10**7, 10**7),
    header(-1, 4),
    array(np.full((18, 18), "a")),
    array(np.array([{}], dtype=object)),
]  # fmt: skip


def read(folder: Path) -> None:
    cl.Curvature.from_release(folder)
    cl.Selection.from_release(folder, 0.2)


@pytest.mark.parametrize("case", range(len(BAD)))
def test_a_release_that_is_damaged_or_contradicts_itself_is_refused(tiny: Path, case: int) -> None:
    read(tiny)
    BAD[case](tiny)
    with pytest.raises(cl.FileFormatError):
        read(tiny)


def test_files_that_are_missing_or_of_another_model(tiny: Path) -> None:
    np.save(tiny / "matrices" / "H.npy", np.eye(3))
    with pytest.raises(cl.InputError):
        cl.Curvature.from_release(tiny)
    with pytest.raises(FileNotFoundError):
        cl.Curvature.from_release(tiny / "none")
    for place, ratio in ((tiny, 0.3), (tiny, 0.205), (tiny, 20), (tiny / "matrices", 0.2)):
        with pytest.raises(FileNotFoundError):
            cl.Selection.from_release(place, ratio)


# On a model ---------------------------------------------------------------------------------------


def test_a_mask_is_applied_to_its_model(tiny: Path) -> None:
    model, plan = tiny_model(), cl.Selection.from_release(tiny, 0.4)
    pruned = cl.prune(model, plan, verify=tiny_text(2))
    assert pruned.num_parameters() == model.num_parameters() - plan.pruned_cost


@pytest.mark.parametrize("changes", [{"heads": "mha"}, {"intermediate_size": 44}, {"layers": 4}])
def test_another_model_is_refused(tiny: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(cl.MismatchError):
        cl.prune(tiny_model(**changes), cl.Selection.from_release(tiny, 0.2))
