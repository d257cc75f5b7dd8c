"""Fixtures that several rooms use."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest


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
    """The real model with its tokenizer, for tests marked `real`; they are skipped without it.

    In CI they fail, unless `.ci/run` has set COCURVE_NO_SMOLLM2 where pip itself could not download
    the package.
    """
    from cocurve_lab import load_model
    from cocurve_lab.extensions.pretrained.smollm2 import smollm2_folder

    folder = smollm2_folder()
    if not folder.exists():
        refused = os.environ.get("COCURVE_NO_SMOLLM2")
        why = f"there is no {folder} ({refused or 'make smollm2 was not run'}). Run: make smollm2"
        if os.environ.get("CI") == "true" and not refused:
            pytest.fail(why)
        pytest.skip(why)
    return load_model("smollm2", device="cpu")
