"""The exported page: one file, offline; the shipped ones hold what was measured."""

from __future__ import annotations

import base64
import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from ipywidgets.widgets.widget import _instances

import cocurve_lab as cl
from cocurve_lab.extensions.judging.generation import Question
from cocurve_lab.extensions.judging.lockstep import next_token_probabilities
from cocurve_lab.extensions.pretrained.kept import (
    kept_curvature,
    kept_interactions,
    kept_plans,
)
from cocurve_widgets import MeasuredPlan, Session, export_html, refresh_html
from cocurve_widgets.instrument import front
from cocurve_widgets.packing import plan_mark
from cocurve_widgets.page_measuring import RATIOS, STRENGTHS
from helpers.lab import NOTEBOOKS
from helpers.pages import curvature_of, data_of
from helpers.problems import llama_8b_units, make_units, random_curvature
from helpers.tiny_models import tiny_model, tiny_text, word_tokenizer

DEMO = NOTEBOOKS[0].with_name("explore_demo.html")
REAL = DEMO.with_name("explore_smollm2.html")
SMALL = random_curvature(make_units(6, 3, 8), seed=5)


def test_page_of_an_8b_is_one_small_file(tmp_path: Path) -> None:
    curvature = random_curvature(llama_8b_units(), positions=300)
    path = export_html(curvature, tmp_path / "page.html")
    assert path.stat().st_size < 2_500_000
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"https?://(?!www\.w3\.org)", text)
    assert "src=" not in text.split("<body>")[0]
    assert "default-src 'none'" in text
    packed = data_of(path)["lambda"]["_problem"]["matrix"]["$bytes"]
    triangle = np.frombuffer(base64.b64decode(packed), "<f4")
    np.testing.assert_array_equal(triangle, curvature.matrix[np.triu_indices(768)].astype("<f4"))


def test_a_refreshed_page_keeps_what_it_holds_and_gets_the_present_front_end(
    tmp_path: Path,
) -> None:
    name = "<!-- \\1 {css} & </script> </title>"  # nothing in a title is taken for a place to fill
    path = export_html(SMALL, tmp_path / "page.html", title=name)
    new, script = path.read_text(encoding="utf-8"), front("page.js")
    assert "&lt;!-- \\1 {css} &amp; &lt;/script&gt;" in new
    assert new.count(script) == 1
    path.write_text(new.replace(script, "old()"), encoding="utf-8")
    assert refresh_html(path).read_text(encoding="utf-8") == new
    foreign = new.replace("<title>", "<title><svg onload=a()>").replace("<small>", "<small><b>")
    path.write_text(foreign, encoding="utf-8")
    text = refresh_html(path).read_text(encoding="utf-8")
    assert "<svg onload" not in text
    assert "<small><b>" not in text
    path.write_text("<title>x</title>", encoding="utf-8")
    with pytest.raises(cl.InputError, match="not a page of export_html"):
        refresh_html(path)


@pytest.mark.parametrize("name", ["<!--<script>", "</script>", "<!--", "a < b \u2028"])
def test_no_name_changes_where_the_data_ends(tmp_path: Path, name: str) -> None:
    session, plan = Session(SMALL), cl.solve_greedy(SMALL, 0.2, 0.5)
    session.add_measured(MeasuredPlan(plan, 0.25, float("nan"), name))
    path = export_html(SMALL, tmp_path / "a.html", session=session)
    (mark,) = data_of(path)["lambda"]["_marks"]["measured"]
    assert (mark["risk"], mark["error"], mark["text"]) == (0.25, None, name)
    # "<!--<script>" makes </script> a part of the data, so the page would end with it
    _, _, rest = path.read_text(encoding="utf-8").partition('id="cocurve-data">')
    assert "<" not in rest[: rest.index("</script>")]


def test_a_bare_matrix_is_enough_and_no_widget_is_left_behind(tmp_path: Path) -> None:
    before = set(_instances)
    bare = cl.Curvature(SMALL.matrix, SMALL.units)  # no groups, no provenance
    export_html(bare, tmp_path / "page.html")
    assert set(_instances) == before


@pytest.mark.parametrize(("page", "most"), [(DEMO, 1_000_000), (REAL, 2_000_000)])
def test_the_shipped_pages_are_of_this_front_end(page: Path, most: int) -> None:
    text = page.read_text(encoding="utf-8")
    for part in (front("page.js"), front("instrument.css")):
        assert part in text, "write it again with refresh_html"
    assert page.stat().st_size < most


def test_the_page_of_the_demo_has_the_damage_of_every_plan_at_its_ratios() -> None:
    curvature, state = curvature_of(DEMO), data_of(DEMO)["lambda"]
    known = {m["plan"]: m for m in state["_marks"]["measured"]}
    ratios = {round(m["ratio"], 4) for m in known.values() if m["strength"] is not None}
    assert ratios == {0.05, 0.1, 0.2, 0.3, 0.4, 0.5}
    assert (state["protect_first"], state["protect_last"]) == (1, 1)
    opening = cl.opening_guards(curvature.units)
    for ratio, guards in itertools.product(ratios, (cl.Guards(), opening)):
        for segment in cl.lambda_path(curvature, ratio, guards).segments:
            found = known[plan_mark(segment.selection.pruned)]
            assert found["rows"] == 64
            assert found["risk"] > found["error"] > 0
            assert {asked for _, asked in found["abilities"].values()} == {20}
    edges = [m["edge"] for m in known.values() if m["edge"] is not None]
    assert len(edges) == 40
    for edge in edges:
        u, v = edge["units"]
        one, two, both = (known[plan_mark(part)]["risk"] for part in ([u], [v], [u, v]))
        assert edge["difference"] == pytest.approx(both - one - two)
    assert known[plan_mark([])]["risk"] == 0


def test_the_page_of_the_real_model_shows_what_is_kept_of_the_plans_that_it_solves() -> None:
    curvature, state = kept_curvature("smollm2"), data_of(REAL)
    marks = state["lambda"]["_marks"]["measured"]
    known = {m["plan"]: m for m in marks}
    assert len(marks) == len(known) > 200
    kept = {p.selection.fingerprint: p for p in kept_plans(curvature).plans}
    seen = curvature_of(REAL, curvature.units)  # in float32
    strengths = (0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 1.0)
    for ratio, strength in itertools.product((0.1, 0.2, 0.3), strengths):
        plan = kept[cl.solve_greedy(curvature, ratio, strength).fingerprint]
        found = known[plan_mark(cl.solve_greedy(seen, ratio, strength).pruned)]
        assert found["risk"] == pytest.approx(plan.kl["c4"].mean())
        assert found["by_row"] == pytest.approx(plan.kl["c4"].tolist(), rel=1e-4)
        assert found["abilities"] == {name: list(pair) for name, pair in plan.right.items()}
    for scale, other in state["scales"].items():
        packed = base64.b64decode(other["lambda"]["_problem"]["matrix"]["$bytes"])
        parts = kept_interactions("smollm2", scale).curvature.matrix
        np.testing.assert_array_equal(np.frombuffer(packed), parts[np.triu_indices(len(parts))])
        assert other["lambda"]["_marks"]["measured"]


# A page of any model: what it shows is measured, cost told first, and a second run resumes

MODEL, TOKENIZER, TEXT = tiny_model(), word_tokenizer(), tiny_text(3)
CURVATURE = random_curvature(cl.enumerate_units(MODEL, 4), seed=7)
QUESTIONS = [Question(name, f"w{n}", f"w{n + 1}") for name in ("easy", "hard") for n in range(2)]


def export(path: Path, **more: object) -> Path:
    asked = {"model": MODEL, "tokenizer": TOKENIZER, "held_out": TEXT, "questions": QUESTIONS}
    return export_html(CURVATURE, path, session=Session(CURVATURE), **(asked | more))


def test_a_page_of_any_model_shows_what_was_measured_and_a_second_run_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = export(tmp_path / "page.html", cache=tmp_path / "kept")
    said = capsys.readouterr().out
    known = {m["plan"]: m for m in data_of(page)["lambda"]["_marks"]["measured"]}
    guards = cl.opening_guards(CURVATURE.units)
    plans = [cl.solve_greedy(CURVATURE, r, x, guards) for r in RATIOS for x in STRENGTHS]
    plans = list({plan.fingerprint: plan for plan in plans}.values())
    table = cl.measure_plans(MODEL, plans, TEXT, progress=False)
    answers = cl.answer_accuracy(MODEL, TOKENIZER, plans, QUESTIONS, progress=False)
    for k, plan in enumerate(plans):
        found = known[plan_mark(plan.pruned)]
        assert found["risk"] == pytest.approx(table.mean[k])
        assert found["by_row"] == pytest.approx(table.kl[k].tolist(), rel=1e-4)
        for name in ("easy", "hard"):
            count = int(answers.right[k][answers.of(name)].sum())
            assert found["abilities"][name] == [count, 2]
    edges = [m["edge"] for m in known.values() if m["edge"]]
    matrix = np.abs(np.triu(CURVATURE.matrix, 1))
    strongest = np.sort(matrix[matrix > 0])[-12:]
    assert sorted(matrix[tuple(edge["units"])] for edge in edges) == pytest.approx(strongest)
    for edge in edges:
        u, v = edge["units"]
        parts = [cl.Selection.from_pruned(CURVATURE.units, p) for p in ([u], [v], [u, v])]
        one, two, both = cl.measure_plans(MODEL, parts, TEXT, progress=False).mean
        assert edge["difference"] == pytest.approx(both - one - two, abs=1e-9)
    count = 1 + len(plans) + len({u for edge in edges for u in edge["units"]}) + len(edges)
    assert said.startswith(f"{count} plans on 3 rows, and 4 questions to")

    passes = []
    hook = MODEL.register_forward_pre_hook(lambda *_: passes.append(1))
    again = export(tmp_path / "again.html", cache=tmp_path / "kept")
    hook.remove()
    assert data_of(again)["lambda"]["_marks"] == data_of(page)["lambda"]["_marks"]
    assert len(passes) <= 2  # the one row and the question that tell the cost


@pytest.mark.parametrize("page", [DEMO, REAL])
def test_a_shipped_page_has_the_next_words_of_every_plan_at_its_stops(page: Path) -> None:
    units = kept_curvature("smollm2").units if page == REAL else None
    curvature, state = curvature_of(page, units), data_of(page)["lambda"]
    guards = cl.opening_guards(curvature.units)
    ratios = {
        round(m["ratio"], 4) for m in state["_marks"]["measured"] if m["strength"] is not None
    }
    stops = [cl.solve_greedy(curvature, r, x, guards) for r in ratios for x in (0.0, 0.5, 1.0)]
    assert len(state["_first"]["sentences"]) == 5
    for sentence in state["_first"]["sentences"]:
        whole = sentence["tokens"][sentence["plans"][""][0][0]]
        assert whole.strip() == sentence["answer"]  # the whole model answers it
        assert {plan_mark(plan.pruned) for plan in stops} <= sentence["plans"].keys()


def test_the_next_words_of_the_demo_page_are_those_of_the_model() -> None:
    model, tokenizer = cl.load_model("demo")
    curvature, sentence = curvature_of(DEMO), data_of(DEMO)["lambda"]["_first"]["sentences"][0]
    plan = cl.solve_greedy(curvature, 0.2, 1.0, cl.opening_guards(curvature.units))
    shares = next_token_probabilities(model, tokenizer, [plan], sentence["text"], chat=False)[0]
    kept = sentence["plans"][plan_mark(plan.pruned)]
    assert [share for _, share in kept] == pytest.approx(np.sort(shares)[::-1][:5], rel=0.01)


def test_a_model_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(cl.InputError, match="held_out"):
        export(tmp_path / "page.html", held_out=None)
    assert not list(tmp_path.iterdir())
