"""The paper's kinds of units: attention and FFN (Section 2, appendix "Structured Units").

A unit of either is a block of input columns of an output projection, W_O or W_down, together with
the rows of the input projections that feed these columns. What it costs, how it is masked and what
is cut of it stands here, and nowhere else. A further kind is one more `UnitKind`; `register_kind`
adds it.

torch is imported for annotations only: a stored H must open without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..base.errors import ArchitectureError
from .architectures import (
    UNIT_KINDS,
    Architecture,
    UnitKind,
    find,
    here,
    register_kind,
    require_supported,
    widths,
)
from .unit import Cut, Kind, RowBlock, Unit

if TYPE_CHECKING:
    from torch import Tensor


class ColumnKind(UnitKind):
    """A kind whose units are input columns of an output projection."""

    def block(self, architecture: Architecture, layer: int) -> Any:
        paths, module = getattr(architecture.family, self.name), architecture.layers[layer]
        others = [UNIT_KINDS[kind].block(architecture, layer) for kind in architecture.family.kinds]
        found = (find(module, path) for path in ([paths] if isinstance(paths, str) else paths))
        # in a layer where another kind has that place, the next path says where this one is
        return next((b for b in found if all(b is not o for o in others)), None)

    def width(self, architecture: Architecture, layer: int) -> int:
        return widths(architecture.output_projection(layer, self.name))[1]

    def active_width(self, architecture: Architecture, layer: int) -> int:
        return self.width(architecture, layer)

    def require(self, architecture: Architecture, layer: int) -> None:
        """Require plain projections, whose rows are all that belongs to the units."""
        model, family = architecture.model, architecture.family
        try:
            names = architecture.projection_names(layer, self.name)
            for name in names:
                require_supported(architecture.projection(layer, self.name, name), name, layer)
        except AttributeError as error:
            raise ArchitectureError(
                f"layer {layer} of {type(model).__name__} lacks the {self.name} projection that "
                f"family {family.model_types[0]!r} declares ({error}); the model may be a variant, "
                "or carry an adapter. Use a plain dense model, or merge adapters first."
            ) from None
        odd = self._undeclared(architecture, layer, names)
        if odd:
            raise ArchitectureError(
                f"{', '.join(odd)} in the {self.name} of layer {layer} of {type(model).__name__} "
                f"is not as family {family.model_types[0]!r} declares: it has other rows than its "
                "units, or reads several of them together. Name it in `gate_up` and `stacked`, or "
                "in `shared`."
            )

    def _undeclared(
        self, architecture: Architecture, layer: int, names: tuple[str, ...]
    ) -> list[str]:
        """Return the weights of a block that its family does not explain."""
        width, block = architecture.width(layer, self.name), architecture.block(layer, self.name)
        stops = {}
        if width:
            rows = self.rows(architecture, layer, 0, width)
            stops = {part.projection: part.stop for part in rows}
        odd = [name for name, stop in stops.items() if widths(getattr(block, name))[0] != stop]
        if block is architecture.layers[layer]:  # what else is in the layer belongs to others
            return odd
        known = {id(weight) for weight in architecture.shared(layer, self.name)}
        # further weights are a norm of one head, or a number of an activation
        sizes = {0, 1}
        if self.name == "attention":
            names = (*names, *architecture.family.latent, *architecture.family.per_head)
            sizes.add(architecture.head_dim(layer))
        for name, part in block.named_parameters():
            declared = name.partition(".")[0] in names or id(part) in known
            if not declared and part.numel() not in sizes:
                odd.append(name)
        return odd

    def units(self, architecture: Architecture, layer: int, groups: int) -> list[Unit]:
        """Return the units of a layer, with their costs.

        A cost counts the rows of the input projections with their biases, and the columns of the
        output projection. Weights that read all heads together go with the only unit there is.
        """
        width = architecture.width(layer, self.name)  # 0 where pruning took the whole block
        if not width:
            return []
        count = min(groups, width) if self.grouped else width // self.step(architecture, layer)
        per_row = {}
        for name in architecture.input_projections(layer, self.name):
            projection = architecture.projection(layer, self.name, name)
            per_row[name] = widths(projection)[1] + (projection.bias is not None)
        per_column = widths(architecture.output_projection(layer, self.name))[0]
        shared = sum(weight.numel() for weight in architecture.shared(layer, self.name))
        heads = architecture.per_head(layer, self.name).values()
        units = []
        for index, (start, stop) in enumerate(split_width(width, count)):
            rows = self.rows(architecture, layer, start, stop)
            cost = sum((part.stop - part.start) * per_row[part.projection] for part in rows)
            cost += (stop - start) * per_column + shared
            cost += sum(part.numel() * (stop - start) // width for part in heads)
            units.append(Unit(self.name, layer, index, start, stop, int(cost)))
        return units

    @contextmanager
    def mask(self, architecture: Architecture, layer: int, scale: Tensor) -> Iterator[None]:
        """Multiply the inputs of the output projection by `scale` inside the block."""

        def multiply(_: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            columns = args[0]
            factors = scale.to(columns)  # their dtype and device, wherever the weights are
            if scale.dim() == 3 and columns.dim() == 2:
                # OPT's FFN sees [B * T, W]: give each row its own mask
                rows = columns.reshape(len(scale), -1, scale.shape[-1])
                columns = (rows * factors).view_as(columns)
            else:
                columns = columns * factors
            return (columns, *args[1:])

        projection = architecture.output_projection(layer, self.name)
        handle = projection.register_forward_pre_hook(here(multiply))
        try:
            yield
        finally:
            handle.remove()

    def cuts(
        self, architecture: Architecture, layer: int, keep: Tensor, gains: Tensor | None
    ) -> dict[str, Cut]:
        """Cut the kept columns' rows out of the input projections; columns are whole units."""
        rows_of = {
            name: keep.new_zeros(widths(architecture.projection(layer, self.name, name))[0])
            for name in architecture.input_projections(layer, self.name)
        }
        # every step-th column starts a piece with rows of its own
        step = self.step(architecture, layer)
        for start in keep[::step].tolist():
            for rows in self.rows(architecture, layer, start, start + step):
                rows_of[rows.projection][rows.start : rows.stop] = 1
        cuts = {name: Cut(rows=mask.nonzero().flatten()) for name, mask in rows_of.items()}
        for name in architecture.per_head(layer, self.name):
            size = architecture.head_dim(layer)
            cuts[name] = Cut(rows=keep[::size] // size)
        return {architecture.output_name(self.name): Cut(columns=keep, gains=gains), **cuts}


class AttentionKind(ColumnKind):
    """Attention: a unit is a head, or the query heads that share one key and value head."""

    def step(self, architecture: Architecture, layer: int) -> int:
        if architecture.shared(layer, self.name):
            # removing one head would change the others, so all go together; pruning may have taken
            # them already, and a step is at least 1
            return max(1, architecture.width(layer, self.name))
        return architecture.head_dim(layer) * architecture.queries_per_group(layer)

    def rows(self, architecture: Architecture, layer: int, start: int, stop: int) -> list[RowBlock]:
        # r query heads read one key/value head, so keys and values have 1/r of the queries' rows
        ratio, family = architecture.queries_per_group(layer), architecture.family
        names = architecture.input_projections(layer, self.name)
        if family.latent:  # each head has its share of every projection's rows
            first = start // architecture.head_dim(layer)
            last = stop // architecture.head_dim(layer)
            blocks = []
            for name in names:
                projection = architecture.projection(layer, self.name, name)
                share = projection.out_features // architecture.num_groups(layer)
                blocks.append(RowBlock(name, first * share, last * share))
            return blocks
        key_value = start // ratio, stop // ratio
        if len(names) == 1 and self.name in family.stacked:  # all q, then all k, v
            width = architecture.width(layer, self.name)
            return _stacked(names[0], width, (start, stop), key_value, key_value, ratio=ratio)
        if len(names) == 1:  # q, k, v of one head, then of the next; such families are MHA
            return [RowBlock(names[0], 3 * start, 3 * stop)]
        query, *others = names  # key and value, or one projection that is both
        own = 1 + family.gated
        queries = RowBlock(query, own * start, own * stop)
        return [queries, *(RowBlock(name, *key_value) for name in others)]

    def to_settings(self, config: Mapping[str, Any], widths: Mapping[str, int]) -> dict[str, int]:
        head_dim = config.get("v_head_dim") or config["head_dim"]
        return {
            "num_attention_heads": widths["attention_columns"] // head_dim,
            "num_key_value_heads": widths["key_value_heads"],
        }

    def from_settings(self, config: Mapping[str, Any]) -> dict[str, int]:
        head_dim = config.get("v_head_dim") or config["head_dim"]
        return {
            "attention_columns": config["num_attention_heads"] * head_dim,
            "key_value_heads": config["num_key_value_heads"],
        }


FFN_SETTINGS = ("shared_intermediate_size", "intermediate_size")  # names of the width of an FFN


class FfnKind(ColumnKind):
    """The FFN: a unit is a group of contiguous intermediate channels."""

    def rows(self, architecture: Architecture, layer: int, start: int, stop: int) -> list[RowBlock]:
        names, family = architecture.family.gate_up, architecture.family
        if len(names) == 1 and self.name in family.stacked:  # all gate rows, then all up rows
            width = architecture.width(layer, self.name)
            return _stacked(names[0], width, (start, stop), (start, stop))
        # gate and up apart, or no gate: row i belongs to channel i
        return [RowBlock(name, start, stop) for name in names]

    def to_settings(self, config: Mapping[str, Any], widths: Mapping[str, int]) -> dict[str, int]:
        return {setting_in(config, FFN_SETTINGS): widths["ffn_columns"]}

    def from_settings(self, config: Mapping[str, Any]) -> dict[str, int]:
        return {"ffn_columns": config[setting_in(config, FFN_SETTINGS)]}


def setting_in(config: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the first of several names that a configuration has a value for."""
    return next(name for name in names if config.get(name) is not None)


def _stacked(
    name: str, width: int, first: tuple[int, int], *rest: tuple[int, int], ratio: int = 1
) -> list[RowBlock]:
    """Blocks of a fused projection: a first part of `width` rows, then parts of `width / ratio`."""
    blocks, offset = [RowBlock(name, *first)], width
    for start, stop in rest:
        blocks.append(RowBlock(name, offset + start, offset + stop))
        offset += width // ratio
    return blocks


def split_width(width: int, groups: int) -> list[tuple[int, int]]:
    """Split `width` into contiguous (start, stop); sizes differ by at most one, wider first."""
    parts, start = [], 0
    for number in range(groups):
        stop = start + width // groups + (number < width % groups)
        parts.append((start, stop))
        start = stop
    return parts


register_kind(
    AttentionKind(
        name="attention",
        label="attention",
        plural="attention",
    )
)
register_kind(
    FfnKind(
        name="ffn",
        label="FFN",
        plural="FFN groups",
        grouped=True,
    )
)
KINDS: tuple[Kind, ...] = tuple(UNIT_KINDS)  # the paper's; their units are columns
