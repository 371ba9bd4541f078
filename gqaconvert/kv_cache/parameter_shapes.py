"""What a layer of each class consists of, as far as its number of parameters goes.

Only classes whose count a test has compared with the built model are listed: all others are said
to be not counted, rather than counted wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts in place of a feed-forward block.

    Attributes:
        count: key of their number.
        width: key of their intermediate size.
        used: key of how many a token passes.
        router_bias: the router adds a bias, or keeps a correction.
        dense_before: key of how many first layers have no experts.
        sparse_step: they sit in every so-manieth layer, `mlp_only_layers` excepted (Qwen).
        shared_count: key of the number of shared experts, each as wide as the others.
        shared_width: key of the width of one shared expert.
        shared_gate: a gate of one row decides about the shared expert.
        biases: the experts' projections add biases.
    """

    count: str
    width: str
    used: str = "num_experts_per_tok"
    router_bias: bool = False
    dense_before: str | None = None
    sparse_step: bool = False
    shared_count: str | None = None
    shared_width: str | None = None
    shared_gate: bool = False
    biases: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """One class.

    Attributes:
        biases: which of q, k, v, o have one: always, or when the key in front of ":" is set, as
            "qkv", "attention_bias:qkvo".
        gated: the feed-forward block has three matrices, not two.
        mlp_bias: True, False, or the key that says so.
        width: key of the intermediate size; four times the hidden size where that is null.
        norms: norms a layer.
        norm_rows: parameters of a norm a channel: 1, 2 with a bias, 0 without any.
        final_norm: there is one after the last layer.
        qk_norm: "head" (over each head), "width" (over all heads), "heads" (a row each), or none.
        qk_norm_if: key that switches it on.
        qk_norm_rows: parameters of that norm a channel.
        positions: key of the number of learned positions.
        positions_offset: rows of that table which are not positions.
        embedding_norm: a norm after the embeddings.
        head_bias: the output head adds a bias; True, or the key that says so.
        sinks: a learned sink for each query head.
        experts: in place of the feed-forward block.
    """

    biases: str = ""
    gated: bool = True
    mlp_bias: bool | str = False
    width: str = "intermediate_size"
    norms: int = 2
    norm_rows: int = 1
    final_norm: bool = True
    qk_norm: str = ""
    qk_norm_if: str | None = None
    qk_norm_rows: int = 1
    positions: str | None = None
    positions_offset: int = 0
    embedding_norm: bool = False
    head_bias: bool | str = False
    sinks: bool = False
    experts: Experts | None = None


_LLAMA = Shape("attention_bias:qkvo", mlp_bias="mlp_bias")
_PLAIN = Shape("attention_bias:qkvo")
_NO_BIAS = Shape()
_QWEN2 = Shape("qkv")
_QWEN3 = Shape("attention_bias:qkvo", qk_norm="head")
_GPT2 = Shape(
    "qkvo", gated=False, mlp_bias=True, width="n_inner", norm_rows=2, positions="n_positions"
)
_GPT_NEOX = Shape("attention_bias:qkvo", gated=False, mlp_bias=True, norm_rows=2)
_OLMO2 = Shape("attention_bias:qkvo", qk_norm="width")
_EXPERTS = Experts("num_local_experts", "intermediate_size")
_QWEN_EXPERTS = Experts("num_experts", "moe_intermediate_size", sparse_step=True)
_DEEPSEEK_EXPERTS = Experts(
    "n_routed_experts",
    "moe_intermediate_size",
    dense_before="first_k_dense_replace",
    shared_count="n_shared_experts",
)

SHAPES: Mapping[str, Shape] = {
    "llama": _LLAMA,
    "arcee": replace(_LLAMA, gated=False),
    "cohere": replace(_PLAIN, norms=1, qk_norm="heads", qk_norm_if="use_qk_norm"),
    "cohere2": replace(_PLAIN, norms=1),
    "cwm": _NO_BIAS,
    "ernie4_5": Shape("use_bias:qkvo", mlp_bias="use_bias"),
    "exaone": _NO_BIAS,
    "exaone4": Shape(qk_norm="head"),
    "gemma": _PLAIN,
    "gemma2": replace(_PLAIN, norms=4),
    "gemma3_text": replace(_QWEN3, norms=4),
    "glm": Shape("attention_bias:qkv"),
    "glm4": Shape("attention_bias:qkv", norms=4),
    "granite": _LLAMA,
    "helium": Shape("attention_bias:qkv", mlp_bias="mlp_bias"),
    "hunyuan_v1_dense": _QWEN3,
    "internlm3": Shape("attention_bias:qkvo"),
    "jais2": Shape("attention_bias:qkvo", gated=False, mlp_bias="mlp_bias", norm_rows=2),
    "ministral": _NO_BIAS,
    "ministral3": _NO_BIAS,
    "mistral": _NO_BIAS,
    "nanochat": Shape("attention_bias:qkvo", gated=False, norm_rows=0),
    "nemotron": Shape("attention_bias:qkvo", gated=False, mlp_bias="mlp_bias", norm_rows=2),
    "olmo": replace(_PLAIN, norm_rows=0),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "phi": Shape(
        "qkvo", gated=False, mlp_bias=True, norms=1, norm_rows=2, head_bias=True,
        qk_norm="head", qk_norm_if="qk_layernorm", qk_norm_rows=2,
    ),
    "phi3": _NO_BIAS,
    "qwen2": _QWEN2,
    "qwen2_vl_text": _QWEN2,
    "qwen2_5_vl_text": _QWEN2,
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "seed_oss": Shape("attention_bias:qkv"),
    "smollm3": _LLAMA,
    "stablelm": Shape(
        "use_qkv_bias:qkv", norm_rows=2, qk_norm="heads", qk_norm_if="qk_layernorm"
    ),
    "starcoder2": Shape("use_bias:qkvo", gated=False, mlp_bias="use_bias", norm_rows=2),
    "vaultgemma": _PLAIN,
    "mixtral": replace(_NO_BIAS, experts=_EXPERTS),
    "phimoe": replace(_PLAIN, norm_rows=2, head_bias="lm_head_bias", experts=_EXPERTS),
    "qwen2_moe": replace(
        _QWEN2,
        experts=replace(
            _QWEN_EXPERTS, shared_width="shared_expert_intermediate_size", shared_gate=True
        ),
    ),
    "qwen3_moe": replace(_QWEN3, experts=_QWEN_EXPERTS),
    "olmoe": replace(_OLMO2, experts=Experts("num_experts", "intermediate_size")),
    "flex_olmo": replace(_OLMO2, experts=Experts("num_experts", "intermediate_size")),
    "granitemoe": replace(_PLAIN, experts=_EXPERTS),
    "gpt_oss": replace(
        _PLAIN, sinks=True, experts=replace(_EXPERTS, router_bias=True, biases=True)
    ),
    "glm4_moe": Shape(
        "attention_bias:qkv", qk_norm="head", qk_norm_if="use_qk_norm",
        experts=_DEEPSEEK_EXPERTS,
    ),
    "minimax_m2": Shape(qk_norm="width", experts=_EXPERTS),
    "deepseek_v2": replace(_PLAIN, experts=_DEEPSEEK_EXPERTS),
    "deepseek_v3": replace(_PLAIN, experts=_DEEPSEEK_EXPERTS),
    "falcon": Shape(
        "bias:qkvo", gated=False, mlp_bias="bias", width="ffn_hidden_size", norm_rows=2
    ),
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "gptj": Shape(
        gated=False, mlp_bias=True, width="n_inner", norms=1, norm_rows=2, head_bias=True
    ),
    "codegen": Shape(
        gated=False, mlp_bias=True, width="n_inner", norms=1, norm_rows=2, head_bias=True
    ),
    "gpt_neo": Shape(
        "o", gated=False, mlp_bias=True, norm_rows=2, positions="max_position_embeddings"
    ),
    "opt": Shape(
        "enable_bias:qkvo", gated=False, mlp_bias="enable_bias", width="ffn_dim", norm_rows=2,
        positions="max_position_embeddings", positions_offset=2,
    ),
    "bloom": Shape("qkvo", gated=False, mlp_bias=True, norm_rows=2, embedding_norm=True, width=""),
    "mpt": Shape(gated=False, width=""),
    "persimmon": Shape(
        "qkvo", gated=False, mlp_bias=True, norm_rows=2, qk_norm="head",
        qk_norm_if="qk_layernorm", qk_norm_rows=2,
    ),
    "biogpt": Shape(
        "qkvo", gated=False, mlp_bias=True, norm_rows=2, positions="max_position_embeddings",
        positions_offset=2,
    ),
}  # fmt: skip
"""Model type of the language model → what it consists of."""
