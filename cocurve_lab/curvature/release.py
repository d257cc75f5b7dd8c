"""The plug for the authors' release, whose files an extension reads.

numpy is imported for annotations only, so that an extension can plug itself in without it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Protocol

from ..base.plugs import Plug, missing

if TYPE_CHECKING:
    import numpy as np

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


def _missing() -> Release:
    raise missing("the authors' release")


RELEASE: Plug[Release] = Plug(_missing)
