"""What the repository shows: names, the wheel, versions, examples, pages, links, commands."""

from __future__ import annotations

import doctest
import re
import runpy
import sys
from importlib import import_module
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import cocurve_lab as cl
from helpers.benchmarks import RESULTS

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "tests" / "benchmarks"


def test_every_public_name_is_there_and_in_the_stub() -> None:
    assert sorted(dir(cl)) == sorted(cl.__all__)
    for name in cl.__all__:
        assert getattr(cl, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = cl.nothing
    stub = runpy.run_path(str(ROOT / ".ci" / "stub.py"))
    assert stub["STUB"].read_text(encoding="utf-8") == stub["text"]()


def test_the_wheel_has_the_notebooks_and_pages() -> None:
    """All that `cocurve lab` copies, where it looks in an installed package."""
    wheel = runpy.run_path(str(ROOT / ".ci" / "wheel.py"))
    added: dict[str, str] = {}
    hook = wheel["Notebooks"](str(ROOT), {}, None, None, "", "wheel")
    hook.initialize("standard", {"force_include": added})
    names = {path.name for path in ROOT.glob("notebooks/*.ipynb")} | {
        "explore_demo.html",
        "explore_smollm2.html",
    }
    assert set(added.values()) == {f"cocurve_lab/notebooks/{n}" for n in names | {"README.md"}}


# The examples in docstrings run, and give what they say -------------------------------------------


MODULES = (
    "cocurve_lab.extensions.analysis.refinement",
    "cocurve_lab.solver.guards",
    "cocurve_lab.solver.path",
    "cocurve_lab.solver.solve",
    "cocurve_lab.solver.targets",
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    found = doctest.testmod(import_module(name))
    assert found.attempted > 0
    assert found.failed == 0


# Every page is reached from README, and every link of a page leads to a file and a heading --------


LINK = re.compile(r"\]\(([^)\s]+)\)")
PAGES = {
    path
    for pattern in ("*.md", ".ci/*.md", "[a-z]*/**/*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md" and not path.is_relative_to(ROOT / "data/models")
}


def links_of(page: Path) -> list[tuple[Path, str]]:
    """The file and the heading of each link that stays in the repository."""
    links = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    parts = [link.partition("#") for link in links]
    return [((page.parent / file).resolve() if file else page, mark) for file, _, mark in parts]


def headings_of(page: Path) -> set[str]:
    """The headings of a page as GitHub writes them in links."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_leads_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {file}#{mark}"
        for page in sorted(PAGES)
        for file, mark in links_of(page)
        if not file.exists() or (mark and file.suffix == ".md" and mark not in headings_of(file))
    ]
    assert broken == []


def test_every_page_is_reached_from_the_readme() -> None:
    reached, new = set(), {ROOT / "README.md"}
    while new:
        page = new.pop()
        reached.add(page)
        new |= {file for file, _ in links_of(page) if file.suffix == ".md"} - reached
    assert reached >= PAGES


# The commands of tests/benchmarks start, and the pages of results say what their numbers say ------


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda p: p.stem)
def test_a_command_explains_itself(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])  # as for a command
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert not end.value.code
    assert path.name in capsys.readouterr().out


@pytest.mark.parametrize("name", ["findings", "gemma", "smollm2"])
def test_a_page_has_the_tables_of_its_kept_numbers(name: str) -> None:
    command = runpy.run_path(str(BENCHMARKS / f"bench_{name}.py"))
    pages = command["pages"]()
    assert pages
    for page, text in pages.items():
        assert page.parent in (RESULTS, RESULTS.parents[1])  # README has a table, too
        assert page.read_text(encoding="utf-8") == text, f"run bench_{name}.py, with --write"


# Dependencies -------------------------------------------------------------------------------------


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
HERE = {"python_version": "3.11", "python_full_version": "3.11.7"}


def test_the_versions_of_the_tests_are_within_the_bounds() -> None:
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {"ray", "recover", "sentencepiece", "test"}
    bounds = [Requirement(text) for text in sum(extras.values(), PROJECT["dependencies"])]
    pins = locked("requirements.txt")
    for bound in bounds:
        if bound.marker is None or bound.marker.evaluate(HERE):
            (version,) = pins[canonicalize_name(bound.name)][0].specifier
            assert bound.specifier.contains(version.version), f"{bound}, locked at {version}"


def locked(name: str) -> dict[str, tuple[Requirement, list[str]]]:
    """The requirements of a file with hashes, by name."""
    text = (ROOT / ".ci" / name).read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = {}
    for line in lines:
        requirement, *hashes = line.split(" --hash=")
        parsed = Requirement(requirement.strip())
        found[canonicalize_name(parsed.name)] = parsed, [mark.strip() for mark in hashes]
    assert len(found) == len(lines)
    return found


@pytest.mark.parametrize("name", ["requirements.txt", "build.txt", "apart.txt"])
def test_every_requirement_has_hashes_and_no_address(name: str) -> None:
    for requirement, hashes in locked(name).values():
        assert requirement.url is None
        assert [pin.operator for pin in requirement.specifier] == ["=="]
        assert hashes
        assert all(re.fullmatch("sha256:[0-9a-f]{64}", mark) for mark in hashes), requirement


def test_what_is_set_up_without_hashes_is_torch_alone() -> None:
    """What .ci/setup leaves out where torch may come from another index is torch's."""
    omitted = re.search(r"own = !/(.*?)/", (ROOT / ".ci" / "setup").read_text(encoding="utf-8"))
    assert omitted
    found = [
        pin for pin, _ in locked("requirements.txt").values() if re.match(omitted[1], pin.name)
    ]
    here = {pin.name for pin in found if pin.marker is None}
    assert here == {"torch"}
    assert not locked("apart.txt").keys() & locked("requirements.txt").keys()
