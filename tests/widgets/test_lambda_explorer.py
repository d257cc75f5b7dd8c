"""The lambda explorer without a browser: traits, plans, flips, linking, what the page receives."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.solver.guards import reachable_ratio
from cocurve_widgets import BridgeExplorer, LambdaExplorer, MeasuredPlan, Session
from helpers.instruments import received, say, settle
from helpers.problems import make_units, random_curvature

CURVATURE = random_curvature(make_units(6, 3, 8), seed=5)


@pytest.fixture
def explorer() -> LambdaExplorer:
    session = Session(CURVATURE)
    return LambdaExplorer(CURVATURE, session=session, protect_first=0, protect_last=0)


@pytest.mark.parametrize(("layers", "kept"), [(4, 0), (6, 1), (12, 2)])
def test_it_opens_with_the_papers_protection_and_no_cap(layers: int, kept: int) -> None:
    curvature = random_curvature(make_units(layers, 3, 8), seed=5)
    explorer = LambdaExplorer(curvature, session=Session(curvature), ratio=0.3)
    guards = cl.Guards(protect_first=kept, protect_last=kept)
    assert explorer.guards == explorer.selection.guards == guards
    assert explorer.selection.pruned == cl.solve_greedy(curvature, 0.3, 1.0, guards).pruned
    run = BridgeExplorer(curvature, session=Session(curvature)).plans["runs"]["edge_aware"]
    assert run["order"][: len(explorer.selection)] == list(explorer.selection.pruned)
    other = LambdaExplorer(curvature, session=explorer.session)  # follows the plan that is there
    explorer.protect_first = 0
    assert (other.protect_first, other.protect_last) == (0, kept)


def test_setting_a_trait_solves_like_solve_greedy(explorer: LambdaExplorer) -> None:
    for ratio, strength, guards in (
        (0.1, 0.0, cl.Guards()),
        (0.4, 0.37, cl.Guards(layer_cap=0.6)),
        (0.5, 1.0, cl.Guards(layer_cap_factor=1.5, protect_first=1, kinds=("ffn",))),
    ):
        explorer.ratio, explorer.interaction_strength = ratio, strength
        explorer.layer_cap, explorer.layer_cap_factor = guards.layer_cap, guards.layer_cap_factor
        explorer.protect_first = guards.protect_first
        explorer.kinds = list(guards.kinds or cl.KINDS)
        expected = cl.solve_greedy(CURVATURE, ratio, strength, guards)
        assert explorer.selection.pruned == expected.pruned
        assert explorer.selection.guards == guards
        assert explorer.session.selection is explorer.selection
        assert explorer.error == ""


def test_a_plan_chosen_elsewhere_sets_the_controls_and(
    explorer: LambdaExplorer,
) -> None:
    explorer.interaction_strength = 0.3
    guards = cl.Guards(layer_cap=0.7, protect_last=1)
    explorer.session.selection = plan = cl.solve_greedy(CURVATURE, 0.4, 0.7, guards)
    assert explorer.session.selection is plan
    assert (explorer.ratio, explorer.interaction_strength, explorer.guards) == (0.4, 0.7, guards)
    assert explorer.selection.pruned == plan.pruned
    for other in (
        cl.Selection.from_pruned(CURVATURE.units, [1, 5], CURVATURE),
        cl.solve_aligned(CURVATURE, 0.3, 0.2, machine=cl.Machine(depth="block")),
    ):
        explorer.session.selection = other  # no controls make it
        assert explorer.selection.pruned == plan.pruned
        assert explorer.ratio == 0.4
        explorer.session.selection = plan
    explorer.interaction_strength = 0.3
    explorer.session.selection = None  # takes no plan's place
    assert explorer.selection.interaction_strength == 0.3


def test_an_unreachable_ratio_names_limit_and_guard_inside_the_widget(
    explorer: LambdaExplorer,
) -> None:
    explorer.layer_cap, explorer.ratio = 0.3, 0.5
    assert explorer.selection is None
    reachable = reachable_ratio(CURVATURE.units, explorer.guards, 0.5)
    assert received(explorer, "view")["reachable"] == pytest.approx(reachable)
    assert received(explorer, "view")["feasible"] is False
    assert "layer_cap" in explorer.error
    explorer.ratio = 0.1
    assert explorer.selection is not None
    assert explorer.error == ""


def test_flips_are_the_exact_path(explorer: LambdaExplorer) -> None:
    explorer.ratio, explorer.interaction_strength = 0.3, 0.0
    assert explorer.flips_stale
    settle(explorer)
    path = cl.lambda_path(CURVATURE, 0.3)
    assert not explorer.flips_stale
    assert explorer.flips == list(path.breakpoints)
    sets = [set(segment.selection.pruned) for segment in path.segments]
    assert received(explorer, "changes") == [sorted(a ^ b) for a, b in itertools.pairwise(sets)]


def test_plan_a_is_the_diagonal_plan_until_another_is_pinned(explorer: LambdaExplorer) -> None:
    explorer.ratio, explorer.interaction_strength = 0.3, 0.8
    first, diagonal = explorer.selection, cl.solve_greedy(CURVATURE, 0.3, 0.0)
    a = received(explorer, "view")["a"]
    assert (explorer.pinned, a["order"]) == (None, list(diagonal.pruned))
    assert a["edge"] == pytest.approx(diagonal.edge_risk)
    explorer.pinned = first
    pin = received(explorer, "pin")
    assert (pin["order"], pin["hand"]) == (list(first.pruned), False)
    assert (pin["node"], pin["edge"]) == pytest.approx((first.node_risk, first.edge_risk))
    guards = {name: pin["controls"][name] for name in ("layer_cap", "protect_first", "kinds")}
    other = cl.solve_greedy(CURVATURE, 0.2, 0.1, cl.Guards(layer_cap=0.6))
    guards["layer_cap"] = 0.6
    made = pin["controls"] | guards | {"ratio": 0.2, "interaction_strength": 0.1}
    facts = {"strength": 0.1, "ratio": 0.2, "controls": made, "hand": False}
    explorer.set_state({"_pin": {"order": list(other.pruned)} | facts})  # as the page does
    assert explorer.pinned.pruned == other.pruned
    assert explorer.pinned.guards == other.guards
    explorer.pinned = None
    assert received(explorer, "pin") == {}

    explorer.pinned = cl.Selection.from_pruned(CURVATURE.units, [1, 5])
    assert received(explorer, "pin")["controls"] is None
    with pytest.raises(cl.MismatchError):
        explorer.pinned = cl.Selection.from_pruned(make_units(3, 2, 2), [0])


def test_code_makes_the_plan_on_the_screen(explorer: LambdaExplorer) -> None:
    explorer.ratio, explorer.interaction_strength = 0.33, 0.123456789
    explorer.layer_cap_factor, explorer.protect_first = 2.0, 1
    scope = {"curvature": CURVATURE}
    exec(explorer.code(), scope)
    assert scope["selection"].pruned == explorer.selection.pruned
    assert scope["selection"].guards == explorer.selection.guards


def test_measured_plans_are_sent_once_each_with_their_rows(explorer: LambdaExplorer) -> None:
    plan, session = explorer.selection, explorer.session
    for text in ("manual", "C4"):  # told last, so it shows
        found = MeasuredPlan(plan, 0.2, 0.1, text, rows=2, by_row=(0.1, 0.3))
        session.add_measured(found)
    session.add_measured(MeasuredPlan(plan, 0.4, 0.1, "now", measured_at=5.0))
    marks = received(explorer, "marks")
    kept, now = marks["measured"]
    assert (kept["text"], kept["by_row"]) == ("C4", [0.1, 0.3])
    assert (now["text"], now["at"], now["risk"]) == ("now", 5.0, 0.4)
    assert now["strength"] == explorer.interaction_strength


def test_the_gate_is_marked_where_it_is_decided_and_of_h() -> None:
    rough = random_curvature(make_units(6, 3, 8), seed=5, groups=4)
    measured = CURVATURE.with_provenance(surrogate="measured KL")
    assert not cl.redundancy_gate(rough).decided
    for curvature, wanted in (
        (CURVATURE, cl.redundancy_gate(CURVATURE).recommended),
        (rough, None),
        (measured, None),
    ):
        explorer = LambdaExplorer(curvature, session=Session(curvature))
        gate = received(explorer, "marks")["gate"]
        assert gate["strength"] == wanted
        assert gate["reason"]
        expected = cl.solve_greedy(curvature, 0.2, 1.0, explorer.guards)
        assert explorer.selection.pruned == expected.pruned


def test_a_large_curvature_stays_in_the_kernel() -> None:
    curvature = random_curvature(make_units(50, 9, 16), positions=30)
    explorer = LambdaExplorer(curvature, session=Session(curvature))
    assert received(explorer, "problem")["matrix"] == b""
    assert len(json.dumps(received(explorer, "view"))) <= 20_000
    answers = []
    explorer.send = lambda content, buffers: answers.append((content, buffers))
    say(explorer, row=17)
    ((content, (row,)),) = answers
    assert content == {"row": 17}
    np.testing.assert_array_equal(np.frombuffer(row), curvature.matrix[17])
