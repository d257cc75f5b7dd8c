"""The families of mixtures of experts; see `models/families.py` for the fields."""

from __future__ import annotations

from typing import Any

from ...models.families import Family
from .kind import Routed

_PLAIN: dict[str, Any] = {"expert": Routed()}
_SHARED: dict[str, Any] = {"expert": Routed(beside=("shared_expert", "shared_expert_gate"))}
_GRANITE: dict[str, Any] = {"expert": Routed(block="block_sparse_moe", router="router")}
_GRANITE_NAMES = (
    ("block_sparse_moe.input_linear.weight", "block_sparse_moe.experts.gate_up_proj"),
    ("block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"),
    (".router.layer.weight", ".router.weight"),
)
MIXTURES = (
    Family(("qwen3_moe",), kinds=_PLAIN),
    Family(("qwen2_moe",), ffn=("mlp", "mlp.shared_expert"), kinds=_SHARED),
    Family(("mixtral",), kinds=_PLAIN, saved_names=((".block_sparse_moe.", ".mlp."),)),
    Family(("gpt_oss",), per_head=("sinks",), kinds={"expert": Routed(router="router")}),
    Family(
        ("granitemoe",),
        logit_scale=("logits_scaling", -1),
        kinds=_GRANITE,
        saved_names=_GRANITE_NAMES,
    ),
    Family(
        ("deepseek_v2", "deepseek_v3"),
        qkv=("q_proj", "q_b_proj", "kv_b_proj"),
        latent=("q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"),
        ffn=("mlp", "mlp.shared_experts"),
        kinds={"expert": Routed(beside=("shared_experts",))},
    ),
    Family(("olmoe",), kinds=_PLAIN, shared=("q_norm", "k_norm")),
    Family(
        ("qwen3_next", "qwen3_5_moe_text"),
        ffn=("mlp", "mlp.shared_expert"),
        mixers=("linear_attn",),
        gated=True,
        kinds=_SHARED,
    ),
    Family(  # Granite 4, also without experts
        ("granitemoehybrid",),
        gate_up=("input_linear",),
        ffn="shared_mlp",
        ffn_output="output_linear",
        mixers=("mamba",),
        logit_scale=("logits_scaling", -1),
        kinds=_GRANITE,
        saved_names=_GRANITE_NAMES,
    ),
)
