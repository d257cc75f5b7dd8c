"""The contract of every study: kept by its marks, read back, resumed, judged and drawn.

Kept tables are found by the settings here, key by key. A change makes every user measure again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.base.storage import fingerprint
from cocurve_lab.curvature.groups import Groups
from cocurve_lab.extensions.choosing.settings import guards_grid
from cocurve_lab.extensions.judging.generation import Question
from cocurve_lab.models.identity import fingerprint_model, model_dtype
from cocurve_studies import abilities
from cocurve_studies.certainty import coverage, precision, purposes, sensitivity
from cocurve_studies.certainty import findings as certain
from cocurve_studies.findings import Finding
from cocurve_studies.sections import SECTIONS
from cocurve_studies.shared import Recipe
from cocurve_studies.structure import (
    arms,
    bridges,
    causal,
    edges,
    geometry,
    matching,
    propositions,
)
from cocurve_studies.structure import findings as structural
from cocurve_studies.tables import Table
from cocurve_studies.trust import (
    choices,
    diagonal,
    fidelity,
    improving,
    reach,
    redundancy,
)
from cocurve_studies.trust import findings as trusting
from helpers.seals import fields_of, sealed
from helpers.studies import forbidden
from helpers.tiny_models import GROUPS, tiny_model, tiny_text, word_tokenizer

MODEL, BUILT_ON = tiny_model(), tiny_text(6)
UNITS = cl.enumerate_units(MODEL, GROUPS)
H = cl.estimate_curvature(MODEL, UNITS, BUILT_ON, 16, progress=False)
TEXT, OTHER = tiny_text(3, 16, seed=7), tiny_text(3, 16, seed=8)
CHOICE = cl.ChoiceOptions(progress=False)
TEXTS = choices.Texts(TEXT, OTHER)
WORDS = {"mixed": [" ".join(f"w{(7 * n + k) % 90}" for k in range(60)) for n in range(60)]}
TOKENIZER = word_tokenizer()
QUESTIONS = [Question(name, f"w{n}", "w1 w2") for n, name in enumerate(("code", "other"))]

M, T, C = fingerprint_model(MODEL), TEXT.fingerprint, H.fingerprint
GRAMS = fingerprint(H.group_grams)
BOTH = {"model": M, "dtype": model_dtype(MODEL)}
RACE = {"max_candidates": CHOICE.max_candidates, "first_rows": CHOICE.first_rows}
RACE |= {"stop_beyond": CHOICE.stop_beyond, "judge": CHOICE.judge}
PAIR = {"model": M, "curvature": C, "choose": T, "report": OTHER.fingerprint} | RACE
PLANS = {"ratios": [0.3], "strengths": [1.0]}
RECIPE = [BUILT_ON.fingerprint, 16, 16]

FIDELITY = fidelity.FidelityOptions((0.2, 0.3, 0.4), (1.0,), 0.3, 5)
REACH = reach.ReachOptions((0.3,), 3, sizes=(), blocks=3, layers=2)  # a split risk is not resumed
PRUNED = redundancy.RedundancyOptions(0.3, 16)
ARMS = arms.CausalOptions(0.3, ((0.6, 0.3),), ("greedy", "random"), (0, 1), caliper=1.0)
EDGES = edges.EdgeOptions((0.3,))
COVER = coverage.CoverageOptions(("saliency",), (4,), (2, 4), 5, 16)
STOP = cl.StopWhenConverged(0.2, 0.0)
KNOBS = sensitivity.SensitivityOptions(
    rows=2,
    positions=8,
    seq_len=12,
    row_counts=(1,),
    position_counts=(),
    top_rs=(),
    group_counts=(),
    draws=2,
)
PURPOSES = {"here": (tiny_text(2, seed=3), TEXT), "there": (tiny_text(2, seed=4), OTHER)}
ASKED = abilities.strength_plans(H, (0.3,), (0.0, 1.0))


def first_build() -> list[Any]:
    """The mark of the base build of the knobs above."""
    rows = cl.CalibrationSet.from_texts(WORDS["mixed"], TOKENIZER, 4, 12, 8, 0, "mixed")
    return ["base", "mixed", rows.fingerprint, 97, 16]  # r at most the vocabulary


def recipe(folder: Any) -> Recipe:
    return Recipe(BUILT_ON, 16, cache=folder, progress=False)


@dataclass(frozen=True)
class Study:
    """How a study is called with a folder, the settings of its table, and what reads the table."""

    run: Callable[[Any], Table]
    settings: dict[str, Any]
    judge: Callable[[Table], list[Finding]] | None = None
    draw: Callable[[Table], Any] | None = None
    resumes: bool = True


def in_folder(study: Callable[..., Table], *inputs: Any, **named: Any) -> Callable[[Path], Table]:
    """A study by its folder, without a bar."""
    quiet = {"progress": False} if "progress" in signature(study).parameters else {}
    return lambda folder: study(*inputs, **named, **quiet, cache=folder)


STUDIES: dict[str, Study] = {
    "single_units": Study(
        in_folder(fidelity.single_unit_fidelity, H),
        {"curvature": C, "groups": fingerprint(H.group_grams, H.group_risks)},
        trusting.single_unit_findings,
        fidelity.plot_single_unit_fidelity,
    ),
    "fidelity": Study(
        in_folder(fidelity.fidelity_study, MODEL, H, TEXT, FIDELITY),
        BOTH
        | {"curvature": C, "text": T, "ratios": FIDELITY.ratios, "strengths": FIDELITY.strengths}
        | {"pool_ratio": 0.3, "pool_size": 5, "seed": 0},
        trusting.fidelity_findings,
        fidelity.plot_fidelity,
    ),
    "edge_reach": Study(
        in_folder(reach.edge_reach, MODEL, H, TEXT, REACH),
        BOTH | {"curvature": C, "text": T} | asdict(REACH),
        trusting.reach_findings,
        reach.plot_reach,
    ),
    "strength": Study(
        in_folder(choices.strength_study, MODEL, H, TEXTS, (0.3,), options=CHOICE),
        PAIR | {"ratios": [0.3]},
        trusting.strength_findings,
        choices.plot_strength,
    ),
    "guards": Study(
        in_folder(choices.guards_study, MODEL, H, TEXTS, (0.3,), options=CHOICE),
        PAIR | {"ratios": [0.3], "grid": list(map(str, guards_grid()))},
        trusting.guards_findings,
    ),
    "diagonal": Study(
        in_folder(diagonal.diagonal_study, MODEL, H, TEXTS, (0.3,), options=CHOICE),
        PAIR | {"ratios": [0.3], "grid": list(map(str, guards_grid()))},
        trusting.diagonal_findings,
        diagonal.plot_diagonal,
    ),
    "refinement": Study(
        in_folder(improving.refinement_study, MODEL, H, TEXT, (0.3,), (1.0,)),
        {"model": M, "curvature": C, "text": T} | PLANS,
        trusting.refinement_findings,
    ),
    "gains": Study(
        in_folder(improving.gains_study, MODEL, H, TEXTS, (0.3,), (1.0,), options=CHOICE),
        {"model": M, "curvature": C, "text": T, "report": OTHER.fingerprint} | PLANS,
        trusting.gains_findings,
        improving.plot_gains,
    ),
    "redundancy": Study(
        in_folder(
            redundancy.redundancy_study,
            {"m": redundancy.Subject(MODEL, BUILT_ON, TEXT, GROUPS)},
            PRUNED,
        ),
        BOTH | {"held_out": T, "recipe": RECIPE, "ffn_groups": GROUPS, "options": asdict(PRUNED)},
        trusting.redundancy_findings,
        redundancy.plot_redundancy,
    ),
    "bridge_thresholds": Study(
        in_folder(bridges.bridge_table, H, (0.3, 0.5)),
        {"curvature": C, "quantiles": [0.3, 0.5], "connectivity": "sum", "ratio": 0.2},
        lambda table: structural.bridge_findings(table, bridges.bridge_edges(H)),
        bridges.plot_bridge_thresholds,
    ),
    "causal": Study(
        in_folder(causal.causal_study, MODEL, H, causal.Outcomes(TEXT, QUESTIONS, TOKENIZER), ARMS),
        {
            "measured": BOTH
            | {"held_out": T, "families": {}}
            | {"questions": fingerprint([[q.capability, q.prompt, q.answer] for q in QUESTIONS])},
            "curvature": C,
            "options": asdict(ARMS),
        },
        structural.causal_findings,
        causal.plot_causal,
    ),
    "edges": Study(
        in_folder(edges.edge_study, MODEL, H, TEXT, EDGES),
        BOTH
        | {"curvature": C, "text": T}
        | {k: v for k, v in asdict(EDGES).items() if k != "correlations"},
        structural.edge_findings,
        edges.plot_edges,
    ),
    "blocks": Study(
        in_folder(geometry.block_table, H),
        {"curvature": C, "groups": GRAMS},
        lambda table: structural.structure_findings(table, []),
        geometry.plot_blocks,
    ),
    "budgets": Study(
        in_folder(geometry.budget_table, H),
        {"curvature": C, "groups": GRAMS, "ratio": 0.2, "strengths": [0.0, 1.0]}
        | {"guards": repr(cl.Guards())},
        lambda table: structural.structure_findings([], table),
        geometry.plot_budgets,
    ),
    "spectrum": Study(
        in_folder(geometry.spectrum_table, H),
        {"curvature": C, "groups": GRAMS},
        draw=geometry.plot_spectrum,
    ),
    "propositions": Study(
        in_folder(propositions.proposition_table, H, (0.2,)),
        {"curvature": C, "groups": GRAMS, "ratios": [0.2], "strengths": [0.0, 1.0]},
        structural.proposition_findings,
        propositions.plot_propositions,
    ),
    "coverage": Study(
        in_folder(coverage.coverage_study, MODEL, UNITS, BUILT_ON, COVER),
        BOTH
        | {"units": UNITS.fingerprint, "calibration": BUILT_ON.fingerprint}
        | {"options": asdict(COVER)},
        certain.coverage_findings,
        coverage.plot_coverage,
    ),
    "stability": Study(
        in_folder(coverage.stability_table, H, (0.2,), (0.0,), draws=5),
        {
            "groups": fingerprint(H.group_grams, H.group_positions, UNITS.fingerprint),
            "plans": [[0.2], [0.0]],
            "draws": [5, 0],
        },
        draw=coverage.plot_stability,
    ),
    "stopping": Study(
        lambda folder: precision.stopping_study(MODEL, UNITS, recipe(folder), STOP),
        {
            "model": [M, model_dtype(MODEL), UNITS.fingerprint],
            "recipe": RECIPE,
            "criterion": [*STOP.criterion, STOP.patience],
        },
        draw=precision.plot_stopping,
        resumes=False,  # the readouts come from the build itself
    ),
    "sensitivity": Study(
        in_folder(sensitivity.sensitivity_study, MODEL, TOKENIZER, WORDS, TEXT, KNOBS),
        BOTH | {"options": asdict(KNOBS)} | {"held_out": T, "builds": [first_build()]},
        certain.sensitivity_findings,
        sensitivity.plot_sensitivity,
    ),
    "purposes": Study(
        in_folder(purposes.purpose_table, MODEL, UNITS, PURPOSES, 0.3, top_r=16),
        {"model": M, "dtype": model_dtype(MODEL), "units": UNITS.fingerprint, "ratio": 0.3}
        | {"recipes": {name: Recipe(rows, 16).mark for name, (rows, _) in PURPOSES.items()}}
        | {"judges": {name: judge.fingerprint for name, (_, judge) in PURPOSES.items()}},
        certain.purpose_findings,
        partial(purposes.plot_purposes, strength=1.0),
    ),
    "abilities": Study(
        in_folder(abilities.ability_study, MODEL, TOKENIZER, ASKED, QUESTIONS),
        BOTH
        | {"questions": fingerprint([[q.capability, q.prompt, q.answer] for q in QUESTIONS])}
        | {
            "plans": [
                [r["variant"], r["base"], r["requested_ratio"], r["selection"].fingerprint]
                for r in ASKED
            ]
        },
        abilities.strength_ability_findings,
        abilities.plot_abilities,
    ),
}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_kept_resumed_judged_and_drawn(name: str, tmp_path: Path) -> None:
    study = STUDIES[name]
    first = study.run(tmp_path)
    (file,) = tmp_path.glob("study_*.json")
    assert file.name.startswith(f"study_{name}_")
    kept = fields_of(file.read_text())
    expected = json.dumps(study.settings, sort_keys=True)
    assert json.dumps(kept["settings"], sort_keys=True) == expected

    if study.resumes:
        file.unlink()
        with forbidden(MODEL):  # what was measured and built is enough
            assert str(study.run(tmp_path)) == str(first)
    file.write_text(sealed(kept | {"rows": kept["rows"][:1]}))
    with forbidden(MODEL):  # the file is read, whatever it says
        assert len(study.run(tmp_path)) == 1

    found = study.judge(first) if study.judge else []
    assert study.judge is None or found
    assert {finding.study for finding in found} <= SECTIONS.keys()
    assert "nan" not in " ".join(finding.ours for finding in found)
    if study.draw:
        check_chart(study.draw(first))


def check_chart(figure: Any) -> None:
    """Axes have names, series are told apart, and each point has its error."""
    assert figure.layout.title.text
    assert figure.layout.xaxis.title.text
    assert figure.layout.yaxis.title.text
    assert any(len(trace.x) for trace in figure.data)
    looks = []
    for trace in figure.data:
        if trace.type == "heatmap":
            assert len(trace.z) == len(trace.y)
            continue
        (points,) = {len(v) for v in (trace.x, trace.y) if not (len(v) and isinstance(v[0], list))}
        for error in (getattr(trace, "error_x", None), getattr(trace, "error_y", None)):
            assert error is None or error.array is None or len(error.array) == points
        if getattr(trace, "mode", "") != "lines" and trace.showlegend is not False and trace.name:
            line, legend = getattr(trace, "line", None), getattr(trace, "legend", None)
            mark = trace.marker.symbol if trace.type == "scatter" else trace.marker.pattern.shape
            looks.append((trace.marker.color, mark, line and line.dash, legend))
    assert len(set(looks)) == len(looks)


# Bad input ----------------------------------------------------------------------------------------
FREE = replace(H, groups=None)
ONE_GROUP = cl.Curvature.from_groups(
    UNITS, Groups(H.group_grams.sum(axis=0)[None], H.group_positions.sum()[None]), {}
)
SEEN = BUILT_ON.rows(0, 2)
INDEFINITE = cl.Curvature(2 - np.eye(len(UNITS)), UNITS, {"text_windows": ""})
LEAKY = {"leaky": redundancy.Subject(MODEL, BUILT_ON, SEEN, GROUPS)}


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (lambda: fidelity.single_unit_fidelity(FREE), cl.InputError, ""),
        (lambda: fidelity.fidelity_study(MODEL, H, SEEN), cl.MismatchError, ""),
        (lambda: reach.edge_reach(MODEL, H, SEEN), cl.MismatchError, ""),
        (lambda: reach.ReachOptions(pairs=0), cl.InputError, "pairs is 0"),
        (lambda: reach.ReachOptions(sizes=(4, 1)), cl.InputError, "sizes"),
        (
            lambda: choices.strength_study(MODEL, H, choices.Texts(TEXT, TEXT), options=CHOICE),
            cl.MismatchError,
            "",
        ),
        (lambda: redundancy.redundancy_study({}), cl.InputError, "models"),
        (lambda: redundancy.redundancy_study(LEAKY, progress=False), cl.MismatchError, ""),
        (
            lambda: redundancy.redundancy_study(
                {"m": redundancy.Subject(MODEL, BUILT_ON, TEXT)},
                redundancy.RedundancyOptions(top_r=0),
                progress=False,
            ),
            cl.InputError,
            "top_r",
        ),
        (lambda: redundancy.redundancy_trend([{"a": 1}], "gain"), cl.InputError, "'gain'"),
        (
            lambda: improving.refinement_study(MODEL, INDEFINITE, TEXT, (0.2,), progress=False),
            cl.NumericalError,
            "",
        ),
        (lambda: bridges.bridge_table(H, []), cl.InputError, "quantile"),
        (lambda: bridges.bridge_table(H, [1.5]), cl.InputError, "1.5"),
        (lambda: bridges.bridge_table(H, connectivity="mean"), cl.InputError, "mean"),  # type: ignore[arg-type]
        (lambda: bridges.bridge_edges(H, top=0), cl.InputError, "top is 0"),
        (lambda: bridges.bridge_edges(H, [99]), cl.InputError, "99"),
        (lambda: bridges.plot_bridge_thresholds([]), cl.InputError, ""),
        *(
            (partial(matching.match_controls, H, **bad), cl.InputError, named)
            for bad, named in (
                ({"bridges": []}, "bridge"),
                ({"bridges": [3, 3]}, "twice"),
                ({"bridges": ["L9.ffn[0]"]}, "L9"),
                ({"bridges": [0], "caliper": -0.1}, "caliper is -0.1"),
                ({"bridges": [0], "caliper": math.inf}, "caliper is inf"),
                ({"bridges": [0], "caliper": math.nan}, "caliper is nan"),
                ({"bridges": [0], "exclude": [99]}, "99"),
            )
        ),
        (lambda: causal.Outcomes(TEXT, QUESTIONS), cl.InputError, "tokenizer"),
        (lambda: arms.CausalOptions(ratio=1.0), cl.InputError, "ratio is 1"),
        (lambda: arms.CausalOptions(fills=("nearest",)), cl.InputError, "nearest"),  # type: ignore[arg-type]
        (lambda: arms.CausalOptions(thresholds=()), cl.InputError, "thresholds"),
        (lambda: arms.CausalOptions(seeds=()), cl.InputError, "seed"),
        (lambda: causal.causal_study(MODEL, H, causal.Outcomes(SEEN), ARMS), cl.MismatchError, ""),
        (lambda: edges.edge_study(MODEL, H, TEXT, edges.EdgeOptions(())), cl.InputError, "ratios"),
        (
            lambda: edges.edge_study(MODEL, H, TEXT, edges.EdgeOptions((1.0,))),
            cl.InputError,
            "ratio is 1",
        ),
        (lambda: edges.edge_study(MODEL, H, SEEN, EDGES), cl.MismatchError, ""),
        (
            lambda: geometry.spectrum_table(cl.Curvature(0 * H.matrix, UNITS)),
            cl.InputError,
            "trace",
        ),
        (
            lambda: coverage.coverage_study(
                MODEL, UNITS, BUILT_ON, coverage.CoverageOptions(sizes=(4,), groups=(16,))
            ),
            cl.InputError,
            "16",
        ),
        (lambda: coverage.stability_table(FREE), cl.InputError, "group"),
        (lambda: coverage.stability_table(ONE_GROUP), cl.InputError, "group"),
        (
            lambda: precision.stopping_study(
                MODEL, UNITS, Recipe(tiny_text(20, 12), 16, 4, progress=False), STOP
            ),
            cl.InputError,
            "groups",
        ),
        (lambda: sensitivity.SensitivityOptions(rows=0), cl.InputError, "0"),
        (lambda: sensitivity.SensitivityOptions(draws=0), cl.InputError, "0"),
        (lambda: sensitivity.SensitivityOptions(row_counts=(4, 0)), cl.InputError, "0"),
        (
            lambda: sensitivity.SensitivityOptions(interaction_strengths=()),
            cl.InputError,
            "interaction_strengths",
        ),
        (
            lambda: sensitivity.sensitivity_study(MODEL, TOKENIZER, {}, TEXT, KNOBS),
            cl.InputError,
            "texts",
        ),
        (
            lambda: sensitivity.sensitivity_study(
                MODEL,
                TOKENIZER,
                WORDS,
                cl.CalibrationSet.from_texts(WORDS["mixed"], TOKENIZER, 4, 12, 8).rows(3, 4),
                KNOBS,
            ),
            cl.MismatchError,
            "",
        ),
        (
            lambda: abilities.ability_study(
                MODEL, TOKENIZER, [ASKED[0] | {"selection": None}], QUESTIONS
            ),
            cl.InputError,
            "",
        ),
    ],
)
def test_bad_input_is_refused(
    call: Callable[[], object], error: type[cl.CocurveError], named: str
) -> None:
    with pytest.raises(error, match=named or None):
        call()


def test_a_recipe_with_another_h_has_another_mark() -> None:
    mine = recipe(None)
    assert mine.mark == RECIPE
    assert replace(mine, groups=4).mark != mine.mark
