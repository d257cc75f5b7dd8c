"""The interface of a pruning method: measure once (expensive), select at any ratio, maybe repair.

All methods choose among the same units, pay the same costs and fill the same budget by the same
stopping rule (filling.py), so two rows of a table differ only in what the method chose.

`Method` is the interface. `Scored` is the base of methods that rank units by one score each: a
subclass gives the scores, and where it differs the order. An `Evidence` keeps the measurements.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..base.arguments import as_path
from ..base.atomic import write_atomically
from ..base.errors import MismatchError, NumericalError
from ..base.origin import LOADED, record_in
from ..base.schema import COUNT, OBJECT, TEXT, Field, Schema, dict_of, reading, require_fields
from ..base.storage import dump_plain, load_plain
from ..calibration import CalibrationSet
from ..models.architectures import Architecture, describe
from ..models.identity import known_record
from ..models.runtime import require_measurable, require_one_device
from ..models.units import UnitSet, require_units
from ..pruner.cutting import prune
from ..solver.guards import FREE, Guards
from ..solver.selection import Selection
from .filling import global_order, take_in_order, uniform_order
from .inputs import InputStatistics, collect_statistics

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORMAT, VERSION = "cocurve-evidence", 1
Arrays = dict[str, np.ndarray]
_FIELDS: Schema = {
    "format": TEXT,
    "version": COUNT,
    "method": TEXT,
    "units": OBJECT,
    "arrays": Field("arrays by name", dict_of(lambda value: isinstance(value, np.ndarray))),
    "provenance": OBJECT,
}


@dataclass(frozen=True, eq=False)
class Evidence:
    """The measurements of a method on a model: enough to select at any ratio without the model.

    Attributes:
        method: name of the method.
        units: the UnitSet the arrays follow.
        arrays: named arrays, "scores" [M] float64 for methods that score units once.
        provenance: model, calibration, seed and options it depends on; plain values.
    """

    method: str
    units: UnitSet
    arrays: Arrays = field(default_factory=dict)
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
        """The score of each unit [M] float64; low goes first."""
        return self.arrays["scores"]

    @property
    def source(self) -> dict[str, Any]:
        """The fields of a plan that say of which model and text it is."""
        text = self.provenance.get("text_windows")
        return {"origin": record_in(self.provenance) or None, "text_windows": text}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write to `path` atomically; `load` reads it without executing anything."""
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
        """Read a saved evidence."""
        path = as_path(path, "path")
        content = load_plain(path, format_name=FORMAT, version=VERSION)
        with reading(path, "Measure again."):
            require_fields(content, _FIELDS)
            units = UnitSet.from_plain(content["units"])
            return cls(content["method"], units, content["arrays"], content["provenance"])

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in self.arrays.items())
        return f"Evidence of {self.method} on {len(self.units)} units: {shapes or 'nothing'}"


class Method(ABC):
    """A pruning method.

    Subclasses are frozen dataclasses; their fields are the method's options, with defaults.

    Attributes:
        name: for `get_method`, lower case with dashes.
        title: its label in tables.
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
        """Gather everything the method needs, in one go over the calibration rows.

        Args:
            model: the dense model; left as it was.
            calibration: rows; methods here use every token of them, never a label.
            seed: for methods that draw; the others ignore it.
        """

    @abstractmethod
    def select(
        self, evidence: Evidence, units: UnitSet, ratio: float, guards: Guards = FREE
    ) -> Selection:
        """Choose the plan of a ratio, a share of removable cost in [0, 1)."""

    def repair(
        self, model: PreTrainedModel, selection: Selection, evidence: Evidence
    ) -> PreTrainedModel:
        """Prune the model, and repair the weights that stay where the method does that."""
        return prune(model, selection)

    def require_own(self, evidence: Evidence, units: UnitSet) -> None:
        """Raise MismatchError unless the evidence is this method's and of these units."""
        if evidence.method != self.name:
            raise MismatchError(
                f"the evidence is of {evidence.method!r}, the method is {self.name!r}. Measure "
                "with the method that selects."
            )
        units.require_same(evidence.units, mine="the unit set", theirs="the evidence")


@dataclass(frozen=True, eq=False)
class Subject:
    """One measurement's inputs: the arguments of `Method.measure`, and the model as described."""

    model: PreTrainedModel
    architecture: Architecture
    units: UnitSet
    calibration: CalibrationSet
    seed: int
    progress: bool

    def statistics(self, title: str, **options: Any) -> InputStatistics:
        """Sum up the inputs of the output projections; options as for `collect_statistics`."""
        return collect_statistics(
            self.model, self.calibration, progress=self.progress, title=title, **options
        )


class Scored(Method):
    """A method that gives every unit one score and removes the lowest.

    Subclasses give `scores`; they override `order` for another allocation.

    Attributes:
        reads_text: whether the scores depend on the calibration.
        draws: whether they depend on the seed.
        knows_experts: whether it scores experts, too.
        ranks_globally: whether the units of all blocks are ranked together; else the same share of
            every block goes.
    """

    reads_text: ClassVar[bool] = True
    draws: ClassVar[bool] = False
    knows_experts: ClassVar[bool] = False
    ranks_globally: ClassVar[bool] = False

    @abstractmethod
    def scores(self, subject: Subject) -> np.ndarray | Arrays:
        """Score the units: [M] float64, low goes first.

        A method whose `select` or `repair` needs more returns named arrays, "scores" among them.
        """

    def order(self, units: UnitSet, scores: np.ndarray) -> list[int]:
        """Rank the units [M], first to go first; ties go to the lower index."""
        return (global_order if self.ranks_globally else uniform_order)(units, scores)

    def measure(
        self,
        model: PreTrainedModel,
        units: UnitSet,
        calibration: CalibrationSet,
        *,
        seed: int = 0,
        progress: bool = True,
    ) -> Evidence:
        """Score all units of the dense model. See `Method.measure`."""
        require_units(model, units)
        if self.needs_gradients:  # they need the weights after the forward too
            require_one_device(model)
        if self.reads_text:  # before any hook is there, because it may run the model
            require_measurable(model, calibration)
        architecture = describe(model)
        if not self.knows_experts:
            architecture.require_columns(self.title)
        found = self.scores(Subject(model, architecture, units, calibration, seed, progress))
        text, origin = calibration if self.reads_text else None, known_record(model, fresh=True)
        provenance = {
            "model_name": origin["name"],
            "model_fingerprint": origin["checkpoint"][LOADED],
            "checkpoint": origin["checkpoint"],
            "model_dtype": origin["dtype"],
            "text_windows": "" if text is None else text.text_windows,
            "calibration_fingerprint": None if text is None else text.fingerprint,
            "num_sequences": None if text is None else len(text),
            "seq_len": None if text is None else text.seq_len,
            "seed": seed if self.draws else None,
            "options": asdict(self),  # type: ignore[call-overload]
        }
        arrays = found if isinstance(found, dict) else {"scores": found}
        return Evidence(self.name, units, arrays, provenance)

    def select(
        self, evidence: Evidence, units: UnitSet, ratio: float, guards: Guards = FREE
    ) -> Selection:
        """Remove the lowest scores, in `order`. See `Method.select`."""
        self.require_own(evidence, units)
        order = self.order(units, evidence.scores)
        return take_in_order(units, order, ratio, guards, **evidence.source)
