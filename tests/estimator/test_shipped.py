"""The small H that ships with the demo model: what it says it is, it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.base.errors import MismatchError
from cocurve_lab.estimator.estimate import build_settings
from cocurve_lab.models.identity import demo_folder
from data.make import small_curvature
from helpers.tiny_models import naive_build

FILE = demo_folder() / "H_16_rows.npz"
FEW = (8, 47)  # units that are measured anew


def test_it_is_of_the_demo_model_and_of_as_many_rows_as_it_says() -> None:
    model, tokenizer = cl.load_model("demo")
    text, _ = cl.default_calibration("demo", tokenizer, 16, positions_per_sequence="all")
    settings = build_settings(model, cl.enumerate_units(model), text, 256, cl.BuildOptions())
    shipped = cl.Curvature.load(FILE, expected=settings)
    assert small_curvature.ROWS == shipped.provenance["sequences_done"] == 16
    assert shipped.provenance["seed"] == text.seed == 0
    with pytest.raises(MismatchError):  # as a reader's own it is refused
        cl.Curvature.load(FILE, expected=settings | {"num_sequences": 64})

    built, _ = naive_build(model, text, 256, groups=16, wanted=FEW)
    np.testing.assert_allclose(shipped.matrix[np.ix_(FEW, FEW)], built, rtol=1e-3, atol=1e-6)


def test_it_is_small_and_no_digit_is_lost_in_its_file(tmp_path: Path) -> None:
    assert FILE.stat().st_size < 120_000
    shipped = cl.Curvature.load(FILE)
    assert shipped.matrix.dtype == np.float64
    assert shipped.group_grams is None
    again = cl.Curvature.load(shipped.save(tmp_path / FILE.name))
    np.testing.assert_array_equal(again.matrix, shipped.matrix)
    odd = cl.Curvature(shipped.matrix / 3, shipped.units, {})  # no float32 holds a third
    kept = cl.Curvature.load(odd.save(tmp_path / "odd.npz")).matrix
    np.testing.assert_array_equal(kept, odd.matrix)
