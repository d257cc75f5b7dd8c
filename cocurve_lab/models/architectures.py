"""Access to the parts of a model: its layers, blocks and projections, found through its family.

The families are declared in families.py. torch is imported for annotations only: `curvature/` reads
units through this file, and a stored H must open without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..base.errors import ArchitectureError
from .experts import require_routed
from .families import ALL_KINDS, UNIT_KINDS, Family, Kind, RowBlock, find_family

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
        return _find(self.model, self.family.decoder)

    @property
    def backbone(self) -> Any:
        """The module that holds the layers: the decoder, or its language model."""
        return _find(self.decoder, self.family.layers.rpartition(".")[0])

    @property
    def stack(self) -> str:
        """The path of the layers in the model, such as "model.layers"."""
        return f"{self.family.decoder}.{self.family.layers}"

    @property
    def layers(self) -> Sequence[Any]:
        """The decoder layers, first to last."""
        return _find(self.decoder, self.family.layers)

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
        logits, cap = self.head(hidden).to(hidden.device), self.logit_cap
        logits = logits if self.logit_scale == 1 else logits * self.logit_scale
        return logits if cap is None else (logits / cap).tanh() * cap

    @property
    def vocabulary(self) -> int:
        """Number of logits V: the rows of the head, which may be more than the tokens."""
        return int(self.head.weight.shape[0])

    def block(self, layer: int, kind: Kind) -> Any:
        """The module of a kind in a layer, or the layer where it holds the projections; or None."""
        module, family = self.layers[layer], self.family
        routed = _find(module, family.experts) if family.experts else None
        if not hasattr(routed, "experts"):  # a dense layer of a mixture, too
            return None if kind == "expert" else _find(module, getattr(family, kind))
        if kind == "ffn":
            return _find(module, family.shared_expert) if family.shared_expert else None
        return routed if kind == "expert" else _find(module, family.attention)

    def kinds(self, layer: int, *, routed: bool = True) -> tuple[Kind, ...]:
        """The kinds of units that a layer was built with; without experts if not `routed`."""
        all_of = (kind for kind in ALL_KINDS if self.block(layer, kind) is not None)
        return tuple(kind for kind in all_of if routed or not UNIT_KINDS[kind].routed)

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
        return str(getattr(self.family, UNIT_KINDS[kind].output))

    def input_projections(self, layer: int, kind: Kind) -> tuple[str, ...]:
        """Attribute names of the input projections: query, key, value, or gate, up."""
        block, names = self.block(layer, kind), getattr(self.family, UNIT_KINDS[kind].inputs)
        # Gemma 4 has None where the keys are the values, too
        return tuple(name for name in names if getattr(block, name, name) is not None)

    def shared(self, layer: int, kind: Kind) -> list[Tensor]:
        """The weights of `Family.shared` in a block; they leave with its only unit."""
        block, names = self.block(layer, kind), self.family.shared
        parts: list[Any] = [getattr(block, name, None) for name in names if UNIT_KINDS[kind].normed]
        each = [part.parameters() if hasattr(part, "parameters") else [part] for part in parts]
        return [weight for weights in each for weight in weights if weight is not None]

    def per_head(self, layer: int, kind: Kind) -> dict[str, Tensor]:
        """The weights of `Family.per_head` of a block, by name."""
        if not UNIT_KINDS[kind].normed or not self.width(layer, kind):
            return {}
        return {name: getattr(self.block(layer, kind), name) for name in self.family.per_head}

    def projection_names(self, layer: int, kind: Kind) -> tuple[str, ...]:
        """Attribute names of a block's projections, the output projection first."""
        # an attention block that lost all its units has no input projections left
        inputs = self.input_projections(layer, kind) if self.width(layer, kind) > 0 else ()
        return (self.output_name(kind), *inputs)

    def width(self, layer: int, kind: Kind) -> int:
        """Input columns W of the output projection: query heads x head_dim, or FFN channels.

        Of experts, their number. 0 where a layer has none of a kind.
        """
        if kind not in self.kinds(layer):
            return 0
        projection = self.output_projection(layer, kind)
        return len(projection.weight) if UNIT_KINDS[kind].routed else widths(projection)[1]

    @property
    def experts_per_token(self) -> int | None:
        """The experts that a router chooses for each token; None in a model without."""
        found = (self.block(layer, "expert") for layer in range(len(self.layers)))
        routers = [getattr(block, self.family.router) for block in found if block is not None]
        return max((int(router.top_k) for router in routers), default=None)

    def active_width(self, layer: int) -> int:
        """FFN channels that one token passes, those of its experts included."""
        width, block = self.width(layer, "ffn"), self.block(layer, "expert")
        if block is None:
            return width
        per_expert = block.experts.down_proj.numel() // len(block.experts.down_proj)
        hidden = int(self.config.hidden_size)
        return width + (self.experts_per_token or 0) * per_expert // hidden

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

    def step(self, layer: int, kind: Kind) -> int:
        """Smallest number of columns that can be cut: an FFN channel, or a query group."""
        return UNIT_KINDS[kind].step(self, layer)

    def unit_rows(self, layer: int, kind: Kind, start: int, stop: int) -> list[RowBlock]:
        """Rows of the input projections that feed columns `start:stop` of the output projection.

        The columns must be whole units (appendix "Structured Units").
        """
        return UNIT_KINDS[kind].rows(self, layer, start, stop)

    @property
    def all_projections(self) -> Iterator[Any]:
        """Every projection of every block, layer by layer."""
        for layer in range(len(self.layers)):
            for kind in self.kinds(layer, routed=False):
                for name in self.projection_names(layer, kind):
                    yield self.projection(layer, kind, name)

    def require_columns(
        self,
        what: str,
        step: str = "Use H by ablations.",
        why: str = "an expert has no columns, its router takes it or leaves it",
    ) -> None:
        """Raise ArchitectureError, naming what was asked for, if the model has experts."""
        if self.experts_per_token is not None:
            raise ArchitectureError(f"{what} is not for mixtures of experts: {why}. {step}")

    def require_attention(self, what: str) -> None:
        """Raise ArchitectureError, naming what was asked for, if a layer has no attention."""
        without = set(range(len(self.layers))) - set(self.attention_layers)
        if without:
            raise ArchitectureError(
                f"{what} is not for hybrids: layer {min(without)} has "
                f"{', '.join(self.family.mixers)} in place of attention, whose write it does not "
                "know. Prune without it."
            )

    def require_unpacked(self) -> None:
        """Raise ArchitectureError if any projection is packed, because it could not be cut."""
        for projection in self.all_projections:
            weight_of(projection)


def describe(model: Any) -> Architecture:
    """Find a model's family, and check that its layers are as the family declares them."""
    if not hasattr(model, "named_modules"):
        raise ArchitectureError(
            f"a {type(model).__name__} is no model. Load one: model, _ = cl.load_model(...)."
        )
    architecture = Architecture(model, find_family(model))
    family = architecture.family
    stack = _find(model, family.decoder)
    head = getattr(model, "get_output_embeddings", lambda: getattr(model, "lm_head", None))
    if head() is None:
        raise ArchitectureError(
            f"{type(model).__name__} has no lm_head. Load it with AutoModelForCausalLM."
        )
    if _find(stack, family.layers) is None:
        raise ArchitectureError(
            f"{type(model).__name__} has no layers at model.{family.decoder}.{family.layers}; it "
            "may be wrapped, by an adapter or a trainer. Merge adapters, unwrap the model, and try "
            "again."
        )
    if not len(architecture.layers):
        raise ArchitectureError(
            f"{type(model).__name__} has no layers, so nothing to prune. Check config.json."
        )
    for layer in range(len(architecture.layers)):
        require_declared(architecture, layer)
        kinds = architecture.kinds(layer)
        mixed = "attention" in kinds or architecture.mixers(layer)
        if kinds in ((), ("attention",)) or not mixed:
            raise ArchitectureError(
                f"layer {layer} of {type(model).__name__} has only {', '.join(kinds) or 'nothing'} "
                f"where family {family.model_types[0]!r} declares more. Update transformers."
            )
        if "expert" in architecture.kinds(layer):
            require_routed(architecture.block(layer, "expert"), family, layer)
    return architecture


def require_declared(architecture: Architecture, layer: int) -> None:
    """Raise ArchitectureError unless a layer's projections are as the family declares them."""
    for kind in architecture.kinds(layer, routed=False):
        _require_linear(architecture, layer, kind)
        _require_independent(architecture, layer, kind)


def _require_linear(architecture: Architecture, layer: int, kind: Kind) -> None:
    try:
        for name in architecture.projection_names(layer, kind):
            require_supported(architecture.projection(layer, kind, name), name, layer)
    except AttributeError as error:
        raise ArchitectureError(
            f"layer {layer} of {type(architecture.model).__name__} lacks the {kind} projection "
            f"that family {architecture.family.model_types[0]!r} declares ({error}); the model may "
            "be a variant, or carry an adapter. Use a plain dense model, or merge adapters first."
        ) from None


def _require_independent(architecture: Architecture, layer: int, kind: Kind) -> None:
    """Raise ArchitectureError unless the projections' rows are all that belongs to the units."""
    width = architecture.width(layer, kind)
    block, names = architecture.block(layer, kind), architecture.projection_names(layer, kind)
    known = {id(weight) for weight in architecture.shared(layer, kind)}
    if kind == "attention":
        names = (*names, *architecture.family.latent, *architecture.family.per_head)
    stops = (
        {}
        if not width
        else {rows.projection: rows.stop for rows in architecture.unit_rows(layer, kind, 0, width)}
    )
    odd = [name for name, stop in stops.items() if widths(getattr(block, name))[0] != stop]
    if block is not architecture.layers[layer]:
        # further weights are a norm of one head, or a number of an activation
        allowed = (0, 1, architecture.head_dim(layer) if kind == "attention" else 0)
        odd += [
            name
            for name, part in block.named_parameters()
            if name.partition(".")[0] not in names
            and part.numel() not in allowed
            and id(part) not in known
        ]
    if odd:
        name = type(architecture.model).__name__
        raise ArchitectureError(
            f"{', '.join(odd)} in the {kind} of layer {layer} of {name} is not as family "
            f"{architecture.family.model_types[0]!r} declares: it has other rows than its units, "
            "or reads several of them together (a mixture of experts does). Name it in "
            "`gate_up` and `stacked`, or in `shared`."
        )


def _find(module: Any, path: str) -> Any:
    for name in path.split(".") if path else ():
        module = getattr(module, name, None)
    return module


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
