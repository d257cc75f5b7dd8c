"""Where each model family keeps its projections.

The lab never copies a model's forward. A family therefore says only where the projections are, and
which rows of a fused one belong together. The order of residual and norms is not declared, because
each layer runs its own forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..base.errors import ArchitectureError, InputError
from .unit import Kind


@dataclass(frozen=True)
class Family:
    """One family of architectures: the names inside the model, and how its rows are fused.

    The defaults are Llama's.

    Attributes:
        model_types: the values of `config.model_type` it covers.
        qkv: (query, key, value), or the one projection that holds all three. A layer may have None
            as its value projection: the keys are then the values, too.
        gate_up: (gate, up), or one projection.
        stacked: the kinds of block whose single projection stacks its parts. For qkv: all queries,
            then all keys, then all values (otherwise query, key and value of one head, then of the
            next). For gate_up: the gate rows, then the up rows (otherwise there is no gate, and
            each row is a channel).
        attention, ffn: paths of the blocks in a layer; "" if the projections lie in the layer
            itself. Several paths of an FFN: it is at the first one that no other kind has.
        attention_output, ffn_output: the output projections W_O and W_down in their blocks.
        decoder: path from the model to the part without its head; `layers` is the path of its list
            of layers from there.
        final: modules beside `layers` between the last layer and the head, in order; a module that
            is None is skipped.
        mixers: attribute names of blocks in a layer that mix tokens and are no attention: linear
            attention, a state space, a convolution. They stand beside attention or in its place,
            have no units, and stay.
        gated: whether the query projection has, after the rows of each head, as many for its gate.
        shared: modules or weights of attention that read all its heads together, such as a norm. In
            a layer that has them, removing one head would change the others. So attention is one
            unit there, and they go with it.
        latent: modules of attention that all its heads share and that stay: those that compress the
            queries, keys and values (MLA). Each head then has its share of every row of `qkv`.
        per_head: weights of attention with one number for each query head.
        logit_scale: (setting, power): the logits are the head's output times this power of this
            setting of the configuration; None if they are its output.
        counts_in_config: whether attention splits q, k and v by the head counts in its
            configuration; a layer with fewer heads then needs a configuration of its own.
        kinds: what registered kinds of units need to know of the family, by their names.
        saved_names: (part of a name in the file, part in the model) of weights that transformers
            saves under another name than the module has.
    """

    model_types: tuple[str, ...]
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    stacked: tuple[Kind, ...] = ("attention", "ffn")
    attention: str = "self_attn"
    ffn: str | tuple[str, ...] = "mlp"
    attention_output: str = "o_proj"
    ffn_output: str = "down_proj"
    decoder: str = "model"
    layers: str = "layers"
    final: tuple[str, ...] = ("norm",)
    mixers: tuple[str, ...] = ()
    gated: bool = False
    shared: tuple[str, ...] = ()
    latent: tuple[str, ...] = ()
    per_head: tuple[str, ...] = ()
    logit_scale: tuple[str, int] | None = None
    counts_in_config: bool = False
    kinds: Mapping[Kind, Any] = field(default_factory=dict)
    saved_names: tuple[tuple[str, str], ...] = ()


FAMILIES = [
    # Llama covers Falcon3 and Yi; Mistral covers Nemo and Small (head_dim != hidden / heads).
    # Qwen3 and Gemma 3 norm queries and keys head by head, with weights that all heads share.
    Family(
        (
            "llama",
            "mistral",
            "qwen2",
            "qwen3",
            "gemma",
            "gemma2",
            "gemma3_text",
            "vaultgemma",
            "gemma4_unified_text",
            "smollm3",
            "olmo",
            "ministral",
            "ministral3",
            "seed_oss",
            "ernie4_5",
            "exaone4",
            "hunyuan_v1_dense",
            "helium",
            "cwm",
            "internlm3",
            "iquestcoder",
            "qwen2_vl_text",
            "qwen2_5_vl_text",
            "qwen3_vl_text",
        )
    ),
    Family(  # Phi-3, Phi-4
        ("phi3",), qkv=("qkv_proj",), gate_up=("gate_up_proj",), counts_in_config=True
    ),
    Family(("olmo2", "olmo3"), shared=("q_norm", "k_norm")),
    Family(("glm", "glm4"), gate_up=("gate_up_proj",)),
    Family(("nemotron", "arcee", "apertus", "jais2"), gate_up=("up_proj",), stacked=()),
    Family(("starcoder2",), gate_up=("c_fc",), stacked=(), ffn_output="c_proj"),
    Family(  # Phi-1, Phi-1.5, Phi-2
        ("phi",),
        gate_up=("fc1",),
        stacked=(),
        attention_output="dense",
        ffn_output="fc2",
        final=("final_layernorm",),
    ),
    Family(("stablelm",), shared=("q_layernorm", "k_layernorm")),
    Family(("doge",), shared=("dt_proj", "A")),  # from all values: which keys each head may see
    Family(("granite",), logit_scale=("logits_scaling", -1)),
    Family(("hyperclovax",), logit_scale=("logits_scaling", 1)),
    Family(("cohere", "cohere2"), shared=("q_norm", "k_norm"), logit_scale=("logit_scale", 1)),
    Family(  # Pythia
        ("gpt_neox",),
        qkv=("query_key_value",),
        gate_up=("dense_h_to_4h",),
        stacked=(),
        attention="attention",
        attention_output="dense",
        ffn_output="dense_4h_to_h",
        decoder="gpt_neox",
        final=("final_layer_norm",),
        saved_names=(("embed_out.", "lm_head."),),
    ),
    Family(
        ("gpt2",),
        qkv=("c_attn",),
        gate_up=("c_fc",),
        stacked=("attention",),
        attention="attn",
        attention_output="c_proj",
        ffn_output="c_proj",
        decoder="transformer",
        layers="h",
        final=("ln_f",),
    ),
    Family(
        ("opt",),
        gate_up=("fc1",),
        stacked=(),
        ffn="",
        attention_output="out_proj",
        ffn_output="fc2",
        decoder="model.decoder",
        final=("final_layer_norm", "project_out"),
    ),
    Family(("qwen3_5_text",), mixers=("linear_attn",), gated=True),
    Family(
        ("falcon_h1",),
        ffn="feed_forward",
        final=("final_layernorm",),
        mixers=("mamba",),
        logit_scale=("lm_head_multiplier", 1),
    ),
    Family(
        ("lfm2",),
        gate_up=("w1", "w3"),
        ffn="feed_forward",
        attention_output="out_proj",
        ffn_output="w2",
        final=("embedding_norm",),
        mixers=("conv",),
    ),
]
# models that read more than text, by the model_type of the whole. Their language model lies at one
# place in all of them; its family is that of its own configuration.
MULTIMODAL = (
    "gemma3",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "internvl",
    "llava",
    "llava_next",
    "mistral3",
)
LANGUAGE_MODEL = "language_model"


def register_family(*model_types: str, **names: Any) -> None:
    """Register a model family in this process, as if it were listed in this file.

    `check_equivalence` tells whether the entry is right.

    Args:
        *model_types: values of `config.model_type`.
        **names: fields of `Family` that differ from Llama's.
    """
    add_family(Family(model_types, **names))


def add_family(family: Family) -> None:
    """Add a family to those that are known; InputError if one of its model types is another's."""
    for other in FAMILIES:
        twice = set(family.model_types) & set(other.model_types)
        if twice and other != family:
            raise InputError(f"{min(twice)} is declared already, as {other}. Leave it out.")
    if family not in FAMILIES:
        FAMILIES.append(family)


def find_family(model: Any) -> Family:
    """Return the family of a Hugging Face causal language model; ArchitectureError if none fits."""
    config: Any = getattr(model, "config", None)
    model_type = getattr(config, "model_type", None)
    nested = model_type in MULTIMODAL
    name = f"{type(model).__name__} (model_type {model_type!r})"
    if nested:
        config = config.get_text_config()
        model_type = config.model_type
        name = f"the language model of {name}, {model_type!r},"
    for family in FAMILIES:
        if model_type in family.model_types and not nested:
            return family
        if model_type in family.model_types and family.decoder == "model":
            return replace(family, layers=f"{LANGUAGE_MODEL}.{family.layers}")
    if config is not None and config.get_text_config() is not config:
        raise ArchitectureError(
            f"{name} is multimodal, and where its language model lies is not declared. Use one of "
            f"{', '.join(MULTIMODAL)}."
        )
    supported = ", ".join(sorted(t for f in FAMILIES for t in f.model_types))
    raise ArchitectureError(
        f"{name} belongs to no supported family. Use one of {supported}, or declare it with "
        "cl.register_family, as cocurve_lab/models/README.md explains."
    )
