"""The front ends' JavaScript: held to Python on fixtures by `node --test`, and self-contained."""

from __future__ import annotations

import base64
import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.cli import main
from cocurve_lab.extensions.writing import brief, plus_minus, typeset
from cocurve_lab.solver.guards import Rules, reachable_ratio
from cocurve_lab.solver.protection import in_the_way
from cocurve_widgets.instrument import front
from cocurve_widgets.packing import nodes_of, pack_problem, plan_mark
from helpers.pages import matrix_of, node
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


def controls(ratio: float, strength: float, guards: cl.Guards) -> dict[str, Any]:
    kinds = [kind for kind in ("attention", "ffn") if guards.allows(kind)]
    return vars(guards) | {"ratio": ratio, "interaction_strength": strength, "kinds": kinds}


def case(curvature: cl.Curvature, ratio: float, strength: float, guards: cl.Guards) -> dict:
    found = {"controls": controls(ratio, strength, guards), "order": [], "stalled": True}
    found["most"] = reachable_ratio(curvature.units, guards, ratio)
    found["loosen"] = in_the_way(Rules(curvature.units, guards, ratio))
    try:
        plan = cl.solve_greedy(curvature, ratio, strength, guards)
    except cl.InfeasibleError:
        return found
    found |= {"node": plan.node_risk, "edge": plan.edge_risk, "mark": plan_mark(plan.pruned)}
    return found | {"order": list(plan.pruned), "stalled": False}


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
    file = cl.solve_greedy(seen, 0.2, 0.3).to_json()
    return {"packed": packed, "cases": cases, "paths": [p for p in paths if p], "file": file}


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
    cases = [case(seen, 0.5, 1.0, cl.Guards(layer_cap=0.5))]
    problems.append(fixture(stall, ()) | {"cases": cases})
    file = tmp_path_factory.mktemp("front") / "problems.json"
    file.write_text(json.dumps(problems))
    return file


@pytest.mark.parametrize("tests", TESTS, ids=lambda path: path.name)
def test_javascript(tests: Path, fixtures: Path) -> None:
    node("--test", str(tests), COCURVE_FIXTURES=str(fixtures))


def test_what_is_copied_of_a_plan_makes_it_and_prunes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    units = cl.enumerate_units(cl.load_model("demo")[0])
    found, facts = nodes_of(random_curvature(units)), {"model": "demo", "ratio": 0.03}
    problem = {"places": found["index"], "layers": found["layer"]}
    problem["kinds"] = [int(kind == "ffn") for kind in found["kind"]]
    order = [3, 30, 31, 77, 150]
    copied = node(
        *("--input-type=module", "-e"),
        f"import {{ takeText }} from '{(FRONT / 'plan_file.js').as_uri()}';"
        f"console.log(takeText({json.dumps(problem)}, {order}, {facts | {'strength': 0.4}}))",
    )
    monkeypatch.chdir(tmp_path)
    exec(copied, {})
    plan = cl.Selection.from_json(Path("plan.json").read_text())
    assert set(plan.pruned) == set(order)
    assert (plan.requested_ratio, plan.interaction_strength) == (0.03, 0.4)
    (command,) = re.findall(r"^# cocurve (prune .*)$", copied, re.M)
    assert main(command.split()) == 0
    smaller, dense = cl.load_pruned("smaller"), cl.load_model("demo")[0]
    gone = dense.num_parameters() - smaller.num_parameters()
    assert gone == units.costs[order].sum()


@pytest.mark.parametrize("entry", ["page", "lambda", "bridge", "generation", "monitor"])
def test_joined_files_share_no_name_and_import_nothing(entry: str) -> None:
    joined = front(f"{entry}.js", render="renderIt")
    assert "import {" not in joined
    assert joined.count("export default { render: renderIt }") == 1
    pattern = r"^(?:export )?(?:async )?(?:function\*?|const|let|class) (\w+)"
    names = re.findall(pattern, joined, re.M)
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
    alone, measured = json.loads(node("--input-type=module", "-e", code))
    assert alone == [typeset(brief(value)) for value in values]
    assert measured == [typeset(plus_minus(pair["risk"], pair["error"])) for pair in pairs]
