"""The tiny model that several studies are run on."""

from __future__ import annotations

import pytest

from helpers.studies import Problem


@pytest.fixture(scope="session")
def problem() -> Problem:
    return Problem()
