"""Every test of the instruments leaves none behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ipywidgets.widgets.widget import _instances


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close what a test leaves open, and wait until its session measures nothing."""
    before = set(_instances)
    yield
    for model_id in set(_instances) - before:
        widget = _instances.get(model_id)  # closing one may close others
        if widget is not None:
            widget.close()
        if hasattr(widget, "session"):
            assert widget.session.worker.join(60)
