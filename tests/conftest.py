"""Fixtures that several rooms use."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from helpers.lab import Lab


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take long, so that no process ends long after the others."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Ctrl-C interrupts, as in a terminal: a shell starts its background jobs with it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """The real model with its tokenizer; for tests marked `real`."""
    from cocurve_lab import load_model
    from helpers.real import require_fetched

    require_fetched()
    return load_model("smollm2", device="cpu")


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One JupyterLab and one browser for all tests that want them."""
    from helpers.lab import running_lab

    with running_lab(tmp_path_factory.mktemp("lab")) as running:
        yield running
