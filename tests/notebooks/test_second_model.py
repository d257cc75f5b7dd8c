"""Notebooks 02, 03 and 07 on another model: what is said after pictures is computed from it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.curvature.graph import bridge_units
from cocurve_studies import sentences
from cocurve_studies.tables import fold
from helpers.lab import SMALL
from helpers.notebooks import NOTEBOOKS, findings_of, run, text_of
from helpers.tiny_models import tiny_model, word_tokenizer

VALUES: dict[str, dict[str, Any]] = {
    "02": {},
    "03": {},
    "07": {},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The parameters of a tiny model of six layers, and of text for it."""
    folder = tmp_path_factory.mktemp("second")
    tiny_model(layers=6, seed=3).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    drawn = np.random.default_rng(0).integers(60, size=(240, 90))
    words = [" ".join(f"w{word}" for word in row) for row in drawn]
    (folder / "text.txt").write_text("\n\n".join(words))
    return {"MODEL": str(folder), "TEXT_FILE": str(folder / "text.txt")}


@pytest.mark.slow
@pytest.mark.parametrize("number", VALUES)
def test_what_a_notebook_says_is_of_its_model(
    number: str, model: dict[str, str], tmp_path: Path
) -> None:
    (notebook,) = (path for path in NOTEBOOKS if path.stem.startswith(number))
    said = text_of(run(notebook, tmp_path, SMALL | {"LENGTH": 32} | VALUES[number] | model))
    curvatures = [cl.Curvature.load(path) for path in (tmp_path / "kept").glob("H_*.pkl")]
    curvature = max(curvatures, key=lambda h: h.provenance["seq_len"])
    assert curvature.units.num_layers == 6
    opening = cl.opening_guards(curvature.units)
    assert opening.protect_first == 1
    if number == "02":
        assert fold(sentences.lambda_changes(curvature)) in said
        assert fold(f"this model: {sentences.trade(curvature)}") in said
        assert "SmolLM2: Attention units" in said
    if number == "03":
        assert fold(sentences.bridge_fate(curvature)) in said
        bridges = bridge_units(curvature)
        assert f"of {len(bridges)} bridges" in said
        assert re.search(r"SmolLM2, 20%: of 67 bridges λ 0 removes \d+", said)
    if number == "07":
        found = findings_of(said)
        assert len(set(found)) > 10
        assert not any("demo" in finding for finding in found)
