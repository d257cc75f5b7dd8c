"""The lambda explorer without a browser: traits, plans, flips, linking, files."""

from __future__ import annotations

import base64
import itertools
import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from traitlets import TraitError

import cocurve_lab as cl
from cocurve_lab.extensions.writing import brief
from cocurve_lab.solver.guards import reachable_ratio
from cocurve_widgets import BridgeExplorer, LambdaExplorer, Measured, Session, lambda_explorer
from helpers.problems import make_units, random_curvature

CURVATURE = random_curvature(make_units(6, 3, 8), seed=5)
FREE = {"protect_first": 0, "protect_last": 0}


@pytest.fixture
def explorer() -> Iterator[LambdaExplorer]:
    made = LambdaExplorer(CURVATURE, session=Session(CURVATURE), **FREE)
    yield made
    made.close()


def settle(explorer: LambdaExplorer) -> None:
    assert explorer.session.worker.join(60)


@pytest.mark.parametrize(("layers", "kept"), [(4, 0), (6, 1), (12, 2)])
def test_it_opens_with_the_papers_protection_and_no_cap(layers: int, kept: int) -> None:
    curvature = random_curvature(make_units(layers, 3, 8), seed=5)
    explorer = LambdaExplorer(curvature, session=Session(curvature), ratio=0.3)
    guards = cl.Guards(protect_first=kept, protect_last=kept)
    assert explorer.guards == explorer.selection.guards == guards
    assert explorer.selection.pruned == cl.solve_greedy(curvature, 0.3, 1.0, guards).pruned
    assert explorer._problem["protected"] == kept
    bridges = BridgeExplorer(curvature, session=Session(curvature), compared_ratio=0.3)
    assert bridges.plans["edge_aware"] == list(explorer.selection.pruned)
    other = LambdaExplorer(curvature, session=explorer.session)  # follows the plan that is there
    explorer.protect_first = 0
    assert (other.protect_first, other.protect_last) == (0, kept)
    for made in (explorer, bridges, other):
        made.close()


def test_a_ratio_out_of_reach_says_which_guard_to_loosen() -> None:
    explorer = LambdaExplorer(CURVATURE, session=Session(CURVATURE), layer_cap=0.5, ratio=0.4)
    assert explorer.selection is None
    assert explorer.error.endswith("or loosen layer_cap.")
    explorer.close()


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
        assert f"Predicted risk {brief(expected.predicted_risk, 4)} nats" in explorer.status


@pytest.mark.parametrize("reader", ["none", "observer", "session", "linked"])
def test_a_move_is_solved_once_and_only_for_a_reader(
    explorer: LambdaExplorer, monkeypatch: pytest.MonkeyPatch, reader: str
) -> None:
    solves: list[float] = []
    longest = lambda_explorer.longest

    def counted(curvature: Any, guards: Any, upto: float, strength: float) -> cl.Selection:
        solves.append(strength)
        return longest(curvature, guards, upto, strength)

    heard: list[cl.Selection] = []
    if reader == "observer":
        explorer.observe(lambda change: heard.append(change["new"]), "selection")
    if reader == "session":
        explorer.session.observe(lambda change: heard.append(change["new"]), "selection")
    if reader == "linked":
        other = BridgeExplorer(CURVATURE, session=explorer.session)
    monkeypatch.setattr(lambda_explorer, "longest", counted)
    moves = [0.1, 0.2, 0.3, 0.4]
    for strength in moves:
        explorer.interaction_strength = strength
    if reader == "none":
        assert solves == []
        assert explorer.session.selection is explorer.selection
        assert solves == [0.4]
    else:
        assert solves == moves
    assert [plan.interaction_strength for plan in heard] == moves[: len(heard)]
    assert reader not in ("observer", "session") or len(heard) == len(moves)
    assert explorer.selection.to_json() == cl.solve_greedy(CURVATURE, 0.2, 0.4).to_json()
    if reader == "linked":
        other.close()


def test_a_plan_chosen_elsewhere_ends_what_is_owed(explorer: LambdaExplorer) -> None:
    explorer.interaction_strength = 0.3
    explorer.session.selection = plan = cl.solve_greedy(CURVATURE, 0.4, 0.7)
    assert explorer.session.selection is plan
    assert (explorer.ratio, explorer.interaction_strength) == (0.4, 0.7)
    assert explorer.selection.pruned == plan.pruned


def test_no_plan_of_another_view_takes_the_place_of_the_owed_one(explorer: LambdaExplorer) -> None:
    explorer.interaction_strength = 0.3
    explorer.session.selection = None
    assert explorer.selection.interaction_strength == 0.3
    assert explorer._view["key"] == list(explorer._key())


def test_unreachable_ratio_says_both_limits_inside_the_widget(explorer: LambdaExplorer) -> None:
    explorer.layer_cap, explorer.ratio = 0.3, 0.5
    assert explorer.selection is None
    reachable = reachable_ratio(CURVATURE.units, explorer.guards, 0.5)
    assert explorer._view["reachable"] == pytest.approx(reachable)
    assert "0.5" in explorer.error
    assert explorer._view["feasible"] is False
    explorer.ratio = 0.1
    assert explorer.selection is not None
    assert explorer.error == ""


def test_where_greedy_stalls_at_lambda_zero_no_plan_is_compared() -> None:
    curvature = random_curvature(make_units(3, 2, 6, 7, 13), seed=6)
    explorer = LambdaExplorer(curvature, session=Session(curvature), ratio=0.5, layer_cap=0.5)
    assert explorer.selection is not None
    with pytest.raises(cl.InfeasibleError, match="stalls"):
        cl.solve_greedy(curvature, 0.5, 0.0, cl.Guards(layer_cap=0.5))
    assert explorer._view["a"] is None
    assert explorer.error == ""
    explorer.close()


def test_flips_come_from_the_worker_and_are_the_exact_path(explorer: LambdaExplorer) -> None:
    explorer.ratio = 0.35
    assert explorer.flips_stale
    settle(explorer)
    path = cl.lambda_path(CURVATURE, 0.35)
    assert not explorer.flips_stale
    assert explorer.flips == list(path.breakpoints)
    sets = [set(segment.selection.pruned) for segment in path.segments]
    assert explorer._changes == [sorted(a ^ b) for a, b in itertools.pairwise(sets)]


def test_plan_a_is_the_diagonal_plan_until_another_is_pinned(explorer: LambdaExplorer) -> None:
    explorer.ratio, explorer.interaction_strength = 0.3, 0.8
    diagonal = cl.solve_greedy(CURVATURE, 0.3, 0.0)
    assert explorer.pinned is None
    assert explorer._pin == {}
    assert explorer.selection.pruned == cl.solve_greedy(CURVATURE, 0.3, 0.8).pruned
    assert explorer._view["a"]["order"] == list(diagonal.pruned)
    assert explorer._view["a"]["edge"] == pytest.approx(diagonal.edge_risk)
    first = explorer.selection
    explorer._heard(None, {"pin": "pin"}, [])  # as the page asks
    assert explorer.pinned is first
    assert explorer._pin["order"] == list(first.pruned)
    assert explorer._pin["node"] == pytest.approx(first.node_risk)
    assert explorer._pin["edge"] == pytest.approx(first.edge_risk)
    explorer.ratio, explorer.interaction_strength = 0.2, 0.1
    second = explorer.selection
    explorer.swap()
    assert (explorer.ratio, explorer.interaction_strength) == (0.3, 0.8)
    assert explorer.selection.pruned == first.pruned
    assert explorer.pinned is second
    explorer.unpin()
    assert explorer._pin == {}


def test_a_plan_of_other_controls_can_be_pinned_but_not_swapped(explorer: LambdaExplorer) -> None:
    by_hand = cl.Selection.from_pruned(CURVATURE.units, [1, 5])
    explorer.pin(by_hand)
    assert explorer._pin["controls"] is None
    assert explorer._pin["node"] + explorer._pin["edge"] == pytest.approx(CURVATURE.risk([1, 5]))
    with pytest.raises(cl.InputError, match="cannot make"):
        explorer.swap()
    assert explorer.pinned is by_hand
    with pytest.raises(cl.MismatchError, match="the plan"):
        explorer.pin(cl.Selection.from_pruned(make_units(3, 2, 2), [0]))


def test_next_and_previous_plan_walk_the_path(explorer: LambdaExplorer) -> None:
    explorer.ratio, explorer.interaction_strength = 0.3, 0.0
    path = cl.lambda_path(CURVATURE, 0.3)
    for segment in path.segments[1:]:
        explorer.next_plan()
        assert set(explorer.selection.pruned) == set(segment.selection.pruned)
    end = explorer.interaction_strength
    assert explorer.next_plan() == end
    explorer.previous_plan()
    assert set(explorer.selection.pruned) == set(path.segments[-2].selection.pruned)


def test_a_plan_chosen_elsewhere_sets_the_controls(explorer: LambdaExplorer) -> None:
    plan = cl.solve_greedy(CURVATURE, 0.3, 0.2, cl.Guards(layer_cap=0.7, protect_last=1))
    explorer.session.selection = plan
    assert (explorer.ratio, explorer.interaction_strength) == (0.3, 0.2)
    assert (explorer.layer_cap, explorer.protect_last) == (0.7, 1)
    assert explorer.selection.pruned == plan.pruned
    by_hand = cl.Selection.from_pruned(CURVATURE.units, [1, 5], CURVATURE)
    explorer.session.selection = by_hand
    assert "cannot make" in explorer.status
    explorer.session.selection = plan
    explorer.session.selection = cl.solve_aligned(
        CURVATURE, 0.3, 0.2, machine=cl.Machine(depth="block")
    )
    assert "cannot make" in explorer.status  # the page takes single units
    assert explorer.selection.pruned == plan.pruned
    assert explorer.selection.pruned == plan.pruned


def test_a_brush_of_another_view_is_marked_here_too(explorer: LambdaExplorer) -> None:
    explorer.session.brushed = [3, 1]
    assert explorer.brushed == [1, 3]
    explorer.set_state({"brushed": [7, 7, 2]})  # as the page does
    assert explorer.session.brushed == [2, 7]
    with pytest.raises(TraitError, match="brushed holds 99"):
        explorer.brushed = [99]


def test_code_makes_the_plan_on_the_screen(explorer: LambdaExplorer) -> None:
    explorer.ratio, explorer.interaction_strength = 0.33, 0.123456789
    explorer.layer_cap_factor, explorer.protect_first = 2.0, 1
    scope = {"curvature": CURVATURE}
    exec(explorer.code(), scope)
    assert scope["selection"].pruned == explorer.selection.pruned
    assert scope["selection"].guards == explorer.selection.guards


def test_measured_plans_are_marked_and_told(explorer: LambdaExplorer) -> None:
    assert "not measured" in explorer.status
    explorer.session.add_measured(Measured(explorer.selection, 0.125, 0.01, "some text"))
    assert "measured KL 0.125 on some text" in explorer.status
    (mark,) = explorer._marks["measured"]
    assert mark["strength"] == explorer.interaction_strength
    assert mark["risk"] == 0.125
    assert explorer._marks["gate"]["strength"] == cl.redundancy_gate(CURVATURE).recommended


def test_of_a_plan_kept_on_several_texts_the_page_gets_one_with_its_rows_and_words(
    explorer: LambdaExplorer,
) -> None:
    plan, session = explorer.selection, explorer.session
    session.prompts = ("What?",)
    for text in ("manual", "C4"):  # told last, so it shows
        found = Measured(plan, 0.2, 0.1, text, rows=2, by_row=(0.1, 0.3), replies=("this",))
        session.add_measured(found)
    session.add_measured(Measured(plan, 0.4, 0.1, "now", measured_at=5.0))
    kept, now = explorer._marks["measured"]
    assert (kept["text"], kept["by_row"], kept["replies"]) == ("C4", [0.1, 0.3], ["this"])
    assert (now["text"], now["at"], now["by_row"]) == ("now", 5.0, [])
    assert explorer._marks["prompts"] == ["What?"]


def test_an_undecided_gate_has_no_mark_and_says_why() -> None:
    rough = random_curvature(make_units(6, 3, 8), seed=5, groups=4)
    explorer, gate = LambdaExplorer(rough), cl.redundancy_gate(rough)
    assert gate.recommended is not None
    assert not gate.decided
    assert explorer._marks["gate"] == {"strength": None, "reason": gate.reason}
    assert gate.reason.startswith("Undecided")
    explorer.close()


def test_a_saved_notebook_keeps_a_picture_and_says_how_to_go_on(
    explorer: LambdaExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, str]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    explorer._ipython_display_()
    note, widget = shown
    assert "run this cell" in note["text/html"]
    assert explorer.status in note["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in widget
    png = base64.b64decode(note["text/html"].split("base64,")[1].split('"')[0])
    assert png.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", png[16:24])
    assert (width, height) == (6 * 16, (3 + 8) * 8)
    rows = np.frombuffer(zlib.decompress(png[41:-16]), np.uint8).reshape(height, width + 1)
    dark = (rows[4::8, 1 + 8 :: 16] == 70).sum()
    assert dark == len(explorer.selection.pruned)


def test_payloads_are_small() -> None:
    from helpers.problems import llama_8b_units

    curvature = random_curvature(llama_8b_units(), positions=200)
    explorer = LambdaExplorer(curvature, session=Session(curvature), ratio=0.6)
    packed = explorer._problem
    once = sum(len(value) for value in packed.values() if isinstance(value, bytes))
    once += len(json.dumps({k: v for k, v in packed.items() if not isinstance(v, bytes)}))
    assert once <= 3_000_000
    assert len(json.dumps(explorer._view)) <= 20_000
    explorer.close()


def test_a_large_curvature_stays_in_the_kernel() -> None:
    units = make_units(50, 9, 16)
    curvature = random_curvature(units, positions=30)
    explorer = LambdaExplorer(curvature, session=Session(curvature))
    assert explorer._problem["matrix"] == b""
    sent = []
    explorer.send = lambda content, buffers: sent.append((content, buffers))  # type: ignore[method-assign]
    explorer._heard(None, {"row": 17}, [])
    ((content, (row,)),) = sent
    assert content == {"row": 17}
    np.testing.assert_array_equal(np.frombuffer(row), curvature.matrix[17])
    explorer.close()


# On another matrix --------------------------------------------------------------------------------


def test_measured_interactions_are_solved_without_a_gate(explorer: LambdaExplorer) -> None:
    assert explorer._marks["gate"]["strength"] == cl.redundancy_gate(CURVATURE).verdict
    measured = CURVATURE.with_provenance(surrogate="measured KL")
    other = LambdaExplorer(measured, session=Session(measured))
    assert other._marks["gate"]["strength"] is None
    assert "not of measured KL" in other._marks["gate"]["reason"]
    assert other.matrix_name == "measured KL"
    assert other.selection is not None
    assert other.selection.pruned == cl.solve_greedy(measured, 0.2, 1.0, other.guards).pruned
    bridges = BridgeExplorer(measured, session=other.session)
    assert "Estimated from the measured KL, not measured" in bridges.status
    bridges.close()
    other.close()
