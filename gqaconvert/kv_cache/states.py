"""States of constant size: what Mamba, linear attention and short convolutions keep of a request.

They do not grow with the context. Their widths are spelled differently in every class, so each
family is tried in turn; a class that fits none is said to be not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from gqaconvert.kv_cache.element_types import StorageType
from gqaconvert.kv_cache.layer_attention import LayerAttention
from gqaconvert.kv_cache.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class ConstantState:
    """Elements that all layers of one request keep.

    Attributes:
        convolution: of the last inputs of short convolutions.
        recurrent: of the states proper.
    """

    convolution: int
    recurrent: int

    @property
    def elements(self) -> int:
        """Both together."""
        return self.convolution + self.recurrent

    def size_bytes(self, kind: StorageType) -> int:
        """Return their bytes: inputs in the type of the weights, recurrent states in fp32."""
        return kind.size_bytes(self.convolution) + 4 * self.recurrent


def constant_state(config: ModelConfig) -> ConstantState | None:
    """Return what layers with a constant state keep, None when the config does not tell."""
    convolution = recurrent = 0
    for layer in config.layers:
        if not layer.constant_state:
            continue
        found = _of_layer(config, layer)
        if found is None:
            return None
        convolution += found[0]
        recurrent += found[1]
    return ConstantState(convolution, recurrent)


def _of_layer(config: ModelConfig, layer: LayerAttention) -> tuple[int, int] | None:
    if layer.type_name == "conv":
        width = _first(config, "conv_L_cache")
        return None if width is None else (config.hidden_size * width, 0)
    for family in (_delta_rule, _kimi, _mamba2, _lightning, _mamba1):
        found = family(config)
        if found is not None:
            return found
    return None


def _delta_rule(config: ModelConfig) -> tuple[int, int] | None:
    """Gated delta rule (Qwen3-Next): a matrix for each value head."""
    kernel, heads = (
        _first(config, "linear_conv_kernel_dim"),
        _first(config, "linear_num_value_heads"),
    )
    keys, width = _first(config, "linear_num_key_heads"), _first(config, "linear_key_head_dim")
    value_width = _first(config, "linear_value_head_dim")
    if not (kernel and heads and keys and width and value_width):
        return None
    return (2 * keys * width + heads * value_width) * kernel, heads * width * value_width


def _kimi(config: ModelConfig) -> tuple[int, int] | None:
    kernel, heads = _first(config, "linear_conv_kernel_dim"), _first(config, "linear_num_heads")
    width = _first(config, "linear_head_dim")
    if not (kernel and heads and width):
        return None
    return 3 * heads * width * kernel, heads * width * width


def _mamba2(config: ModelConfig) -> tuple[int, int] | None:
    """Mamba 2: a matrix for each head; B and C, shared by groups, pass the convolution, too."""
    heads = _first(config, "mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
    groups = _first(config, "mamba_n_groups", "mamba_ngroups", "n_groups")
    if config.text_model_type == "mamba2":
        heads = _first(config, "num_heads")
    state, kernel = _state_and_kernel(config)
    if not (heads and groups and state and kernel):
        return None
    inner = _first(config, "mamba_d_ssm")
    if inner is None:
        own = _first(config, "mamba_head_dim", "mamba_headdim", "mamba_d_head")
        inner = heads * own if own and config.text_model_type == "nemotron_h" else _inner(config)
    if inner is None:
        return None
    return (inner + 2 * groups * state) * kernel, inner * state


def _mamba1(config: ModelConfig) -> tuple[int, int] | None:
    """Mamba: a row of states for each channel."""
    state, kernel = _state_and_kernel(config)
    inner = _inner(config)
    if not (state and kernel and inner):
        return None
    return inner * kernel, inner * state


def _lightning(config: ModelConfig) -> tuple[int, int] | None:
    """Lightning attention (MiniMax): a matrix for each head, no convolution."""
    if config.get("linear_attn_alpha_factor") is None:
        return None
    return 0, config.num_heads * config.head_dim * config.head_dim


def _state_and_kernel(config: ModelConfig) -> tuple[int | None, int | None]:
    return (
        _first(config, "mamba_d_state", "ssm_state_size", "state_size"),
        _first(config, "mamba_d_conv", "conv_kernel"),
    )


def _inner(config: ModelConfig) -> int | None:
    expand = _first(config, "mamba_expand", "expand")
    return None if expand is None else expand * config.hidden_size


def _first(config: ModelConfig, *names: str) -> int | None:
    for name in names:
        value = config.get(name)
        if type(value) is int:
            return value
    return None
