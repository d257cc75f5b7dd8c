"""An H from random probes is called a preview wherever it is shown, the H of ablations never."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.surrogates.notes import preview_note
from cocurve_widgets import (
    BridgeExplorer,
    LambdaExplorer,
    export_html,
)
from helpers.lab import Lab, in_browser
from helpers.pages import data_of
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import tiny_model, word_tokenizer

MODEL = tiny_model()
UNITS = cl.enumerate_units(MODEL, 4)
TOKENIZER = word_tokenizer()
REAL = random_curvature(UNITS, seed=3)
PREVIEW = REAL.with_provenance(method="probe", probes=64, rank=8, noise_floor=0.0997)
FACTS = ("64 probes", f"rank 8 of {len(UNITS)}", "|correlation| of 0.1", "above 0.5", "gradients")


# The note ---------------------------------------------------------------------------------------


def test_the_note_has_the_numbers_of_a_preview_and_the_next_step() -> None:
    for view in ("instrument", "picture"):
        note = preview_note(PREVIEW, view)
        assert PREVIEW.note(view) == note
        assert all(fact in note for fact in FACTS)
        assert note.endswith(f"Build H by ablations and make the {view} again.")


def test_an_h_from_ablations_has_no_note() -> None:
    assert REAL.note() == preview_note(REAL) == ""
    assert preview_note(REAL.with_provenance(method="infinitesimal", probes=64)) == ""


@pytest.mark.parametrize("missing", [None, float("nan"), "many"])
def test_numbers_that_are_not_there_are_said_to_be_missing(missing: object) -> None:
    bare = REAL.with_provenance(method="probe")
    unknown = bare.with_provenance(probes=missing, rank=missing, noise_floor=missing)
    for curvature in (bare, unknown):
        note = preview_note(curvature)
        assert note.count("not recorded") == 3
        assert f"{missing} " not in note
    assert preview_note(bare.with_provenance(rank=8)).count("not recorded") == 2


# Instruments ------------------------------------------------------------------------------------


def test_the_gate_has_no_mark_and_lambda_is_bounded() -> None:
    explorer = LambdaExplorer(PREVIEW)
    assert explorer._marks["gate"]["strength"] is None
    assert "says nothing" in explorer._marks["gate"]["reason"]
    assert explorer._marks["trusted"] == 0.5
    assert "trusted" not in explorer.status
    assert explorer.interaction_strength == 0.5  # not in the hatched part
    explorer.interaction_strength = 0.51
    assert explorer.selection.pruned == cl.solve_greedy(REAL, 0.2, 0.51).pruned  # said, not changed
    assert explorer.status.endswith("Not to be trusted: lambda is above 0.5 on a preview.")
    state = explorer.state()
    assert (state["preview"], state["_marks"]["trusted"]) == (preview_note(PREVIEW), 0.5)


def test_the_real_h_keeps_its_gate_and_is_not_doubted() -> None:
    explorer = LambdaExplorer(REAL, interaction_strength=1.0)
    assert explorer._marks["gate"]["strength"] == cl.redundancy_gate(REAL).recommended is not None
    assert explorer._marks["trusted"] is None
    assert "trusted" not in explorer.status


def test_bridges_of_a_preview_are_told_from_bridges() -> None:
    preview, real = BridgeExplorer(PREVIEW), BridgeExplorer(REAL)
    for explorer, expected in ((preview, True), (real, False)):
        words = (explorer.status, explorer.state()["status"], explorer.bridges["note"])
        assert ["preview" in text for text in words] == [expected] * 3
    assert "preview" in repr(cl.bridge_units(PREVIEW))
    assert list(cl.bridge_units(PREVIEW)) == list(cl.bridge_units(REAL))


def test_the_page_is_called_a_preview(tmp_path: Path) -> None:
    path = export_html(PREVIEW, tmp_path / "preview.html", title="Today's H")
    text = path.read_text(encoding="utf-8")
    assert "<h1>Today&#x27;s H (preview)</h1>" in text
    assert "a preview of H, the matrix of all pairs, estimated" in text
    assert {state["preview"] for state in data_of(path).values()} == {preview_note(PREVIEW)}
    real = export_html(REAL, tmp_path / "real.html")
    assert {state["preview"] for state in data_of(real).values()} == {""}
    assert "(preview)</h1>" not in real.read_text(encoding="utf-8")


# Pictures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", [cl.plot_correlation, cl.plot_saliency])
def test_pictures_of_a_preview_hold_the_note_below_the_title(draw: Callable[..., Any]) -> None:
    preview, real = draw(PREVIEW), draw(REAL)
    heading = real.layout.title.text
    assert preview.layout.title.text.startswith(f"{heading}<br>")
    said = preview.layout.title.text.removeprefix(heading)
    lines = [line.split(">", 1)[1].removesuffix("</span>") for line in said.split("<br>")[1:]]
    assert " ".join(lines) == preview_note(PREVIEW, "picture")
    grown = preview.layout.margin.t - real.layout.margin.t
    assert grown == preview.layout.height - real.layout.height >= 15 * len(lines)


# In a browser -----------------------------------------------------------------------------------


@in_browser
def test_the_page_shows_note_hatching_and_no_gate(lab: Lab, tmp_path: Path) -> None:
    curvature = random_curvature(make_units(6, 3, 8), seed=5)
    hidden = curvature.with_provenance(method="probe", probes=64, rank=64, noise_floor=0.1)
    for name, shown in (("preview", hidden), ("real", curvature)):
        export_html(shown, tmp_path / f"{name}.html")
    found = {}
    for name in ("preview", "real"):
        with lab.page(tmp_path / f"{name}.html") as page:
            page.locator(".cc-numbers td").first.wait_for()
            page.get_by_label("lambda, weight of the edges").press("End")  # lambda 1, hatched
            if name == "preview":
                page.get_by_text("Not to be trusted").first.wait_for()
            found[name] = page.evaluate(LOOK)
    preview, real = found["preview"], found["real"]
    assert preview["notes"] == [preview_note(hidden)] * 3  # plans, map and bridges
    assert "above 0.5" in preview["legend"]
    assert "no gate mark" in preview["legend"]
    assert preview["gates"] == 0
    assert "Not to be trusted" in preview["status"]
    assert "not to be trusted" in preview["slider"]
    assert all("preview" in label for label in preview["labels"])
    assert preview["doubted"] == 1
    assert real["doubted"] == 0
    assert (real["notes"], real["legend"]) == ([], "")
    assert real["gates"] == 1
    assert "preview" not in json.dumps(real)


LOOK = """() => {
  const roots = [...document.querySelectorAll('.cocurve')];
  const legend = document.querySelector('.cc-hatch').closest('.cc-legend');
  return {
    notes: [...document.querySelectorAll('.cc-preview')].map(note => note.textContent),
    legend: legend.hidden ? '' : legend.textContent,
    gates: document.querySelectorAll('.cc-gate').length,
    doubted: document.querySelectorAll('.cc-doubt rect').length,
    status: document.querySelector('.cc-status').textContent,
    slider: document.querySelector('.cc-along input[type=range]').getAttribute('aria-valuetext'),
    labels: [...roots.map(root => root.getAttribute('aria-label')),
      ...[...document.querySelectorAll('canvas[role=img]')].map(c => c.getAttribute('aria-label'))],
  };
}"""
