"""Measured interactions: the KL of parts alone and in pairs, and plans made of whole parts."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.interactions.measured import Interactions
from cocurve_lab.measuring.risk import Meter
from helpers.tiny_models import tiny_model, tiny_text

ROWS = tiny_text(3, 12)


def measured(family: str = "llama", parts: Any = "blocks", **options: Any) -> Interactions:
    model = tiny_model(family)
    units = cl.enumerate_units(model, ffn_groups=4)
    return cl.measure_interactions(model, parts, ROWS, units=units, progress=False, **options)


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("llama", "units"),
        ("gemma3_text", "blocks"),
        ("llama", "layers"),
        ("gpt_neox", [[0, 3], ["L1.ffn[1]"], [5, 7, 2]]),
    ],
)
def test_alone_and_together_are_measured_risks(family: str, parts: Any) -> None:
    model = tiny_model(family, "mha" if family == "gpt_neox" else "gqa")
    units = cl.enumerate_units(model, ffn_groups=4)
    found = cl.measure_interactions(model, parts, ROWS, units=units, progress=False)
    if parts == "layers":
        layers = [{units[i].layer for i in part} for part in found.parts]
        assert layers == [{layer} for layer in range(units.num_layers)]
    for a, b in list(combinations(range(len(found.parts)), 2))[:6]:
        sets = [found.parts[a], found.parts[b], found.parts[a] + found.parts[b]]
        one, other, both = (cl.pruning_risk(model, [units[i] for i in s], ROWS) for s in sets)
        assert found.alone.mean(axis=0)[[a, b]] == pytest.approx([one, other], rel=1e-4, abs=1e-9)
        edge = found.interaction[a, b]
        assert edge == pytest.approx(both - one - other, rel=1e-3, abs=1e-6)


def test_its_curvature_predicts_one_and_two_parts_exactly() -> None:
    found = measured(parts="blocks")
    q = found.curvature
    assert q.units.total_cost == found.units.total_cost
    places = {
        (found.units[s[0]].layer, found.units[s[0]].kind): p for p, s in enumerate(found.parts)
    }
    for place, unit in enumerate(q.units):
        part = places[unit.layer, unit.kind]
        assert q.risk([place]) == pytest.approx(found.alone[:, part].mean())
        assert unit.cost == found.costs[part]
    errors = cl.jackknife(q, "edges").standard_error  # its groups are rows
    edge = found.by_row[:, 0, 1]
    assert errors[0, 1] == pytest.approx(edge.std(ddof=1) / np.sqrt(len(edge)))


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_a_plan_is_of_whole_parts_and_as_good_as_the_best(strength: float) -> None:
    found = measured(parts="blocks")
    plan = found.solve(0.3, strength)
    chosen = [part for part in found.parts if set(part) <= set(plan.pruned)]
    assert sorted(plan.pruned) == sorted(unit for part in chosen for unit in part)
    assert plan.realized_ratio >= plan.requested_ratio == 0.3

    def objective(parts: tuple[int, ...]) -> float:
        edges = found.interaction[np.ix_(parts, parts)].sum() / 2
        return float(found.alone.mean(axis=0)[list(parts)].sum() + strength * edges)

    need = 0.3 * found.units.total_cost
    every = (s for n in range(1, 5) for s in combinations(range(len(found.parts)), n))
    reach = [s for s in every if found.costs[list(s)].sum() >= need]
    assert plan.objective == pytest.approx(min(map(objective, reach)))
    again = cl.Selection.from_json(plan.to_json())
    assert (again.pruned, again.made.matrix) == (plan.pruned, "measured KL")


def test_a_pool_measures_pairs_of_the_cheapest_parts_alone() -> None:
    whole, few = measured(), measured(pool=3)
    per_cost = whole.alone.mean(axis=0) / whole.costs
    assert set(few.pool) == set(np.argsort(per_cost)[:3])
    kept = list(few.pool)
    np.testing.assert_allclose(few.interaction, whole.interaction[np.ix_(kept, kept)], atol=1e-6)
    assert few.solve(0.1).pruned
    with pytest.raises(cl.InputError):
        few.solve(0.95)


def test_it_resumes_where_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, fill, calls = measured(), Meter.fill, []

    def interrupted(self: Meter, *args: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        fill(self, *args)

    monkeypatch.setattr(Meter, "fill", interrupted)
    path = tmp_path / "plans.ckpt"
    with pytest.raises(KeyboardInterrupt):
        measured(checkpoint=path)
    kept = path.stat().st_size
    again = measured(checkpoint=path)
    assert path.stat().st_size > kept > 0
    assert np.array_equal(again.together, whole.together)


def test_a_file_keeps_everything(tmp_path: Path) -> None:
    whole, path = measured(), tmp_path / "blocks.npz"
    whole.save(path)
    read = Interactions.load(path)
    assert np.array_equal(read.together, whole.together)
    for field in ("parts", "pool", "units", "provenance"):
        assert getattr(read, field) == getattr(whole, field)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(cl.FileFormatError):
        Interactions.load(path)


@pytest.mark.parametrize(
    "options",
    [
        *({"parts": parts} for parts in ("heads", [], [[0], []], [[0, 1], [1]], [[10**6]])),
        {"pool": 1},
    ],
    ids=str,
)
def test_impossible_parts_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(cl.InputError):
        measured(**options)
