"""Declarations: the kinds of removable units, and where each model family keeps its projections.

A new kind of unit is one more entry of `UNIT_KINDS`. The lab never copies a model's forward. A
family therefore says only where the projections are, and which rows of a fused one belong together.
The order of residual and norms is not declared, because each layer runs its own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

from ..base.errors import ArchitectureError, InputError

Kind = Literal["attention", "ffn", "expert"]


class RowBlock(NamedTuple):
    """Rows `start:stop` of one input projection (named as in its block) that belong to a unit."""

    projection: str
    start: int
    stop: int


@dataclass(frozen=True)
class UnitKind:
    """One kind of unit: all that the lab knows about it.

    Attributes:
        label: its name for readers, and `plural` that of several units.
        block, output, inputs: the fields of `Family` with the attribute names of its block in a
            layer, of the output projection (W_O or W_down), and of the input projections.
        step: (architecture, layer) -> smallest number of columns that can be cut.
        rows: (architecture, layer, start, stop) -> rows of the input projections that feed the
            columns `start:stop` of the output projection.
        grouped: whether a unit is one of `ffn_groups` contiguous groups of columns; otherwise it is
            one step.
        normed: whether the weights of `Family.shared` go with the unit.
        feeds: the later kinds of the same layer that read its output.
        routed: whether a router chooses among the units. They have no columns then: `start:stop` of
            a unit is its place among the experts (experts.py).
    """

    label: str
    plural: str
    block: str
    output: str
    inputs: str
    step: Callable[[Any, int], int]
    rows: Callable[[Any, int, int, int], list[RowBlock]]
    grouped: bool = False
    normed: bool = False
    feeds: tuple[Kind, ...] = ()
    routed: bool = False


def _attention_step(architecture: Any, layer: int) -> int:
    if architecture.shared(layer, "attention"):
        # removing one head would change the others, so all go together; pruning may have taken
        # them already, and a step is at least 1
        return max(1, architecture.width(layer, "attention"))
    return int(architecture.head_dim(layer) * architecture.queries_per_group(layer))


def _attention_rows(architecture: Any, layer: int, start: int, stop: int) -> list[RowBlock]:
    # r query heads read one key/value head, so keys and values have 1/r of the queries' rows
    ratio = architecture.queries_per_group(layer)
    names = architecture.input_projections(layer, "attention")
    if architecture.family.latent:  # each head has its share of every projection's rows
        rows = {name: architecture.projection(layer, "attention", name) for name in names}
        share = {n: part.out_features // architecture.num_groups(layer) for n, part in rows.items()}
        heads = [at // architecture.head_dim(layer) for at in (start, stop)]
        return [RowBlock(name, heads[0] * n, heads[1] * n) for name, n in share.items()]
    key_value = start // ratio, stop // ratio
    if len(names) == 1 and "attention" in architecture.family.stacked:  # all q, then all k, v
        width = architecture.width(layer, "attention")
        return _stacked(names[0], width, (start, stop), key_value, key_value, ratio=ratio)
    if len(names) == 1:  # q, k, v of one head, then of the next; such families are MHA
        return [RowBlock(names[0], 3 * start, 3 * stop)]
    query, *others = names  # key and value, or one projection that is both
    own = 1 + architecture.family.gated
    return [
        RowBlock(query, own * start, own * stop),
        *(RowBlock(name, *key_value) for name in others),
    ]


def _ffn_rows(architecture: Any, layer: int, start: int, stop: int) -> list[RowBlock]:
    names = architecture.family.gate_up
    if len(names) == 1 and "ffn" in architecture.family.stacked:  # all gate rows, then all up rows
        return _stacked(names[0], architecture.width(layer, "ffn"), (start, stop), (start, stop))
    # gate and up apart, or no gate: row i belongs to channel i
    return [RowBlock(name, start, stop) for name in names]


def _stacked(
    name: str, width: int, first: tuple[int, int], *rest: tuple[int, int], ratio: int = 1
) -> list[RowBlock]:
    """Blocks of a fused projection: a first part of `width` rows, then parts of `width / ratio`."""
    blocks, offset = [RowBlock(name, *first)], width
    for start, stop in rest:
        blocks.append(RowBlock(name, offset + start, offset + stop))
        offset += width // ratio
    return blocks


UNIT_KINDS: dict[Kind, UnitKind] = {  # in the order of their blocks in a layer
    "attention": UnitKind(
        *("attention", "attention", "attention", "attention_output", "qkv"),
        *(_attention_step, _attention_rows),
        normed=True,
        feeds=("ffn", "expert"),
    ),
    "ffn": UnitKind(
        *("FFN", "FFN groups", "ffn", "ffn_output", "gate_up"),
        *(lambda *_: 1, _ffn_rows),
        grouped=True,
    ),
    "expert": UnitKind(
        *("expert", "experts", "experts", "router", "router"),
        *(lambda *_: 1, lambda *_: []),
        routed=True,
    ),
}
ALL_KINDS: tuple[Kind, ...] = tuple(UNIT_KINDS)
KINDS = tuple(kind for kind in ALL_KINDS if not UNIT_KINDS[kind].routed)  # with columns


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
        attention, ffn: attribute names of the blocks in a layer; "" if the projections lie in the
            layer itself.
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
        experts: path in a layer of the block with a router and experts. A layer that has them there
            has no FFN but `shared_expert`, the path of the one that all tokens pass; "" for none.
        router: attribute name of the router in its block. The experts are `experts`.
        saved_names: (part of a name in the file, part in the model) of weights that transformers
            saves under another name than the module has.
    """

    model_types: tuple[str, ...]
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    stacked: tuple[Kind, ...] = KINDS
    attention: str = "self_attn"
    ffn: str = "mlp"
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
    experts: str = ""
    router: str = "gate"
    shared_expert: str = ""
    saved_names: tuple[tuple[str, str], ...] = ()


_GRANITE_EXPERTS = (
    ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
    ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
    (".router.layer.weight", ".router.weight"),
)
FAMILIES = [
    # Llama covers Falcon3 and Yi; Mistral covers Nemo and Small (head_dim != hidden / heads).
    # Qwen3 and Gemma 3 norm queries and keys head by head, with weights that all heads share.
    Family(
        (
            *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "vaultgemma"),
            *("gemma4_unified_text", "smollm3", "olmo", "ministral", "ministral3", "seed_oss"),
            *("ernie4_5", "exaone4", "hunyuan_v1_dense", "helium", "cwm", "internlm3"),
            *("iquestcoder", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"),
        )
    ),
    Family(("phi3",), ("qkv_proj",), ("gate_up_proj",), counts_in_config=True),  # Phi-3, Phi-4
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
    Family(("qwen3_moe",), experts="mlp"),
    Family(("qwen2_moe",), experts="mlp", shared_expert="mlp.shared_expert"),
    Family(("mixtral",), experts="mlp", saved_names=((".block_sparse_moe.", ".mlp."),)),
    Family(("gpt_oss",), per_head=("sinks",), experts="mlp", router="router"),
    Family(
        ("granitemoe",),
        logit_scale=("logits_scaling", -1),
        experts="block_sparse_moe",
        router="router",
        saved_names=_GRANITE_EXPERTS,
    ),
    Family(
        ("deepseek_v2", "deepseek_v3"),
        ("q_proj", "q_b_proj", "kv_b_proj"),
        latent=("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"),
        experts="mlp",
        shared_expert="mlp.shared_experts",
    ),
    Family(("olmoe",), experts="mlp", shared=("q_norm", "k_norm")),
    Family(  # Pythia
        ("gpt_neox",),
        ("query_key_value",),
        ("dense_h_to_4h",),
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
        ("c_attn",),
        ("c_fc",),
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
        ("qwen3_next", "qwen3_5_moe_text"),
        mixers=("linear_attn",),
        gated=True,
        experts="mlp",
        shared_expert="mlp.shared_expert",
    ),
    Family(
        ("granitemoehybrid",),
        gate_up=("input_linear",),
        ffn="shared_mlp",
        ffn_output="output_linear",
        mixers=("mamba",),
        logit_scale=("logits_scaling", -1),
        experts="block_sparse_moe",
        router="router",
        shared_expert="shared_mlp",
        saved_names=_GRANITE_EXPERTS,
    ),
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
    """Support further models in this process, as an entry of this file would.

    `check_equivalence` tells whether the entry is right.

    Args:
        *model_types: values of `config.model_type`.
        **names: fields of `Family` that differ from Llama's.
    """
    known = [field.name for field in fields(Family)[1:]]
    wrong = [name for name in names if name not in known]
    if wrong or not model_types or not all(isinstance(name, str) for name in model_types):
        raise InputError(
            f"register_family takes model types and fields of Family, not {[*model_types, *wrong]}."
            f" Give some of {', '.join(known)}."
        )
    family = Family(model_types, **names)
    for other in FAMILIES:
        twice = set(model_types) & set(other.model_types)
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
    if any(part.rpartition(".")[2] == "experts" for part, _ in model.named_modules()):
        raise ArchitectureError(
            f"{name} is a mixture of experts of no declared family. Use one of "
            f"{', '.join(t for f in FAMILIES if f.experts for t in f.model_types)}."
        )
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
