"""The kind of unit "expert": what a router chooses among, taken out for a while or for good.

An expert is ablated by a router logit of minus infinity: the next expert takes its place, and the
gates of the others are what the router makes of them then. To the router that is the same as having
no such row. So a mask lets it run on the rows that stay, and translates its choice back to the
experts' own numbers; the pruner deletes the other rows and experts. No forward is copied, and it
does not matter in which order a router takes its softmax, its k best and its sum.

torch is imported for annotations only: a stored H must open without it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...base.errors import ArchitectureError, InputError
from ...models.architectures import UnitKind, find
from ...models.kinds import FFN_SETTINGS, setting_in
from ...models.unit import Cut, Unit

if TYPE_CHECKING:
    from torch import Tensor

    from ...models.architectures import Architecture

# what configurations call the number of experts, and the width (or number) of shared ones
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_SHARED = ("shared_expert_intermediate_size", "n_shared_experts", *FFN_SETTINGS)

_GROUPS = ("num_group", "n_group")


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


class ExpertKind(UnitKind):
    """A unit is one expert of a router, and its place among the router's rows.

    It has no columns: an ablation lets the router choose anew, so a replay runs the block again.
    """

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


# Routers ------------------------------------------------------------------------------------------


def require_routed(
    block: Any, name: str, beside: tuple[str, ...], layer: int, model_type: str
) -> None:
    """Raise ArchitectureError unless experts can be deleted one by one from a block.

    Args:
        name: the attribute name of the router.
        beside: those of parts that are neither router nor experts.
    """
    router, experts = getattr(block, name, None), block.experts
    rows = getattr(getattr(router, "weight", None), "shape", (0,))[0]
    of_experts = [*getattr(router, "parameters", list)(), *experts.parameters()]
    known = (name, "experts", *beside)
    others = [part for part, _ in block.named_children() if part not in known]
    groups = max(int(getattr(router, name, None) or 1) for name in _GROUPS)
    groups = 1 if getattr(router, "topk_method", "") == "greedy" else groups
    if groups > 1:
        why = (
            f"chooses among {groups} groups of experts, which must stay equal, so no expert goes "
            "alone"
        )
    elif not rows or any(weight.shape[:1] != (rows,) for weight in of_experts) or others:
        why = f"is not as family {model_type!r} declares {others or ''}".rstrip()
    elif not hasattr(router, "top_k"):
        why = "does not say how many experts a token takes"
    else:
        return
    raise ArchitectureError(
        f"the router of layer {layer} {why}. Update transformers, or use a model whose router "
        "chooses freely."
    )


def require_enough(kept: int, top_k: int, layer: int) -> None:
    """Raise InputError if a router has fewer experts left than it chooses for a token."""
    if kept < top_k:
        raise InputError(
            f"the plan leaves layer {layer} {kept} experts, but its router chooses {top_k} for "
            "each token. Keep at least as many."
        )


def narrowed(part: Any, keep: Tensor) -> Any:
    """Copy a router or its experts with the experts in `keep` [E'] alone; nothing is shared."""
    new, count = copy.copy(part), part.num_experts
    keep = keep.to(next(part.parameters()).device)
    # the module's own copy of its tables, whose tensors are replaced
    vars(new).update({name: dict(vars(part)[name]) for name in ("_parameters", "_buffers")})
    for name, weight in new._parameters.items():
        if weight is not None:
            kept = weight.detach()[keep]
            new._parameters[name] = type(weight)(kept, requires_grad=weight.requires_grad)
    for name, buffer in new._buffers.items():
        if buffer is not None and buffer.shape[:1] == (count,):
            new._buffers[name] = buffer[keep]
    new.num_experts = len(keep)
    return new


def without_experts(router: Any, rows: Tensor, layer: int) -> Callable[[Tensor], Any]:
    """Return the forward of a router that does not see some experts.

    Args:
        rows: 0 for an expert that is gone, else 1: [E], or [B, 1, E] for each row of a batch.
    """
    outer = getattr(vars(router).get("forward"), "rows", None)
    if outer is not None:  # inside another mask, whose experts stay gone
        rows = rows * outer
    kept = [row.nonzero().flatten() for row in rows.detach().reshape(-1, rows.shape[-1]).cpu()]
    for keep in kept:
        require_enough(len(keep), int(router.top_k), layer)

    def one(keep: Tensor, hidden: Tensor) -> list[Tensor]:
        # the forward of the class, because that of this router is replaced
        answer = list(type(router).forward(narrowed(router, keep), hidden))
        places = keep.to(hidden.device)
        # logits, gates and choice; the choice comes first in Granite-MoE of transformers 5.17
        choice = 2 if answer[0].is_floating_point() else 0
        every = answer[2 - choice].new_full((len(answer[0]), rows.shape[-1]), float("-inf"))
        every[:, places] = answer[2 - choice]
        answer[choice], answer[2 - choice] = places[answer[choice]], every
        return answer

    def run(hidden: Tensor) -> tuple[Tensor, ...]:
        split = hidden.reshape(len(kept), -1, hidden.shape[-1])
        parts = [one(keep, row) for keep, row in zip(kept, split, strict=True)]
        whole = [part.new_empty(len(kept), *part.shape) for part in parts[0]]
        for at, part in enumerate(parts):
            for into, own in zip(whole, part, strict=True):
                into[at] = own
        return tuple(part.flatten(0, 1) for part in whole)

    run.rows = rows  # type: ignore[attr-defined]
    return run


EXPERT = ExpertKind("expert", "expert", "experts", columns=False, even=True)
