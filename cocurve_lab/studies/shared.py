"""Does 1/2 s^T H s predict the measured KL? Of single units, of pairs, and of whole plans.

The paper's appendix "Surrogate Fidelity: Empirical Study". Tables that were measured hold the KL of
every held-out sequence in columns `kl_0`, `kl_1`, ..., so that their summaries can resample text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..calibration import CalibrationSet
from ..curvature.matrix import Curvature
from ..curvature.uncertainty import Groups, jackknife
from ..estimator.build import BuildOptions
from ..estimator.estimate import estimate_curvature, load_or_estimate
from ..figures import COLORS
from ..measuring.risk import PlanTable
from ..models.identity import fingerprint_model, model_dtype
from ..models.units import UnitSet
from ..solver.selection import Selection
from ..storage import fingerprint
from ..tables import Folder, Row, Table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..calibration import CalibrationSet


PALETTE = (*COLORS.values(), "#009E73", "#56B4E9", "#CC79A7")  # Okabe-Ito


SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross")


# What every measured study does ----------------------------------------------------------------
def measured_on(
    model: PreTrainedModel, curvature: Curvature, held_out: CalibrationSet
) -> dict[str, str]:
    """Fingerprints of model, curvature and text: the part of a table's settings all studies share.

    Raises:
        MismatchError: H was built on a row of the text, even where the table itself is kept.
    """
    held_out.require_disjoint(curvature)
    return {
        "model": fingerprint_model(model),
        "dtype": model_dtype(model),
        "curvature": curvature.fingerprint,
        "text": held_out.fingerprint,
    }


def sequence_columns(values: np.ndarray, name: str = "kl") -> dict[str, float]:
    """One row's values [sequences] as columns name_0, name_1, ..."""
    return {f"{name}_{number}": float(value) for number, value in enumerate(values)}


def sequence_values(table: Table, name: str = "kl") -> np.ndarray:
    """The values [rows, sequences] that `sequence_columns` put into a table."""
    count = sum(key.startswith(f"{name}_") and key[len(name) + 1 :].isdigit() for key in table[0])
    return np.array([[row[f"{name}_{number}"] for number in range(count)] for row in table])


def number(value: Any) -> float | None:
    return float(value) if np.isfinite(value) else None


@dataclass(frozen=True)
class Recipe:
    """How a study builds H of a model, and where it looks for it first.

    Attributes:
        calibration: rows and scored positions.
        top_r: size of the support.
        groups: groups of rows whose Grams are kept apart; as many as rows, and H of any rows is a
            sum of them, in rows x M^2 x 8 bytes.
        cache: folder of the builds; None keeps nothing.
        progress: show a progress bar.
    """

    calibration: CalibrationSet
    top_r: int = 256
    groups: int = 16
    cache: Folder = None
    progress: bool = True

    def build(self, model: PreTrainedModel, units: UnitSet) -> Curvature:
        """H of a model, loaded where it lies in the cache.

        Raises:
            KeyboardInterrupt: the build was stopped; a study of half an H would be another study.
        """
        options = BuildOptions(groups=self.groups)
        rest: dict[str, Any] = {"progress": self.progress, "options": options}
        inputs = (model, units, self.calibration, self.top_r)
        if self.cache is None:
            curvature = estimate_curvature(*inputs, **rest)
        else:
            curvature = load_or_estimate(self.cache, *inputs, **rest)
        if not curvature.provenance["complete"]:
            raise KeyboardInterrupt("the build was stopped. Run the study again to go on.")
        return curvature

    @property
    def mark(self) -> list[Any]:
        """What decides the outcome, for `cached_table`."""
        return [self.calibration.fingerprint, self.top_r, self.groups]


# Shared by the studies that build and measure ---------------------------------------------------
def study_settings(model: PreTrainedModel, held_out: CalibrationSet) -> dict[str, Any]:
    """Marks of a model and of the text it is measured on, for `cached_table`."""
    marks = (fingerprint_model(model), model_dtype(model), held_out.fingerprint)
    return dict(zip(("model", "dtype", "held_out"), marks, strict=True))


def compared(table: PlanTable, place: int, base: int) -> Row:
    """One measured plan against another of the same table, paired over sequences.

    Returns:
        `realized_ratio`, `pruned_units`, `overlap`; `kl` and `difference` (to the base) with their
        standard errors `kl_se` and `difference_se`, nats per token; `perplexity` of the plan and
        `dense_perplexity`.
    """
    plan, difference = table.selections[place], table.paired(place, base)
    assert table.dense_nll is not None  # measure_plans always has it
    return {
        "realized_ratio": plan.realized_ratio,
        "pruned_units": len(plan),
        "overlap": plan_overlap(plan, table.selections[base]),
        "kl": table.mean[place],
        "kl_se": table.standard_error[place],
        "difference": difference[0],
        "difference_se": difference[1],
        "perplexity": table.perplexity[place],
        "dense_perplexity": np.exp(table.dense_nll.mean()),
    }


def plan_overlap(plan: Selection, other: Selection) -> float | None:
    """Jaccard overlap of two pruned sets, [0, 1]; 1 if both are empty, None if units differ."""
    if plan.units != other.units:
        return None
    either = int((plan.indicator | other.indicator).sum())
    return int((plan.indicator & other.indicator).sum()) / either if either else 1.0


DRAWS = 100  # bootstrap draws behind errors of medians and plans


def settings_of(curvature: Curvature, **options: Any) -> dict[str, Any]:
    grams = curvature.group_grams
    groups = None if grams is None else fingerprint(grams)
    return {"curvature": curvature.fingerprint, "groups": groups} | options


def errors_of(curvature: Curvature, statistic: Callable[[Curvature], Any], size: int) -> list[Any]:
    """Jackknife standard errors [size] of something smooth in H, None where unknown."""
    if curvature.group_grams is None:
        return [None] * size
    errors = jackknife(curvature, statistic).standard_error.ravel()
    return [float(error) if np.isfinite(error) else None for error in errors]


def resampled(curvature: Curvature, draws: int = DRAWS, seed: int = 0) -> Iterator[Curvature]:
    """H on groups of sequences drawn again; nothing for an H without groups."""
    if curvature.group_grams is None:
        return
    groups = Groups.of(curvature)
    even = np.full(len(groups), 1 / len(groups))
    for counts in np.random.default_rng(seed).multinomial(len(groups), even, size=draws):
        yield groups.weighted(counts)


def spread_of(values: list[Any]) -> Any:
    """Standard deviation over draws, first axis; None with fewer than two of them."""
    return np.std(np.array(values, dtype=float), axis=0, ddof=1) if len(values) > 1 else None
