"""What may be changed in the heads of a block without changing what the model computes.

The allowed changes: a key by one complex number a RoPE plane, or by any invertible matrix where no
position turns it; a value by any invertible matrix, undone in the output projection; KV heads moved
together with their query heads. Norms, gates and clipping take some of them away. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gqaconvert.attention.geometry import Attention, AttentionBlock
from gqaconvert.attention.rope_angles import rope_angles
from gqaconvert.attention.specs import FreedomFacts, freedom_facts, layout_for, naming
from gqaconvert.checkpoint.tensors import StoredTensor
from gqaconvert.kv_cache.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class BlockFreedom:
    """What is free in one attention block.

    Attributes:
        rotary_dims: the first dimensions of a key that RoPE turns; 0 for none.
        pairing: which of them it turns together.
        angles: radians that it turns each plane by from one token to the next, None where unknown.
        keys_fixed: why keys may only be averaged, None where they are free as above.
        values_fixed: the same of values.
        heads_fixed: why heads may not change places, None where they may.
        companions: tensors with a block of rows for each query head, which move with it.
        unread: why nothing can be calibrated here: no statistics describe this block.
    """

    rotary_dims: int
    pairing: Literal["halves", "adjacent"]
    angles: tuple[float, ...] | None = None
    keys_fixed: str | None = None
    values_fixed: str | None = None
    heads_fixed: str | None = None
    companions: tuple[str, ...] = ()
    unread: str | None = None

    @property
    def is_calibratable(self) -> bool:
        """Whether a calibrated method can do anything here that averaging does not."""
        return self.unread is None and not (self.keys_fixed and self.values_fixed)

    @property
    def reason(self) -> str:
        """Why keys and values are averaged here; "" where neither is."""
        if self.unread:
            return self.unread
        return "; ".join(dict.fromkeys(filter(None, (self.keys_fixed, self.values_fixed))))

    def planes(self) -> list[tuple[int, int]]:
        """Return the pairs of dimensions that RoPE turns together."""
        half = self.rotary_dims // 2
        if self.pairing == "halves":
            return [(i, i + half) for i in range(half)]
        return [(2 * i, 2 * i + 1) for i in range(half)]


def block_freedom(
    block: AttentionBlock,
    attention: Attention,
    config: ModelConfig,
    tensors: Mapping[str, StoredTensor],
) -> BlockFreedom:
    """Return what is free in a block.

    Args:
        block: one of `attention.blocks`.
        attention: the model's attention.
        config: its config.
        tensors: all tensors, of which names and shapes are used.
    """
    facts, model_type = freedom_facts(), attention.model_type
    rotary, layer_type = _rotary_dims(block, attention, config)
    keys = facts.keys_fixed.get(model_type)
    values = facts.values_fixed.get(model_type)
    if block.key_norm != "none":
        keys = "keys are normalised"
    if rotary and config.get(facts.key_norm_options.get(model_type, "")):
        keys = "keys are normalised after RoPE, without weights"
    if rotary % 2:
        keys = keys or f"RoPE turns {rotary} dimensions, an odd number"
    if _clip(config):
        keys = values = "queries, keys and values are clipped (clip_qkv)"
    rows = tensors[f"{block.stems['q']}.weight"].shape[0] if "q" in block.stems else None
    if rows is not None and rows != block.num_heads * block.head_dim:
        values = values or "head outputs are gated element by element"
    if "o" not in block.stems:
        values = values or "no output projection was found"
    companions, heads, gated = _beside(block, facts, tensors)
    if config.rope.kind == "alibi":
        heads = "ALiBi gives each query head a slope of its own"
    return BlockFreedom(
        rotary_dims=rotary,
        pairing="adjacent" if attention.rope == "adjacent" else "halves",
        angles=rope_angles(config, layer_type, rotary) if rotary else None,
        keys_fixed=keys,
        values_fixed=values or gated,
        heads_fixed=heads,
        companions=companions,
        unread=_unread(block, attention, config, layer_type),
    )


def _rotary_dims(
    block: AttentionBlock, attention: Attention, config: ModelConfig
) -> tuple[int, str | None]:
    number = block.layer
    inside = number is not None and number < len(config.layers)
    layer = config.layers[number] if number is not None and inside else None
    kind = layer.type_name if layer else None
    if attention.rope == "none":
        return 0, kind
    if config.get("position_embedding_type") == "nope":
        return 0, kind
    if not _has_rope(block.layer, config):
        return 0, kind
    if (
        layer is not None
        and attention.model_type in freedom_facts().rope_in_sliding_layers
        and layer.kind != "sliding"
        and not config.get("force_rope")
    ):
        return 0, kind
    factor = config.rope.partial_rotary_factor
    by_type = config.get("rope_parameters")
    if isinstance(by_type, Mapping) and kind in by_type:
        own = by_type[kind]
        if own is None:
            return 0, kind
        factor = own.get("partial_rotary_factor", 1.0) if isinstance(own, Mapping) else factor
    return int(block.head_dim * (1.0 if factor is None else factor)), kind


def _has_rope(layer: int | None, config: ModelConfig) -> bool:
    """Whether `no_rope_layers`, which holds a 1 for each layer with RoPE, leaves it to a layer."""
    listed, interval = config.get("no_rope_layers"), config.get("no_rope_layer_interval")
    if layer is None:
        return True
    if isinstance(listed, list) and layer < len(listed):
        return bool(listed[layer])
    return not (isinstance(interval, int) and interval > 0 and (layer + 1) % interval == 0)


def _beside(
    block: AttentionBlock, facts: FreedomFacts, tensors: Mapping[str, StoredTensor]
) -> tuple[tuple[str, ...], str | None, str | None]:
    """Find what else the module holds: what moves with heads, why they cannot, why V is fixed."""
    companions: list[str] = []
    heads_fixed = values_fixed = None
    if block.norm_modules:
        heads_fixed = "each head has a norm module of its own"
    for name, shape, part in _others(block, tensors):
        rows = shape[0] if shape else 0
        if part in facts.not_per_head:
            continue
        if part in facts.gates and rows == block.num_heads:
            companions.append(name)
        elif part in facts.gates:
            values_fixed = "head outputs are gated element by element"
            companions.append(name)
        elif part in facts.output_norms:
            values_fixed = "head outputs are normalised together"
            companions.append(name)
        elif part in facts.query_norms:
            if block.key_norm in ("full_width", "per_kv_head"):
                companions.append(name)
        elif part in facts.per_query_head:
            companions.append(name)
        else:
            heads_fixed = f"{part} may belong to single heads"
        if name in companions and rows % block.num_heads:
            heads_fixed = f"{part} does not divide by query heads"
    return tuple(companions), heads_fixed, values_fixed


def _others(
    block: AttentionBlock, tensors: Mapping[str, StoredTensor]
) -> Iterable[tuple[str, tuple[int, ...], str]]:
    known = {tensor.name for tensor in block.head_tensors}
    known |= {name for names in block.norm_modules for name in names}
    stems = tuple(f"{stem}." for stem in block.stems.values())
    keys = set(layout_for("").key_norm)
    for name, tensor in tensors.items():
        if not name.startswith(f"{block.module}.") or name in known or name.startswith(stems):
            continue
        part = name.removeprefix(f"{block.module}.").split(".")[0]
        if part not in keys:  # a gain that all heads share
            yield name, tensor.shape, part


def _unread(
    block: AttentionBlock, attention: Attention, config: ModelConfig, layer_type: str | None
) -> str | None:
    if not attention.certified:
        return f"what {attention.model_type} computes between its projections is not known"
    if layout_for(attention.model_type).shared_blocks:
        return "one block serves several layers"
    parts = set(block.module.split("."))
    if not _in_stack(block, config) or naming().draft_layers & parts:
        return "this layer predicts further tokens and is not run for the next one"
    if "cross_attn" in parts or (layer_type or "").startswith("cross"):
        return "its keys and values read images"
    return None


def _in_stack(block: AttentionBlock, config: ModelConfig) -> bool:
    return block.layer is not None and block.layer < len(config.layers)


def _clip(config: ModelConfig) -> Any:  # noqa: ANN401
    inner = config.get("attn_config")
    return config.get("clip_qkv") or (isinstance(inner, Mapping) and inner.get("clip_qkv"))
