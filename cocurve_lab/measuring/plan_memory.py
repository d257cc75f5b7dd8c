"""What was measured of plans, kept on disk: a measurement that was stopped goes on where it was."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import MismatchError
from ..storage import dump_plain, fingerprint, load_plain, write_atomically
from ..tables import Folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..calibration import CalibrationSet

log = logging.getLogger(__name__)


class Kind(NamedTuple):
    """Which file it is, and what it holds, for messages."""

    format_name: str
    version: int
    what: str


@dataclass
class PlanMemory:
    """Measured values by plan fingerprint; where nothing was measured yet, column 0 is NaN.

    Attributes:
        kind: of the file.
        path: the file; None keeps nothing.
        shape: (rows, columns) of a plan's values, float64; a row is a sequence or a question.
        settings: what decides the values, compared when the file is read.
    """

    kind: Kind
    path: Path | None
    shape: tuple[int, int]
    settings: dict[str, Any] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        kind: Kind,
        path: str | os.PathLike[str] | None,
        shape: tuple[int, int],
        settings: Callable[[], dict[str, Any]],
    ) -> PlanMemory:
        """What the file holds; an empty memory without one.

        Args:
            settings: asked only where there is a path: it may read all weights.

        Raises:
            MismatchError: the file is of other settings; the message names the first.
            FileFormatError: it is another kind of file, or damaged.
        """
        if path is None:
            return cls(kind, None, shape)
        memory = cls(kind, Path(path), shape, settings())
        if Path(path).exists():
            content = load_plain(path, format_name=kind.format_name, version=kind.version)
            for key, value in memory.settings.items():
                if content["settings"].get(key) != value:
                    raise MismatchError(
                        f"{path} holds {kind.what} with another {key}: "
                        f"{content['settings'].get(key)!r}, now {value!r}. Use another file."
                    )
            memory.values = content["values"]
        return memory

    def absent(self, marks: Iterable[str], rows: int | Sequence[int] | slice) -> list[str]:
        """Those of `marks` not measured on all of these rows yet."""
        return [
            mark
            for mark in marks
            if mark not in self.values or np.isnan(self.values[mark][rows, 0]).any()
        ]

    def add(self, marks: Sequence[str], rows: int | Sequence[int], found: np.ndarray) -> None:
        """Remember what was found of each plan on these rows, and write the file."""
        for mark, values in zip(marks, found, strict=True):
            self.values.setdefault(mark, np.full(self.shape, np.nan))[rows] = values
        if self.path is None:
            return
        content = {
            "format": self.kind.format_name,
            "version": self.kind.version,
            "settings": self.settings,
            "values": self.values,
        }
        try:
            write_atomically(self.path, dump_plain(content))
        except OSError as error:
            log.warning("%s could not be written (%s). The measurement goes on.", self.path, error)


def plans_file(folder: Folder, model: PreTrainedModel, text: CalibrationSet) -> Path | None:
    """Where the measured plans of a model on a text are kept: `measure_plans(checkpoint=...)`.

    One file serves all studies in the folder, so a plan measured in one is not measured in another.
    """
    if folder is None:
        return None
    from ..models.identity import fingerprint_model, model_dtype

    mark = fingerprint(fingerprint_model(model), model_dtype(model), text.fingerprint)
    return Path(folder) / f"plans_{mark[:10]}.ckpt"
