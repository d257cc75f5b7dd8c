"""What the layers of a tiny model see on a text, by hooks of our own."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from helpers.tiny_models import full_logits, tiny_double, tiny_model, tiny_text

TEXT = tiny_text(rows=4, length=24)


class Seen(NamedTuple):
    """What every layer saw, rows and tokens apart [rows, T, .], float64."""

    columns: dict[tuple[int, str], Tensor]  # inputs of W_O and W_down
    ffn_in: dict[int, Tensor]
    ffn_out: dict[int, Tensor]
    layer_in: dict[int, Tensor]
    layer_out: dict[int, Tensor]

    def tokens(self, layer: int, kind: str) -> np.ndarray:
        """The inputs of an output projection [rows x T, W]."""
        flat: np.ndarray = self.columns[layer, kind].flatten(0, 1).numpy()
        return flat


@lru_cache
def model_of(family: str, heads: str) -> PreTrainedModel:
    return tiny_model(family, heads)


@lru_cache
def seen(family: str, heads: str) -> Seen:
    """Full activations of a float64 copy of `model_of` on TEXT."""
    wide = tiny_double(model_of(family, heads))
    found = Seen({}, {}, {}, {}, {})

    def keep(into: dict[Any, Tensor], key: Any, what: str) -> Any:
        def hook(_: Any, args: Any, output: Any) -> None:
            value = args[0] if what == "in" else output
            into[key] = (value[0] if isinstance(value, tuple) else value).detach()

        return hook

    for number, layer in enumerate(wide.model.layers):
        attention = keep(found.columns, (number, "attention"), "in")
        layer.self_attn.o_proj.register_forward_hook(attention)
        layer.mlp.down_proj.register_forward_hook(keep(found.columns, (number, "ffn"), "in"))
        layer.mlp.register_forward_hook(keep(found.ffn_in, number, "in"))
        layer.mlp.register_forward_hook(keep(found.ffn_out, number, "out"))
        layer.register_forward_hook(keep(found.layer_in, number, "in"))
        layer.register_forward_hook(keep(found.layer_out, number, "out"))
    full_logits(wide, TEXT.input_ids)
    return found


def output_weight(model: PreTrainedModel, layer: int, kind: str) -> np.ndarray:
    """W_O or W_down [d, W], float64."""
    block = model.model.layers[layer]
    module = block.self_attn.o_proj if kind == "attention" else block.mlp.down_proj
    weight: np.ndarray = module.weight.detach().double().numpy()
    return weight
