"""What ships with a fetched model: the short form of H, and measured plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.pretrained.kept import (
    KEPT_TEXTS,
    kept_curvature,
    kept_folder,
    kept_interactions,
    kept_plans,
    read_plans,
    write_curvature,
    write_plans,
)
from cocurve_lab.measuring.plan_memory import model_settings
from helpers.seals import fields_of, sealed
from helpers.tiny_models import tiny_model, tiny_text

PLAN: dict[str, Any] = {
    "name": "by hand",
    "requested_ratio": None,
    "interaction_strength": None,
    "pruned": [1, 4],
    "kl": {"c4": [0.5, 0.25]},
    "nll": {"c4": [3.5, 3.0]},
    "right": {"capitals": [3, 4]},
}


@pytest.fixture(scope="module")
def built() -> cl.Curvature:
    model = tiny_model("llama")
    rows = tiny_text(20, 12)
    options = cl.BuildOptions(groups=20)
    return cl.estimate_curvature(
        model, cl.enumerate_units(model, 4), rows, top_r=32, progress=False, options=options
    )


@pytest.fixture
def short(built: cl.Curvature, tmp_path: Path) -> cl.Curvature:
    write_curvature(built, tmp_path / "H.npz")
    return cl.Curvature.load(tmp_path / "H.npz")


def test_h_keeps_its_entries_and_its_errors(built: cl.Curvature, short: cl.Curvature) -> None:
    np.testing.assert_allclose(short.matrix, built.matrix, rtol=1e-6, atol=1e-9)
    for name in ("saliency", "edges", "ffn_redundancy", "connectivity"):
        mine, theirs = (cl.jackknife(h, name).standard_error for h in (short, built))
        np.testing.assert_allclose(mine, theirs, rtol=0.02)
    np.testing.assert_allclose(short.single_unit_risk, built.single_unit_risk, rtol=1e-6)


def test_plans_are_tied_to_their_model(short: cl.Curvature, tmp_path: Path) -> None:
    path, mark = tmp_path / "plans.json", short.provenance["model_fingerprint"]
    write_plans(path, mark, {"c4": {"rows": 1}}, [PLAN])
    (plan,) = read_plans(path, short).plans
    assert (plan.selection.pruned, plan.right) == ((1, 4), {"capitals": (3, 4)})
    assert plan.selection.predicted_risk == pytest.approx(short.risk([1, 4]))
    assert (len(plan.kl["c4"]), plan.every_row("c4").mean()) == (1, 0.375)  # one further row
    assert len(plan.every_row("wikitext")) == 0
    with pytest.raises(cl.MismatchError):
        read_plans(path, short.with_provenance(model_fingerprint="0" * 64))


@pytest.mark.parametrize("field", ["pruned", "kl", "right"])
def test_a_damaged_plan_is_refused(short: cl.Curvature, tmp_path: Path, field: str) -> None:
    path = tmp_path / "plans.json"
    write_plans(path, short.provenance["model_fingerprint"], {}, [PLAN])
    content = fields_of(path.read_text())
    content["plans"][0][field] = {"pruned": [999]}.get(field, 7)
    path.write_text(sealed(content))
    with pytest.raises(cl.FileFormatError):
        read_plans(path, short)


def test_other_models_have_nothing_kept(short: cl.Curvature) -> None:
    assert kept_curvature("demo") is kept_interactions("demo", "layers") is None
    whole = kept_curvature("smollm2")
    for place in ("smollm2", kept_folder() / "H.npz"):
        assert cl.Curvature.load(place).fingerprint == whole.fingerprint
    assert kept_plans(short.with_provenance(kept=None)) is None


@pytest.mark.parametrize(("text", "file"), KEPT_TEXTS.items())
def test_the_h_that_ships_is_of_24_rows_with_errors(text: Any, file: str) -> None:
    curvature = kept_curvature("smollm2", text)
    assert (len(curvature.units), curvature.provenance["sequences_done"]) == (570, 24)
    errors = cl.jackknife(curvature, "edges").standard_error
    assert 0 < np.median(errors) < np.median(np.abs(curvature.saliency))
    assert (kept_folder() / file).stat().st_size < 6e6


@pytest.mark.real
@pytest.mark.parametrize("text", KEPT_TEXTS)
def test_the_h_that_ships_is_of_the_fetched_model(smollm2: tuple[Any, Any], text: Any) -> None:
    model, curvature = smollm2[0], kept_curvature("smollm2", text)
    assert curvature.provenance["model_fingerprint"] == model_settings(model)["model_fingerprint"]
    assert curvature.units == cl.enumerate_units(model)


def test_the_plans_that_ship_are_of_the_h_that_ships() -> None:
    curvature = kept_curvature("smollm2")
    found = kept_plans(curvature).plans
    assert len(found[0].selection) == 0
    assert all(values.max() < 1e-6 for values in found[0].kl.values())
    solved = [p for p in found if p.name.startswith("H, ") and "own guards" not in p.name]
    assert {plan.selection.requested_ratio for plan in solved} >= {0.02, 0.1, 0.2, 0.3, 0.4}
    for plan in solved[::5]:
        kept, selection = 2 if plan.name.endswith("ends kept") else 0, plan.selection
        guards = cl.Guards(protect_first=kept, protect_last=kept)
        made = (selection.requested_ratio, selection.interaction_strength, guards)
        assert set(cl.solve_greedy(curvature, *made).pruned) == set(selection.pruned)
        assert {len(values) for values in plan.kl.values()} == {6}


@pytest.mark.parametrize(("parts", "count"), [("layers", 30), ("blocks", 60)])
def test_measured_interactions_ship_beside_h(parts: Any, count: int) -> None:
    found = kept_interactions("smollm2", parts)
    assert len(found.parts) == count
    kept_curvature("smollm2").units.require_same(found.units, mine="H", theirs="the parts")
    assert found.solve(0.2, 0.5).realized_ratio >= 0.2


@pytest.mark.parametrize("percent", [10, 20, 30])
def test_the_best_plans_ship_with_their_size(percent: int) -> None:
    plan = cl.Selection.from_json((kept_folder() / f"best_{percent}.json").read_text())
    assert plan.realized_ratio == pytest.approx(percent / 100, abs=0.003)
    assert plan.requested_ratio == percent / 100
