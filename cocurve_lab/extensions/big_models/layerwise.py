"""Plans that run through the layers together, where the weights of the layers come from elsewhere.

The teacher's pass needs each layer once anyway. While a layer is there for it, the masked rows of
many plans run it too. So the weights are read once for all of them, not once for each batch. The
numbers keep their bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from ...base.tables import fold
from ...calibration import CalibrationSet
from ...estimator.batches import Room, memory_needed
from ...estimator.replay import LayerCall, first_output, run_decoder
from ...models.architectures import Architecture
from ...models.layers import WeightSource, held
from ...models.masking import Scales, scaled, stack_rows


def run_together(
    architecture: Architecture, ids: Tensor, positions: Tensor, batches: Sequence[list[Scales]]
) -> list[Tensor]:
    """Run the dense model and batches of masked copies to the end, layer by layer.

    Args:
        architecture: the dense model, inside `models.runtime.measuring`.
        ids: [1, T] int64 on the model's device.
        positions: [P] int64 there, the scored positions.
        batches: the masks of B rows each.

    Returns:
        Final hidden states at the scored positions: of the dense model [1, P, d], then of each
        batch [B, P, d].
    """
    states: list[Tensor] = []

    @contextmanager
    def passed(layer: int, call: LayerCall) -> Iterator[None]:
        if layer == 0:
            # copied, since half precision rounds products of one row seen many times otherwise
            states.extend(call.hidden.repeat(len(rows), 1, 1) for rows in batches)
        yield
        with held(architecture, layer):
            for at, rows in enumerate(batches):  # each state replaces the one before at once
                own = [{key: row[key] for key in row if key[0] == layer} for row in rows]
                with scaled(architecture, stack_rows(architecture, own)):
                    out = architecture.layers[layer](states[at], *call.args, **call.kwargs)
                states[at] = first_output(out)

    dense = run_decoder(architecture, ids, passed).to(ids.device)[:, positions]
    last = (states[at][:, positions.to(states[at].device)] for at in range(len(states)))
    return [dense, *(architecture.final(hidden).to(ids.device) for hidden in last)]


def most_together(architecture: Architecture, text: CalibrationSet, batch: int, most: float) -> int:
    """Plans that advance together: whole batches, whose states take half of the room at most.

    Args:
        architecture, text: what is measured.
        batch: plans per forward pass.
        most: the result is at most this, but at least one batch.
    """
    needed = partial(memory_needed, architecture, (), text, 0, batch)
    fixed = needed()
    fitting = Room.of(architecture.model).beside(fixed) // (needed(block=1) - fixed)
    return max(1, int(min(fitting, most) // batch)) * batch


def announcement(
    architecture: Architecture,
    stream: WeightSource,
    text: CalibrationSet,
    batch: int,
    together: int,
    passes: int,
) -> str:
    """Memory, and bytes of weights to be read, in words.

    Args:
        architecture, text, batch: as for `most_together`, and `together` its result.
        stream: brings the weights.
        passes: over the layers, in all.
    """
    memory = memory_needed(architecture, (), text, 0, batch, block=together)
    once = stream.bytes_from(0)
    return fold(
        f"Layers are read when they run, once for the dense model and up to {together} plans: "
        f"{once / 1e9:.2g} GB of weights each time, {passes * once / 1e9:.2g} GB in all. "
        f"{memory / 1e9:.2g} GB beside the weights that stay."
    )
