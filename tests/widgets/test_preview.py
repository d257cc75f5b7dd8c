"""An H from random probes is called a preview wherever it is shown, and an H from ablations never.

Also here: every instrument joins session and model by the same rules.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from traitlets import TraitError

import cocurve_lab as cl
from cocurve_lab.extensions.surrogates.notes import preview_note
from cocurve_widgets import (
    BridgeExplorer,
    CurvatureMap,
    FidelityScatter,
    GenerationCompare,
    LambdaExplorer,
    Session,
    export_html,
)
from helpers.lab import CHROMIUM, NO_BROWSER, Lab
from helpers.pages import data_of
from helpers.problems import make_units, random_curvature
from helpers.tiny_models import tiny_model, tiny_text, word_tokenizer

MODEL = tiny_model()
UNITS = cl.enumerate_units(MODEL, 4)
TOKENIZER = word_tokenizer()
REAL = random_curvature(UNITS, seed=3)
PREVIEW = REAL.with_provenance(method="probe", probes=64, rank=8, noise_floor=0.0997)
FACTS = ("64 probes", f"rank 8 of {len(UNITS)}", "|correlation| of 0.1", "above 0.5", "gradients")


def make_lambda(curvature: cl.Curvature, **given: Any) -> LambdaExplorer:
    return LambdaExplorer(curvature, **given)


def make_bridge(curvature: cl.Curvature, **given: Any) -> BridgeExplorer:
    return BridgeExplorer(curvature, **given)


def make_map(curvature: cl.Curvature, **given: Any) -> CurvatureMap:
    return CurvatureMap(curvature, **given)


def make_fidelity(curvature: cl.Curvature, **given: Any) -> FidelityScatter:
    return FidelityScatter(curvature, **given)


def make_generation(curvature: cl.Curvature, **given: Any) -> GenerationCompare:
    model, tokenizer = given.pop("model", None), given.pop("tokenizer", None)
    return GenerationCompare(model or MODEL, tokenizer or TOKENIZER, curvature, **given)


EVERY = [make_lambda, make_bridge, make_map, make_fidelity, make_generation]
Make = Callable[..., Any]


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    """Instruments to close in the end."""
    made: list[Any] = []
    yield made
    for instrument in made:
        instrument.close()


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


@pytest.mark.parametrize("make", EVERY)
def test_every_instrument_sends_the_note_and_none_on_the_real_h(
    make: Make, opened: list[Any]
) -> None:
    opened += [make(PREVIEW), make(REAL)]
    preview, real = opened
    assert preview.get_state()["preview"] == preview_note(PREVIEW)
    assert real.get_state()["preview"] == ""
    with pytest.raises(TraitError):
        preview.preview = ""
    with pytest.raises(cl.InputError, match="no control 'preview'"):
        make(PREVIEW, preview="")


def test_the_gate_has_no_mark_and_lambda_is_bounded(opened: list[Any]) -> None:
    explorer = LambdaExplorer(PREVIEW)
    opened.append(explorer)
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


def test_the_real_h_keeps_its_gate_and_is_not_doubted(opened: list[Any]) -> None:
    explorer = LambdaExplorer(REAL, interaction_strength=1.0)
    opened.append(explorer)
    assert explorer._marks["gate"]["strength"] == cl.redundancy_gate(REAL).recommended is not None
    assert explorer._marks["trusted"] is None
    assert "trusted" not in explorer.status


def test_bridges_of_a_preview_are_told_from_bridges(opened: list[Any]) -> None:
    opened += [BridgeExplorer(PREVIEW), BridgeExplorer(REAL)]
    preview, real = opened
    for explorer, expected in ((preview, True), (real, False)):
        words = (explorer.status, explorer.state()["status"], explorer.bridges["note"])
        assert ["preview" in text for text in words] == [expected] * 3
    assert "preview" in repr(cl.bridge_units(PREVIEW))
    assert list(cl.bridge_units(PREVIEW)) == list(cl.bridge_units(REAL))


def test_the_scatter_has_the_note_on_top_and_in_its_picture(opened: list[Any]) -> None:
    opened += [FidelityScatter(PREVIEW), FidelityScatter(REAL)]
    preview, real = opened
    assert preview_note(PREVIEW) in preview.children[2].value
    assert 'role="note"' in preview.children[2].value
    assert "preview" in preview.figure.widget.layout.title.text
    assert preview_note(PREVIEW) in preview.figure.widget._description  # its name for readers
    assert "_description" in preview.figure.widget.get_state()
    assert len(real.children) == len(preview.children) - 1
    assert "preview" not in real.figure.widget.layout.title.text
    assert "preview" not in real.figure.widget._description


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
def test_pictures_of_a_preview_hold_the_note_below_the_title(draw: Make) -> None:
    preview, real = draw(PREVIEW), draw(REAL)
    heading = real.layout.title.text
    assert preview.layout.title.text.startswith(f"{heading}<br>")
    said = preview.layout.title.text.removeprefix(heading)
    lines = [line.split(">", 1)[1].removesuffix("</span>") for line in said.split("<br>")[1:]]
    assert " ".join(lines) == preview_note(PREVIEW, "picture")
    grown = preview.layout.margin.t - real.layout.margin.t
    assert grown == preview.layout.height - real.layout.height >= 15 * len(lines)


def test_the_picture_of_h_names_the_layers_of_both_kinds() -> None:
    units = REAL.units
    axis = cl.plot_correlation(REAL).layout.xaxis
    assert len(axis.ticktext) == len(axis.tickvals)
    kinds = {unit.name: (unit.kind, str(unit.layer)) for unit in units}
    wanted = [(kind, str(layer)) for kind in cl.KINDS for layer in range(units.num_layers)]
    shown = [kinds[name] for name in axis.tickvals]
    assert [layer for _, layer in shown] == list(axis.ticktext)
    assert shown == [block for block in wanted if block in set(kinds.values())]
    # 64 layers of attention alone: not every label fits
    large = make_units(layers=64)
    figure = cl.plot_correlation(random_curvature(large))
    assert 20 < len(figure.layout.xaxis.ticktext) < 64
    assert figure.layout.yaxis.tickvals == figure.layout.xaxis.tickvals


# One place for session and model ----------------------------------------------------------------


@pytest.mark.parametrize("make", EVERY)
def test_a_model_is_attached_to_the_session_given(make: Make, opened: list[Any]) -> None:
    session = Session(REAL)
    opened.append(make(REAL, session=session, model=MODEL, tokenizer=TOKENIZER))
    assert opened[0].session is session
    assert session.model is MODEL
    assert session.tokenizer is TOKENIZER


@pytest.mark.parametrize("make", EVERY)
def test_without_a_session_it_is_the_curvatures_own(make: Make, opened: list[Any]) -> None:
    curvature = random_curvature(UNITS, seed=4)
    opened.append(make(curvature, model=MODEL))
    assert opened[0].session is Session.of(curvature)
    assert opened[0].session.model is MODEL


@pytest.mark.parametrize("make", EVERY)
def test_a_session_of_another_curvature_is_refused_and_left_alone(make: Make) -> None:
    others = (random_curvature(UNITS, seed=5), random_curvature(make_units()), PREVIEW)
    for other in others:
        session = Session(other)
        with pytest.raises(cl.MismatchError, match="the session is on"):
            make(REAL, session=session, model=MODEL)
        assert session.model is None


@pytest.mark.parametrize("make", EVERY)
def test_a_model_of_other_units_is_refused_by_all(make: Make) -> None:
    session = Session(REAL)
    with pytest.raises(cl.MismatchError, match="the model"):
        make(REAL, session=session, model=tiny_model(layers=2))
    assert session.model is None
    with pytest.raises(cl.MismatchError, match="the model"):
        Session(REAL, tiny_model(layers=2))


@pytest.mark.parametrize("make", EVERY)
def test_a_misspelt_control_attaches_nothing(make: Make) -> None:
    session = Session(REAL)
    with pytest.raises(cl.InputError, match="no control"):
        make(REAL, session=session, model=MODEL, ratoi=0.2)
    assert session.model is None


def test_what_is_not_given_stays(opened: list[Any]) -> None:
    session = Session(REAL, MODEL, TOKENIZER)
    opened.append(BridgeExplorer(REAL, session=session))
    assert (session.model, session.tokenizer) == (MODEL, TOKENIZER)
    other = word_tokenizer()
    assert Session.bind(REAL, session, tokenizer=other) is session
    assert (session.model, session.tokenizer) == (MODEL, other)


def test_preview_and_real_h_have_sessions_of_their_own() -> None:
    preview, real = Session.of(PREVIEW), Session.of(REAL)
    assert preview is not real
    assert Session.of(PREVIEW) is preview


def test_the_text_needs_a_model() -> None:
    with pytest.raises(cl.InputError, match="no model"):
        GenerationCompare(None, TOKENIZER, REAL, session=Session(REAL))  # type: ignore[arg-type]


def test_plans_of_a_preview_are_measured_like_others(opened: list[Any]) -> None:
    scatter = FidelityScatter(PREVIEW, MODEL, tiny_text(), session=Session(PREVIEW))
    opened.append(scatter)
    plan = cl.solve_greedy(PREVIEW, 0.3, 0.5)
    scatter.measure(plan)
    (point,) = (row for row in scatter.points if row["kind"] == "plan")
    assert point["measured_risk"] == pytest.approx(cl.pruning_risk(MODEL, plan, tiny_text()))


# In a browser -----------------------------------------------------------------------------------


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason=NO_BROWSER)
def test_the_page_shows_note_hatching_and_no_gate(lab: Lab, tmp_path: Path) -> None:
    curvature = random_curvature(make_units(6, 3, 8), seed=5)
    hidden = curvature.with_provenance(method="probe", probes=64, rank=64, noise_floor=0.1)
    for name, shown in (("preview", hidden), ("real", curvature)):
        export_html(shown, tmp_path / f"{name}.html")
    page = lab.browser.new_page(viewport={"width": 1280, "height": 1000})
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    found = {}
    for name in ("preview", "real"):
        page.goto((tmp_path / f"{name}.html").as_uri())
        page.locator(".cc-facts td").first.wait_for()
        page.locator(".cc-sliders input[type=range]").first.press("End")  # lambda 1, hatched
        if name == "preview":
            page.get_by_text("Not to be trusted").first.wait_for()
        found[name] = page.evaluate(LOOK)
    page.close()
    assert not errors
    preview, real = found["preview"], found["real"]
    assert preview["notes"] == [preview_note(hidden)] * 3  # plans, map and bridges
    assert "above 0.5" in preview["legend"]
    assert "no gate mark" in preview["legend"]
    assert "gate (no mark)" in preview["strip"]
    assert "Not to be trusted" in preview["status"]
    assert "not to be trusted" in preview["slider"]
    assert all("preview" in label for label in preview["labels"])
    assert 0.2 < preview["inked"] < 0.9  # lines, not an area
    assert real["inked"] == 0
    assert (real["notes"], real["legend"]) == ([], "")
    assert "gate (triangle)" in real["strip"]
    assert "preview" not in json.dumps(real)


LOOK = """() => {
  const roots = [...document.querySelectorAll('.cocurve')];
  const strip = document.querySelector('.cc-sliders canvas');
  const pen = strip.getContext('2d');
  // below the flips, above the labels, right of lambda 0.5, left of a gate mark at 1
  const left = Math.round(0.95 * strip.width);
  const ink = pen.getImageData(left, 10, Math.round(0.02 * strip.width), 8).data;
  const legend = document.querySelector('.cc-sliders .cc-legend:not(.cc-key)');
  return {
    notes: [...document.querySelectorAll('.cc-preview')].map(note => note.textContent),
    legend: legend.hidden ? '' : legend.textContent,
    strip: strip.title,
    status: document.querySelector('.cc-status').textContent,
    slider: document.querySelector('input[type=range]').getAttribute('aria-valuetext'),
    labels: [...roots.map(root => root.getAttribute('aria-label')),
      ...[...document.querySelectorAll('canvas[role=img]')].map(c => c.getAttribute('aria-label'))],
    inked: ink.filter((value, i) => i % 4 === 3 && value > 40).length / (ink.length / 4),
  };
}"""
