"""GPT-J and CodeGen as Phi: the same block, with RoPE on neighbouring dimensions, fewer biases.

The rows of q and k are put into the order in which Phi turns them; all else keeps its values, so
nothing is rounded.
"""

from __future__ import annotations

import math
from typing import Any

from gqaconvert.attention.equivalents.options import carried
from gqaconvert.attention.equivalents.rewriting import Equivalent, Rewriting
from gqaconvert.attention.equivalents.weights import Array, halves_from_pairs
from gqaconvert.checkpoint.tensors import CheckpointIndex
from gqaconvert.errors import UnsupportedModelError
from gqaconvert.kv_cache.model_config import ModelConfig

_TARGET = "PhiForCausalLM"
_TOKENS = {"bos_token_id": 50256, "eos_token_id": 50256, "pad_token_id": None}
_IGNORED = r"h\.\d+\.attn\.(bias|masked_bias|causal_mask)"

_CODEGEN_SHARDS = 4
"""CodeGen's fused projection is interleaved across as many shards (`mp_num` in its class)."""


def read_gptj(config: ModelConfig, index: CheckpointIndex) -> Equivalent:
    """Read a GPT-J checkpoint as a Phi one.

    Raises:
        UnsupportedModelError: an option Phi lacks.
        CheckpointError: tensors and config contradict each other.
    """
    rewriting = Rewriting(config, index, prefix="transformer", ignored=_IGNORED)
    heads, width, rotary = config.num_heads, config.hidden_size, _rotary_dim(config)
    for number in range(config.num_layers):
        old, new = f"h.{number}.attn", f"model.layers.{number}.self_attn"
        for name in ("q_proj", "k_proj"):
            weight = rewriting.take(f"{old}.{name}.weight", (width, width))
            rewriting.derive(
                f"{new}.{name}.weight",
                (weight,),
                lambda found: halves_from_pairs(found[0], heads, rotary),
                (width, width),
            )
        rewriting.rename(f"{old}.v_proj.weight", f"{new}.v_proj.weight")
    return _finish(config, rewriting, rotary)


def read_codegen(config: ModelConfig, index: CheckpointIndex) -> Equivalent:
    """Read a CodeGen checkpoint as a Phi one.

    Raises:
        UnsupportedModelError: an option Phi lacks.
        CheckpointError: tensors and config contradict each other.
    """
    rewriting = Rewriting(config, index, prefix="transformer", ignored=_IGNORED)
    heads, width, rotary = config.num_heads, config.hidden_size, _rotary_dim(config)
    if width % _CODEGEN_SHARDS:
        raise UnsupportedModelError(
            f"{width} dimensions do not divide by the {_CODEGEN_SHARDS} shards of CodeGen's layout",
            at=config.at,
        )
    for number in range(config.num_layers):
        old, new = f"h.{number}.attn", f"model.layers.{number}.self_attn"
        fused = rewriting.take(f"{old}.qkv_proj.weight", (3 * width, width))
        for part, name in enumerate(("q_proj", "v_proj", "k_proj")):

            def pick(found: Any, part: int = part, name: str = name) -> Any:  # noqa: ANN401
                rows = _shard_rows(found[0], part)
                return rows if name == "v_proj" else halves_from_pairs(rows, heads, rotary)

            rewriting.derive(f"{new}.{name}.weight", (fused,), pick, (width, width))
    return _finish(config, rewriting, rotary)


def _shard_rows(fused: Array, part: int) -> Array:
    width = fused.shape[1]
    return fused.reshape(_CODEGEN_SHARDS, 3, -1, width)[:, part].reshape(-1, width)


def _rotary_dim(config: ModelConfig) -> int:
    rotary = config.get("rotary_dim")
    if not isinstance(rotary, int) or rotary % 2 or not 0 < rotary <= config.head_dim:
        raise UnsupportedModelError(
            f"rotary_dim={rotary!r} is no even number up to head_dim={config.head_dim}",
            at=f"{config.at} rotary_dim",
        )
    return rotary


def _finish(config: ModelConfig, rewriting: Rewriting, rotary: int) -> Equivalent:
    width = config.hidden_size
    for number in range(config.num_layers):
        old, new = f"h.{number}", f"model.layers.{number}"
        beside = f"{old}.attn.out_proj.weight"
        rewriting.rename(beside, f"{new}.self_attn.dense.weight")
        for name in ("q_proj", "k_proj", "v_proj", "dense"):
            rewriting.constant(f"{new}.self_attn.{name}.bias", 0.0, (width,), beside)
        rewriting.rename_module(f"{old}.ln_1", f"{new}.input_layernorm")
        rewriting.rename_module(f"{old}.mlp.fc_in", f"{new}.mlp.fc1")
        rewriting.rename_module(f"{old}.mlp.fc_out", f"{new}.mlp.fc2")
    rewriting.rename("wte.weight", "model.embed_tokens.weight")
    rewriting.rename_module("ln_f", "model.final_layernorm")
    rewriting.rename_head(("lm_head.weight",), "lm_head.weight", "wte.weight")
    rewriting.rename("lm_head.bias", "lm_head.bias")
    raw = carried(
        config, model_type="phi", architecture=_TARGET, tokens=_TOKENS, tokenizer="GPT2Tokenizer"
    ) | {
        "hidden_size": width,
        "intermediate_size": config.get("n_inner") or 4 * width,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "hidden_act": config.get("activation_function"),
        "max_position_embeddings": config.get("n_positions"),
        "initializer_range": config.get("initializer_range", 0.02),
        "layer_norm_eps": config.get("layer_norm_epsilon"),
        "attention_dropout": config.get("attn_pdrop", 0.0),
        "resid_pdrop": config.get("resid_pdrop", 0.0),
        "embd_pdrop": config.get("embd_pdrop", 0.0),
        "qk_layernorm": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": _factor(rotary, config.head_dim),
        },
    }
    return rewriting.finish(raw, _TARGET)


def _factor(rotary: int, head_dim: int) -> float:
    # Phi takes int(head_dim * factor) dimensions, which must not fall below the number meant.
    factor = rotary / head_dim
    return factor if int(head_dim * factor) == rotary else math.nextafter(factor, 1.0)
