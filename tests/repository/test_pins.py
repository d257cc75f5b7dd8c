"""Dependencies: each is pinned once, exactly, and conda installs the same."""

from __future__ import annotations

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
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
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
