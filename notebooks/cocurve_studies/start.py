"""The H that notebooks 02 to 10 start from: what ships with a model, or the reader's own."""

from __future__ import annotations

import os

from cocurve_lab.curvature.matrix import Curvature
from cocurve_lab.extensions.pretrained.kept import kept_curvature
from cocurve_lab.models.identity import demo_folder, is_demo
from cocurve_lab.models.units import UnitSet

from .lazy import CalibrationSet, PreTrainedModel

SHIPPED = "H_64_rows.npz"  # of the demo model, on the calibration rows of these notebooks


def curvature_for(
    model_id: str | os.PathLike[str],
    model: PreTrainedModel,
    units: UnitSet,
    calibration: CalibrationSet,
    top_r: int = 256,
    folder: str | os.PathLike[str] = "kept",
) -> Curvature:
    """Open the H [M, M] of a model that ships, or load or build the one of these settings.

    H of the demo model ships for the default settings of the notebooks, that of SmolLM2 for its 24
    rows of C4 whatever the settings are. Any other H is looked for in `folder`, and built there.
    """
    kept = kept_curvature(model_id)
    if kept is not None:
        return kept
    if is_demo(model_id) and (demo_folder() / SHIPPED).exists():
        shipped = Curvature.load(demo_folder() / SHIPPED)
        known = shipped.provenance
        settings = known["calibration_fingerprint"], known["top_r"], known["units_fingerprint"]
        if settings == (calibration.fingerprint, top_r, units.fingerprint):
            return shipped
    from cocurve_lab.estimator.estimate import load_or_estimate

    return load_or_estimate(folder, model, units, calibration, top_r)
