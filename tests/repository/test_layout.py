"""The files of the repository, and what the public face of the library shows."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import cocurve_lab as cl

ROOT = Path(__file__).resolve().parents[2]
WIDGETS = ROOT / "widgets" / "cocurve_widgets"
PRIVATE = re.compile("_[^_]")
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))

FOLDERS = {"cocurve_lab", "notebooks", "widgets", "data", "tests"}
FILES = {
    *("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"),
    *("pyproject.toml", "Makefile"),
}
# in pieces, so that this file does not name them either
HOSTS = [
    ".".join(parts)
    for parts in (
        *(("pypi", "org"), ("pythonhosted", "org"), ("download", "pytorch", "org")),
        *(("anaconda", "org"), ("npmjs", "org"), ("npmjs", "com")),
    )
]


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
    extras = {"ipywidgets", "anywidget", "plotly", "matplotlib", "ray", "gguf"}
    extras |= {"lm_eval", "datasets"}
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


# The public face ---------------------------------------------------------------------------------


def test_the_public_face_is_small_and_every_name_is_there() -> None:
    assert sorted(dir(cl)) == sorted(cl.__all__)
    assert len(cl.__all__) <= 71
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
    is_notebook = path.suffix == ".ipynb"
    trees = code_of(path) if is_notebook else [ast.parse(path.read_text(encoding="utf-8"))]
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.Import):
            assert not [a.name for a in node.names if a.name.startswith("cocurve_lab.")]
        if is_notebook:
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
