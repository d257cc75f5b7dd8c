"""The repository itself: layout, pins, notebooks, and whether the README tells the truth."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
BENCHMARKS = sorted(ROOT.glob("tests/benchmarks/*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")

FOLDERS = {"cocurve_lab", "notebooks", "widgets", "data", "tests"}
FILES = {
    "pyproject.toml",
    "environment.yml",
    "constraints.txt",
    "Makefile",
    "README.md",
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


def pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def dependencies() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(text) for group in (PROJECT["dependencies"], *extras) for text in group]


def test_top_level_is_fixed() -> None:
    found = {path.relative_to(ROOT).parts[0] for path in repository_files()}
    assert {name for name in found if not name.startswith(".")} == FOLDERS | FILES


def test_no_file_names_a_registry_host() -> None:
    named = []
    for path in repository_files():
        content = path.read_bytes().lower()
        named += [f"{path.relative_to(ROOT)}: {host}" for host in HOSTS if host.encode() in content]
    assert not named


@pytest.mark.parametrize("python", PYTHONS)
def test_each_dependency_is_pinned_once(python: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0"}

    def applies(requirement: Requirement) -> bool:
        return requirement.marker is None or requirement.marker.evaluate(environment)

    for dependency in filter(applies, dependencies()):
        name = canonicalize_name(dependency.name)
        matching = [pin for pin in filter(applies, pins()) if canonicalize_name(pin.name) == name]
        assert len(matching) == 1, f"{name}: pins {[str(pin) for pin in matching]}"
        version = str(matching[0].specifier).removeprefix("==")
        assert dependency.specifier.contains(version), f"{dependency} is pinned to {version}"


def test_constraints_pin_exactly() -> None:
    loose = [str(pin) for pin in pins() if [s.operator for s in pin.specifier] != ["=="]]
    assert not loose


def test_conda_environment_adds_nothing() -> None:
    text = (ROOT / "environment.yml").read_text(encoding="utf-8")
    body = [line.strip() for line in text.splitlines() if not line.startswith("#")]
    packages = body[body.index("dependencies:") + 1 :]
    assert packages == [
        "- python=3.11",
        "- pip",
        "- pip:",
        "- -c constraints.txt",
        "- -e .[lab,hub,eval,gguf,ray,test]",
    ]


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


def test_readme_commands_are_targets() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    code = "\n".join(re.findall(r"```\n.*?```|`[^`\n]+`", README, flags=re.DOTALL))
    commands = set(re.findall(r"\bmake ([a-z]+)\b", code))
    assert {"lab", "demo", "test"} <= commands <= targets


def test_readme_lists_every_file_of_the_library() -> None:
    folders = (
        "cocurve_lab",
        "cocurve_lab/cli",
        "cocurve_lab/export",
        "cocurve_lab/studies",
        "cocurve_lab/methods",
        "cocurve_lab/evaluation",
        "widgets/cocurve_widgets",
    )
    files = {path.name for f in folders for path in (ROOT / f).glob("*.py")} - {"__init__.py"}
    listed = set(re.findall(r"^ {2,4}(\w+\.py) ", README, flags=re.MULTILINE))
    assert (listed - files, files - listed) == (set(), set()), "(listed only, there only)"


def test_gallery_is_small_and_there() -> None:
    shown = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README)
    assert len(shown) >= 4
    assert all((ROOT / path).read_bytes().startswith(b"\x89PNG") for path in shown)
    assert sum(path.stat().st_size for path in ROOT.glob("widgets/gallery/*.png")) < 1_000_000


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda p: p.name)
def test_benchmark_explains_itself(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = [place for place in sys.path if Path(place) != ROOT / "tests"]
    monkeypatch.setattr(sys, "path", [str(path.parent), *elsewhere])  # as for a command
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").parent == ROOT / "tests" / "helpers":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert not end.value.code
    assert "usage" in capsys.readouterr().out.lower()
