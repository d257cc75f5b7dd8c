"""The house: its rooms, the walls between them, and what the public face shows."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import networkx as nx
import pytest

import cocurve_lab as cl

ROOT = Path(__file__).resolve().parents[2]
LIBRARY, WIDGETS = ROOT / "cocurve_lab", ROOT / "widgets" / "cocurve_widgets"
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))

FOLDERS = {"cocurve_lab", "notebooks", "widgets", "data", "tests"}
FILES = {
    "pyproject.toml",
    "environment.yml",
    "constraints.txt",
    "Makefile",
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE",
}
# in pieces, so that this file does not name them either
HOSTS = tuple(
    ".".join(parts)
    for parts in [
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("download", "pytorch", "org"),
        ("anaconda", "org"),
        ("npmjs", "org"),
        ("npmjs", "com"),
    ]
)


def repository_files() -> list[Path]:
    """What git tracks, or in a copy without git the files outside dot-folders and caches."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    tracked = listing.stdout.split("\0") if listing.returncode == 0 else []
    paths = [ROOT / name for name in tracked if name]
    if not paths:
        folders = [ROOT / name for name in sorted(FOLDERS)]
        paths = [ROOT / name for name in sorted(FILES)]
        paths += [p for f in folders for p in f.rglob("*") if "__pycache__" not in p.parts]
    return [path for path in paths if path.is_file()]


def test_top_level_is_fixed() -> None:
    found = {path.relative_to(ROOT).parts[0] for path in repository_files()}
    assert {name for name in found if not name.startswith(".")} == FOLDERS | FILES


def test_no_file_names_a_registry_host() -> None:
    named = []
    for path in repository_files():
        content = path.read_bytes().lower()
        named += [f"{path.relative_to(ROOT)}: {host}" for host in HOSTS if host.encode() in content]
    assert not named


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebook_is_stripped(path: Path) -> None:
    assert path.stat().st_size < 200_000
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert "widgets" not in notebook["metadata"]
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    dirty = [i for i, cell in enumerate(code) if cell["outputs"] or cell["execution_count"]]
    assert not dirty, "code cells with outputs or counts: run `make format`"


def test_there_are_notebooks() -> None:
    assert ROOT / "notebooks" / "01_build_H.ipynb" in NOTEBOOKS


def test_import_needs_no_extra() -> None:
    extras = {
        "ipywidgets",
        "anywidget",
        "plotly",
        "ray",
        "gguf",
        "lm_eval",
        "datasets",
        "matplotlib",
    }
    program = (
        "import sys, cocurve_lab as cl\n"
        "for name in cl.__all__: getattr(cl, name)\n"  # names are imported on first use
        f"print(*sorted({extras!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_widget_package_imports() -> None:
    import cocurve_widgets

    assert all(hasattr(cocurve_widgets, name) for name in cocurve_widgets.__all__)


# Rooms -------------------------------------------------------------------------------------------


def module_of(path: Path) -> str:
    """`solver.greedy` for solver/greedy.py, `solver` for its __init__, "" for the root."""
    parts = path.relative_to(LIBRARY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The folder a module lies in; a file at the root is a room of its own."""
    parts = module.split(".")
    is_folder = (LIBRARY / Path(*parts)).is_dir()
    return module if is_folder or len(parts) == 1 else ".".join(parts[:-1])


MODULES = {module_of(path): path for path in sorted(LIBRARY.rglob("*.py"))}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


# what several rooms share
AT_ROOT = (
    *("atomic", "calibration", "errors", "figures", "numeric", "progress"),
    *("schema", "storage", "tables"),
)


def imported(module: str) -> Iterator[tuple[str, str]]:
    """(module, name) of all that a module takes from the library, lazily or for annotations too."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    package = [part for part in package if part]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1] + (node.module or "").split(".")
            home = ".".join(part for part in base if part)
            for alias in node.names:
                inner = f"{home}.{alias.name}".strip(".")
                yield (inner, "") if inner in MODULES else (home, alias.name)


# A verb of the contract on a noun of a lower room, `curvature.additive()`: imported when called.
UPWARDS = {("curvature.matrix", "solver.additive")}


@cache
def graph_of(rooms: bool) -> nx.DiGraph:
    """Who imports whom: modules, or the rooms they lie in."""
    graph = nx.DiGraph()
    for module in MODULES:
        for home, _ in imported(module):
            if (module, home) in UPWARDS:
                continue
            one, other = (room_of(module), room_of(home)) if rooms else (module, home)
            if one != other:
                graph.add_edge(one, other)
    return graph


def test_relative_imports_are_the_only_ones_inside() -> None:
    """An absolute import of the library would not be seen by the walls."""
    for path in MODULES.values():
        for node in ast.walk(tree_of(path)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert not [name for name in names if name.split(".")[0] == "cocurve_lab"], path


# a package from outside -> where it may be imported
ALLOWED: Mapping[str, tuple[str, ...]] = {
    "lm_eval": ("evaluation/",),
    "ray": ("extensions/big_models/",),
    "gguf": ("extensions/gguf/",),
    "plotly": ("figures.py",),
    "matplotlib": (),
    "pandas": (),
    "ipywidgets": (),
    "anywidget": (),
    "cocurve_widgets": (),
}


@pytest.mark.parametrize("package", ALLOWED)
def test_a_package_is_imported_only_where_it_belongs(package: str) -> None:
    found = set()
    for path in MODULES.values():
        for node in ast.walk(tree_of(path)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            if package in {name.split(".")[0] for name in names}:
                found.add(path.relative_to(LIBRARY).as_posix())
    assert [place for place in found if not place.startswith(ALLOWED[package] or "/")] == []


def at_run_time(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from at_run_time(node)


def test_curvature_and_solver_never_import_torch() -> None:
    """Not in any function either, nor through what they import: the test below runs only some."""
    graph, found = graph_of(rooms=False), []
    walled = {module for module in MODULES if module.split(".")[0] in ("curvature", "solver")}
    for module in sorted(
        walled.union(*(nx.descendants(graph, module) for module in walled & set(graph)))
    ):
        for node in at_run_time(tree_of(MODULES[module])):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            packages = {name.split(".")[0] for name in names}
            found += [f"{module}: {name}" for name in packages & {"torch", "transformers"}]
    assert found == []


PRIVATE = re.compile("_[^_]")


def privates_of(path: Path) -> set[str]:
    """Private names that a file defines: functions, classes, constants and attributes."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return {name for name in names if PRIVATE.match(name)}


def test_no_private_name_crosses_a_module() -> None:
    ours = set().union(*map(privates_of, MODULES.values()))
    crossing = []
    for module, path in MODULES.items():
        taken = {name for _, name in imported(module)}
        crossing += [f"{module}: {name}" for name in taken if PRIVATE.match(name)]
        crossing += [
            f"{module}: {ast.unparse(node)}"
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Attribute) and node.attr in ours - privates_of(path)
        ]
    assert crossing == []


NUMPY_ONLY = """
import importlib, sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(name)

sys.meta_path.insert(0, Refused())
for module in sys.argv[2:]:
    importlib.import_module(f"cocurve_lab.{module}")
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
    rooms = [module for module in MODULES if module.split(".")[0] in ("curvature", "solver")]
    command = [sys.executable, "-c", NUMPY_ONLY, str(stored), *rooms]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True", "4"]


ROOMS = sorted(path.parent for path in LIBRARY.rglob("__init__.py") if path.parent != LIBRARY)


# The public face ---------------------------------------------------------------------------------


def test_the_public_face_is_small_and_every_name_is_there() -> None:
    assert sorted(dir(cl)) == sorted(cl.__all__)
    assert len(cl.__all__) <= 70
    for name in cl.__all__:
        assert getattr(cl, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = cl.nothing


def test_the_stub_is_that_of_the_tables() -> None:
    stub = runpy.run_path(str(ROOT / ".ci" / "stub.py"))
    assert stub["STUB"].read_text(encoding="utf-8") == stub["text"]()


def code_of(notebook: Path) -> list[ast.Module]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    lines = (
        "\n".join(
            "pass" if line.lstrip().startswith(("%", "!")) else line
            for line in "".join(cell["source"]).splitlines()
        )
        for cell in cells
        if cell["cell_type"] == "code"
    )
    return [ast.parse(text) for text in lines]


@pytest.mark.parametrize("path", [*NOTEBOOKS, *sorted(WIDGETS.glob("*.py"))], ids=lambda p: p.name)
def test_notebooks_and_widgets_use_public_names(path: Path) -> None:
    trees = code_of(path) if path.suffix == ".ipynb" else [tree_of(path)]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            assert not [a.name for a in node.names if a.name.startswith("cocurve_lab.")]
        if path.suffix == ".ipynb":
            names = [a.name for a in node.names] if isinstance(node, ast.ImportFrom) else []
            names += [node.attr] if isinstance(node, ast.Attribute) else []
            assert not [name for name in names if PRIVATE.match(name)]
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cocurve_lab"):
            names = {alias.name for alias in node.names}
            assert not [name for name in names if name.startswith("_")]
            if node.module != "cocurve_lab":  # what stands at the top is taken from there
                assert names.isdisjoint(cl.__all__)
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "cl"
        ):
            assert node.attr in cl.__all__, node.attr
