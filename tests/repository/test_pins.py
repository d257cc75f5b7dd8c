"""Dependencies: each is pinned once, exactly, with hashes, and conda installs the same."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")


def pins() -> list[Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def dependencies() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"].values()
    return [Requirement(text) for group in (PROJECT["dependencies"], *extras) for text in group]


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


def test_hashes_are_those_of_the_constraints() -> None:
    """With the pins for Python 3.11 and newer; run `make lock` after a change."""
    environment = {"python_version": "3.11", "python_full_version": "3.11.7"}
    pinned = {
        canonicalize_name(pin.name): pin.specifier
        for pin in pins()
        if pin.marker is None or pin.marker.evaluate(environment)
    }
    found, apart = locked("requirements.txt"), locked("apart.txt")
    assert not apart.keys() & found.keys()
    every = found | apart
    assert {name: every[name][0].specifier for name in pinned if name in every} == pinned
    built = {name: pin.specifier for name, (pin, _) in locked("build.txt").items()}
    assert {name: built[name] for name in built if name in pinned} == {
        name: pinned[name] for name in built if name in pinned
    }
    # the rest is for other systems, or what .ci/setup omits together with torch
    setup = (ROOT / ".ci" / "setup").read_text(encoding="utf-8")
    omitted = re.search(r"own = !/(.*?)/", setup)
    assert omitted
    for name in found.keys() - pinned.keys():
        marker = found[name][0].marker
        foreign = marker and not marker.evaluate({"sys_platform": "linux"})
        assert foreign or re.match(omitted[1], name), f"{name} is in no list of pins"
    here = pinned.keys() - apart.keys()
    assert {name for name in here if re.match(omitted[1], name)} == {"torch"}


def test_conda_environment_adds_nothing() -> None:
    text = (ROOT / "environment.yml").read_text(encoding="utf-8")
    body = [line.strip() for line in text.splitlines() if not line.startswith("#")]
    packages = body[body.index("dependencies:") + 1 :]
    assert packages == [
        "- python=3.11",
        "- pip",
        "- pip:",
        "- -c constraints.txt",
        "- -e .[lab,hub,eval,gguf,pretrained,ray,test]",
    ]
    python = packages[0].partition("=")[2]
    assert python in PYTHONS  # whose pins the tests above have checked, extra by extra
    assert SpecifierSet(PROJECT["requires-python"]).contains(python)
    extras = packages[-1].partition("[")[2].rstrip("]").split(",")
    assert set(extras) <= PROJECT["optional-dependencies"].keys()  # pip only warns of another
