"""Dependencies: each has one exact version within its bounds, and what is installed has hashes."""

from __future__ import annotations

import re
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


def requirements_of(text: str) -> list[tuple[Requirement, list[str]]]:
    """The requirements of a file and their hashes."""
    lines = text.replace("\\\n", " ").splitlines()
    parts = [line.split(" --hash=") for line in lines if line and not line.startswith("#")]
    return [(Requirement(first.strip()), [mark.strip() for mark in rest]) for first, *rest in parts]


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_each_dependency_is_pinned_once_within_its_bounds(python: str) -> None:
    environment = {"python_version": python, "python_full_version": f"{python}.0"}
    extras = PROJECT["optional-dependencies"].values()
    needed = [Requirement(line) for group in (PROJECT["dependencies"], *extras) for line in group]
    pinned: dict[str, list[str]] = {}
    for pin, _ in requirements_of((ROOT / "constraints.txt").read_text(encoding="utf-8")):
        assert [one.operator for one in pin.specifier] == ["=="], pin
        if pin.marker is None or pin.marker.evaluate(environment):
            version = str(pin.specifier).removeprefix("==")
            pinned.setdefault(canonicalize_name(pin.name), []).append(version)
    for dependency in needed:
        if dependency.marker is None or dependency.marker.evaluate(environment):
            (version,) = pinned[canonicalize_name(dependency.name)]
            assert dependency.specifier.contains(version), f"{dependency}, pinned to {version}"


def test_every_file_to_install_has_its_hash_and_the_pinned_version() -> None:
    """Run `make lock` after a change of constraints.txt."""
    pins = {
        canonicalize_name(pin.name): pin.specifier
        for pin, _ in requirements_of((ROOT / "constraints.txt").read_text(encoding="utf-8"))
        if pin.marker is None or pin.marker.evaluate({"python_full_version": "3.11.7"})
    }
    for name in ("requirements.txt", "build.txt", "apart.txt"):
        for requirement, hashes in requirements_of((ROOT / ".ci" / name).read_text("utf-8")):
            assert requirement.url is None
            assert hashes
            assert all(re.fullmatch("sha256:[0-9a-f]{64}", mark) for mark in hashes), requirement
            pinned = pins.get(canonicalize_name(requirement.name), requirement.specifier)
            assert pinned == requirement.specifier, f"{requirement}, pinned to {pinned}"
