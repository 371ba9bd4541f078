"""GPT-NeoX (such as Pythia) as Phi where its residual is parallel, else as Nemotron.

Phi has one norm before attention and MLP, GPT-NeoX two on the same input: both lose their gain
and shift to the layers that read them, and Phi's norm is left plain. Nemotron stores the gains of
its norms less one.

In float32 the logits differ by less than 1e-5. In 16 bits the folded weights are rounded once
more. With random models of 2 to 8 layers, 32 to 512 wide, whose gains spread by 10 to 50 %, that
moved logits by 0.1 to 0.35 % of their standard deviation in bfloat16 and by 0.01 to 0.04 % in
float16 (root mean square; the largest by four times that), while running the source itself in
that type instead of float32 moved them by 0.5 to 1 % and 0.06 to 0.11 %. Gains less one are exact
from 0.5 up; where a tenth of the gains were smaller, logits moved by 0.06 to 0.09 % and 0.01 %.
"""

from __future__ import annotations

from typing import Any

from gqaconvert.attention.equivalents.options import carried, require, rope_parameters
from gqaconvert.attention.equivalents.rewriting import Equivalent, Rewriting
from gqaconvert.attention.equivalents.weights import fold_gain, fold_shift, per_head_rows, wide
from gqaconvert.checkpoint.tensors import CheckpointIndex, StoredTensor
from gqaconvert.kv_cache.model_config import ModelConfig

PARTS = ("q_proj", "k_proj", "v_proj")

_TOKENS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": None}
_HEADS = ("embed_out.weight", "lm_head.weight")
_IGNORED = r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"


FOLDING_NOTICE = (
    "gains and shifts of the norms were folded into q, k, v and the first MLP layer, whose 16-bit"
    " weights were thereby rounded once more (0.1 to 0.35 % of the logits' spread in bfloat16 on"
    " random models, a third of what computing in bfloat16 costs anyway)"
)
LESS_ONE_NOTICE = (
    "Nemotron stores the gains of its norms less one: exact for gains from 0.5 up, while those"
    " between 0 and 0.5 are off by up to 2^-9 in bfloat16 and 2^-12 in float16"
)


def read_gpt_neox(config: ModelConfig, index: CheckpointIndex) -> Equivalent:
    """Read a GPT-NeoX checkpoint as one of the class that equals it.

    Raises:
        UnsupportedModelError: an option that class lacks.
        CheckpointError: tensors and config contradict each other.
    """
    rewriting = Rewriting(config, index, prefix="gpt_neox", ignored=_IGNORED)
    parallel = config.get("use_parallel_residual")
    return _as_phi(config, rewriting) if parallel else _as_nemotron(config, rewriting)


def _as_phi(config: ModelConfig, rewriting: Rewriting) -> Equivalent:
    require(config, "PhiForCausalLM", is_decoder=False)
    width = config.hidden_size
    for number in range(config.num_layers):
        old, new = f"layers.{number}", f"model.layers.{number}"
        _fold_attention(rewriting, config, old, new)
        _fold_mlp(rewriting, old, new)
        rewriting.constant(
            f"{new}.input_layernorm.weight", 1.0, (width,), f"{old}.input_layernorm.weight"
        )
        rewriting.constant(
            f"{new}.input_layernorm.bias", 0.0, (width,), f"{old}.input_layernorm.bias"
        )
        rewriting.rename(f"{old}.attention.dense.weight", f"{new}.self_attn.dense.weight")
        if config.get("attention_bias"):
            rewriting.rename(f"{old}.attention.dense.bias", f"{new}.self_attn.dense.bias")
        else:
            beside = f"{old}.attention.dense.weight"
            rewriting.constant(f"{new}.self_attn.dense.bias", 0.0, (width,), beside)
        rewriting.rename_module(f"{old}.mlp.dense_4h_to_h", f"{new}.mlp.fc2")
    rewriting.rename("embed_in.weight", "model.embed_tokens.weight")
    rewriting.rename_module("final_layer_norm", "model.final_layernorm")
    head = rewriting.rename_head(_HEADS, "lm_head.weight", "embed_in.weight")
    vocabulary = rewriting.take(head).shape[0]
    rewriting.constant("lm_head.bias", 0.0, (vocabulary,), head)
    raw = _config(config, "phi", "PhiForCausalLM") | {
        "layer_norm_eps": config.get("layer_norm_eps"),
        "resid_pdrop": config.get("hidden_dropout", 0.0),
        "embd_pdrop": config.get("hidden_dropout", 0.0),
        "qk_layernorm": False,
    }
    notices = (FOLDING_NOTICE,) if rewriting.rounds else ()
    return rewriting.finish(raw, "PhiForCausalLM", notices)


def _fold_attention(rewriting: Rewriting, config: ModelConfig, old: str, new: str) -> None:
    heads, width = config.num_heads, config.hidden_size
    rows = heads * config.head_dim
    fused = rewriting.take(f"{old}.attention.query_key_value.weight", (3 * rows, width))
    gain = rewriting.take(f"{old}.input_layernorm.weight", (width,))
    shift = rewriting.take(f"{old}.input_layernorm.bias", (width,))
    bias: tuple[StoredTensor, ...] = ()
    if config.get("attention_bias"):
        bias = (rewriting.take(f"{old}.attention.query_key_value.bias", (3 * rows,)),)
    for part, name in enumerate(PARTS):

        def weight(found: Any, part: int = part) -> Any:  # noqa: ANN401
            return fold_gain(per_head_rows(found[0], part, heads), found[1])

        def folded(found: Any, part: int = part) -> Any:  # noqa: ANN401
            own = per_head_rows(found[2], part, heads) if len(found) > 2 else None
            return fold_shift(per_head_rows(found[0], part, heads), found[1], own)

        target = f"{new}.self_attn.{name}"
        rewriting.derive(f"{target}.weight", (fused, gain), weight, (rows, width))
        rewriting.derive(f"{target}.bias", (fused, shift, *bias), folded, (rows,))


def _fold_mlp(rewriting: Rewriting, old: str, new: str) -> None:
    weight = rewriting.take(f"{old}.mlp.dense_h_to_4h.weight")
    bias = rewriting.take(f"{old}.mlp.dense_h_to_4h.bias")
    gain = rewriting.take(f"{old}.post_attention_layernorm.weight")
    shift = rewriting.take(f"{old}.post_attention_layernorm.bias")
    rewriting.derive(
        f"{new}.mlp.fc1.weight", (weight, gain), lambda found: fold_gain(*found), weight.shape
    )
    rewriting.derive(
        f"{new}.mlp.fc1.bias", (weight, shift, bias), lambda found: fold_shift(*found), bias.shape
    )


def _as_nemotron(config: ModelConfig, rewriting: Rewriting) -> Equivalent:
    target = "NemotronForCausalLM"
    require(config, target, is_decoder=False)
    kinds = ("weight", "bias") if config.get("attention_bias") else ("weight",)
    for number in range(config.num_layers):
        old, new = f"layers.{number}", f"model.layers.{number}"
        for kind in kinds:
            _split_attention(
                rewriting, config, f"{old}.attention.query_key_value.{kind}", new, kind
            )
            rewriting.rename(f"{old}.attention.dense.{kind}", f"{new}.self_attn.o_proj.{kind}")
        for norm in ("input_layernorm", "post_attention_layernorm"):
            _less_one(rewriting, f"{old}.{norm}", f"{new}.{norm}")
        rewriting.rename_module(f"{old}.mlp.dense_h_to_4h", f"{new}.mlp.up_proj")
        rewriting.rename_module(f"{old}.mlp.dense_4h_to_h", f"{new}.mlp.down_proj")
    rewriting.rename("embed_in.weight", "model.embed_tokens.weight")
    _less_one(rewriting, "final_layer_norm", "model.norm")
    rewriting.rename_head(_HEADS, "lm_head.weight", "embed_in.weight")
    raw = _config(config, "nemotron", target) | {
        "norm_eps": config.get("layer_norm_eps"),
        "head_dim": config.head_dim,
        "attention_bias": config.get("attention_bias"),
        "mlp_bias": True,
    }
    notices = (LESS_ONE_NOTICE,) if rewriting.rounds else ()
    return rewriting.finish(raw, target, notices)


def _split_attention(
    rewriting: Rewriting, config: ModelConfig, fused_name: str, new: str, kind: str
) -> None:
    rows = config.num_heads * config.head_dim
    rest = (config.hidden_size,) if kind == "weight" else ()
    fused = rewriting.take(fused_name, (3 * rows, *rest))
    for part, name in enumerate(PARTS):

        def pick(found: Any, part: int = part) -> Any:  # noqa: ANN401
            return per_head_rows(found[0], part, config.num_heads)

        rewriting.derive(f"{new}.self_attn.{name}.{kind}", (fused,), pick, (rows, *rest))


def _less_one(rewriting: Rewriting, old: str, new: str) -> None:
    gain = rewriting.take(f"{old}.weight")
    rewriting.derive(f"{new}.weight", (gain,), lambda found: wide(found[0]) - 1, gain.shape)
    rewriting.rename(f"{old}.bias", f"{new}.bias")


def _config(config: ModelConfig, model_type: str, architecture: str) -> dict[str, Any]:
    raw = carried(
        config,
        model_type=model_type,
        architecture=architecture,
        tokens=_TOKENS,
        tokenizer="GPTNeoXTokenizer",
    )
    return raw | {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.get("intermediate_size"),
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "hidden_act": config.get("hidden_act"),
        "max_position_embeddings": config.get("max_position_embeddings"),
        "initializer_range": config.get("initializer_range", 0.02),
        "attention_dropout": config.get("attention_dropout", 0.0),
        "rope_parameters": rope_parameters(config),
    }
