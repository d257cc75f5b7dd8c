"""Every notebook is a clean file of its size; every exercise takes right answers and no others."""

from __future__ import annotations

import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import numpy as np
import pytest
import torch

import cocurve_lab as cl
from cocurve_studies import exercises
from cocurve_studies.exercises import RIGHT, check
from helpers.lab import NOTEBOOKS, SOLUTIONS
from helpers.tiny_models import GROUPS, tiny_model, tiny_text, word_tokenizer

CELLS, WORDS, LINES = 35, 1500, 8  # at most: of a notebook, and of a cell of code


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_a_clean_file_of_its_size_with_one_question(notebook: Path) -> None:
    content = nbformat.read(notebook, as_version=4)
    nbformat.validate(content)
    assert content.metadata.kernelspec.name == "python3"
    assert "widgets" not in content.metadata
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    assert not [cell for cell in code if cell.outputs or cell.execution_count is not None]
    assert max(len(cell.source.splitlines()) for cell in code) <= LINES
    assert len(content.cells) <= CELLS
    words = sum(len(cell.source.split()) for cell in content.cells)
    assert words <= WORDS
    (parameters,) = [c for c in content.cells if "parameters" in c.metadata.get("tags", [])]
    assert all(name in parameters.source for name in ("MODEL", "DEVICE", "ROWS, HELD_OUT"))
    asked = [cell.source.count("**Question**: ") for cell in content.cells]
    assert asked[0] == sum(asked) == 1
    assert sum(cell.source.startswith("## What was seen") for cell in content.cells) == 1


# Every exercise -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """The names of the notebooks on a tiny model."""
    model, tokenizer = tiny_model(layers=4, seed=5), word_tokenizer()
    units = cl.enumerate_units(model, GROUPS)
    curvature = cl.estimate_curvature(model, units, tiny_text(12, 24), 16, progress=False)
    prompts = [f"w{n} w{n + 7} w{n + 31}" for n in range(0, 40, 8)]
    lab = {name: getattr(cl, name) for name in ("Selection", "ablate", "solve_greedy")}
    return {
        "cl": SimpleNamespace(**lab, example_prompts=lambda *_: prompts),
        "np": np,
        "torch": torch,
        "exercises": exercises,
        "model": model,
        "tokenizer": tokenizer,
        "units": units,
        "curvature": curvature,
        "plan": cl.solve_greedy(curvature, 0.2),
        "plans": [cl.Selection.from_pruned(units, [])],
        "MODEL": "a model",
        "held_out": None,
    }


def said(number: str, names: dict[str, Any], code: str) -> str:
    """What the check of a notebook prints after some code in place of the stub's."""
    (notebook,) = (path for path in NOTEBOOKS if path.stem.startswith(number))
    cells = [c.source for c in nbformat.read(notebook, as_version=4).cells if c.cell_type == "code"]
    stub = next(source for source in cells if "# your code" in source)
    checks = next(source for source in cells if "print(exercises." in source)
    lines: list[str] = []
    space = names | {"print": lambda *words: lines.append(" ".join(map(str, words)))}
    for source in (stub, textwrap.dedent(code), checks):
        exec(source, space)
    return lines[-1]


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


@pytest.mark.parametrize("number", SOLUTIONS)
def test_right_answers_pass_and_others_get_a_hint(number: str, names: dict[str, Any]) -> None:
    for code in (SOLUTIONS[number], *RIGHT_TOO[number]):
        assert said(number, names, code) == RIGHT
    for code in ("", *NEARLY[number]):  # the stub as it stands, and near misses
        assert said(number, names, code).startswith("not yet: ")


def test_a_check_counts_and_names_errors() -> None:
    cases, answers = [(1,), (2,), (3,)], [11, 12, None]
    assert check({1: 11, 2: 12, 3: None}.get, cases, answers, "A hint.") == RIGHT
    counted = check(lambda n: n + 10, cases, answers, "A hint.")
    assert counted == "not yet: 2 of 3 cases are right. A hint."
    assert check(lambda n: n / 0, cases, answers, "").startswith("not yet: ZeroDivisionError")
    # a constant would pass
    assert check(lambda _: 1, cases, [1, 1, 1], "").startswith("not yet: all 3 cases have the same")
    for wrong in (True, None, "1", [[1], [1, 2]]):
        assert check(lambda n, w=wrong: w, [(0,), (1,)], [1, 2], "").startswith("not yet: 0")
