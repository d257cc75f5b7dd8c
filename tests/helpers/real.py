"""SmolLM2-135M, for tests marked `real`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from cocurve_lab.extensions.pretrained.smollm2 import smollm2_folder


def require_fetched(environment: Mapping[str, str] = os.environ) -> Path:
    """The folder of the model; without it a test is skipped, or in CI fails.

    `.ci/run` sets COCURVE_NO_SMOLLM2 where pip itself could not download the package.
    """
    folder = smollm2_folder()
    if not folder.exists():
        refused = environment.get("COCURVE_NO_SMOLLM2")
        why = f"there is no {folder} ({refused or 'make smollm2 was not run'}). Run: make smollm2"
        if environment.get("CI") == "true" and not refused:
            pytest.fail(why)
        pytest.skip(why)
    return folder
