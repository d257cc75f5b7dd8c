"""The front ends' JavaScript: held to Python on fixtures, and kept small, by `node --test`."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.extensions.figures import COLORS, ORDERED, SIGNED
from cocurve_lab.extensions.writing import brief, plus_minus, typeset
from cocurve_lab.solver.guards import Rules, reachable_ratio
from cocurve_lab.solver.protection import in_the_way
from cocurve_widgets.instrument import front
from cocurve_widgets.packing import pack_problem, plan_mark
from helpers.pages import matrix_of
from helpers.problems import make_units, random_curvature

HERE = Path(__file__).resolve().parent
FRONT = HERE.parents[1] / "widgets" / "cocurve_widgets" / "front"
TESTS = sorted((HERE / "front").glob("*.test.mjs"))
GUARDS = (
    cl.Guards(),
    cl.Guards(layer_cap=0.4),
    cl.Guards(layer_cap_factor=1.5),
    cl.Guards(protect_first=1, protect_last=1),
    cl.Guards(kinds=("ffn",)),
    cl.Guards(layer_cap=0.3, protect_last=1, kinds=("attention",)),
)


def node() -> str:
    """The Node.js that comes with playwright."""
    from playwright._impl._driver import compute_driver_executable

    return str(compute_driver_executable()[0])


def controls(ratio: float, strength: float, guards: cl.Guards) -> dict[str, Any]:
    return {
        "ratio": ratio,
        "interaction_strength": strength,
        "layer_cap": guards.layer_cap,
        "layer_cap_factor": guards.layer_cap_factor,
        "protect_first": guards.protect_first,
        "protect_last": guards.protect_last,
        "kinds": [kind for kind in ("attention", "ffn") if guards.allows(kind)],
    }


def case(curvature: cl.Curvature, ratio: float, strength: float, guards: cl.Guards) -> dict:
    found = {"controls": controls(ratio, strength, guards)}
    found["most"] = reachable_ratio(curvature.units, guards, ratio)
    found["loosen"] = in_the_way(Rules(curvature.units, guards, ratio))
    try:
        plan = cl.solve_greedy(curvature, ratio, strength, guards)
    except cl.InfeasibleError:
        return found | {"order": [], "stalled": True}
    parts = {"node": plan.node_risk, "edge": plan.edge_risk}
    return (
        found
        | parts
        | {
            "order": list(plan.pruned),
            "mark": plan_mark(plan.pruned),
            "stalled": False,
        }
    )


def path(curvature: cl.Curvature, ratio: float, guards: cl.Guards) -> dict | None:
    try:
        segments = cl.lambda_path(curvature, ratio, guards).segments
    except cl.InfeasibleError:
        return None
    if any(segment.selection is None for segment in segments):
        return None  # where greedy stalls the browser shows no flips
    sets = [set(segment.selection.pruned) for segment in segments]
    return {
        "controls": controls(ratio, 0.0, guards),
        "breaks": [segment.start for segment in segments[1:]],
        "changes": [sorted(a ^ b) for a, b in itertools.pairwise(sets)],
    }


def fixture(curvature: cl.Curvature, strengths: tuple[float, ...]) -> dict[str, Any]:
    packed = pack_problem(curvature)
    seen = cl.Curvature(matrix_of(packed), curvature.units)  # both solve what was sent
    for name in ("saliency", "connectivity", "matrix"):
        packed[name] = base64.b64encode(packed[name]).decode()
    ratios = (0.0, 0.1, 0.2, 0.37, 0.6)
    cases = [case(seen, r, s, g) for r in ratios for s in strengths for g in GUARDS]
    small = len(seen.units) <= 200  # the browser's sweep solves anew at every order
    paths = [path(seen, r, g) for r in (0.2, 0.5) for g in GUARDS[:4] if small]
    return {"packed": packed, "cases": cases, "paths": [p for p in paths if p]}


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    problems = [
        fixture(random_curvature(make_units(4, 2, 4), seed=1), (0.0, 0.3, 1.0)),
        fixture(random_curvature(make_units(3, 2, 6, 7, 13), seed=2), (0.0, 4.5e-5, 0.7)),
        fixture(random_curvature(make_units(8, 4, 14), seed=3), (0.01, 1.0)),
        fixture(random_curvature(make_units(20, 8, 20), seed=4), (0.5,)),  # 560 units: float32
        fixture(cl.Curvature(np.eye(12), make_units(3, 2, 2)), (0.0, 1.0)),  # all ties
    ]
    # greedy stalls at lambda 0 and not at lambda 1
    stall = random_curvature(make_units(3, 2, 6, 7, 13), seed=6)
    seen = cl.Curvature(matrix_of(pack_problem(stall)), stall.units)
    problems.append(
        fixture(stall, ()) | {"cases": [case(seen, 0.5, 1.0, cl.Guards(layer_cap=0.5))]}
    )
    file = tmp_path_factory.mktemp("front") / "problems.json"
    file.write_text(json.dumps(problems))
    return file


@pytest.mark.parametrize("tests", TESTS, ids=lambda path: path.name)
def test_javascript(tests: Path, fixtures: Path) -> None:
    run = subprocess.run(
        [node(), "--no-warnings", "--test", str(tests)],
        env=os.environ | {"COCURVE_FIXTURES": str(fixtures)},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_front_end_files_are_small_and_self_contained() -> None:
    files = sorted(FRONT.iterdir())
    assert {file.suffix for file in files} == {".js", ".css"}
    for file in files:
        text = file.read_text(encoding="utf-8")
        assert len(text.encode()) < 25_000, file.name
        assert "http" not in text.replace("http://www.w3.org", ""), file.name  # no address at all
        assert "eval(" not in text, file.name


def test_one_palette_for_pages_and_pictures() -> None:
    texts = {file.name: file.read_text(encoding="utf-8") for file in FRONT.glob("*.js")}
    for name, value in COLORS.items():
        assert f'{name}: "{value}"' in texts["kit.js"]
    colored = [name for name, text in texts.items() if re.search(r"#[0-9a-fA-F]{6}\b", text)]
    assert colored == ["kit.js"]


def test_a_color_has_one_meaning_and_a_share_is_ordered() -> None:
    text = (FRONT / "kit.js").read_text(encoding="utf-8")
    block = text.split("export const COLORS = {")[1].split("}")[0]
    named = dict(re.findall(r'(\w+): "(#[0-9A-F]{6})"', block))
    assert set(named) == {*COLORS, "a", "b"}  # kinds, bridge, signs, plans
    assert len(set(named.values())) == len(named)
    assert [color for _, color in SIGNED][::2] == [COLORS["negative"], COLORS["positive"]]
    light = [
        sum(w * int(c[i : i + 2], 16) for w, i in ((0.3, 1), (0.59, 3), (0.11, 5))) for c in ORDERED
    ]
    assert light == sorted(light, reverse=True)
    ordered = text.split("export const ORDERED = [")[1].split("]")[0]
    assert re.findall(r'"(#[0-9A-F]{6})"', ordered) == list(ORDERED)


def test_front_joins_modules_without_their_imports() -> None:
    joined = front("lambda.js", render="renderLambda")
    assert "import {" not in joined
    assert joined.count("export default { render: renderLambda }") == 1
    places = [joined.index(f"export function {name}(") for name in ("h", "greedy", "renderLambda")]
    assert places == sorted(places)
    assert joined.count("export function h(") == 1


@pytest.mark.parametrize(
    "entry", ["page", "lambda", "bridge", "map", "scatter", "generation", "monitor"]
)
def test_files_that_are_joined_share_no_name(entry: str) -> None:
    pattern = r"^(?:export )?(?:async )?(?:function\*?|const|let|class) (\w+)"
    names = re.findall(pattern, front(f"{entry}.js"), re.M)
    assert len(names) > 20
    assert [name for name, times in Counter(names).items() if times > 1] == []


def test_tables_of_notebooks_write_numbers_as_the_instruments_do() -> None:
    values = [0.0, 2.12e-18, -0.000123456, 0.5, 8.399, 1234.5, 999_999.0, -3e7]
    errors = [1e-7, 0.0038, 0.04, 0.5, 7.0, 1234.0, 2e7]
    risks = [0.0, 2.12e-18, -0.000123456, 0.51, 8.399, -1234.6]
    pairs = [{"risk": risk, "error": error} for risk in risks for error in errors]
    file = (FRONT / "compare.js").as_uri()
    code = f"""import {{ brief, withError }} from '{file}';
        console.log(JSON.stringify([{values}.map(brief), {json.dumps(pairs)}.map(withError)]))"""
    run = subprocess.run(
        [node(), "--input-type=module", "-e", code], capture_output=True, text=True, check=True
    )
    alone, measured = json.loads(run.stdout)
    assert alone == [typeset(brief(value)) for value in values]
    assert measured == [typeset(plus_minus(pair["risk"], pair["error"])) for pair in pairs]
