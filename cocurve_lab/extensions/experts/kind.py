"""The kind of unit "expert", and what it needs to know of a family."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...models.architectures import find
from ...models.kinds import FFN_SETTINGS, setting_in
from ...models.unit import Cut, Kind, RowBlock, Unit
from .routers import narrowed, require_enough, require_routed

if TYPE_CHECKING:
    from torch import Tensor

    from ...models.architectures import Architecture

# what configurations call the number of experts, and the width (or number) of shared ones
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_SHARED = ("shared_expert_intermediate_size", "n_shared_experts", *FFN_SETTINGS)


@dataclass(frozen=True)
class Routed:
    """Where a family keeps its experts.

    Attributes:
        block: path in a layer of the block with a router and `experts`. A layer without `experts`
            there is dense.
        router: attribute name of the router in the block.
        beside: names of further parts of the block, which are no experts.
    """

    block: str = "mlp"
    router: str = "gate"
    beside: tuple[str, ...] = ()


@dataclass(frozen=True)
class ExpertKind:
    """A unit is one expert of a router, and its place among the router's rows.

    It has no columns: an ablation lets the router choose anew, so a replay runs the block again.
    """

    name: Kind = "expert"
    label: str = "expert"
    plural: str = "experts"
    columns: bool = False
    grouped: bool = False
    even: bool = True

    def declared(self, architecture: Architecture) -> Routed:
        """Return where the family of a model with experts keeps them."""
        found: Routed = architecture.family.kinds[self.name]
        return found

    def router(self, architecture: Architecture, layer: int) -> Any:
        """Return the router of a layer that has experts."""
        return getattr(self.block(architecture, layer), self.declared(architecture).router)

    def block(self, architecture: Architecture, layer: int) -> Any:
        if self.name not in architecture.family.kinds:
            return None
        found = find(architecture.layers[layer], self.declared(architecture).block)
        return found if hasattr(found, "experts") else None

    def width(self, architecture: Architecture, layer: int) -> int:
        return len(self.router(architecture, layer).weight)

    def rows(self, architecture: Architecture, layer: int, start: int, stop: int) -> list[RowBlock]:
        return []

    def step(self, architecture: Architecture, layer: int) -> int:
        return 1

    def least(self, architecture: Architecture) -> int:
        """Return the experts that a router chooses for each token; 0 in a model without."""
        layers = range(len(architecture.layers))
        mixed = [layer for layer in layers if self.block(architecture, layer) is not None]
        return max((int(self.router(architecture, at).top_k) for at in mixed), default=0)

    def active_width(self, architecture: Architecture, layer: int) -> int:
        weight = self.block(architecture, layer).experts.down_proj
        channels = weight.numel() // len(weight) // int(architecture.config.hidden_size)
        return self.least(architecture) * channels

    def require(self, architecture: Architecture, layer: int) -> None:
        declared = self.declared(architecture)
        block, model_type = self.block(architecture, layer), architecture.family.model_types[0]
        require_routed(block, declared.router, declared.beside, layer, model_type)

    def units(self, architecture: Architecture, layer: int, groups: int) -> list[Unit]:
        """Return the experts of a layer; each costs its matrices, biases and row of the router."""
        parts = self.router(architecture, layer), self.block(architecture, layer).experts
        cost = sum(weight[:1].numel() for part in parts for weight in part.parameters())
        count = self.width(architecture, layer)
        return [Unit(self.name, layer, at, at, at + 1, cost) for at in range(count)]

    def mask(
        self, architecture: Architecture, layer: int, scale: Tensor
    ) -> AbstractContextManager[None]:
        from ...models.layer_calls import replaced_forward
        from .routers import without_experts

        router = self.router(architecture, layer)
        return replaced_forward(router, without_experts(router, scale, layer))

    def cuts(
        self, architecture: Architecture, layer: int, keep: Tensor, gains: Tensor | None
    ) -> dict[str, Cut]:
        require_enough(len(keep), self.least(architecture), layer)
        return dict.fromkeys((self.declared(architecture).router, "experts"), Cut(rows=keep))

    def narrowed(self, part: Any, cut: Cut) -> Any:
        return part if cut.rows is None else narrowed(part, cut.rows)

    def to_settings(self, config: Mapping[str, Any], widths: Mapping[str, int]) -> dict[str, int]:
        counts = {setting_in(config, _EXPERTS): widths["expert_columns"]}
        if "ffn_columns" in widths:  # that of the shared expert, not of dense layers
            name, dense = setting_in(config, _SHARED), setting_in(config, FFN_SETTINGS)
            counts |= {dense: 0, name: widths["ffn_columns"] // _unit(config, name)}
        return counts

    def from_settings(self, config: Mapping[str, Any]) -> dict[str, int]:
        name = setting_in(config, _SHARED)
        return {
            "expert_columns": config[setting_in(config, _EXPERTS)],
            "ffn_columns": config[name] * _unit(config, name),
        }


def _unit(config: Mapping[str, Any], name: str) -> int:
    """Return the channels that one of a setting stands for."""
    return int(config["moe_intermediate_size"]) if name == "n_shared_experts" else 1


EXPERT = ExpertKind()
