"""H and the exact H* of the same few rows, kept in a folder: what a fair comparison needs.

H* costs several times a build, so it is made of few rows; against an H of more rows it would lose
for want of text alone.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ..build import BuildOptions
from ..calibration import CalibrationSet
from ..curvature import Curvature
from ..estimator import build_settings, estimate_curvature, load_or_estimate
from ..infinitesimal import exact_curvature
from ..loading import model_name
from ..storage import fingerprint
from ..units import UnitSet
from .tables import Folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


def finite_and_exact(
    model: PreTrainedModel,
    units: UnitSet,
    calibration: CalibrationSet,
    top_r: int = 256,
    cache: Folder = None,
    progress: bool = True,
) -> tuple[Curvature, Curvature]:
    """H from whole removals and H* from derivatives, both [M, M] and of the same rows (eq. huv).

    Args:
        model: the dense model.
        units: from `enumerate_units(model)`.
        calibration: the rows; see `exact_curvature` for what each costs.
        top_r: r, size of the teacher's support.
        cache: folder in which both are looked for first, and kept; None keeps nothing.
        progress: show progress bars.

    Returns:
        (H, H*), in nats per token.

    Raises: as `estimate_curvature` and `exact_curvature`; KeyboardInterrupt where one of the two
        was stopped, because a comparison of different rows would be another one.
    """
    folder = None if cache is None else Path(cache)
    if folder is None:
        finite = estimate_curvature(model, units, calibration, top_r, progress=progress)
    else:
        finite = load_or_estimate(folder, model, units, calibration, top_r, progress=progress)
    settings = build_settings(model, units, calibration, top_r, "infinitesimal", BuildOptions())
    path = folder and folder / f"H_star_{model_name(model)}_{fingerprint(settings)[:10]}.pkl"
    if path is not None and path.exists():
        exact = Curvature.load(path, expected=settings)
    else:
        exact = exact_curvature(model, units, calibration, top_r, progress=progress)
    if not (finite.provenance["complete"] and exact.provenance["complete"]):
        raise KeyboardInterrupt("a build was stopped. Run it again to go on.")
    if path is not None and not path.exists():
        try:
            exact.save(path)
        except OSError as error:  # minutes of work: hand them over, whatever the disk says
            log.warning("%s could not be written (%s). H* is returned all the same.", path, error)
    return finite, exact
