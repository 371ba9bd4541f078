"""What each layer keeps of the tokens it has seen.

Full, windowed or no keys and values, in how many heads and how wide; or a state of constant size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from gqaconvert.errors import CheckpointError
from gqaconvert.kv_cache.class_rules import Section

LayerKind = Literal["full", "sliding", "chunked", "compressed", "linear", "none"]

KINDS: Mapping[str, LayerKind] = {
    "full_attention": "full",
    "indexed_attention": "full",
    "minimax_m3_sparse": "full",
    "hybrid": "full",
    "sliding_attention": "sliding",
    "hybrid_sliding": "sliding",
    "reference_sliding_attention": "sliding",
    "window_attention": "sliding",
    "chunked_attention": "chunked",
    "compressed_sparse_attention": "compressed",
    "heavily_compressed_attention": "compressed",
    "linear_attention": "linear",
    "conv": "linear",
    "moe": "none",
    "mlp": "none",
}
"""What config classes call a layer → what it keeps."""
_WITH_STATE = ("hybrid", "hybrid_sliding", "linear_attention", "conv")

_DECODER_LAYERS = (
    "decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers", "decoder_num_layers",
)  # fmt: skip
_DECODER_HEADS = (
    "decoder_attention_heads", "num_decoder_attention_heads", "decoder_num_attention_heads",
    "decoder_num_heads",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """One layer.

    Attributes:
        kind: full (all tokens kept), sliding (the last `window`), chunked (`window` at a time),
            compressed (fewer entries than tokens), linear (a state of constant size: Mamba, linear
            attention, convolution), none (no attention at all).
        type_name: what its config class calls it, such as "hybrid" or "indexed_attention".
        num_kv_heads: key-value heads; 0 when kind is linear or none.
        head_dim: width of a key; 0 likewise.
        v_head_dim: width of a value; 0 likewise.
        window: tokens a sliding or chunked layer looks at, else None.
        shared: keeps nothing itself and reads the keys and values of an earlier layer.
        constant_state: keeps a state of constant size, alone or beside its keys and values.
    """

    kind: LayerKind
    type_name: str
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    shared: bool = False
    constant_state: bool = False


@dataclass(frozen=True, slots=True)
class Attention:
    """All layers, and the counts of a layer with full attention."""

    layers: tuple[LayerAttention, ...]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    kv_heads_key: tuple[str, ...] | None
    head_dim: int
    head_dim_explicit: bool


def read_layers(
    section: Section, written: Mapping[str, Any], is_encoder_decoder: bool, at: str
) -> Attention:
    """Read the layers of a language model.

    Args:
        section: its config, filled in.
        written: the same section as it is in the file.
        is_encoder_decoder: take the decoder's counts where the class has both.
        at: where the section is, for messages.

    Raises:
        CheckpointError: a count is missing or is no count.
    """
    count = _count(
        section, _first(section, _DECODER_LAYERS, is_encoder_decoder, "num_hidden_layers"), at
    )
    heads_key = _first(section, _DECODER_HEADS, is_encoder_decoder, "num_attention_heads")
    hidden_size = _count(section, "hidden_size", at)
    types = _types(section, count)
    no_attention = all(KINDS.get(name) in ("linear", "none") for name in types)
    heads = 0
    if not (no_attention and section.get(heads_key) is None):
        heads = _count(section, heads_key, at)
    kv_heads, key = _kv_heads(section, written, heads, at)
    head_dim = _head_dim(section, hidden_size, heads, at)
    head_key = _spelling(section, written, "head_dim")
    explicit = written.get(head_key) is not None and section.record.rules.get("head_dim") not in (
        "mla", "ignored", "computed", "twice",
    )  # fmt: skip
    layers = tuple(_layer(section, i, name, kv_heads, head_dim) for i, name in enumerate(types))
    for layer in layers:
        _whole(layer.num_kv_heads, "the number of key-value heads of a layer", at)
        _whole(layer.head_dim, "head_dim of a layer", at)
        _whole(layer.v_head_dim, "v_head_dim", at)
        if layer.window is not None:
            _whole(layer.window, f"width of a {layer.kind} layer", at)
    wide = _one_of(section, layers, kv_heads, head_dim)
    return Attention(
        _with_shared(section, layers), hidden_size, heads, *wide[:1], key, wide[1], explicit
    )


def _one_of(
    section: Section, layers: tuple[LayerAttention, ...], kv_heads: int, head_dim: int
) -> tuple[int, int]:
    if section.overrides or "per_layer_code" in section.record.rules:
        for layer in layers:
            if layer.kind == "full":
                return layer.num_kv_heads, layer.head_dim
    return kv_heads, head_dim


def _first(section: Section, names: tuple[str, ...], wanted: bool, otherwise: str) -> str:
    if wanted:
        for name in names:
            if name in section.record.fields and section.fields.get(name) is not None:
                return name
    return otherwise


def _count(section: Section, key: str, at: str) -> int:
    value = section.get(key)
    name = section.record.field_name(key)
    if value is None:
        raise CheckpointError(
            f"config.json does not say {name}, and its class has no default",
            at=f"{at} {name}",
            remedy=f'add "{name}", or fetch config.json again; models without layers of attention'
            " cannot be read",
        )
    return _whole(value, name, at)


def _whole(value: object, name: str, at: str) -> int:
    if type(value) is int:
        return value
    raise CheckpointError(
        f"{name} is {value!r}, not a whole number",
        at=f"{at} {name}",
        remedy="write it as a plain number",
    )


def _types(section: Section, count: int) -> tuple[str, ...]:
    if section.layer_types is not None:
        return section.layer_types
    return tuple(_type_by_width(section, layer) for layer in range(count))


def _type_by_width(section: Section, layer: int) -> str:
    # What transformers' caches do for a class without layer_types.
    if _of_layer(section, layer, "sliding_window") is not None:
        return "sliding_attention"
    if _of_layer(section, layer, "attention_chunk_size") is not None:
        return "chunked_attention"
    return "full_attention"


def _of_layer(section: Section, layer: int, key: str) -> Any:  # noqa: ANN401
    override = section.overrides.get(layer, {})
    return override[key] if key in override else section.get(key)


def _kv_heads(
    section: Section, written: Mapping[str, Any], heads: int, at: str
) -> tuple[int, tuple[str, ...] | None]:
    rule = section.record.rules.get("kv_heads")
    if rule == "as_heads":
        return heads, None
    if rule == "attn_config":
        settings = section.get("attn_config")
        count = settings.get("kv_n_heads") if isinstance(settings, dict) else None
        own_heads = heads if count is None else _whole(count, "attn_config.kv_n_heads", at)
        return own_heads, ("attn_config", "kv_n_heads")
    if rule == "multi_query" or (rule == "falcon" and not section.get("new_decoder_architecture")):
        # Falcon's old layout has the same two choices as GPT-BigCode: num_kv_heads is taken and
        # ignored.
        return (1 if section.get("multi_query") else heads), ("multi_query",)
    name = "num_kv_heads" if rule == "falcon" else section.record.field_name("num_key_value_heads")
    own = name in section.fields and (
        "kv" in name or "key_value" in name or not section.record.name
    )
    own = own and not {name, "num_key_value_heads"}.isdisjoint(section.record.fields)
    if not own:
        return heads, None
    kv_heads = section.fields.get(name)
    if kv_heads is not None:
        _count(section, name, at)
    return kv_heads or heads, (_spelling(section, written, "num_key_value_heads", name),)


def _spelling(
    section: Section, written: Mapping[str, Any], key: str, name: str | None = None
) -> str:
    """Return the name under which a file writes a field; of two, the one transformers sets last."""
    name = name or section.record.field_name(key)
    others = [other for other, target in section.record.alias.items() if target == name]
    for other in others:
        if other in written and other not in section.record.fields:
            return other
    return name


def _head_dim(section: Section, hidden_size: int, heads: int, at: str) -> int:
    rule = section.record.rules.get("head_dim")
    computed = hidden_size // heads if heads > 0 else 0
    if rule == "mla" or section.get("kv_lora_rank") is not None:
        return _count(section, "qk_nope_head_dim", at) + _count(section, "qk_rope_head_dim", at)
    if rule == "ignored":
        return computed
    if rule == "twice" or (rule == "twice_if_absent" and not section.get("head_dim")):
        return 2 * hidden_size // heads if heads > 0 else 0
    if rule == "computed" and section.record.field_name("head_dim") in section.record.fields:
        return computed
    if section.get("head_dim") is None:
        return computed
    return _count(section, "head_dim", at)


def _layer(section: Section, index: int, name: str, kv_heads: int, head_dim: int) -> LayerAttention:
    kind = KINDS.get(name, "full")
    state = name in _WITH_STATE
    if kind in ("linear", "none"):
        return LayerAttention(kind, name, 0, 0, 0, constant_state=state)
    override = section.overrides.get(index, {})
    kv_heads = override.get("num_key_value_heads") or kv_heads
    head_dim = override.get("head_dim") or head_dim
    value_dim = (
        _of_layer(section, index, "v_head_dim") if "v_head_dim" in section.record.fields else None
    )
    code = section.record.rules.get("per_layer_code")
    if kind == "sliding" and code == "twice_the_kv_heads":
        kv_heads *= 2
    if kind == "sliding" and code == "swa_fields":
        kv_heads, head_dim = section.get("swa_num_key_value_heads"), section.get("swa_head_dim")
    if section.get("kv_lora_rank") is not None:
        nope, rope = (_of_layer(section, index, f"qk_{part}_head_dim") for part in ("nope", "rope"))
        head_dim = nope + rope
    window = {"sliding": "sliding_window", "chunked": "attention_chunk_size"}.get(kind)
    width = _of_layer(section, index, window) if window else None
    return LayerAttention(
        kind, name, kv_heads, head_dim, value_dim or head_dim, width, False, state
    )


def _with_shared(
    section: Section, layers: tuple[LayerAttention, ...]
) -> tuple[LayerAttention, ...]:
    shared = _shared(section, len(layers))
    return tuple(replace(layer, shared=i in shared) for i, layer in enumerate(layers))


def _shared(section: Section, count: int) -> frozenset[int]:
    rule = section.record.rules.get("shared")
    if rule == "last":
        return frozenset(range(max(count - (section.get("num_kv_shared_layers") or 0), 0), count))
    if rule == "sources":
        sources = section.get("kv_source_layers") or range(count)
        return frozenset(i for i, source in enumerate(sources) if i != source)
    if rule == "modes":
        modes = section.get("kv_sharing_modes") or ()
        return frozenset(i for i, mode in enumerate(modes) if str(mode).startswith("reuse"))
    return frozenset()
