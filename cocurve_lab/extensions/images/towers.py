"""Units of the image tower beside those of the language tower: one budget, one H, two towers.

The image tower is an `Architecture` of its own, whose families stand below. `TwoTowers` joins it to
the language tower: its layers come after the decoder's, its kinds are called "vision-attention" and
"vision-ffn". Masks, costs and cuts then are those of the core.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...base.errors import ArchitectureError
from ...models.architectures import Architecture, require_declared, widths
from ...models.families import UNIT_KINDS, VISION_KINDS, Family, Kind, RowBlock
from ...models.layers import source_of
from ...pruner.modeling_cocurve import VISION_WIDTHS, narrow_vision

if TYPE_CHECKING:
    from torch import Tensor

_QWEN: dict[str, Any] = {
    "qkv": ("qkv",),  # all queries, then all keys, then all values
    "stacked": ("attention",),
    "attention": "attn",
    "attention_output": "proj",
    "decoder": "model.visual",
    "layers": "blocks",
}
_PLAIN: dict[str, Any] = {"gate_up": ("fc1",), "stacked": (), "ffn_output": "fc2"}
_TOWER = "model.vision_tower"
FAMILIES = (  # by the model_type of `vision_config`
    Family(("qwen2_vl_vision",), **_QWEN, gate_up=("fc1",), ffn_output="fc2"),
    Family(("qwen2_5_vl_vision",), **_QWEN),
    Family(
        ("qwen3_vl_vision", "qwen3_5_vision"),
        **_QWEN,
        gate_up=("linear_fc1",),
        ffn_output="linear_fc2",
    ),
    Family(
        ("siglip_vision_model", "clip_vision_model"),
        **_PLAIN,
        attention_output="out_proj",
        decoder=_TOWER,
        layers="encoder.layers",
    ),
    Family(
        ("internvl_vision",),
        **_PLAIN,
        attention="attention",
        attention_output="projection_layer",
        decoder=_TOWER,
        layers="encoder.layer",
        shared=("q_norm", "k_norm"),
    ),
    Family(
        ("pixtral",),
        attention="attention",
        ffn="feed_forward",
        decoder=_TOWER,
        layers="transformer.layers",
    ),
)


@dataclass(frozen=True)
class TwoTowers(Architecture):
    """A model with an image tower. What is read of a layer there is read of `vision`.

    Attributes:
        language: the model as it is without units of the image tower.
        vision: the image tower; None if it is of no family above, or its layers are elsewhere.
    """

    language: Architecture
    vision: Architecture | None

    def _at(self, layer: int, kind: Kind) -> tuple[Architecture, int, Kind]:
        """The tower of a kind, and the layer and kind there."""
        inside = UNIT_KINDS[kind].inside
        if inside is None or self.vision is None:
            return self.language, layer, kind
        return self.vision, layer - len(self.layers), inside

    @property
    def depth(self) -> int:
        return len(self.layers) + (0 if self.vision is None else len(self.vision.layers))

    @property
    def vision_layers(self) -> range:
        model_type = self.model.config.vision_config.model_type
        if self.vision is None:
            raise ArchitectureError(
                f"the image tower of {type(self.model).__name__} is {model_type!r}, whose units "
                "are not declared. Enumerate the units without vision=True, or use one of "
                f"{', '.join(name for family in FAMILIES for name in family.model_types)}."
            )
        if source_of(self.model) is not None:
            raise ArchitectureError(
                "units of the image tower need all weights in memory, but the model is streamed. "
                "Load it without stream=True, or list its units without vision=True."
            )
        for layer in range(len(self.vision.layers)):
            require_declared(self.vision, layer)
        return range(len(self.layers), self.depth)

    def kinds(self, layer: int, *, routed: bool = True) -> tuple[Kind, ...]:
        own = layer - len(self.layers)
        if own < 0 or self.vision is None:
            return self.language.kinds(layer, routed=routed)
        return tuple(VISION_KINDS[kind] for kind in self.vision.kinds(own))

    def block(self, layer: int, kind: Kind) -> Any:
        tower, at, own = self._at(layer, kind)
        return tower.block(at, own)

    def output_name(self, kind: Kind) -> str:
        tower, _, own = self._at(0, kind)
        return tower.output_name(own)

    def input_projections(self, layer: int, kind: Kind) -> tuple[str, ...]:
        tower, at, own = self._at(layer, kind)
        return tower.input_projections(at, own)

    def shared(self, layer: int, kind: Kind) -> list[Tensor]:
        tower, at, own = self._at(layer, kind)
        return tower.shared(at, own)

    def per_head(self, layer: int, kind: Kind) -> dict[str, Tensor]:
        tower, at, own = self._at(layer, kind)
        return tower.per_head(at, own)

    def step(self, layer: int, kind: Kind) -> int:
        tower, at, own = self._at(layer, kind)
        return tower.step(at, own)

    def unit_rows(self, layer: int, kind: Kind, start: int, stop: int) -> list[RowBlock]:
        tower, at, own = self._at(layer, kind)
        return tower.unit_rows(at, own, start, stop)

    def settle_vision(self) -> None:
        """Set the head counts of the image tower, and write its widths into its configuration.

        Whoever builds the model from that configuration, `load_pruned` or the modeling file, cuts
        its image tower to them.
        """
        assert self.vision is not None
        names = {id(module): name for name, module in self.decoder.named_modules()}
        found: dict[str, list[int]] = {}
        for layer in range(len(self.vision.layers)):
            for kind in self.vision.kinds(layer):
                block, output = self.vision.block(layer, kind), self.vision.output_name(kind)
                for name in (*self.vision.input_projections(layer, kind), output):
                    if hasattr(block, name):  # without heads, the output projection alone is there
                        own = widths(getattr(block, name))
                        found[f"{names[id(block)]}.{name}"] = list(own)
        narrow_vision(self.decoder, found)
        setattr(self.model.config.vision_config, VISION_WIDTHS, found)


def two_towers(language: Architecture) -> Architecture:
    """Join the image tower of a model to the `Architecture` of its language tower."""
    vision, model = None, language.model
    for family in FAMILIES:
        if model.config.vision_config.model_type in family.model_types:
            vision = Architecture(model, family)
    try:
        known = vision is not None and len(vision.layers) > 0
    except (AttributeError, TypeError):  # another release of transformers keeps them elsewhere
        known = False
    return TwoTowers(model, language.family, language, vision if known else None)
