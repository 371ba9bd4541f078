"""What training costs follow from: counts and widths of a model, from its config alone.

No torch and no weights, so that a recipe can be reckoned through before anything is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from gqaconvert.attention.specs import layout_for
from gqaconvert.kv_cache.model_config import ModelConfig
from gqaconvert.kv_cache.parameter_shapes import SHAPES, Shape
from gqaconvert.kv_cache.parameters import (
    attention_parameters,
    count_parameters,
    intermediate_width,
    kv_projection_parameters,
)

_TWO_IN_ONE = frozenset({"phi3", "glm", "glm4"})
"""Classes whose gate and up projections are one matrix."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A language model, as far as the cost of training it goes.

    Attributes:
        parameters: in all; a tied head does not count twice.
        embeddings: of the input embedding, which is the head as well when tied.
        head: of an output head of its own; 0 when tied.
        attention: of all attention blocks.
        kv: of these, in the key and value projections.
        active_matrices: elements of the layers' matrices that one token passes.
        num_layers: layers.
        hidden_size: M.
        intermediate_size: width inside a feed-forward block that one token passes.
        gated: the feed-forward block has three matrices, not two.
        num_heads: H.
        num_kv_heads: K.
        head_dim: D of queries and keys.
        v_head_dim: of values.
        vocab_size: tokens.
        norms: norms a layer over the hidden size.
        norm: "rms", "layer" (a LayerNorm with a gain and a bias), or "bare" (without either).
        qk_norm: queries and keys are normalised.
        attention_inputs: projections that read the input of an attention block: 3, or 1 when fused.
        mlp_inputs: projections that read the input of a feed-forward block.
        windows: tokens each layer looks back over, None for all.
    """

    parameters: int
    embeddings: int
    head: int
    attention: int
    kv: int
    active_matrices: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    gated: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    vocab_size: int
    norms: int
    norm: str
    qk_norm: bool
    attention_inputs: int
    mlp_inputs: int
    windows: tuple[int | None, ...]

    @property
    def layer(self) -> int:
        """Parameters of one layer, on average."""
        return (self.parameters - self.embeddings - self.head) // self.num_layers

    @property
    def head_matrix(self) -> int:
        """Elements of the matrix that makes logits, tied or not."""
        return self.vocab_size * self.hidden_size


def model_facts(config: ModelConfig, num_kv_heads: int | None = None) -> ModelFacts | None:
    """Gather the facts of a model; None where the parameters of its class cannot be counted.

    Args:
        config: of the model, or of the source it is converted from.
        num_kv_heads: KV heads after conversion; None for those of the config.
    """
    shape = SHAPES.get(config.text_model_type)
    counted = count_parameters(config)
    attention = attention_parameters(config)
    width, vocabulary = intermediate_width(config), config.vocab_size
    if shape is None or counted is None or attention is None or vocabulary is None or not width:
        return None
    if not config.num_kv_heads or not config.num_layers:
        return None
    kv_heads = num_kv_heads or config.num_kv_heads
    # Biases and norms of keys and values shrink as well: a thousandth of what these matrices do.
    kv = kv_projection_parameters(config, kv_heads)
    less = kv_projection_parameters(config, config.num_kv_heads) - kv
    layer = config.layers[0]
    embeddings = vocabulary * config.hidden_size
    idle = counted.total - counted.active
    qk_norm = bool(shape.qk_norm) and (
        shape.qk_norm_if is None or bool(config.get(shape.qk_norm_if))
    )
    return ModelFacts(
        parameters=counted.total - less,
        embeddings=embeddings,
        head=0 if config.tie_word_embeddings else embeddings,
        attention=attention - less,
        kv=kv,
        active_matrices=counted.matrices - idle - less,
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=width,
        gated=shape.gated,
        num_heads=config.num_heads,
        num_kv_heads=kv_heads,
        head_dim=layer.head_dim,
        v_head_dim=layer.v_head_dim,
        vocab_size=vocabulary,
        norms=shape.norms,
        norm=_norm(shape),
        qk_norm=qk_norm,
        attention_inputs=1 if layout_for(config.text_model_type).fused else 3,
        mlp_inputs=1 if config.text_model_type in _TWO_IN_ONE or not shape.gated else 2,
        windows=tuple(each.window for each in config.layers),
    )


def _norm(shape: Shape) -> str:
    return {0: "bare", 1: "rms", 2: "layer"}[shape.norm_rows]
