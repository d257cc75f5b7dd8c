"""Tiny random models, text and tokenizers, and the paper's definitions computed the slow way.

Nothing here imports the module it is used to test: columns of units come from the configuration,
masks are hooks of our own, H is eq. (gram) written out over full passes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from cocurve_lab import CalibrationSet

torch.set_num_threads(1)  # models this small only wait for a second thread

HIDDEN, FFN, VOCAB, CONTEXT, GROUPS = 32, 42, 97, 64, 4  # 42 / 4: uneven groups of 11 and 10
CHAT = (  # a chat template
    "{% for message in messages %}w80 {{ message['content'] }} w81{% endfor %}"
    "{% if add_generation_prompt %} w82{% endif %}"
)
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "mistral": (MistralConfig, {"head_dim": 12, "sliding_window": None}),  # not hidden / heads
    "qwen2": (Qwen2Config, {}),  # biases on q, k and v
    "phi3": (Phi3Config, {"pad_token_id": 0}),  # fused projections
}
EVERY = [(family, heads) for family in FAMILIES for heads in HEADS]
# windows and softcaps small enough to matter on rows of 24 tokens; test_families.py runs all
MORE_FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, {"head_dim": 12}),
    "gemma": (GemmaConfig, {"head_dim": 12, "pad_token_id": None}),
    "gemma2": (
        Gemma2Config,
        {
            "head_dim": 12,
            "sliding_window": 7,
            "final_logit_softcapping": 2.5,
            "attn_logit_softcapping": 1.5,
            "query_pre_attn_scalar": 10,
            "tie_word_embeddings": True,
            "pad_token_id": None,
        },
    ),
    "gemma3_text": (
        Gemma3TextConfig,
        {
            "head_dim": 12,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "tie_word_embeddings": True,
            "pad_token_id": None,
        },
    ),
    "olmo2": (Olmo2Config, {"pad_token_id": None}),
    "gpt_neox": (GPTNeoXConfig, {}),
    "gpt_neox_sequential": (GPTNeoXConfig, {"use_parallel_residual": False}),
    "gpt2": (GPT2Config, {"tie_word_embeddings": True}),
    "opt": (OPTConfig, {"word_embed_proj_dim": HIDDEN, "tie_word_embeddings": True}),
    "opt_350m": (OPTConfig, {"word_embed_proj_dim": 20, "do_layer_norm_before": False}),
}
WINDOWS = {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2}
# families of shapes that those above have, by model_type (and "+" a variant): one row of the
# contract each. With the settings that distinguish them, large enough to matter on such rows.
_FURTHER: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layers": [1, 0, 1, 1]},
    "olmo": {"clip_qkv": 0.8},
    "olmo3": WINDOWS,
    "granite": {
        "attention_multiplier": 0.5,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.6,
        "logits_scaling": 3.0,
    },
    "ministral": WINDOWS | {"head_dim": 12},
    "ministral3": {
        "head_dim": 12,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 8,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "seed_oss": {"head_dim": 12, "attention_bias": True, "attention_out_bias": True},
    "ernie4_5": {"use_bias": True, "head_dim": 8},
    "exaone4": WINDOWS | {"head_dim": 12},
    "glm": {"head_dim": 12, "attention_bias": True},
    "glm4": {"head_dim": 12},
    "hunyuan_v1_dense": {"head_dim": 12},
    "phi": {},
    "starcoder2": {"sliding_window": 7},
    "stablelm": {"use_parallel_residual": True},
    "stablelm+norms": {"qk_layernorm": True},
    "nemotron": {"head_dim": 12},
    "arcee": {"head_dim": 12},
    "apertus": {},
    "helium": {"head_dim": 8},
    "cwm": WINDOWS | {"head_dim": 12, "bos_token_id": 1, "eos_token_id": 2},
    "doge": {"keep_window_size": 7},
    "internlm3": {"head_dim": 12, "attention_bias": True, "mlp_bias": True},
    "iquestcoder": {"head_dim": 12},
    "hyperclovax": {"attention_multiplier": 0.5, "logits_scaling": 0.4},
    "jais2": {"head_dim": 12},
    "vaultgemma": WINDOWS | {"head_dim": 12, "final_logit_softcapping": 2.5},
    "gemma4_unified_text": WINDOWS
    | {"head_dim": 12, "global_head_dim": 16, "attention_k_eq_v": True},
    "cohere": {"logit_scale": 0.4},
    "cohere+norms": {"logit_scale": 0.4, "use_qk_norm": True},
    "cohere2": WINDOWS | {"logit_scale": 0.4},
}
FURTHER = {
    name: (CONFIG_MAPPING[name.partition("+")[0]], {"pad_token_id": None} | own)
    for name, own in _FURTHER.items()
    if name.partition("+")[0] in CONFIG_MAPPING  # older releases lack some
}
# mixtures of experts, with routers that choose clearly; names as in `_FURTHER`
EXPERTS, TOP_K = 6, 2
_MOE = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 24}
_LOCAL = {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "intermediate_size": 24}
_MLA = {
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_EXPERT_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _MOE | {"head_dim": 12},
    "qwen3_moe+norm": _MOE | {"head_dim": 12, "norm_topk_prob": True},
    "qwen3_moe+dense": _MOE | {"head_dim": 12, "mlp_only_layers": [1]},
    "olmoe": _MOE | {"intermediate_size": 24},
    "qwen2_moe": _MOE | {"shared_expert_intermediate_size": 26},
    "mixtral": _LOCAL,
    "gpt_oss": _LOCAL | WINDOWS | {"head_dim": 12},
    "granitemoe": _LOCAL | {"attention_multiplier": 0.5, "logits_scaling": 3.0},
    "deepseek_v2": _MLA | {"q_lora_rank": None, "topk_method": "greedy"},
    "deepseek_v3": _MLA | {"q_lora_rank": 12, "norm_topk_prob": True},
}
EXPERT_FAMILIES = {
    name: (CONFIG_MAPPING[name.partition("+")[0]], {"pad_token_id": None} | own)
    for name, own in _EXPERT_FAMILIES.items()
}
# hybrids: layers whose attention is something else, or has something beside it
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_d_conv": 4}
_GRANITE = {
    "layer_types": ["mamba", "attention", "mamba"],
    "shared_intermediate_size": FFN,
    "attention_multiplier": 0.5,
    "residual_multiplier": 0.6,
    "logits_scaling": 3.0,
    "position_embedding_type": "rope",
}
_HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _LINEAR | {"head_dim": 12},
    "qwen3_next": _LINEAR | _MOE | {"head_dim": 12, "shared_expert_intermediate_size": 26},
    "qwen3_5_moe_text": _LINEAR | _MOE | {"head_dim": 12, "shared_expert_intermediate_size": 26},
    "granitemoehybrid": _MAMBA | _GRANITE | {"num_local_experts": 0},
    "granitemoehybrid+experts": _MAMBA | _GRANITE | _LOCAL,
    "falcon_h1": _MAMBA
    | {
        "lm_head_multiplier": 0.4,
        "attention_out_multiplier": 0.7,
        "mlp_multipliers": [0.8, 1.3],
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "projectors_bias": True,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
}
HYBRIDS = {
    name: (CONFIG_MAPPING[name.partition("+")[0]], {"pad_token_id": None} | own)
    for name, own in _HYBRIDS.items()
}
NO_ATTENTION = ("linear_attention", "mamba", "conv")
# multimodal models: the settings of the language model and of the one that reads images. An
# image takes 4 tokens with the id IMAGE, which is in no random text
IMAGE = VOCAB
_VISION = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
_SIGLIP = _VISION | {"hidden_size": 8, "image_size": 8, "patch_size": 4}
_QWEN_VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 1,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 16,
}
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": IMAGE + 1,
    "vision_start_token_id": IMAGE + 2,
    "vision_end_token_id": IMAGE + 3,
}
_SECTIONS = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
}
_MULTIMODAL: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        {"model_type": "gemma3_text", "head_dim": 12} | WINDOWS,
        _SIGLIP,
        {"mm_tokens_per_image": 4, "image_token_id": IMAGE},
    ),
    "qwen2_vl": (_SECTIONS, _QWEN_VISION | {"embed_dim": 16, "hidden_size": HIDDEN}, _QWEN_IDS),
    "qwen2_5_vl": (
        _SECTIONS,
        _QWEN_VISION | {"fullatt_block_indexes": [1], "window_size": 8},
        _QWEN_IDS,
    ),
    "qwen3_vl": (
        _SECTIONS | {"head_dim": 8},
        _QWEN_VISION | {"deepstack_visual_indexes": [0, 1]},
        _QWEN_IDS,
    ),
    "qwen3_5": (
        _LINEAR
        | {"head_dim": 8}
        | {"rope_parameters": _SECTIONS["rope_parameters"] | {"partial_rotary_factor": 1.0}},
        _QWEN_VISION,
        _QWEN_IDS,
    ),
    "internvl": (
        {"model_type": "qwen2"},
        _VISION
        | {"model_type": "internvl_vision", "hidden_size": 8}
        | {"image_size": [8, 8], "patch_size": [2, 2]},
        {"image_token_id": IMAGE},
    ),
    "llava": (
        {"model_type": "llama"},
        _SIGLIP | {"model_type": "clip_vision_model", "projection_dim": 8},
        {"image_token_id": IMAGE, "image_seq_length": 4},
    ),
    "llava_next": (
        {"model_type": "mistral", "head_dim": 12},
        _SIGLIP | {"model_type": "clip_vision_model", "projection_dim": 8},
        {"image_token_id": IMAGE, "image_grid_pinpoints": [[8, 8]]},
    ),
    "mistral3": (
        {"model_type": "mistral", "head_dim": 12},
        _SIGLIP | {"model_type": "pixtral", "head_dim": 4},
        {"image_token_id": IMAGE, "spatial_merge_size": 1, "vision_feature_layer": -1},
    ),
}
MULTIMODAL = {name: (CONFIG_MAPPING[name], {}) for name in _MULTIMODAL}
MHA_ONLY = (
    "gpt_neox",
    "gpt_neox_sequential",
    "gpt2",
    "opt",
    "opt_350m",
    "deepseek_v2",
    "deepseek_v3",
)
EVERY_FAMILY = EVERY + [
    (family, heads)
    for family in MORE_FAMILIES
    for heads in (("mha",) if family in MHA_ONLY else HEADS)
]
# what other configurations call a setting; None: they have none
_NAMES: dict[Any, dict[str, str | None]] = {
    GPT2Config: {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "num_key_value_heads": None,
        "max_position_embeddings": "n_positions",
    },
    GPTNeoXConfig: {"num_key_value_heads": None},
    OPTConfig: {
        "intermediate_size": "ffn_dim",
        "num_key_value_heads": None,
        "initializer_range": "init_std",
    },
}
LLAMA_3 = {  # rope_parameters of Llama 3.1 and later, for rows this short
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# (layers, W_O, W_down) by model_type, in the model and in a layer
LLAMA_PLACES = ("model.layers", "self_attn.o_proj", "mlp.down_proj")
PLACES = {
    "gpt_neox": ("gpt_neox.layers", "attention.dense", "mlp.dense_4h_to_h"),
    "gpt2": ("transformer.h", "attn.c_proj", "mlp.c_proj"),
    "opt": ("model.decoder.layers", "self_attn.out_proj", "fc2"),
    "phi": ("model.layers", "self_attn.dense", "mlp.fc2"),
    "starcoder2": ("model.layers", "self_attn.o_proj", "mlp.c_proj"),
    "granitemoehybrid": ("model.layers", "self_attn.o_proj", "shared_mlp.output_linear"),
    "falcon_h1": ("model.layers", "self_attn.o_proj", "feed_forward.down_proj"),
    "lfm2": ("model.layers", "self_attn.out_proj", "feed_forward.w2"),
}


def tiny_model(
    family: str = "llama",
    heads: str = "gqa",
    *,
    layers: int = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    **changes: Any,
) -> PreTrainedModel:
    """A random model whose biases and norms are random too, in eval mode."""
    make, own = (FAMILIES | MORE_FAMILIES | FURTHER | EXPERT_FAMILIES | HYBRIDS | MULTIMODAL)[
        family
    ]
    text, vision, beside = _MULTIMODAL.get(family, ({}, {}, {}))
    own = own | text
    query, key_value = HEADS[heads]
    settings = {
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "vocab_size": VOCAB,
        "num_hidden_layers": layers,
        "num_attention_heads": query,
        "num_key_value_heads": key_value,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.15,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    names = _NAMES.get(make, {})
    named = {names.get(key, key): value for key, value in (settings | own | changes).items()}
    named.pop(None, None)
    if "layer_types" in named:
        named["layer_types"] = named["layer_types"][:layers]
    if vision:
        tied = {"tie_word_embeddings": named.pop("tie_word_embeddings")}
        text = named | {"pad_token_id": None, "vocab_size": VOCAB + 4}
        named = {"text_config": text, "vision_config": vision}
        named |= beside | tied
    if family in ("gemma2", "vaultgemma") and attention == "sdpa":
        attention = "eager"  # the one with softcapping
    if family == "gpt_oss":
        attention = "eager"  # the one with sinks
    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if vision else AutoModelForCausalLM
    model = auto.from_config(make(**named), attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            # Gemma 3's projector of images begins with zeros
            if parameter.dim() == 1 or (vision and not parameter.any()):
                parameter.add_(0.1 * torch.randn(parameter.shape))
        for _, router in routers(model):
            router.weight.mul_(4)
            if hasattr(router, "e_score_correction_bias"):
                router.e_score_correction_bias.copy_(0.1 * torch.randn(EXPERTS))
    return model.to(dtype).eval().requires_grad_(False)


def sharper(factor: float) -> PreTrainedModel:
    """A tiny model whose logits are multiplied by a factor: the larger, the surer."""
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight.mul_(factor)
    return model


def nan_model() -> PreTrainedModel:
    """A tiny model that gives NaN for one token."""
    model = tiny_model()
    model.lm_head.weight[3] = torch.nan
    return model


def routers(model: PreTrainedModel) -> Iterator[tuple[int, Any]]:
    """The layers with experts, and their routers, found by what they have."""
    for number, layer in enumerate(getattr(model.base_model, "layers", ())):
        for block in layer.modules():
            if isinstance(getattr(block, "experts", None), torch.nn.Module):
                yield number, getattr(block, "gate", None) or block.router


def route_by_hand(config: Any, router: Any, hidden: Tensor, gone: list[int]) -> tuple[Any, ...]:
    """What a router returns when the logits of some experts are minus infinity."""
    bias = getattr(router, "bias", None)
    logits = torch.nn.functional.linear(hidden.flatten(0, -2), router.weight, bias)
    logits[:, gone] = -torch.inf
    kind, k = config.model_type, config.num_experts_per_tok
    if kind in ("gpt_oss", "granitemoe", "granitemoehybrid"):  # the softmax of the best ones
        best, chosen = logits.topk(k, dim=-1)
        return logits, torch.softmax(best, dim=-1), chosen
    scores = torch.softmax(logits.float(), dim=-1)
    if kind == "deepseek_v3":  # with a bias that only the choice sees
        scores = logits.sigmoid()
        choice = (scores + router.e_score_correction_bias).masked_fill(logits.isinf(), -torch.inf)
        chosen = choice.topk(k, dim=-1).indices
        gates = scores.gather(1, chosen)
    else:
        gates, chosen = scores.topk(k, dim=-1)
    if kind in ("mixtral", "qwen3_5_moe_text") or getattr(config, "norm_topk_prob", False):
        gates = gates / gates.sum(dim=-1, keepdim=True)
    return logits, gates.to(logits.dtype) * getattr(config, "routed_scaling_factor", 1), chosen


def tiny_text(
    rows: int = 4,
    length: int = 24,
    scored: int | str = "all",
    *,
    seed: int = 0,
    vocab: int = VOCAB,
) -> CalibrationSet:
    """Random rows; `scored` positions per row, or "all"."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (rows, length), generator=generator)
    if scored == "all":
        return CalibrationSet(input_ids=ids)
    draws = [torch.randperm(length - 1, generator=generator)[:scored] for _ in range(rows)]
    return CalibrationSet(input_ids=ids, positions=torch.stack(draws).sort().values)


def word_tokenizer(context: int = 10**30, eos: str | None = "<end>") -> PreTrainedTokenizerFast:
    """Words w0 ... w89 by whitespace; id of "wN" is N + 2."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"<end>": 0, "<unk>": 1} | {f"w{n}": n + 2 for n in range(90)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, unk_token="<unk>", model_max_length=context
    )


def write_model(folder: Path, model: Any = None, **how: Any) -> Path:
    """Write a model, a tiny one by default, and its tokenizer into a folder."""
    (model or tiny_model()).save_pretrained(folder, **how)
    word_tokenizer(CONTEXT).save_pretrained(folder)
    return folder


def bytes_in(folder: Path) -> dict[str, bytes]:
    """What the files of a folder hold, by name."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def opening_tokenizer(*starts: str) -> PreTrainedTokenizerFast:
    """The word tokenizer, which puts these tokens before a text, as Gemma's puts `<bos>`."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = word_tokenizer()
    template = " ".join([*starts, "$A"])
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in set(starts)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(template, None, ids)
    return tokenizer


class Columns(NamedTuple):
    """A unit from the configuration alone."""

    layer: int
    kind: str
    start: int
    stop: int


def attention_is_whole(config: Any) -> bool:
    """Whether something reads all heads of a layer together, so that they leave together."""
    normed = getattr(config, "use_qk_norm", False), getattr(config, "qk_layernorm", False)
    return config.model_type in ("olmo2", "olmo3", "olmoe", "doge") or (
        config.model_type in ("cohere", "stablelm") and any(normed)
    )


def units_by_hand(model: PreTrainedModel, groups: int = GROUPS) -> list[Columns]:
    """The paper's units in order: KV-aligned query groups, then contiguous channel groups."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    heads = 1 if attention_is_whole(config) else heads
    names = ("intermediate_size", "n_inner", "ffn_dim")
    width = next(getattr(config, name) for name in names if hasattr(config, name))
    shared = getattr(config, "n_shared_experts", 0) * getattr(config, "moe_intermediate_size", 0)
    for name in ("shared_expert_intermediate_size", "shared_intermediate_size"):
        shared = getattr(config, name, shared)
    if config.model_type == "granitemoehybrid":
        width = shared

    def channels(width: int) -> list[tuple[int, int]]:
        parts = np.array_split(np.arange(width), groups) if width else []
        return [(int(part[0]), int(part[-1]) + 1) for part in parts]

    mixed = dict(routers(model))
    units = []
    for layer in range(config.num_hidden_layers):
        own = config.per_layer_config[layer] if getattr(config, "is_heterogeneous", 0) else config
        head_dim = (
            getattr(own, "v_head_dim", None)
            or getattr(own, "head_dim", None)
            or config.hidden_size // config.num_attention_heads
        )
        step = head_dim * config.num_attention_heads // heads
        for group in range(0 if kinds[layer] in NO_ATTENTION else heads):
            units.append(Columns(layer, "attention", group * step, (group + 1) * step))
        ffn = channels(shared if layer in mixed else width)
        units += [Columns(layer, "ffn", start, stop) for start, stop in ffn]
        count = len(mixed[layer].weight) if layer in mixed else 0
        units += [Columns(layer, "expert", e, e + 1) for e in range(count)]
    return units


@contextmanager
def masked_by_hand(
    model: PreTrainedModel, units: Iterable[Any], gains: dict[Any, float] | None = None
) -> Iterator[None]:
    """Zero the units' input columns of the output projections with hooks of our own."""
    layers, *outputs = PLACES.get(model.config.model_type, LLAMA_PLACES)
    if model.config.model_type in MULTIMODAL:
        layers = "model.language_model.layers"
    units = list(units)
    scales = [(unit, 0.0) for unit in units] + list((gains or {}).items())
    with ExitStack() as stack:
        for number, router in routers(model):
            gone = [u.start for u in units if (u.layer, u.kind) == (number, "expert")]
            routed = partial(route_by_hand, model.config, router, gone=gone)

            def answer(_: Any, args: Any, own: Any, routed: Any = routed) -> Any:
                found = routed(args[0])
                return found if own[0].is_floating_point() else found[::-1]  # 5.17's Granite-MoE

            hook = router.register_forward_hook(answer)
            stack.callback(hook.remove)
        for unit, scale in scales:
            if unit.kind == "expert":
                continue
            output = outputs[unit.kind == "ffn"]
            if unit.kind == "ffn" and unit.layer in dict(routers(model)) and output in LLAMA_PLACES:
                many = model.config.model_type.startswith("deepseek")
                output = f"mlp.shared_expert{'s' * many}.down_proj"
            module = model.get_submodule(f"{layers}.{unit.layer}.{output}")
            stack.callback(_cut_by_hand(module, unit, scale))
        yield


def _cut_by_hand(module: Any, unit: Any, scale: float) -> Any:
    """Scale a unit's input columns of a projection; what undoes it."""

    def cut(_: Any, args: Any) -> Any:
        changed = args[0].clone()
        changed[..., unit.start : unit.stop] *= scale
        return (changed,)

    return module.register_forward_pre_hook(cut).remove


@torch.no_grad()
def full_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits [N, T, V] float64 of a whole pass."""
    return model(input_ids=ids, use_cache=False).logits.double()


def naive_build(
    model: PreTrainedModel,
    calibration: CalibrationSet,
    top_r: int,
    groups: int = GROUPS,
    wanted: Sequence[int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """H [M, M] by eq. (gram) and the single-unit KL [M] on the support: a full pass per unit.

    With `wanted`, of these units alone.
    """
    units = units_by_hand(model, groups)
    units = units if wanted is None else [units[u] for u in wanted]
    features: list[list[Tensor]] = [[] for _ in units]
    risks: list[list[Tensor]] = [[] for _ in units]
    for ids, positions in zip(calibration.input_ids, calibration.positions, strict=True):
        teacher = full_logits(model, ids[None])[0, positions]
        support = teacher.topk(top_r, dim=-1).indices
        z0 = teacher.gather(-1, support)
        p0 = torch.softmax(z0, dim=-1)
        for index, unit in enumerate(units):
            with masked_by_hand(model, [unit]):
                z = full_logits(model, ids[None])[0, positions].gather(-1, support)
            delta = z0 - z
            mean = (p0 * delta).sum(dim=-1, keepdim=True)
            features[index].append((p0.sqrt() * (delta - mean)).flatten())
            logp, logq = torch.log_softmax(z0, -1), torch.log_softmax(z, -1)
            risks[index].append((p0 * (logp - logq)).sum(dim=-1))
    scored = calibration.positions.numel()
    bar = torch.stack([torch.cat(parts) for parts in features])
    return (bar @ bar.T / scored).numpy(), torch.stack([torch.cat(r).mean() for r in risks]).numpy()


def naive_risk(
    model: PreTrainedModel,
    units: Iterable[Any],
    calibration: CalibrationSet,
    gains: dict[Any, float] | None = None,
    *,
    double: bool = True,
) -> np.ndarray:
    """Full-vocabulary KL(teacher || masked) of each row [N], in float64 but for a quantized model.

    `double=False` leaves the weights as they are, for those that have no float64 form.
    """
    wide, units = tiny_double(model) if double else model, list(units)
    rows = []
    for ids, positions in zip(calibration.input_ids, calibration.positions, strict=True):
        log_p = torch.log_softmax(full_logits(wide, ids[None])[0, positions], dim=-1)
        with masked_by_hand(wide, units, gains):
            log_q = torch.log_softmax(full_logits(wide, ids[None])[0, positions], dim=-1)
        rows.append(float((log_p.exp() * (log_p - log_q)).sum(dim=-1).mean()))
    return np.array(rows)


def tiny_double(model: PreTrainedModel) -> PreTrainedModel:
    """A float64 copy of a model with the same weights."""
    import copy

    return copy.deepcopy(model).double()


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Frobenius norm of the difference over that of the expectation."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
