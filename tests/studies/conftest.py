"""One tiny problem for all studies: its H takes seconds."""

from __future__ import annotations

import pytest

from helpers.studies import Problem


@pytest.fixture(scope="session")
def problem() -> Problem:
    return Problem()
