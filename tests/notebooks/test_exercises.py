"""Every exercise: right answers pass, however written; stub, constants and near misses fail.

The cells come from the notebooks and run on a tiny model, with the names that they find there.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import nbformat
import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_studies import exercises
from cocurve_studies.exercises import RIGHT, check
from helpers.notebooks import NOTEBOOKS, SOLUTIONS
from helpers.tiny_models import GROUPS, tiny_model, tiny_text, word_tokenizer


class Exercise(NamedTuple):
    """The cells of one exercise: stub, check and solution."""

    stub: str
    check: str
    solution: str

    @property
    def name(self) -> str:
        """The function that the reader writes."""
        (function,) = [node for node in ast.parse(self.stub).body if is_function(node)]
        return function.name

    def said(self, names: dict[str, Any], code: str) -> str:
        """What the check prints after some code."""
        lines: list[str] = []
        space = names | {"print": lambda *words: lines.append(" ".join(map(str, words)))}
        for source in (self.stub, code, self.check):
            exec(source, space)
        (line,) = lines
        return line


def is_function(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef)


def exercise_of(notebook: Path) -> Exercise:
    cells = nbformat.read(notebook, as_version=4).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    stub = next(n for n, source in enumerate(code) if "# your code" in source)
    tried = next(n for n, source in enumerate(code) if "print(exercises." in source)
    assert 0 < tried - stub <= 2
    solution = SOLUTIONS[notebook.stem[:2]]
    (asked,) = [c.source for c in cells if "README.md#solutions" in c.source]
    assert "xercise" in asked
    return Exercise(code[stub], code[tried], solution)


EXERCISES = {path.stem[:2]: exercise_of(path) for path in NOTEBOOKS[:5]}


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """The names of the notebooks on a tiny model."""
    model, tokenizer = tiny_model(layers=4, seed=5), word_tokenizer()
    units = cl.enumerate_units(model, GROUPS)
    curvature = cl.estimate_curvature(model, units, tiny_text(12, 24), 16, progress=False)
    plan = cl.solve_greedy(curvature, 0.2)
    prompts = [f"w{n} w{n + 7} w{n + 31}" for n in range(0, 40, 8)]

    class Lab:
        """`cl` with prompts that the tiny tokenizer can read."""

        def __getattr__(self, name: str) -> Any:
            return getattr(cl, name)

        @staticmethod
        def example_prompts(*_: Any) -> list[str]:
            return prompts

    measured = [(0.1, 0.3), (0.2, 0.2), (0.4, 0.9)]
    points = [{"kind": "plan", "predicted_risk": x, "measured_risk": y} for x, y in measured]
    space = {
        "cl": Lab(),
        "np": np,
        "torch": torch,
        "exercises": exercises,
        "f": SimpleNamespace(points=points),
    }
    space |= {"model": model, "tokenizer": tokenizer, "units": units, "curvature": curvature}
    space |= {"plan": plan, "plans": [cl.Selection.from_pruned(units, [])], "MODEL": "a model"}
    return space | {"held_out": None}


def test_every_notebook_has_one_and_its_solution() -> None:
    assert list(EXERCISES) == list(SOLUTIONS) == [f"{n:02}" for n in range(1, 6)]


@pytest.mark.parametrize("number", EXERCISES)
def test_the_unfinished_stub_fails_with_a_hint(number: str, names: dict[str, Any]) -> None:
    said = " ".join(EXERCISES[number].said(names, "").split())
    assert re.fullmatch(r"not yet: \d+ of \d+ cases are right\. .{20,}", said) or re.match(
        r"not yet: \w+Error: ", said
    )


@pytest.mark.parametrize("number", EXERCISES)
def test_no_answer_of_the_solution_passes_for_all(number: str, names: dict[str, Any]) -> None:
    """A constant that is right in some case is wrong in another."""
    exercise = EXERCISES[number]
    given: list[Any] = []
    code = f"{exercise.solution}\nright = {exercise.name}\n{exercise.name} = "
    code += "lambda *case: given.append(right(*case)) or given[-1]"
    assert exercise.said(names | {"given": given}, code) == RIGHT
    for answer in given[:3]:
        code = f"{exercise.name} = lambda *_: answer"
        assert exercise.said(names | {"answer": answer}, code).startswith("not yet: ")


# Right answers in other words, and answers that are nearly right; by notebook ---------------------
RIGHT_TOO = {
    "01": [
        """
        def my_risk(H, removed):
            s = np.zeros(len(H))
            s[removed] = 1
            return s @ H @ s / 2
        """,
        "def my_risk(H, removed): return curvature.risk(removed)",
    ],
    "02": [
        """
        def first_difference(ratio, count):
            plans = [set(cl.solve_greedy(curvature, ratio, s).pruned) for s in strengths]
            far = [s for s, plan in zip(strengths, plans) if len(plan ^ plans[0]) >= count]
            return min(far) if far else None
        """,
    ],
    "03": [
        """
        def my_partner(unit):
            others = [v for v in range(len(units)) if v != unit]
            return max(others, key=lambda v: abs(curvature.matrix[unit, v]))
        """,
        """
        def my_partner(unit):
            order = np.argsort(-np.abs(curvature.matrix[unit]))
            return units[[v for v in order if v != unit][0]].name
        """,
    ],
    "04": [
        """
        def my_spearman(predicted, measured):
            d = predicted.argsort().argsort() - measured.argsort().argsort()
            n = len(d)
            return 1 - 6 * (d**2).sum() / (n * (n**2 - 1))
        """,
    ],
    "05": [
        """
        def foretell(plan, prompt_ids, dense_ids):
            with cl.ablate(model, plan):
                logits = model(torch.tensor([prompt_ids + dense_ids])).logits[0]
            chosen = logits.argmax(-1)[len(prompt_ids) - 1 : -1]
            apart = (chosen != torch.tensor(dense_ids)).nonzero()
            return apart[0, 0] if len(apart) else None
        """,
    ],
}
NEARLY = {
    "01": [
        "def my_risk(H, removed): return H[removed, removed].sum() / 2",  # no edges
        "def my_risk(H, removed): return abs(H[removed][:, removed]).sum() / 2",  # no signs
    ],
    "02": [
        """
        def first_difference(ratio, count):  # one side only
            zero = set(cl.solve_greedy(curvature, ratio, 0.0).pruned)
            for s in strengths:
                if len(set(cl.solve_greedy(curvature, ratio, s).pruned) - zero) >= count:
                    return s
        """,
    ],
    "03": [
        "def my_partner(unit): return np.abs(curvature.matrix[unit]).argmax()",  # often itself
    ],
    "04": [
        "def my_spearman(x, y): return np.corrcoef(x, y)[0, 1]",  # no ranks
        "def my_spearman(x, y): return np.corrcoef([x.argsort().argsort(), y.argsort().argsort()])",
    ],
    "05": [
        """
        def foretell(plan, prompt_ids, dense_ids):  # one token late
            with cl.ablate(model, plan):
                logits = model(torch.tensor([prompt_ids + dense_ids])).logits[0]
            for n, token in enumerate(dense_ids):
                if logits[len(prompt_ids) + n].argmax() != token:
                    return n
        """,
    ],
}


def written(table: dict[str, list[str]], right: bool = False) -> list[Any]:
    """A parameter for each answer."""
    return [
        pytest.param(number, textwrap.dedent(code), right, id=f"{number}-{right}-{place}")
        for number, codes in table.items()
        for place, code in enumerate(codes)
    ]


@pytest.mark.parametrize(("number", "code", "right"), [*written(RIGHT_TOO, True), *written(NEARLY)])
def test_right_answers_pass_however_they_are_written_and_others_get_the_hint(
    number: str, code: str, right: bool, names: dict[str, Any]
) -> None:
    said = EXERCISES[number].said(names, code)
    assert said == RIGHT if right else said.startswith("not yet: ")


# The check itself ---------------------------------------------------------------------------------


def test_a_check_counts_and_names_errors_and_shows_no_answer() -> None:
    cases, answers = [(1,), (2,), (3,)], [11, 12, None]
    answer: Callable[[int], Any] = dict(zip((1, 2, 3), answers, strict=True)).get
    assert check(answer, cases, answers, "A hint.") == RIGHT
    said = check(lambda n: n + 10, cases, answers, "A hint.")
    assert said == "not yet: 2 of 3 cases are right. A hint."
    assert not re.search("11|12", said)
    assert check(lambda n: n / 0, cases, answers, "").startswith("not yet: ZeroDivisionError")
    assert check(lambda _: 1, cases, [1, 1, 1], "").startswith("not yet: all 3 cases have the same")


@pytest.mark.parametrize(
    ("value", "answer", "same"),
    [
        (1, 1.0, True),
        (1 + 1e-9, 1.0, True),
        (1.1, 1.0, False),
        (True, 1, False),
        (None, 0, False),
        ("1", 1, False),
        ([1, 2], np.array([1.0, 2.0]), True),
        (1, np.array([1, 1]), False),
        ([[1], [1, 2]], 1, False),
        (np.nan, 1.0, False),
    ],
)
def test_values_are_compared_up_to_rounding(value: Any, answer: Any, same: bool) -> None:
    said = check(lambda n: value if n else 5, [(1,), (0,)], [answer, 5], "")
    assert (said == RIGHT) is same
