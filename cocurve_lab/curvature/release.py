"""The plugs for files of H in other forms: those of the authors' release, and those that ship.

numpy and torch are imported for annotations only, so that an extension can plug itself in alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ..base.plugs import Plug, absent

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from ..models.units import UnitSet
    from .settings import Facts


class Release(Protocol):
    """Reads a folder of the release; no model is needed."""

    def read_release(self, folder: str | os.PathLike[str]) -> tuple[np.ndarray, UnitSet, Facts]:
        """Read H [M, M] float64, its units, and the facts that the release states."""

    def read_mask(
        self, folder: str | os.PathLike[str], ratio: float
    ) -> tuple[UnitSet, list[int], dict[str, Any]]:
        """Read a published mask: its units, the pruned indices, and the fields of a Selection."""

    def has_matrix(self, folder: str | os.PathLike[str]) -> bool:
        """Return whether H itself is there."""


class ReleaseRows(Protocol):
    """Makes rows of text as the authors' scripts do."""

    def pack(
        self,
        documents: Iterable[str],
        tokenizer: PreTrainedTokenizerBase,
        rows: int,
        length: int,
        start: list[int],
        end: int | None,
    ) -> tuple[Tensor, list[int]]:
        """Cut rows [rows, length] as the authors do; return them and the tokens of each."""

    def draw(self, sizes: list[int], per_row: int | Literal["all"], seed: int) -> Tensor:
        """Draw positions [N, P] as the authors do, each row with a seed of its own."""


SHIPPED: dict[str, Callable[[], Path]] = {}  # the files of H by name
FORMS: dict[str, Callable[[dict[str, Any]], Any]] = {}  # what makes a Curvature, by "format"
RELEASE: Plug[Release] = Plug(absent("the authors' release"))
ROWS: Plug[ReleaseRows] = Plug(absent("the authors' release"))
