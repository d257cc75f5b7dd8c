"""The contract of every study that is kept: measured once, read back, resumed, judged and drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.judging.generation import Question
from cocurve_lab.extensions.pretrained.kept import kept_plans
from cocurve_lab.models.identity import demo_folder
from cocurve_studies import abilities
from cocurve_studies.certainty import findings as certain
from cocurve_studies.certainty import sensitivity
from cocurve_studies.findings import Finding
from cocurve_studies.start import curvature_for
from cocurve_studies.structure import bridges, causal, edges, geometry
from cocurve_studies.structure import findings as structural
from cocurve_studies.tables import Table, pick
from cocurve_studies.trust import choices, fidelity, reach
from cocurve_studies.trust import findings as trusting
from helpers.seals import fields_of, sealed
from helpers.studies import QUIET, Problem, forbidden
from helpers.tiny_models import tiny_text, word_tokenizer

TOKENIZER = word_tokenizer()
QUESTIONS = [Question(name, f"w{n}", "w1 w2") for n, name in enumerate(("code", "other"))]
KNOBS = sensitivity.SensitivityOptions(2, 20, (1,), (10,), 2)
ARMS = causal.CausalOptions(0.3, ((0.6, 0.3),), caliper=1.0)
PARTS = reach.ReachOptions((0.3,), 3, (2,), 6, blocks=3, layers=2)
PLANS = fidelity.FidelityOptions((0.2, 0.3, 0.4), (1.0,), 0.3, 5)


@dataclass(frozen=True)
class Study:
    """How a study is called, and what reads its table."""

    run: Callable[..., Table]
    inputs: Callable[[Problem], tuple[Any, ...]]
    judge: Callable[[Any], list[Finding]] | None = None
    draw: Callable[[Table], Any] | None = None
    more: dict[str, Any] | None = None

    def __call__(self, problem: Problem, folder: Path) -> Table:
        quiet = {"progress": False} if "progress" in signature(self.run).parameters else {}
        return self.run(*self.inputs(problem), **quiet, **(self.more or {}), cache=folder)


def measured(p: Problem) -> tuple[Any, ...]:
    return p.model, p.curvature, p.texts.report


def chosen(p: Problem) -> tuple[Any, ...]:
    return p.model, p.curvature, p.texts, (0.3,)


def asked(p: Problem) -> tuple[Any, ...]:
    return p.model, TOKENIZER, abilities.strength_plans(p.curvature, (0.4,), (0.0, 1.0)), QUESTIONS


STUDIES: dict[str, Study] = {
    "fidelity": Study(
        fidelity.fidelity_study,
        lambda p: (*measured(p), PLANS),
        trusting.fidelity_findings,
    ),
    "edge_reach": Study(
        reach.edge_reach,
        lambda p: (*measured(p), PARTS),
        trusting.reach_findings,
    ),
    "strength": Study(
        choices.strength_study,
        chosen,
        trusting.strength_findings,
        choices.plot_strength,
        {"options": QUIET, "draws": 2},
    ),
    "diagonal": Study(
        choices.diagonal_study,
        chosen,
        trusting.diagonal_findings,
        more={"options": QUIET, "draws": 2},
    ),
    "bridge_thresholds": Study(
        bridges.bridge_table,
        lambda p: (p.curvature, (0.3, 0.5)),
    ),
    "causal": Study(
        causal.causal_study,
        lambda p: (*measured(p), ARMS),
        structural.causal_findings,
        more={"tokenizer": TOKENIZER, "questions": QUESTIONS},
    ),
    "edges": Study(
        edges.edge_study,
        lambda p: (*measured(p), (0.3,)),
        structural.edge_findings,
        more={"draws": 2},
    ),
    "blocks": Study(
        geometry.block_table,
        lambda p: (p.curvature,),
        lambda table: structural.structure_findings(table, []),
    ),
    "budgets": Study(
        geometry.budget_table,
        lambda p: (p.curvature,),
        lambda table: structural.structure_findings([], table),
        geometry.plot_budgets,
    ),
    "propositions": Study(
        geometry.proposition_table,
        lambda p: (p.curvature, (0.2, 0.4)),
        structural.proposition_findings,
    ),
    "sensitivity": Study(
        sensitivity.sensitivity_study,
        lambda p: (p.model, tiny_text(4), tiny_text(3, 16, seed=7), KNOBS),
        certain.sensitivity_findings,
    ),
    "abilities": Study(
        abilities.ability_study,
        asked,
        abilities.edge_ability_findings,
    ),
}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_kept_resumed_judged_and_drawn(
    name: str, problem: Problem, tmp_path: Path
) -> None:
    study = STUDIES[name]
    first = study(problem, tmp_path)
    (file,) = tmp_path.glob("study_*.json")
    assert file.name.startswith(f"study_{name}_")
    file.unlink()
    with forbidden(problem.model):  # what was measured and built is enough
        assert str(pick(study(problem, tmp_path))) == str(pick(first))
    kept = fields_of(file.read_text())
    file.write_text(sealed(kept | {"rows": kept["rows"][:1]}))
    with forbidden(problem.model):  # the file is read, whatever it says
        assert len(study(problem, tmp_path)) == 1
    if study.judge is not None:
        found = study.judge(first)
        assert found
        assert "nan" not in " ".join(finding.ours for finding in found)
    if study.draw is not None:
        figure = study.draw(first)
        assert figure.layout.title.text
        assert any(len(trace.x) for trace in figure.data)


def test_notebooks_start_from_the_h_that_ships(tmp_path: Path) -> None:
    model, tokenizer = cl.load_model("demo")
    units = cl.enumerate_units(model)
    every = {"seq_len": None, "positions_per_sequence": "all", "text_file": None}
    calibration, judge = cl.default_calibration("demo", tokenizer, 64, 8, **every)
    with forbidden(model):
        h = curvature_for("demo", model, units, calibration, 256, tmp_path)
        with pytest.raises(AssertionError):  # of other settings it is built
            curvature_for("demo", model, units, calibration, 128, tmp_path)
    assert (h.provenance["sequences_done"], len(h.group_grams)) == (64, 16)
    judge.require_disjoint(h)
    small = cl.Curvature.load(demo_folder() / "H_16_rows.npz")  # of the first of the same rows
    assert np.corrcoef(np.log(h.saliency), np.log(small.saliency))[0, 1] > 0.95
    assert kept_plans(h) is None
