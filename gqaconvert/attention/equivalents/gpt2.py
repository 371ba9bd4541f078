"""GPT-2 as GPT-BigCode: the same block, with transposed weights, and q, k, v head by head.

GPT-BigCode knows one KV head or all of them. Scores divided by the layer's number become smaller
queries; `reorder_and_upcast_attn` names a way of rounding and changes nothing in real numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gqaconvert.attention.equivalents.options import carried, require
from gqaconvert.attention.equivalents.rewriting import Equivalent, Rewriting
from gqaconvert.attention.equivalents.weights import Array, interleaved_heads, wide
from gqaconvert.checkpoint.tensors import CheckpointIndex
from gqaconvert.kv_cache.model_config import ModelConfig

TARGET = "GPTBigCodeForCausalLM"

_TOKENS = {"bos_token_id": 50256, "eos_token_id": 50256, "pad_token_id": None}
_IGNORED = r"h\.\d+\.attn\.(bias|masked_bias)"


def read_gpt2(config: ModelConfig, index: CheckpointIndex) -> Equivalent:
    """Read a GPT-2 checkpoint as a GPT-BigCode one.

    Raises:
        UnsupportedModelError: an option GPT-BigCode lacks.
        CheckpointError: tensors and config contradict each other.
    """
    require(config, TARGET, add_cross_attention=False)
    rewriting = Rewriting(config, index, prefix="transformer", ignored=_IGNORED)
    for number in range(config.num_layers):
        old, new = f"h.{number}", f"transformer.h.{number}"
        _attention(rewriting, config, number)
        for name in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            weight = rewriting.take(f"{old}.{name}.weight")
            rewriting.derive(
                f"{new}.{name}.weight", (weight,), lambda found: found[0].T, weight.shape[::-1]
            )
            rewriting.rename(f"{old}.{name}.bias", f"{new}.{name}.bias")
        rewriting.rename_module(f"{old}.ln_1", f"{new}.ln_1")
        rewriting.rename_module(f"{old}.ln_2", f"{new}.ln_2")
    for name in ("wte", "wpe"):
        rewriting.rename(f"{name}.weight", f"transformer.{name}.weight")
    rewriting.rename_module("ln_f", "transformer.ln_f")
    rewriting.rename_head(("lm_head.weight",), "lm_head.weight", "wte.weight")
    raw = carried(
        config,
        model_type="gpt_bigcode",
        architecture=TARGET,
        tokens=_TOKENS,
        tokenizer="GPT2Tokenizer",
    )
    return rewriting.finish(raw | _shape(config), TARGET)


def _attention(rewriting: Rewriting, config: ModelConfig, number: int) -> None:
    heads, width = config.num_heads, config.hidden_size
    divisor = number + 1 if config.get("scale_attn_by_inverse_layer_idx") else 1

    def join(columns: Array) -> Array:
        query, key, value = np.split(columns, 3)
        return interleaved_heads(
            query if divisor == 1 else wide(query) / divisor, key, value, heads
        )

    old, new = f"h.{number}.attn.c_attn", f"transformer.h.{number}.attn.c_attn"
    weight = rewriting.take(f"{old}.weight", (width, 3 * width))
    bias = rewriting.take(f"{old}.bias", (3 * width,))
    rewriting.derive(f"{new}.weight", (weight,), lambda found: join(found[0].T), (3 * width, width))
    rewriting.derive(f"{new}.bias", (bias,), lambda found: join(found[0]), (3 * width,))


def _shape(config: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": config.hidden_size,
        "n_inner": config.get("n_inner"),
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_positions": config.get("n_positions"),
        "activation_function": config.get("activation_function"),
        "layer_norm_epsilon": config.get("layer_norm_epsilon"),
        "initializer_range": config.get("initializer_range", 0.02),
        "attn_pdrop": config.get("attn_pdrop", 0.1),
        "resid_pdrop": config.get("resid_pdrop", 0.1),
        "embd_pdrop": config.get("embd_pdrop", 0.1),
        "scale_attn_weights": config.get("scale_attn_weights"),
        "multi_query": False,
    }
