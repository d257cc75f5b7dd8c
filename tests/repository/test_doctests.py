"""The examples in docstrings run, and give what they say."""

from __future__ import annotations

import doctest
from importlib import import_module

import pytest

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
