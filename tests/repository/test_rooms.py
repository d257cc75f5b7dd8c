"""The rooms and the walls between them: core, extensions, studies; no import goes up."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
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
    "extensions": 1,
    "methods": 2,
    "evaluation": 2,
    "cli": 3,
}
STUDIES = 4
CIRCLE = 0  # files


def module_of(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    module_of(path, root): path
    for package, root in PACKAGES.items()
    for path in sorted((root / package).rglob("*.py"))
}


LIBRARY = ROOT / "cocurve_lab"
INSIDE = {module: path for module, path in MODULES.items() if path.is_relative_to(LIBRARY)}
WALLED = [m for m in INSIDE if m.split(".")[1:2] in (["curvature"], ["solver"])]  # no torch there


def floor_of(module: str) -> int:
    package, _, rest = module.partition(".")
    if package == "cocurve_studies":
        return STUDIES
    return FLOORS.get(rest.partition(".")[0], STUDIES)  # __init__ and __main__ see all


@cache
def nodes_of(module: str) -> tuple[ast.AST, ...]:
    """All nodes of a file, the file itself first."""
    return tuple(ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))))


@cache
def taken_by(module: str) -> frozenset[tuple[str, str]]:
    """(module, name) of all that a module imports, anywhere in the file; name "" for a module."""
    path, found = MODULES[module], set()
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            home = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{home}.{alias.name}"
                found.add((inner, "") if inner in MODULES else (home, alias.name))
    return frozenset(found)


def imports_of(module: str) -> set[str]:
    return {home for home, _ in taken_by(module)} & set(MODULES) - {module}


def packages_in(nodes: Iterable[ast.AST]) -> set[str]:
    """The packages that absolute imports among these nodes name."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
    return {name.split(".")[0] for name in names}


@cache
def graph() -> nx.DiGraph:
    found = nx.DiGraph([(one, other) for one in MODULES for other in imports_of(one)])
    found.add_nodes_from(MODULES)
    return found


def test_no_import_goes_up() -> None:
    found = {
        (one, other)
        for one in MODULES
        for other in imports_of(one)
        if floor_of(one) < floor_of(other) and "." in other
    }
    assert sorted(found) == []


def test_no_file_of_the_library_names_the_studies() -> None:
    files = (file for ending in ("py", "pyi", "md") for file in LIBRARY.rglob(f"*.{ending}"))
    assert [file for file in files if "cocurve_studies" in file.read_text(encoding="utf-8")] == []


def test_files_import_in_no_circle() -> None:
    circles = [part for part in nx.strongly_connected_components(graph()) if len(part) > 1]
    assert sum(map(len, circles)) <= CIRCLE


@pytest.mark.parametrize(
    ("module", "most"),
    [("cocurve_lab.curvature.matrix", 19), ("cocurve_lab.estimator.estimate", 43)],
)
def test_a_file_of_the_core_needs_few_others(module: str, most: int) -> None:
    needed = nx.descendants(graph(), module) | {module}
    assert len([name for name in needed if MODULES[name].name != "__init__.py"]) <= most


# Packages from outside ----------------------------------------------------------------------------
# a package from outside -> where it may be imported
ALLOWED: Mapping[str, tuple[str, ...]] = {
    "lm_eval": ("evaluation/",),
    "ray": ("extensions/big_models/",),
    "gguf": ("extensions/gguf/",),
    "plotly": ("extensions/figures.py",),
    "matplotlib": (),
    "pandas": ("measuring/", "extensions/choosing/", "extensions/judging/"),
    "ipywidgets": (),
    "anywidget": (),
    "cocurve_widgets": (),
}


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_is_imported_only_where_it_belongs(package: str) -> None:
    found = [
        path.relative_to(LIBRARY).as_posix()
        for module, path in INSIDE.items()
        if package in packages_in(nodes_of(module))
    ]
    assert [place for place in found if not place.startswith(ALLOWED[package] or "/")] == []


def test_relative_imports_are_the_only_ones_inside() -> None:
    assert [m for m in INSIDE if "cocurve_lab" in packages_in(nodes_of(m))] == []


def at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from at_run_time(node)


def test_curvature_and_solver_never_import_torch() -> None:
    """Not in any function either, nor through what they import: the test below runs only some."""
    reached = set(WALLED).union(*(nx.descendants(graph(), module) for module in WALLED))
    heavy = {
        module: packages_in(at_run_time(nodes_of(module)[0])) & {"torch", "transformers"}
        for module in reached
    }
    assert [module for module, found in heavy.items() if found] == []


NUMPY_ONLY = """
import importlib, sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "pandas"):
            raise ImportError(name)

sys.meta_path.insert(0, Refused())
for module in sys.argv[2:]:
    importlib.import_module(module)
import cocurve_lab as cl

H = cl.Curvature.load(sys.argv[1])
plan = cl.solve_greedy(H, 0.2)
gate, path, bridges = cl.redundancy_gate(H), cl.lambda_path(H, 0.2), cl.bridge_units(H)
cl.refine(plan, H), cl.risk_lower_bound(H, 0.2), cl.solve_gains(H, plan), cl.edge_graph(H)
cl.plot_correlation(H), cl.plot_saliency(H), cl.plot_budget(plan)
from cocurve_widgets import BridgeExplorer, LambdaExplorer, export_html
LambdaExplorer(H), BridgeExplorer(H)
export_html(H, sys.argv[1] + ".html")
print(cl.Selection.from_json(plan.to_json()) is not None, len(plan))
"""


def test_a_stored_H_opens_solves_and_shows_without_torch(tmp_path: Path) -> None:
    from helpers.problems import make_units, random_curvature

    stored = random_curvature(make_units(), groups=4).save(tmp_path / "H.pkl")
    command = [sys.executable, "-c", NUMPY_ONLY, str(stored), *WALLED]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "4"]


# Private names ------------------------------------------------------------------------------------
PRIVATE = re.compile("_[^_]")


def privates_of(module: str) -> set[str]:
    """Private names that a file defines: functions, classes, constants and attributes."""
    names = set()
    for node in nodes_of(module):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return {name for name in names if PRIVATE.match(name)}


def test_no_private_name_crosses_a_module() -> None:
    own = {module: privates_of(module) for module in INSIDE}
    every, crossing = set().union(*own.values()), []
    for module in INSIDE:
        crossing += [f"{module}: {n}" for _, n in taken_by(module) if PRIVATE.match(n)]
        others = every - own[module]
        crossing += [
            f"{module}: {ast.unparse(node)}"
            for node in nodes_of(module)
            if isinstance(node, ast.Attribute) and node.attr in others
        ]
    assert crossing == []
