"""H and H* of the same rows: what the two builders give, kept and read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cocurve_lab as cl
from cocurve_lab.estimator.estimate import exact_curvature
from cocurve_studies.trust import infinitesimal
from cocurve_studies.trust.infinitesimal import finite_and_exact
from helpers.tiny_models import GROUPS, tiny_model, tiny_text

TOP_R = 16


def test_both_are_of_the_rows_and_a_second_call_builds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = tiny_model(), tiny_text(2)
    units = cl.enumerate_units(model, GROUPS)
    finite, exact = finite_and_exact(model, units, text, TOP_R, tmp_path, progress=False)
    expected = cl.estimate_curvature(model, units, text, TOP_R, progress=False)
    np.testing.assert_allclose(finite.matrix, expected.matrix, rtol=1e-6, atol=1e-12)
    derived = exact_curvature(model, units, text, TOP_R, progress=False)
    np.testing.assert_allclose(exact.matrix, derived.matrix, rtol=1e-6, atol=1e-12)
    assert not np.allclose(finite.matrix, exact.matrix, rtol=1e-3)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(infinitesimal, "exact_curvature", fail)
    again = finite_and_exact(model, units, text, TOP_R, tmp_path, progress=False)
    assert [h.fingerprint for h in again] == [finite.fingerprint, exact.fingerprint]
    with pytest.raises(AssertionError, match="built again"):  # other rows are another H*
        finite_and_exact(model, units, tiny_text(3), TOP_R, tmp_path, progress=False)
