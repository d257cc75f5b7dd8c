"""What a verb prints never ends it: closed and full outputs, and terminals without a sign."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cocurve_lab as cl
from helpers.tiny_models import tiny_model, tiny_text

SOLVE = [sys.executable, "-m", "cocurve_lab", "solve", "H.pkl", "--ratio", "0.2", "--gate"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place, model = tmp_path_factory.mktemp("terminal"), tiny_model()
    units = cl.enumerate_units(model, ffn_groups=4)
    cl.estimate_curvature(model, units, tiny_text(6, 12), 16, progress=False).save(place / "H.pkl")
    return place


@pytest.mark.parametrize("output", ["full", "closed", "left", "ascii"])
def test_a_verb_finishes_whatever_becomes_of_its_output(output: str, folder: Path) -> None:
    plan = folder / f"{output}.json"
    command = [*SOLVE, "--out", str(plan)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii" if output == "ascii" else "utf-8"}
    if output == "full":
        with open("/dev/full", "w") as full:
            done = subprocess.run(command, stdout=full, stderr=full, cwd=folder, env=environment)
    elif output == "closed":
        shell = [*("sh", "-c", '"$@" >&- 2>&-', "sh"), *command]
        done = subprocess.run(shell, cwd=folder, env=environment)
    elif output == "left":
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder, env=environment
        ) as running:
            assert running.stdout is not None
            running.stdout.close()  # as `| head -0` does
            said = running.communicate()[1]
        assert b"Traceback" not in said
        assert b"Broken" not in said
        assert running.returncode == 0
        done = None
    else:
        done = subprocess.run(command, capture_output=True, cwd=folder, env=environment)
        assert done.stdout.isascii()
        assert b"?" not in done.stdout.replace(b"?\n", b"")
    assert done is None or done.returncode == 0
    assert cl.Selection.from_json(plan.read_text()).pruned
