"""The one rule of the house: core, extensions, studies; no import goes up."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"cocurve_lab": ROOT, "cocurve_studies": ROOT / "notebooks"}
CORE = (
    *("base", "calibration", "models", "curvature", "estimator"),
    *("solver", "measuring", "pruner"),
)
FLOORS = {
    **dict.fromkeys(CORE, 0),
    "figures": 0,
    "extensions": 1,
    "methods": 2,
    "evaluation": 2,
    "cli": 3,
}
STUDIES = 4
LATE = {("cocurve_lab.cli", "cocurve_studies.paper.command")}  # the verb `cocurve paper`
CIRCLE = 0  # files


def module_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_of(path, root): path
    for package, root in PACKAGES.items()
    for path in sorted((root / package).rglob("*.py"))
}


def floor_of(module: str) -> int:
    package, _, rest = module.partition(".")
    if package == "cocurve_studies":
        return STUDIES
    return FLOORS.get(rest.partition(".")[0], STUDIES)  # __init__ and __main__ see all


@cache
def imports_of(module: str) -> frozenset[str]:
    """The modules of ours that a module imports, anywhere in the file."""
    path, found = MODULES[module], set()
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in MODULES}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            home = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{home}.{alias.name}"
                found.add(inner if inner in MODULES else home)
    return frozenset(found & set(MODULES) - {module})


def graph() -> nx.DiGraph:
    return nx.DiGraph([(one, other) for one in MODULES for other in imports_of(one)])


def test_no_import_goes_up() -> None:
    found = {
        (one, other)
        for one in MODULES
        for other in imports_of(one)
        if floor_of(one) < floor_of(other) and "." in other
    }
    assert sorted(found - LATE) == []


def test_files_import_in_no_circle() -> None:
    circles = [part for part in nx.strongly_connected_components(graph()) if len(part) > 1]
    assert sum(map(len, circles)) <= CIRCLE


@pytest.mark.parametrize(
    ("module", "most"),
    [("cocurve_lab.curvature.matrix", 16), ("cocurve_lab.estimator.estimate", 36)],
)
def test_a_file_of_the_core_needs_few_others(module: str, most: int) -> None:
    needed = nx.descendants(graph(), module) | {module}
    assert len([name for name in needed if MODULES[name].name != "__init__.py"]) <= most
