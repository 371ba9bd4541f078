"""OPT (and Galactica) as GPT-BigCode: the same block, and a position table without two rows.

GPT-BigCode knows one KV head or all of them. OPT-350m, with norms behind and narrow embeddings,
has no such equal.
"""

from __future__ import annotations

from gqaconvert.attention.equivalents.gpt2 import TARGET
from gqaconvert.attention.equivalents.options import carried, require
from gqaconvert.attention.equivalents.rewriting import Equivalent, Rewriting
from gqaconvert.attention.equivalents.weights import interleaved_heads
from gqaconvert.checkpoint.tensors import CheckpointIndex
from gqaconvert.kv_cache.model_config import ModelConfig

_TOKENS = {"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1}
_POSITION_OFFSET = 2
"""Rows at the start of OPT's position table that no token reads."""

_NORM_EPSILON = 1e-5
"""OPT has no option for it and takes torch's default."""

PADDING_NOTICE = (
    "OPT counts positions from the attention mask, GPT-BigCode takes position_ids: `generate`"
    " passes them, but a direct call on text padded on the left must do so, too"
)


def read_opt(config: ModelConfig, index: CheckpointIndex) -> Equivalent:
    """Read an OPT checkpoint as a GPT-BigCode one.

    Raises:
        UnsupportedModelError: an option GPT-BigCode lacks.
        CheckpointError: tensors and config contradict each other.
    """
    width = config.hidden_size
    require(config, TARGET, do_layer_norm_before=True, _remove_final_layer_norm=False)
    if config.get("word_embed_proj_dim") is not None:
        require(config, TARGET, word_embed_proj_dim=width)
    # Tensors that the options switch off are ignored by OPT's class even where a file holds them.
    unused = [r"version"]
    if not config.get("enable_bias"):
        unused.append(r"layers\.\d+\.(self_attn\.(q|k|v|out)_proj|fc1|fc2)\.bias")
    if not config.get("layer_norm_elementwise_affine"):
        unused.append(
            r"(layers\.\d+\.(self_attn|final)_layer_norm|final_layer_norm)\.(weight|bias)"
        )
    rewriting = Rewriting(config, index, prefix="model.decoder", ignored="|".join(unused))
    for number in range(config.num_layers):
        old, new = f"layers.{number}", f"transformer.h.{number}"
        _attention(rewriting, config, f"{old}.self_attn", f"{new}.attn.c_attn")
        _linear(rewriting, config, f"{old}.self_attn.out_proj", f"{new}.attn.c_proj")
        _linear(rewriting, config, f"{old}.fc1", f"{new}.mlp.c_fc")
        _linear(rewriting, config, f"{old}.fc2", f"{new}.mlp.c_proj")
        _norm(rewriting, config, f"{old}.self_attn_layer_norm", f"{new}.ln_1")
        _norm(rewriting, config, f"{old}.final_layer_norm", f"{new}.ln_2")
    rewriting.rename("embed_tokens.weight", "transformer.wte.weight")
    rewriting.rename_rows("embed_positions.weight", "transformer.wpe.weight", _POSITION_OFFSET)
    _norm(rewriting, config, "final_layer_norm", "transformer.ln_f")
    rewriting.rename_head(("lm_head.weight",), "lm_head.weight", "embed_tokens.weight")
    raw = carried(
        config,
        model_type="gpt_bigcode",
        architecture=TARGET,
        tokens=_TOKENS,
        tokenizer="GPT2Tokenizer",
    ) | {
        "n_embd": width,
        "n_inner": config.get("ffn_dim"),
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_positions": config.get("max_position_embeddings"),
        "activation_function": config.get("activation_function"),
        "layer_norm_epsilon": _NORM_EPSILON,
        "initializer_range": config.get("init_std", 0.02),
        "attn_pdrop": config.get("attention_dropout", 0.0),
        "resid_pdrop": config.get("dropout", 0.1),
        "embd_pdrop": 0.0,
        "multi_query": False,
    }
    return rewriting.finish(raw, TARGET, (PADDING_NOTICE,))


def _attention(rewriting: Rewriting, config: ModelConfig, old: str, new: str) -> None:
    heads, width = config.num_heads, config.hidden_size
    kinds = {"weight": (width, width), "bias": (width,)}
    for kind, shape in kinds.items():
        target = (3 * width, *shape[1:])
        if kind == "bias" and not config.get("enable_bias"):
            rewriting.constant(f"{new}.bias", 0.0, target, f"{old}.q_proj.weight")
            continue
        parts = [rewriting.take(f"{old}.{part}_proj.{kind}", shape) for part in "qkv"]
        rewriting.derive(
            f"{new}.{kind}",
            parts,
            lambda found: interleaved_heads(found[0], found[1], found[2], heads),
            target,
        )


def _linear(rewriting: Rewriting, config: ModelConfig, old: str, new: str) -> None:
    rewriting.rename(f"{old}.weight", f"{new}.weight")
    if config.get("enable_bias"):
        rewriting.rename(f"{old}.bias", f"{new}.bias")
    else:
        rows = rewriting.take(f"{old}.weight").shape[0]
        rewriting.constant(f"{new}.bias", 0.0, (rows,), f"{old}.weight")


def _norm(rewriting: Rewriting, config: ModelConfig, old: str, new: str) -> None:
    if config.get("layer_norm_elementwise_affine"):
        rewriting.rename_module(old, new)
        return
    for kind, value in (("weight", 1.0), ("bias", 0.0)):
        shape = (config.hidden_size,)
        rewriting.constant(f"{new}.{kind}", value, shape, "embed_tokens.weight")
