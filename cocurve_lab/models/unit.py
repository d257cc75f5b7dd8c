"""One removable unit, and what stays of a projection when units go.

torch is imported for annotations only: a stored H must open without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Kind = str  # the name of a kind of units: "attention", "ffn"
Scales = dict[tuple[int, Kind], "Tensor"]  # (layer, kind) -> factors of the input columns


@dataclass(frozen=True, slots=True)
class Unit:
    """One removable unit u (Section 2, appendix "Structured Units").

    Attributes:
        kind: "attention": one head, one KV-aligned query group (GQA, MQA), or all heads of a layer
            where they share a norm (OLMo2). "ffn": one block of contiguous intermediate channels.
            Or the name of a registered kind.
        layer, index: the decoder layer, and the number among its units of this kind.
        start, stop: the unit's input columns of the output projection W_O or W_down; of a kind
            without columns, its place among the units of its layer.
        cost: c_u in parameters: everything that is deleted with the unit.
    """

    kind: Kind
    layer: int
    index: int
    start: int
    stop: int
    cost: int

    @property
    def name(self) -> str:
        """The name in every message and picture, such as L12.ffn[3]."""
        return f"L{self.layer}.{self.kind}[{self.index}]"

    def __str__(self) -> str:
        return self.name


class RowBlock(NamedTuple):
    """Rows `start:stop` of one input projection (named as in its block) that belong to a unit."""

    projection: str
    start: int
    stop: int


@dataclass(frozen=True)
class Cut:
    """What stays of a projection with weight [out, in], or of a module with several weights.

    Attributes:
        rows: int64, outputs that stay, with their biases; None for all. Of other modules, the
            entries of the first axis of each of their weights.
        columns: int64, inputs that stay; None for all.
        gains: float64, factors of the columns that stay; None if all are 1.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None
    gains: Tensor | None = None

    def weight(self, weight: Tensor) -> Tensor:
        """Return what stays of a weight [out, in]; it may be a view of it."""
        if self.rows is not None:
            weight = weight[self.rows.to(weight.device)]
        if self.columns is not None:
            weight = weight[:, self.columns.to(weight.device)]
        return weight if self.gains is None else fold_gains(weight, self.gains)

    def transposed(self, weight: Tensor) -> Tensor:
        """Return what stays of a weight that is stored as [in, out]."""
        return self.weight(weight.T).T.contiguous()

    def bias(self, bias: Tensor) -> Tensor:
        """Return what stays of a bias [out]; it may be the bias itself."""
        return bias if self.rows is None else bias[self.rows.to(bias.device)]


def fold_gains(weight: Tensor, gains: Tensor) -> Tensor:
    """Multiply columns [d, W'] of W_down by their gains [W'], rounded once to its dtype."""
    folded, gains = weight.new_empty(weight.shape), gains.to(weight.device)
    # some rows at a time: in float64, the whole would take four times a half-precision weight
    for rows, into in zip(weight.split(256), folded.split(256), strict=True):
        into.copy_(rows.double() * gains)
    return folded
