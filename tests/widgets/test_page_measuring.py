"""A page of any model: what it shows is measured, cost told first, and a second run resumes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.judging.generation import Question
from cocurve_widgets import Session, export_html
from cocurve_widgets.packing import plan_mark
from cocurve_widgets.page_measuring import RATIOS, STRENGTHS
from helpers.pages import data_of
from helpers.problems import random_curvature
from helpers.tiny_models import tiny_model, tiny_text, word_tokenizer

MODEL, TOKENIZER, TEXT = tiny_model(), word_tokenizer(), tiny_text(3)
CURVATURE = random_curvature(cl.enumerate_units(MODEL, 4), seed=7)
QUESTIONS = [Question(name, f"w{n}", f"w{n + 1}") for name in ("easy", "hard") for n in range(2)]


def export(path: Path, **more: object) -> Path:
    asked = {"model": MODEL, "tokenizer": TOKENIZER, "held_out": TEXT, "questions": QUESTIONS}
    return export_html(CURVATURE, path, session=Session(CURVATURE), **(asked | more))


def test_a_page_of_any_model_shows_what_was_measured_and_a_second_run_measures_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
        with cl.ablate(MODEL, plan):
            replies = [cl.continue_text(MODEL, TOKENIZER, q.prompt, 12) for q in QUESTIONS[:3]]
        assert found["replies"] == replies
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
    assert said.startswith(f"{count} plans on 3 rows, 4 questions and 3 prompts")

    monkeypatch.setattr(cl, "continue_text", None)
    passes = []
    hook = MODEL.register_forward_pre_hook(lambda *_: passes.append(1))
    again = export(tmp_path / "again.html", cache=tmp_path / "kept")
    hook.remove()
    assert data_of(again)["lambda"]["_marks"] == data_of(page)["lambda"]["_marks"]
    assert len(passes) <= 2  # the one row and the question that tell the cost


def test_a_model_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(cl.InputError, match="held_out"):
        export(tmp_path / "page.html", held_out=None)
    assert not list(tmp_path.iterdir())
