"""Passes of many plans at once, for a model whose layers are not in memory.

An extension runs them (extensions/big_models); `PASSES` is where it is plugged in. torch is
imported for annotations only, so that it can plug itself in without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..base.plugs import Plug, missing

if TYPE_CHECKING:
    from torch import Tensor

    from ..calibration import CalibrationSet
    from ..models.architectures import Architecture
    from ..models.layers import WeightSource
    from ..models.masking import Scales


class Passes(Protocol):
    """Passes of a model over one text, each for many plans."""

    def run(self, ids: Tensor, positions: Tensor, batches: Sequence[list[Scales]]) -> list[Tensor]:
        """Run the dense model and batches of masked copies to the end, layer by layer.

        Args:
            ids: [1, T] int64 on the model's device.
            positions: [P] int64 there, the scored positions.
            batches: the masks of B rows each.

        Returns:
            Final hidden states at the scored positions: of the dense model [1, P, d], then of each
            batch [B, P, d].
        """

    def most_together(self, batch: int, most: float) -> int:
        """Plans that advance together: at least one batch, and at most `most`."""


class MakePasses(Protocol):
    """Makes the passes of a model whose source brings layers."""

    def __call__(
        self, architecture: Architecture, source: WeightSource, text: CalibrationSet
    ) -> Passes: ...


def _missing() -> Any:
    raise missing("measuring a model whose layers are not in memory")


PASSES: Plug[MakePasses] = Plug(_missing)
