"""What several studies share: the marks by which kept tables are found again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from typing import Any

import pytest

import cocurve_lab as cl
from cocurve_lab.base.storage import fingerprint
from cocurve_lab.models.identity import fingerprint_model, model_dtype
from cocurve_studies.certainty import coverage, precision, sensitivity
from cocurve_studies.shared import Recipe
from cocurve_studies.structure import arms, bridges, causal, edges, geometry, propositions
from cocurve_studies.trust import (
    choices,
    fidelity,
    improving,
    infinitesimal,
    iterative,
    redundancy,
    saturation,
)
from helpers.tiny_models import GROUPS, tiny_model, tiny_text, word_tokenizer

MODEL, BUILT_ON = tiny_model(), tiny_text(4)
UNITS = cl.enumerate_units(MODEL, GROUPS)
H = cl.estimate_curvature(MODEL, UNITS, BUILT_ON, 16, progress=False)
TEXT, OTHER = tiny_text(3, 16, seed=7), tiny_text(3, 16, seed=8)
RECIPE = Recipe(BUILT_ON, 16)
CHOICE = cl.ChoiceOptions()
TEXTS = choices.Texts(TEXT, OTHER)
WORDS = {"mixed": [" ".join(f"w{(7 * n + k) % 90}" for k in range(60)) for n in range(60)]}
KNOBS = sensitivity.SensitivityOptions(
    rows=2,
    positions=8,
    seq_len=12,
    row_counts=(),
    position_counts=(),
    top_rs=(),
    group_counts=(),
    draws=1,
)

M, T, C = fingerprint_model(MODEL), TEXT.fingerprint, H.fingerprint
GRAMS = fingerprint(H.group_grams)
BOTH = {"model": M, "dtype": model_dtype(MODEL)}
RACE = {"max_candidates": CHOICE.max_candidates, "first_rows": CHOICE.first_rows}
RACE |= {"stop_beyond": CHOICE.stop_beyond, "judge": CHOICE.judge}
PAIR = {"model": M, "curvature": C, "choose": T, "report": OTHER.fingerprint} | RACE
PLANS = {"ratios": [0.2], "strengths": [1.0]}
FIDELITY = fidelity.FidelityOptions()
STOP = cl.StopWhenConverged(0.2, 0.0)


def first_build(texts: dict[str, list[str]]) -> list[Any]:
    """The mark of the base build of the knobs above."""
    rows = cl.CalibrationSet.from_texts(texts["mixed"], word_tokenizer(), 2, 12, 8, 0, "mixed")
    return ["base", "mixed", rows.fingerprint, 97, 16]  # r at most the vocabulary


# study -> how it is called, and its settings, key by key, as kept tables have them
KEPT: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "single_units": (
        lambda: fidelity.single_unit_fidelity(H),
        {"curvature": C, "groups": fingerprint(H.group_grams, H.group_risks)},
    ),
    "fidelity": (
        # with a sketch of shifts the table has prices that earlier ones have not
        lambda: fidelity.fidelity_study(MODEL, replace(H, shift_source=None), TEXT),
        BOTH
        | {"curvature": C, "text": T, "ratios": FIDELITY.ratios, "strengths": FIDELITY.strengths}
        | {"pool_ratio": 0.2, "pool_size": 26, "seed": 0},
    ),
    "pair_saturation": (
        lambda: saturation.pair_saturation(MODEL, H, TEXT),
        BOTH | {"curvature": C, "text": T, "pairs": "60", "seed": "0"},
    ),
    "strength": (
        lambda: choices.strength_study(MODEL, H, TEXTS, (0.2,)),
        PAIR | {"ratios": [0.2]},
    ),
    "guards": (
        lambda: choices.guards_study(MODEL, H, TEXTS, (0.2,)),
        PAIR | {"ratios": [0.2]},
    ),
    "refinement": (
        lambda: improving.refinement_study(MODEL, H, TEXT, (0.2,), (1.0,)),
        {"model": M, "curvature": C, "text": T} | PLANS,
    ),
    "gains": (
        lambda: improving.gains_study(MODEL, H, TEXTS, (0.2,), (1.0,)),
        {"model": M, "curvature": C, "text": T, "report": OTHER.fingerprint} | PLANS,
    ),
    "infinitesimal": (
        lambda: infinitesimal.measure_infinitesimal(MODEL, H, H, TEXT),
        BOTH
        | {"text": T, "curvatures": [C, C], "methods": ["ablation"] * 2}
        | {"groups": [fingerprint(H.group_grams, H.group_positions)] * 2}
        | {"grid": asdict(infinitesimal.PlanGrid())},
    ),
    "redundancy": (
        lambda: redundancy.redundancy_study({"m": redundancy.Subject(MODEL, BUILT_ON, TEXT)}),
        BOTH
        | {"held_out": T, "recipe": [BUILT_ON.fingerprint, 256, 16], "ffn_groups": 16}
        | {"options": asdict(redundancy.RedundancyOptions())},
    ),
    "iterative": (
        lambda: iterative.iterative_study(MODEL, RECIPE, TEXT),
        BOTH
        | {"held_out": T, "recipe": [BUILT_ON.fingerprint, 16, 16]}
        | {"options": asdict(iterative.IterativeOptions())},
    ),
    "bridge_thresholds": (
        lambda: bridges.bridge_table(H, (0.5,)),
        {"curvature": C, "quantiles": [0.5], "connectivity": "sum", "ratio": 0.2},
    ),
    "causal": (
        lambda: causal.causal_study(MODEL, H, causal.Outcomes(TEXT)),
        {
            "measured": BOTH | {"held_out": T, "families": {}, "questions": fingerprint([])},
            "curvature": C,
            "options": asdict(arms.CausalOptions()),
        },
    ),
    "edges": (
        lambda: edges.edge_study(MODEL, H, TEXT),
        BOTH | {"curvature": C, "text": T} | asdict(edges.EdgeOptions()),
    ),
    "blocks": (lambda: geometry.block_table(H), {"curvature": C, "groups": GRAMS}),
    "budgets": (
        lambda: geometry.budget_table(H),
        {"curvature": C, "groups": GRAMS, "ratio": 0.2, "strengths": [0.0, 1.0]}
        | {"guards": repr(cl.Guards())},
    ),
    "spectrum": (lambda: geometry.spectrum_table(H), {"curvature": C, "groups": GRAMS}),
    "propositions": (
        lambda: propositions.proposition_table(H, (0.2,)),
        {"curvature": C, "groups": GRAMS, "ratios": [0.2], "strengths": [0.0, 1.0]},
    ),
    "coverage": (
        lambda: coverage.coverage_study(MODEL, UNITS, BUILT_ON),
        BOTH
        | {"units": UNITS.fingerprint, "calibration": BUILT_ON.fingerprint}
        | {"options": asdict(coverage.CoverageOptions())},
    ),
    "stability": (
        lambda: coverage.stability_table(H),
        {
            "groups": fingerprint(H.group_grams, H.group_positions, UNITS.fingerprint),
            "plans": [[0.2, 0.4], [0.0, 1.0]],
            "draws": [50, 0],
        },
    ),
    "stopping": (
        lambda: precision.stopping_study(MODEL, UNITS, RECIPE, STOP),
        {
            "model": [M, model_dtype(MODEL), UNITS.fingerprint],
            "recipe": [BUILT_ON.fingerprint, 16, 16],
            "criterion": [*STOP.criterion, STOP.patience],
        },
    ),
    "sensitivity": (
        lambda: sensitivity.sensitivity_study(MODEL, word_tokenizer(), WORDS, TEXT, KNOBS),
        # the knob "temperature" came later; without a value of it tables are the earlier ones
        BOTH
        | {"options": {k: v for k, v in asdict(KNOBS).items() if k != "temperatures"}}
        | {"held_out": T, "builds": [first_build(WORDS)]},
    ),
}


class Asked(Exception):
    """A study asked for its table."""


@pytest.mark.parametrize("study", KEPT)
def test_a_kept_table_is_found_again(study: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def ask(folder: Any, name: str, settings: dict[str, Any], compute: Any) -> None:
        asked.update(name=name, settings=settings)
        raise Asked

    run, expected = KEPT[study]
    for room in ("trust", "structure", "certainty"):
        package = import_module(f"cocurve_studies.{room}")
        for module in vars(package).values():
            if hasattr(module, "cached_table"):
                monkeypatch.setattr(module, "cached_table", ask)
    with pytest.raises(Asked):
        run()
    assert asked["name"] == study
    assert json.dumps(asked["settings"], sort_keys=True) == json.dumps(expected, sort_keys=True)


def test_a_recipe_with_another_h_has_another_mark() -> None:
    assert RECIPE.mark == [BUILT_ON.fingerprint, 16, 16]
    marks = [replace(RECIPE, **change).mark for change in ({"temperature": 2.0}, {"groups": 4})]
    marks += [replace(RECIPE, sketch_positions=20).mark, RECIPE.mark]
    assert len({json.dumps(mark) for mark in marks}) == 4
    shifts = replace(RECIPE, sketch_positions=20, progress=False).build(MODEL, UNITS).shifts
    assert shifts is not None
    assert len(shifts) == 20
