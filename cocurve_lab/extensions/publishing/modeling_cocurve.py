"""A pruned language model: the stock model of its family, with layers of different widths.

transformers runs this file with `trust_remote_code=True`. It needs only torch and transformers. The
widths stand in config.json under `per_layer_config`, where `skip` names the blocks that a layer
lost. Each layer is built by the family's own class from its own counts. So attention uses the
standard interface, and caches, adapters and trainers find what they expect.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

# the classes that fit are LlamaModel, LlamaForCausalLM and so on; a release may lack some
STOCK = (
    "InternVL", "Llava", "LlavaNext", "Mistral3", "Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Apertus",
    "Arcee", "Cohere", "Cohere2", "Cwm", "DeepseekV2", "DeepseekV3", "Doge", "Ernie4_5", "Exaone4",
    "Gemma", "Gemma2", "Gemma3", "Glm", "Glm4", "GptOss", "Granite", "GraniteMoe", "Helium",
    "HunYuanDenseV1", "HyperCLOVAX", "Jais2", "Llama", "Ministral", "Ministral3", "Mistral",
    "Mixtral", "Nemotron", "Olmo", "Olmo2", "Olmo3", "Olmoe", "Phi", "Phi3", "Qwen2", "Qwen2Moe",
    "Qwen3", "Qwen3Moe", "SeedOss", "SmolLM3", "StableLm", "Starcoder2", "VaultGemma",
)  # fmt: skip
OUTPUTS = ("o_proj", "dense", "down_proj", "fc2", "c_proj")  # output projections of blocks


class NoHeads(nn.Module):
    """Replaces an attention block that lost every head. It returns the output bias, if any.

    Norms of queries and keys stay, unused, because they belong to no head.
    """

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.config, self.layer_idx = attention.config, attention.layer_idx
        self.head_dim = attention.head_dim
        self.num_key_value_groups = attention.num_key_value_groups
        self.heads = 0
        self.output = next(name for name in OUTPUTS if hasattr(attention, name))
        stock = getattr(attention, self.output)
        self.add_module(self.output, nn.Linear(0, stock.out_features, bias=stock.bias is not None))
        for name, module in attention.named_children():
            if {weight.numel() for weight in module.parameters()} == {self.head_dim}:
                self.add_module(name, module)

    def forward(
        self, hidden_states: torch.Tensor, cache: Any = None, **options: Any
    ) -> tuple[torch.Tensor, None]:
        if self.heads:
            # never called; vLLM takes a layer only if the source of its attention has this call
            attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface(
                self.config._attn_implementation,
                None,  # type: ignore[arg-type]
            )
            attend(self, hidden_states, hidden_states, hidden_states, None)
        cache = options.get("past_key_values", cache)  # its name before transformers 5.24
        if cache is not None:
            # transformers reads the length of the past from a layer's cache, which may be this one
            rows, length, _hidden = hidden_states.shape
            note = hidden_states.new_zeros(rows, 1, length, 1)
            cache.update(note, note, self.layer_idx)
        return getattr(self, self.output)(hidden_states[..., :0]), None


class NoChannels(nn.Module):
    """Replaces an FFN block that lost every channel. It returns the output bias, if any."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.output = next(name for name in OUTPUTS if hasattr(mlp, name))
        for name, module in mlp.named_children():
            if next(module.parameters(), None) is not None:
                self.add_module(name, module)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.output)(hidden_states[..., :0])


class Empty(nn.Module):
    """A projection from or to nothing. vLLM would replace a Linear, and divides by both widths."""

    def __init__(self, stock: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = stock.weight, stock.bias

    def forward(self, columns: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(columns, self.weight, self.bias)


def own_layer(stock: nn.Module, config: Any, index: int) -> nn.Module:
    """Build a layer of the same class with the widths of its own configuration."""
    if "mlp" in config.skip:
        config.intermediate_size = 0  # the block stays, empty, because it may have an output bias
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors")
        layer: Any = type(stock)(config, index)
        if "attention" in config.skip:
            layer.self_attn = NoHeads(layer.self_attn)
        if "mlp" in config.skip:
            layer.mlp = NoChannels(layer.mlp)
    if config._attn_implementation == "vllm":  # elsewhere they stay Linear, as adapters expect
        for block in (layer.self_attn, layer.mlp):
            for name, child in list(block.named_children()):
                if isinstance(child, nn.Linear) and not child.weight.numel():
                    setattr(block, name, Empty(child))
    return layer


def layers_of(model: Any) -> Any:
    """Find the layers; of a multimodal model, those of its language model."""
    return getattr(model.base_model, "language_model", model.base_model).layers


class OwnWidths:
    """A mixin for a stock model class: builds the model, then replaces layers by their own."""

    def __init__(self, config: Any) -> None:
        text = config.get_text_config()
        own = text.to_dict().get("per_layer_config")
        # without it for now: the stock constructor reads one width for all layers
        text.per_layer_config = None
        try:
            super().__init__(config)  # type: ignore[call-arg]
        finally:
            text.per_layer_config = own
        model: Any = self
        layers = layers_of(model)
        for index in map(int, own or ()):
            layers[index] = own_layer(layers[index], text.per_layer_config[index], index)
        model.post_init()

    def set_attn_implementation(self, *arguments: Any, **options: Any) -> None:
        """Set the attention implementation, as in transformers, in every layer."""
        super().set_attn_implementation(*arguments, **options)  # type: ignore[misc]
        model: Any = self
        # a layer with its own widths holds a copy of the configuration, which super() leaves alone
        chosen = model.config.get_text_config()._attn_implementation
        for layer in layers_of(model):
            layer.self_attn.config._attn_implementation = chosen


def __getattr__(name: str) -> Any:
    """Make CocurveLlamaForCausalLM and so on, the names in config.json, when they are asked for."""
    stem = name.removeprefix("Cocurve")
    for end in ("ForCausalLM", "ForConditionalGeneration", "ForSequenceClassification", "Model"):
        stem = stem.removesuffix(end)
    stock = getattr(transformers, name.removeprefix("Cocurve"), None)
    if stock is None or not name.startswith("Cocurve") or stem.removesuffix("Text") not in STOCK:
        raise AttributeError(name)
    # Gemma 2 caps attention scores; older transformers would choose sdpa, which omits the cap
    sdpa = stock._supports_sdpa and "Gemma2" not in name
    made = type(name, (OwnWidths, stock), {"__module__": __name__, "_supports_sdpa": sdpa})
    return globals().setdefault(name, made)
