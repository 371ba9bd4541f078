"""How many parameters a model has, from its config alone.

For classes in `parameter_shapes`; towers beside the language model (vision, audio) are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from gqaconvert.kv_cache.layer_attention import LayerAttention
from gqaconvert.kv_cache.model_config import ModelConfig
from gqaconvert.kv_cache.parameter_shapes import SHAPES, Experts, Shape


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a language model.

    Attributes:
        total: all.
        active: of these, those that one token passes; less than all where there are experts.
        matrices: of all, those in matrices of layers: what is quantised. Embeddings, output head,
            norms and biases are not.
    """

    total: int
    active: int
    matrices: int


def count_parameters(config: ModelConfig) -> Parameters | None:
    """Count the parameters of a model; None where its class is not covered."""
    shape = SHAPES.get(config.text_model_type)
    vocabulary = config.vocab_size
    if shape is None or vocabulary is None or config.is_encoder_decoder:
        return None
    if _has_oddities(config):
        return None
    hidden = config.hidden_size
    matrices = idle = rest = 0
    for number, layer in enumerate(config.layers):
        if layer.kind in ("linear", "none", "compressed") or layer.shared:
            return None
        attention, attention_rest = _attention(config, layer, shape)
        block, block_rest, block_idle = _feed_forward(config, number, shape)
        matrices += attention + block
        rest += attention_rest + block_rest + _norms(config, shape) * hidden * shape.norm_rows
        idle += block_idle
    rest += vocabulary * hidden * (1 if config.tie_word_embeddings else 2)
    rest += vocabulary * _switched(config, shape.head_bias)
    rest += (shape.final_norm + shape.embedding_norm) * hidden * shape.norm_rows
    if shape.positions:
        rest += (config.get(shape.positions) + shape.positions_offset) * hidden
    return Parameters(matrices + rest, matrices + rest - idle, matrices)


def kv_projection_parameters(config: ModelConfig, kv_heads: int) -> int:
    """Return the weights of all key and value projections when there are so many KV heads."""
    if config.kv_lora_rank:
        return 0
    return sum(
        config.hidden_size
        * (layer.num_kv_heads * kv_heads // config.num_kv_heads)
        * (layer.head_dim + layer.v_head_dim)
        for layer in config.layers
        if layer.num_kv_heads and not layer.shared
    )


def attention_parameters(config: ModelConfig) -> int | None:
    """Count the parameters of all attention blocks, biases and norms of q and k included.

    None where the class is not covered.
    """
    shape = SHAPES.get(config.text_model_type)
    if shape is None:
        return None
    return sum(sum(_attention(config, layer, shape)) for layer in config.layers)


def intermediate_width(config: ModelConfig) -> int | None:
    """Return the width inside the feed-forward blocks that one token passes, all experts together.

    None where the class is not covered.
    """
    shape = SHAPES.get(config.text_model_type)
    if shape is None:
        return None
    if shape.experts is None:
        return _width(config, shape)
    used, width = config.get(shape.experts.used), config.get(shape.experts.width)
    return None if used is None or width is None else used * width


def _has_oddities(config: ModelConfig) -> bool:
    """Options that add or drop parameters in ways no shape speaks of."""
    projected = config.get("word_embed_proj_dim")
    return (
        (projected is not None and projected != config.hidden_size)
        or config.get("layer_norm_elementwise_affine") is False
        or config.get("do_layer_norm_before") is False
        or config.get("_remove_final_layer_norm") is True
        or config.get("no_bias") is False
        or config.get("cross_attention_layers") is not None
        or config.get("add_cross_attention") is True
    )


def _attention(config: ModelConfig, layer: LayerAttention, shape: Shape) -> tuple[int, int]:
    if config.kv_lora_rank:
        return _latent_attention(config, layer)
    heads, kv_heads = config.num_heads, layer.num_kv_heads
    rows = {
        "q": heads * layer.head_dim,
        "k": kv_heads * layer.head_dim,
        "v": kv_heads * layer.v_head_dim,
        "o": heads * layer.v_head_dim,
    }
    switch, _, parts = shape.biases.rpartition(":")
    rest = 0
    if not switch or config.get(switch):
        rest += sum(config.hidden_size if part == "o" else rows[part] for part in parts)
    if shape.qk_norm and (shape.qk_norm_if is None or config.get(shape.qk_norm_if)):
        width = {
            "head": 2 * layer.head_dim,
            "heads": rows["q"] + rows["k"],
            "width": rows["q"] + rows["k"],
        }[shape.qk_norm]
        rest += width * shape.qk_norm_rows
    return sum(rows.values()) * config.hidden_size, rest + shape.sinks * heads


def _latent_attention(config: ModelConfig, layer: LayerAttention) -> tuple[int, int]:
    """Multi-head latent attention: keys and values come from a latent, queries may, too."""
    heads, hidden, latent = config.num_heads, config.hidden_size, config.kv_lora_rank or 0
    rotary, query_latent = config.qk_rope_head_dim or 0, config.get("q_lora_rank")
    query = heads * layer.head_dim
    matrices = (query_latent * (hidden + query)) if query_latent else hidden * query
    matrices += hidden * (latent + rotary) + heads * layer.v_head_dim * hidden
    matrices += latent * heads * (layer.head_dim - rotary + layer.v_head_dim)
    rest = latent + (query_latent or 0)
    if config.get("attention_bias"):
        rest += (query_latent or 0) + latent + rotary + hidden
    return matrices, rest


def _feed_forward(config: ModelConfig, number: int, shape: Shape) -> tuple[int, int, int]:
    """Return the parameters of its matrices, those beside them, and those a token does not pass."""
    hidden, experts = config.hidden_size, shape.experts
    if experts is None or not _is_sparse(config, number, experts):
        width = _width(config, shape)
        rest = ((2 if shape.gated else 1) * width + hidden) * _switched(config, shape.mlp_bias)
        return (3 if shape.gated else 2) * hidden * width, rest, 0
    count, used = config.get(experts.count), config.get(experts.used)
    one = 3 * hidden * config.get(experts.width)
    one_bias = (2 * config.get(experts.width) + hidden) * experts.biases
    shared = 0
    if experts.shared_width:
        shared = 3 * hidden * config.get(experts.shared_width)
    elif experts.shared_count:
        shared = one * (config.get(experts.shared_count) or 0)
    router = count * hidden + experts.router_bias * count + experts.shared_gate * hidden
    return count * one + shared, router + count * one_bias, (count - used) * (one + one_bias)


def _is_sparse(config: ModelConfig, number: int, experts: Experts) -> bool:
    if experts.dense_before:
        return number >= (config.get(experts.dense_before) or 0)
    if experts.sparse_step:
        step = config.get("decoder_sparse_step") or 1
        return number not in (config.get("mlp_only_layers") or ()) and (number + 1) % step == 0
    return True


def _width(config: ModelConfig, shape: Shape) -> int:
    return config.get(shape.width) or 4 * config.hidden_size


def _norms(config: ModelConfig, shape: Shape) -> int:
    if config.text_model_type == "falcon":
        # The new layout has two where attention and feed-forward block run side by side, as has
        # one that runs them in turn; the old one shares one.
        if config.get("new_decoder_architecture"):
            return 1 if config.get("num_ln_in_parallel_attn") == 1 else 2
        return 1 if config.get("parallel_attn") else 2
    if config.text_model_type == "stablelm":
        return 1 if config.get("use_parallel_residual") else 2
    return shape.norms


def _switched(config: ModelConfig, switch: bool | str) -> bool:
    return switch if isinstance(switch, bool) else bool(config.get(switch))
