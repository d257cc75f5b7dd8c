"""Portions: the numbers of units a block may lose, so that the rest runs fast on its machine.

Tensor parallelism gives each device the same number of KV heads and FFN channels. Matrix kernels
want widths in multiples of 64 or 128. A block removed as a whole costs no time at all. Under such a
guard a block may lose only some numbers of units, its stops, and units are removed in portions,
from one stop to the next.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from ..base.errors import InputError
from ..models.architectures import UNIT_KINDS
from ..models.unit import Kind
from ..models.units import UnitSet

Depth = Literal["block", "layer"]


@dataclass(frozen=True)
class Group:
    """Units that share their stops: those of a block, or of a layer that goes as a whole.

    Attributes:
        layer, ids: the layer, and the indices of the units.
        stops: the numbers of units that it may lose, ascending, from 0 to all of them.
        costs: what it saves at each stop, in the budget's costs.
    """

    layer: int
    ids: np.ndarray
    stops: tuple[int, ...]
    costs: tuple[float, ...]


class Portions:
    """The groups of a UnitSet, and `of` [M], the number of each unit's group.

    Args:
        tensor_parallel, align, depth: as in `Guards`.
        costs: [M], of the budget.
    """

    def __init__(
        self,
        units: UnitSet,
        tensor_parallel: int,
        align: int,
        depth: Depth | None,
        costs: np.ndarray,
    ) -> None:
        self.units, self.unit_costs = units, costs
        if depth is not None and (units.limited).any():
            raise InputError(
                f"depth is {depth!r}, but a router always needs experts. Leave depth out."
            )
        channels = math.lcm(align, tensor_parallel)
        multiples = {k: channels if UNIT_KINDS[k].grouped else tensor_parallel for k in UNIT_KINDS}
        self.groups: list[Group] = []
        self.of = np.empty(len(units), dtype=np.int64)
        for layer in range(units.num_layers):
            here = np.flatnonzero(units.layers == layer)
            found = []
            for kind, multiple in multiples.items():
                if len(ids := here[units.kinds[here] == kind]):
                    found.append((ids, self._stops(ids, kind, multiple, whole=depth is not None)))
            if depth == "layer" and found:
                found = [(here, (0, len(here)))]
            for ids, stops in found:
                self.of[ids] = len(self.groups)
                self.groups.append(Group(layer, ids, stops, self._costs(ids, stops)))

    def counts(self, chosen: Iterable[int]) -> list[int]:
        """Return how many of the chosen units each group holds."""
        return np.bincount(self.of[list(chosen)], minlength=len(self.groups)).tolist()

    def unfinished(self, chosen: Iterable[int]) -> list[int]:
        """Return the numbers of the groups that the chosen units leave between two stops."""
        pairs = zip(self.counts(chosen), self.groups, strict=True)
        return [number for number, (n, group) in enumerate(pairs) if n not in group.stops]

    def most(self, forced: Sequence[int], free: np.ndarray, room: Sequence[float]) -> float:
        """Return the most that can be removed, in the budget's costs; exact.

        `forced` units must go, `free` [M] bool are further units that may go, and `room` [layers]
        is the cost that each layer may lose.
        """
        held, total = self.counts(forced), 0.0
        for layer in range(self.units.num_layers):
            options = []
            for group, least in zip(self.groups, held, strict=True):
                if group.layer == layer:
                    up_to = least + int(free[group.ids].sum())
                    pairs = zip(group.stops, group.costs, strict=True)
                    options.append([cost for stop, cost in pairs if least <= stop <= up_to])
            sums = [cost for cost in map(sum, product(*options)) if cost <= room[layer]]
            if not sums:
                raise incomplete(f"of layer {layer}")
            total += max(sums)
        return total

    def _stops(self, ids: np.ndarray, kind: Kind, multiple: int, *, whole: bool) -> tuple[int, ...]:
        """The numbers of units that a block may lose so that a multiple is left, or nothing."""
        units, layer = self.units.units, int(self.units.layers[ids[0]])
        label = UNIT_KINDS[kind].label
        if UNIT_KINDS[kind].grouped:
            widths, noun = [units[u].stop - units[u].start for u in ids], f"{label} channels"
        else:
            # one unit may be one KV head, of which engines keep a copy per device, or all heads
            widths, noun = [1] * len(ids), f"units of {label}"
            multiple = 1 if len(ids) == 1 else multiple
        if sum(widths) % multiple:
            raise InputError(
                f"layer {layer} has {sum(widths)} {noun}, not a multiple of {multiple}, before "
                "anything is removed. Lower tensor_parallel or align."
            )
        if whole:
            return 0, len(ids)
        kept = (self.units.least or 0) if kind == "expert" else 0
        if all(width % multiple == 0 for width in widths):
            return tuple(range(len(ids) + 1 - kept))
        if len(set(widths)) > 1:
            raise InputError(
                f"{label} units of layer {layer} have {min(widths)} to {max(widths)} channels, not "
                f"one multiple of {multiple}. Choose ffn_groups that divide the width."
            )
        step = multiple // math.gcd(multiple, widths[0])
        return tuple(range(0, len(ids) + 1 - kept, step))

    def _costs(self, ids: np.ndarray, stops: tuple[int, ...]) -> tuple[float, ...]:
        mine = self.unit_costs[ids]
        if len(stops) > 2 and (mine != mine[0]).any():
            raise InputError(
                f"costs of units like {self.units.units[ids[0]]} range from {mine.min():g} to "
                f"{mine.max():g}; portions need one cost in each block. Give equal costs."
            )
        # of two stops the second is everything, so costs may differ there
        return tuple(mine.sum().item() if n == len(ids) else n * mine[0].item() for n in stops)


def incomplete(where: str) -> InputError:
    """Make the error for included units whose portion cannot be completed."""
    return InputError(
        f"include names units {where} whose portions cannot be completed under the guards. Include "
        "all units of a portion, or loosen the guards."
    )
