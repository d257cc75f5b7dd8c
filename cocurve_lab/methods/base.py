"""What every pruning method is here: measure once (dear), select often (cheap), maybe repair.

All methods choose among the same units, pay the same costs and fill the same budget by the same
stopping rule (filling.py), so that what differs between two rows of a table is the choice alone.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..calibration import CalibrationSet
from ..errors import FileFormatError, MismatchError, NumericalError
from ..models.units import UnitSet
from ..solver.guards import Guards
from ..solver.selection import Selection
from ..storage import dump_plain, load_plain, write_atomically

if TYPE_CHECKING:
    from transformers import PreTrainedModel


FORMAT, VERSION = "cocurve-evidence", 1


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a method measured on a model, enough to select at any ratio without the model.

    Attributes:
        method: name of the method.
        units: the UnitSet the arrays follow.
        arrays: named arrays, "scores" [M] float64 for methods that score units once.
        provenance: model, calibration, seed and options it depends on; plain values.
    """

    method: str
    units: UnitSet
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, array in self.arrays.items():
            if not np.isfinite(array).all():
                raise NumericalError(
                    f"{self.method} measured NaN or infinite {name}. Check the weights; half "
                    "precision may overflow: try bfloat16 or float32."
                )

    @property
    def scores(self) -> np.ndarray:
        """Score of each unit [M], low goes first."""
        return self.arrays["scores"]

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to `path`, whole or not at all; `load` reads it without executing anything."""
        content = {
            "format": FORMAT,
            "version": VERSION,
            "method": self.method,
            "units": self.units.to_plain(),
            "arrays": self.arrays,
            "provenance": self.provenance,
        }
        write_atomically(path, dump_plain(content))
        return Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Evidence:
        """Read a saved evidence.

        Raises:
            FileNotFoundError: no such file.
            FileFormatError: truncated, hostile, or another format or version.
        """
        content = load_plain(path, format_name=FORMAT, version=VERSION)
        try:
            units = UnitSet.from_plain(content["units"])
            return cls(content["method"], units, content["arrays"], content["provenance"])
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(
                f"{path} lacks a part of an evidence ({error}). Measure again."
            ) from None

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in self.arrays.items())
        return f"Evidence of {self.method} on {len(self.units)} units: {shapes or 'nothing'}"


class Method(ABC):
    """A pruning method.

    Subclasses are frozen dataclasses; their fields are the method's options, with defaults.

    Attributes:
        name: for `get_method`, lower case with dashes.
        title: as tables print it.
        honours_guards: whether layer cap and protection bind; kinds always do.
        needs_gradients: whether measuring runs backward passes.
        repairs: whether `repair` changes weights that stay.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    honours_guards: ClassVar[bool] = True
    needs_gradients: ClassVar[bool] = False
    repairs: ClassVar[bool] = False

    @abstractmethod
    def measure(
        self,
        model: PreTrainedModel,
        units: UnitSet,
        calibration: CalibrationSet,
        *,
        seed: int = 0,
        progress: bool = True,
    ) -> Evidence:
        """Everything the method needs to know, in one go over the calibration rows.

        Args:
            model: the dense model; left as it was.
            units: from `enumerate_units(model)`.
            calibration: rows; methods here use every token of them, never a label.
            seed: for methods that draw.
            progress: show a progress bar with ETA.

        Raises:
            MismatchError: the units are not the model's.
            InputError: text that does not fit the model.
            NumericalError: the model gives NaN or infinite values.
        """

    @abstractmethod
    def select(
        self,
        evidence: Evidence,
        units: UnitSet,
        ratio: float,
        guards: Guards = Guards(),  # noqa: B008  (frozen, so sharing the default is safe)
    ) -> Selection:
        """The plan of a ratio, share of removable cost in [0, 1).

        Raises:
            MismatchError: the evidence is another method's, or of other units.
            InputError: the ratio is out of range.
            InfeasibleError: no plan of this method reaches the ratio under the guards.
        """

    def repair(
        self, model: PreTrainedModel, selection: Selection, evidence: Evidence
    ) -> PreTrainedModel:
        """The pruned model, with the weights that stay repaired where the method does that."""
        from ..pruner.cutting import prune

        return prune(model, selection)

    def require_own(self, evidence: Evidence, units: UnitSet) -> None:
        """Raise MismatchError unless the evidence is this method's and of these units."""
        if evidence.method != self.name:
            raise MismatchError(
                f"the evidence is of {evidence.method!r}, the method is {self.name!r}. Measure "
                "with the method that selects."
            )
        units.require_same(evidence.units, mine="the unit set", theirs="the evidence")
