"""Store measurements of plans on disk, so that a measurement can resume and be extended.

A file belongs to one model and one text. It contains the values of each plan by the plan's
fingerprint.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..base.atomic import write_atomically
from ..base.schema import COUNT, OBJECT, TEXT, Field, dict_of, reading, require_fields
from ..base.storage import dump_plain, load_plain, require_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel


log = logging.getLogger(__name__)
_FIELDS = {"format": TEXT, "version": COUNT, "settings": OBJECT, "values": OBJECT}


class FileKind(NamedTuple):
    """A kind of file: the name and version of its format, and its content in words."""

    format_name: str
    version: int
    what: str


@dataclass
class PlanMemory:
    """Measured values of plans, by plan fingerprint.

    Attributes:
        kind: the kind of file.
        path: the file; None keeps nothing on disk.
        shape: (rows, columns) of a plan's values; a row is a sequence or a question.
        settings: the settings that decide the values; they are compared when the file is read.
        values: fingerprint -> [rows, columns] float64; column 0 is NaN in rows not measured yet.
    """

    kind: FileKind
    path: Path | None
    shape: tuple[int, int]
    settings: dict[str, Any] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def open(
        cls,
        kind: FileKind,
        path: str | os.PathLike[str] | None,
        shape: tuple[int, int],
        settings: Callable[[], dict[str, Any]],
    ) -> PlanMemory:
        """Read the memory from its file; without one it is empty.

        `settings` is called only if there is a path, because it may read all weights.
        """
        if path is None:
            return cls(kind, None, shape)
        memory = cls(kind, Path(path), shape, settings())
        if Path(path).exists():
            content = load_plain(path, format_name=kind.format_name, version=kind.version)
            remedy = "Delete it and measure again, or use a copy."
            fitting = Field(f"float64 of shape {list(shape)} by plan", dict_of(memory._fits))
            with reading(path, remedy):  # another text has another shape: the settings come first
                require_fields(content, _FIELDS)
                require_settings(content["settings"], memory.settings, f"{path} ({kind.what})")
                require_fields(content, _FIELDS | {"values": fitting})
            memory.values = content["values"]
        return memory

    def _fits(self, values: Any) -> bool:
        return (
            isinstance(values, np.ndarray)
            and values.dtype == np.float64
            and values.shape == self.shape  # NaN where a row is not measured yet
        )

    def absent(self, marks: Iterable[str], rows: int | Sequence[int] | slice) -> list[str]:
        """Return the fingerprints in `marks` that are not measured on all of these rows yet."""
        return [
            mark
            for mark in marks
            if mark not in self.values or np.isnan(self.values[mark][rows, 0]).any()
        ]

    def add(self, marks: Sequence[str], rows: int | Sequence[int], found: np.ndarray) -> None:
        """Store the values of n plans on a row [n, columns] or several, and write the file."""
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
        except OSError as error:  # a full disk must not end the measurement
            log.warning("%s could not be written (%s). The measurement goes on.", self.path, error)


def model_settings(model: PreTrainedModel) -> dict[str, Any]:
    """Return the settings that identify a model; this reads all its weights."""
    from ..models.identity import fingerprint_model, model_dtype

    return {"model_fingerprint": fingerprint_model(model), "model_dtype": model_dtype(model)}
