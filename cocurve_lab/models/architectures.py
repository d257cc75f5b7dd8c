"""Access to the parts of a model: its layers, blocks and projections, found through its family.

The families are declared in families.py. torch is imported for annotations only: `curvature/` reads
units through this file, and a stored H must open without torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import wraps
from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..base.errors import ArchitectureError, InputError
from .families import Family, find_family
from .unit import Cut, Kind, RowBlock, Unit

if TYPE_CHECKING:
    from torch import Tensor, nn

# bitsandbytes NF4, by name because it is optional: the layer runs, but its stored weight is a
# string of bytes without rows and columns
_PACKED = ("Linear4bit",)


# Models -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """A model together with its family, so that its parts are found whatever they are called.

    Widths are read from the weights, layer by layer, never from the configuration. A pruned model
    is therefore described as correctly as a dense one.

    Attributes:
        model: the causal language model; may live on the meta device.
        family: the declaration that fits it.
    """

    model: Any
    family: Family

    @property
    def config(self) -> Any:
        """The configuration of the layers: of a multimodal model, its language model's."""
        return self.model.config.get_text_config()

    @property
    def decoder(self) -> Any:
        """The model without its head; it returns what the head reads."""
        return find(self.model, self.family.decoder)

    @property
    def backbone(self) -> Any:
        """The module that holds the layers: the decoder, or its language model."""
        return find(self.decoder, self.family.layers.rpartition(".")[0])

    @property
    def stack(self) -> str:
        """The path of the layers in the model, such as "model.layers"."""
        return f"{self.family.decoder}.{self.family.layers}"

    @property
    def layers(self) -> Sequence[Any]:
        """The decoder layers, first to last."""
        return find(self.decoder, self.family.layers)

    def last_hidden(self, ids: Tensor) -> Tensor:
        """Run the decoder on token ids [B, T]: what the head reads [B, T, d], on their device."""
        # a model spread over several devices ends on another one than it begins on
        hidden: Tensor = self.decoder(input_ids=ids, use_cache=False)[0]
        return hidden.to(ids.device)

    def final(self, hidden: Tensor) -> Tensor:
        """Apply the modules between the last layer and the head to hidden states [..., d]."""
        backbone = self.backbone
        for name in self.family.final:
            module = getattr(backbone, name)
            # OPT keeps None where its sizes need no project_out
            hidden = hidden if module is None else module(hidden)
        return hidden

    @property
    def head(self) -> nn.Linear:
        """The linear part of the head, weight [V, d]. `logits` computes the whole head."""
        return self.model.get_output_embeddings()

    @property
    def logit_cap(self) -> float | None:
        """The c of logits c tanh(z / c), where z is the head's output (Gemma 2), or None."""
        cap = getattr(self.config, "final_logit_softcapping", None)
        return None if cap is None else float(cap)

    @property
    def logit_scale(self) -> float:
        """The factor of the head's output in the logits: not 1 in Granite or Cohere."""
        if self.family.logit_scale is None:
            return 1.0
        setting, power = self.family.logit_scale
        return float(getattr(self.config, setting) ** power)

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [..., V] from final hidden states [..., d], in the model's dtype."""
        # on the device of the hidden states: the head of a spread model has its own
        return self.settled(self.head(hidden).to(hidden.device))

    def settled(self, z: Tensor) -> Tensor:
        """Scale and cap the head's own output z, of all tokens or of some: the logits."""
        logits, cap = z if self.logit_scale == 1 else z * self.logit_scale, self.logit_cap
        return logits if cap is None else (logits / cap).tanh() * cap

    @property
    def vocabulary(self) -> int:
        """Number of logits V: the rows of the head, which may be more than the tokens."""
        return int(self.head.weight.shape[0])

    def block(self, layer: int, kind: Kind) -> Any:
        """The module of a kind in a layer, or the layer where it holds the projections; or None."""
        return UNIT_KINDS[kind].block(self, layer)

    def kinds(self, layer: int) -> tuple[Kind, ...]:
        """The kinds of units that a layer was built with."""
        return tuple(kind for kind in UNIT_KINDS if self.block(layer, kind) is not None)

    def column_kinds(self, layer: int) -> tuple[Kind, ...]:
        """Those of `kinds` whose units are columns of an output projection."""
        return tuple(kind for kind in self.kinds(layer) if UNIT_KINDS[kind].columns)

    def mixers(self, layer: int) -> list[Any]:
        """The blocks of a layer that mix tokens and are no attention; they have no units."""
        found = (getattr(self.layers[layer], name, None) for name in self.family.mixers)
        return [block for block in found if block is not None]

    @property
    def attention_layers(self) -> list[int]:
        """The layers that have attention; in a hybrid, not all."""
        every = range(len(self.layers))
        return [layer for layer in every if self.block(layer, "attention") is not None]

    def projection(self, layer: int, kind: Kind, name: str) -> Any:
        """A projection of a block, by its attribute name."""
        return getattr(self.block(layer, kind), name)

    def weight(self, layer: int, kind: Kind, name: str) -> Tensor:
        """Weight [out, in] of a projection, as a view; raises as `weight_of`."""
        return weight_of(self.projection(layer, kind, name))

    def output_projection(self, layer: int, kind: Kind) -> Any:
        """The linear layer W_O or W_down, whose input columns are the units."""
        return self.projection(layer, kind, self.output_name(kind))

    def output_weight(self, layer: int, kind: Kind) -> Tensor:
        """Weight [d, W] of W_O or W_down, as a view; raises as `weight_of`."""
        return weight_of(self.output_projection(layer, kind))

    def output_name(self, kind: Kind) -> str:
        """Attribute name of W_O or W_down in its block."""
        return str(getattr(self.family, f"{kind}_output"))

    def input_projections(self, layer: int, kind: Kind) -> tuple[str, ...]:
        """Attribute names of the input projections: query, key, value, or gate, up."""
        family, block = self.family, self.block(layer, kind)
        names = family.qkv if kind == "attention" else family.gate_up
        # Gemma 4 has None where the keys are the values, too
        return tuple(name for name in names if getattr(block, name, name) is not None)

    def shared(self, layer: int, kind: Kind) -> list[Tensor]:
        """The weights of `Family.shared` in a block; they leave with its only unit."""
        block, names = self.block(layer, kind), self.family.shared if kind == "attention" else ()
        parts: list[Any] = [getattr(block, name, None) for name in names]
        each = [part.parameters() if hasattr(part, "parameters") else [part] for part in parts]
        return [weight for weights in each for weight in weights if weight is not None]

    def per_head(self, layer: int, kind: Kind) -> dict[str, Tensor]:
        """The weights of `Family.per_head` of a block, by name."""
        if kind != "attention" or not self.width(layer, kind):
            return {}
        return {name: getattr(self.block(layer, kind), name) for name in self.family.per_head}

    def projection_names(self, layer: int, kind: Kind) -> tuple[str, ...]:
        """Attribute names of a block's projections, the output projection first."""
        # an attention block that lost all its units has no input projections left
        inputs = self.input_projections(layer, kind) if self.width(layer, kind) > 0 else ()
        return (self.output_name(kind), *inputs)

    def width(self, layer: int, kind: Kind) -> int:
        """Input columns W of the output projection: query heads x head_dim, or FFN channels.

        Of a kind without columns, the number of its units. 0 where a layer has none of a kind.
        """
        return UNIT_KINDS[kind].width(self, layer) if kind in self.kinds(layer) else 0

    def active_width(self, layer: int) -> int:
        """Intermediate channels that one token passes in a layer."""
        kinds = (UNIT_KINDS[kind] for kind in self.kinds(layer) if kind != "attention")
        return sum(kind.active_width(self, layer) for kind in kinds)

    def head_dim(self, layer: int) -> int:
        """Dimension d_h of one head."""
        block = self.block(layer, "attention")
        # GPT-NeoX says head_size; with latent keys and values (MLA), a value has its own width
        names = ("v_head_dim", "head_dim", "head_size")
        return int(next(getattr(block, name) for name in names if hasattr(block, name)))

    def queries_per_group(self, layer: int) -> int:
        """Query heads r that share one key/value head: 1 for MHA, all of them for MQA."""
        return int(getattr(self.block(layer, "attention"), "num_key_value_groups", 1))

    def num_groups(self, layer: int) -> int:
        """Key/value heads of a layer. Each is one attention unit, unless heads share a norm."""
        return self.width(layer, "attention") // (
            self.head_dim(layer) * self.queries_per_group(layer)
        )

    def unit_rows(self, layer: int, kind: Kind, start: int, stop: int) -> list[RowBlock]:
        """Rows of the input projections that feed columns `start:stop` of the output projection.

        The columns must be whole units (appendix "Structured Units").
        """
        return UNIT_KINDS[kind].rows(self, layer, start, stop)

    @property
    def all_projections(self) -> Iterator[Any]:
        """Every projection of every block, layer by layer."""
        for layer in range(len(self.layers)):
            for kind in self.column_kinds(layer):
                for name in self.projection_names(layer, kind):
                    yield self.projection(layer, kind, name)

    def require_columns(
        self,
        what: str,
        step: str = "Use H by ablations.",
        why: str = "which are no columns of an output projection",
    ) -> None:
        """Raise ArchitectureError, naming what was asked for, if there are units of other kinds."""
        kinds = {kind for layer in range(len(self.layers)) for kind in self.kinds(layer)}
        others = [UNIT_KINDS[kind].plural for kind in kinds if not UNIT_KINDS[kind].columns]
        if others:
            raise ArchitectureError(
                f"{what} is not for models with {', '.join(others)}, {why}. {step}"
            )

    def require_unpacked(self) -> None:
        """Raise ArchitectureError if any projection is packed, because it could not be cut."""
        for projection in self.all_projections:
            weight_of(projection)


def describe(model: Any) -> Architecture:
    """Find a model's family, and check that its layers are as the family declares them."""
    if not hasattr(model, "named_modules"):
        raise InputError(f"the model is a {type(model).__name__}. Give a PreTrainedModel.")
    architecture = Architecture(model, find_family(model))
    family = architecture.family
    head = getattr(model, "get_output_embeddings", lambda: getattr(model, "lm_head", None))
    if head() is None:
        raise ArchitectureError(
            f"{type(model).__name__} has no lm_head. Load it with AutoModelForCausalLM."
        )
    if not architecture.layers:
        raise ArchitectureError(
            f"{type(model).__name__} has no layers at {architecture.stack}; it may be wrapped, by "
            "an adapter or a trainer. Merge adapters, unwrap the model, and try again, or check "
            "config.json."
        )
    for layer in range(len(architecture.layers)):
        kinds = architecture.kinds(layer)
        for kind in kinds:
            UNIT_KINDS[kind].require(architecture, layer)
        mixed = "attention" in kinds or architecture.mixers(layer)
        if kinds in ((), ("attention",)) or not mixed:
            raise ArchitectureError(
                f"layer {layer} of {type(model).__name__} has only {', '.join(kinds) or 'nothing'} "
                f"where family {family.model_types[0]!r} declares more. Update transformers."
            )
    return architecture


def find(module: Any, path: str) -> Any:
    """Return the module at a path such as "mlp.shared"; None if there is none."""
    for name in path.split(".") if path else ():
        module = getattr(module, name, None)
    return module


# Kinds of units ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitKind(ABC):
    """One kind of unit: all that the lab knows about it.

    Attributes:
        name: the value of `Unit.kind`.
        label: its name for readers.
        plural: the name of several units for readers.
        columns: whether units are input columns of an output projection. Then a replay may subtract
            a unit's own write, gains and refits apply, and other methods can score it. Otherwise an
            ablation runs the block anew under a mask.
        grouped: whether a unit is one of `ffn_groups` contiguous groups of columns.
        even: whether stock classes need as many units of this kind in each layer. Then
            `solve_greedy` removes as many from each unless it is told otherwise.
    """

    name: Kind
    label: str
    plural: str
    columns: bool = True
    grouped: bool = False
    even: bool = False

    @abstractmethod
    def block(self, architecture: Architecture, layer: int) -> Any:
        """Return the module that holds the units of a layer; None if it has none.

        The block of a further kind acts on each position alone and comes last in its layer: a
        replay lets the blocks before it answer, and leaves out positions that are not scored.
        """

    @abstractmethod
    def width(self, architecture: Architecture, layer: int) -> int:
        """Return the number of places that units of a layer divide up: its columns W."""

    def step(self, architecture: Architecture, layer: int) -> int:
        """Return the smallest number of places that can be cut."""
        return 1

    def rows(self, architecture: Architecture, layer: int, start: int, stop: int) -> list[RowBlock]:
        """Return the rows of the input projections that feed the places `start:stop`, if any."""
        return []

    def least(self, architecture: Architecture) -> int:
        """Return the fewest units that a layer with this kind may keep."""
        return 0

    @abstractmethod
    def active_width(self, architecture: Architecture, layer: int) -> int:
        """Return the intermediate channels that one token passes in the block of a layer."""

    @abstractmethod
    def require(self, architecture: Architecture, layer: int) -> None:
        """Raise ArchitectureError unless the block of a layer is as its family declares it."""

    @abstractmethod
    def units(self, architecture: Architecture, layer: int, groups: int) -> list[Unit]:
        """Return the units of a layer."""

    @abstractmethod
    def mask(
        self, architecture: Architecture, layer: int, scale: Tensor
    ) -> AbstractContextManager[None]:
        """Run the block with its places scaled by [W], or by [B, 1, W] for each row of a batch."""

    @abstractmethod
    def cuts(
        self, architecture: Architecture, layer: int, keep: Tensor, gains: Tensor | None
    ) -> Mapping[str, Cut]:
        """Return the cut of each part of the block, by name, if the places `keep` [W'] stay."""

    def narrowed(self, part: Any, cut: Cut) -> Any:
        """Make a new part of the block from what stays of one; it shares nothing with that one.

        Not asked of kinds with columns: the pruner slices their projections itself.
        """
        raise NotImplementedError

    @abstractmethod
    def to_settings(self, config: Mapping[str, Any], widths: Mapping[str, int]) -> dict[str, int]:
        """Return a layer's counts under the names of a configuration; 0 takes a name away.

        `widths` are those of the manifest, such as {"ffn_columns": W}. Kinds are asked in order,
        and a later one may correct an earlier one.
        """

    @abstractmethod
    def from_settings(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Return the widths that a configuration names, as `to_settings` takes them."""


UNIT_KINDS: dict[Kind, UnitKind] = {}  # by name, in the order of their blocks in a layer


def register_kind(kind: UnitKind) -> None:
    """Add a kind of units, after those that are known; its name must be free."""
    if UNIT_KINDS.setdefault(kind.name, kind) is not kind:
        raise ValueError(f"there is a kind {kind.name!r} already")


def kind_number(kind: Kind) -> int:
    """Return the place of a kind in the order of units within a layer."""
    return list(UNIT_KINDS).index(kind)


# Projections --------------------------------------------------------------------------------------


def weight_of(projection: Any) -> Tensor:
    """Return the weight [out, in] of a projection, as a view: writing into it changes the layer."""
    if is_packed(projection):
        raise ArchitectureError(
            f"a {type(projection).__name__} holds packed {projection.weight.dtype} weights: they "
            "can be masked and measured, but not read or cut. Load the model unquantized, for "
            "example in bfloat16."
        )
    return projection.weight.T if is_transposed(projection) else projection.weight


def widths(projection: Any) -> tuple[int, int]:
    """(outputs, inputs) of a projection."""
    if is_transposed(projection):
        inputs, outputs = projection.weight.shape
        return int(outputs), int(inputs)
    return int(projection.out_features), int(projection.in_features)


def is_transposed(projection: Any) -> bool:
    """Whether the weight is stored as [in, out], as in transformers' Conv1D (GPT-2)."""
    return hasattr(projection, "nf")


def is_packed(projection: Any) -> bool:
    """Whether the weight is quantized in a form that runs but cannot be read or cut."""
    return type(projection).__name__ in _PACKED


def require_supported(projection: Any, name: str, layer: int) -> None:
    """Raise ArchitectureError unless a projection is a plain, transposed or packed linear layer."""
    if hasattr(projection, "base_layer"):  # PEFT puts its layers around the original
        raise ArchitectureError(
            f"{name} of layer {layer} carries an adapter ({type(projection).__name__}). "
            "Merge adapters before pruning."
        )
    if is_packed(projection):
        return
    weight = weight_of(projection)
    if not weight.is_floating_point() or tuple(weight.shape) != widths(projection):
        raise ArchitectureError(
            f"{name} of layer {layer} holds {weight.dtype} weights of shape {tuple(weight.shape)}; "
            "this kind of quantization is not supported. Load the model unquantized, or, to "
            "measure it only, in bitsandbytes' 4 bits."
        )


# Hooks ------------------------------------------------------------------------------------------

Hook = TypeVar("Hook", bound=Callable[..., Any])


def here(hook: Hook, otherwise: Callable[..., Any] | None = None) -> Hook:
    """Let a hook act on calls of this thread alone; all others get what `otherwise` returns.

    A model that is measured on one thread answers as usual on all others.
    """
    thread = get_ident()

    @wraps(hook)
    def act(*args: Any, **kwargs: Any) -> Any:
        if get_ident() == thread:
            return hook(*args, **kwargs)
        return otherwise(*args, **kwargs) if otherwise is not None else None

    return cast(Hook, act)
