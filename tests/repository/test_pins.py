"""Dependencies: each is locked once, exactly, with hashes, within the bounds of the package."""

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
