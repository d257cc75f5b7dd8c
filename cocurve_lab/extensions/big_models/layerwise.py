"""Evaluate many plans in one pass over streamed layers.

The teacher's pass needs each layer once anyway. While a layer is present for it, the masked rows of
many plans run it too, so its weights are read once for all of them. The numbers keep their bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from ...calibration import CalibrationSet
from ...estimator.batches import Room
from ...models.architectures import Architecture
from ...models.layer_calls import LayerCall, run_decoder
from ...models.layers import WeightSource, present
from ...models.masking import Scales, scaled, stack_rows


@dataclass(frozen=True)
class LayerwisePasses:
    """Passes of a streamed model over one text, each for many plans.

    Attributes:
        architecture: the dense model.
        source: brings its weights.
        text: the rows.
    """

    architecture: Architecture
    source: WeightSource
    text: CalibrationSet

    def run(self, ids: Tensor, positions: Tensor, batches: Sequence[list[Scales]]) -> list[Tensor]:
        """Run as `Passes.run` says, layer by layer."""
        architecture, states = self.architecture, list[Tensor]()

        @contextmanager
        def passed(layer: int, call: LayerCall) -> Iterator[None]:
            if layer == 0:
                # copied: half precision rounds products of one row seen many times otherwise
                states.extend(call.hidden.repeat(len(rows), 1, 1) for rows in batches)
            yield
            with present(architecture, layer):
                for at, rows in enumerate(batches):  # each state replaces the one before at once
                    own = [{key: row[key] for key in row if key[0] == layer} for row in rows]
                    with scaled(architecture, stack_rows(architecture, own)):
                        states[at] = call.run(architecture.layers[layer], states[at])

        dense = run_decoder(architecture, ids, passed).to(ids.device)[:, positions]
        last = (states[at][:, positions.to(states[at].device)] for at in range(len(states)))
        return [dense, *(architecture.final(hidden).to(ids.device) for hidden in last)]

    def most_together(self, batch: int, most: float) -> int:
        """Plans that advance together: whole batches, whose states fill half of the free memory.

        Args:
            batch: plans per forward pass.
            most: the result is at most this, but at least one batch.
        """
        room = Room.of(self.architecture, (), self.text, 0)
        fitting = room.beside(room.needed(batch)) // room.state
        return max(1, int(min(fitting, most) // batch)) * batch
