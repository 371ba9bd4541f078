"""What `inspect` tells of a checkpoint: its attention, its cache, and what it can become.

From headers and config alone.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gqaconvert.attention.equivalents import Equivalent, find_equivalent
from gqaconvert.attention.geometry import Attention, attention_kind
from gqaconvert.attention.recognise import recognise
from gqaconvert.checkpoint.index import read_index
from gqaconvert.checkpoint.sources import resolve_source
from gqaconvert.checkpoint.tensors import CheckpointIndex
from gqaconvert.errors import CheckpointError, UnsupportedModelError
from gqaconvert.kv_cache.model_config import ModelConfig, parse_config, read_config
from gqaconvert.kv_cache.sizes import kv_bytes_per_token
from gqaconvert.units import ELEMENT_TYPES, weight_type


@dataclass(frozen=True, slots=True)
class Saving:
    """What one legal number of KV heads would give."""

    kv_heads: int
    attention: str
    kv_bytes_per_token: int
    share_of_cache: float


@dataclass(frozen=True)
class Inspection:
    """What is known of a checkpoint without reading weights.

    Attributes:
        model: as it was named.
        revision: commit, for a Hub model.
        model_type, architectures: classes by config.
        attention: "MHA", "GQA", "MQA" or "MLA".
        num_layers: layers.
        layer_kinds: kind → number of layers: full, sliding, chunked, linear, none.
        sliding_window: width of the window, where some layer has one.
        num_heads, num_kv_heads, head_dim, hidden_size: geometry.
        layout: how q, k and v are stored, None where not understood.
        biases: which of q, k, v, o have one.
        key_norm: kind of norm on keys.
        rope: which dimensions turn together, "none" without RoPE.
        dtype: type of K and V weights.
        parameters: elements stored; 0 where headers cannot be read.
        size_bytes: bytes of all tensors.
        kv_bytes_per_token: bytes a token adds to the cache in the checkpoint's type, None where no
            formula is known.
        legal_kv_heads: counts that `convert` accepts, largest first.
        savings: one entry for each legal count.
        convertible: whether `convert` would accept it.
        becomes: the equivalent class that `convert` rewrites it into, None where the class stays.
        reason: why not, None if it would.
        remedy: what to do about it.
    """

    model: str
    revision: str | None
    model_type: str
    architectures: tuple[str, ...]
    attention: str
    num_layers: int
    layer_kinds: dict[str, int]
    sliding_window: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    layout: str | None
    biases: str | None
    key_norm: str | None
    rope: str
    tied_embeddings: bool
    dtype: str
    parameters: int
    size_bytes: int
    kv_bytes_per_token: int | None
    legal_kv_heads: tuple[int, ...]
    savings: tuple[Saving, ...]
    convertible: bool
    becomes: str | None
    reason: str | None
    remedy: str | None

    def to_json(self) -> dict[str, Any]:
        """Return a mapping of plain values."""
        return asdict(self)


def inspect(model: str | Path, revision: str | None = None) -> Inspection:
    """Read what a checkpoint is and what it can become.

    Args:
        model: folder, alias or Hub id; of a Hub model only config and headers are fetched.
        revision: branch, tag or commit of a Hub model.

    Raises:
        UsageError: no such model.
        CheckpointError: headers or config cannot be read.
    """
    source = resolve_source(str(model), revision)
    if source.folder is not None:
        return describe(str(model), read_config(source.folder), read_index(source.folder))
    from gqaconvert.checkpoint.hub import read_hub_index  # imports huggingface_hub

    found = read_hub_index(str(source.repo_id), revision)
    config = parse_config(found.config, f"{source.repo_id}/config.json")
    return describe(str(model), config, found.index, found.commit)


def describe(
    model: str, config: ModelConfig, index: CheckpointIndex | None, revision: str | None = None
) -> Inspection:
    """Describe a checkpoint whose config and headers have been read; pure."""
    equivalent, attention, error = _understand(config, index)
    dtype = _dtype(config, equivalent.index if equivalent else index, attention)
    element_bytes = ELEMENT_TYPES[dtype].size_bytes
    now = _kv_bytes(config, element_bytes)
    heads = config.num_kv_heads
    legal = attention.poolable() if attention else ()
    savings = []
    for count in legal:
        then = kv_bytes_per_token(config, element_bytes, count)
        savings.append(Saving(count, attention_kind(config.num_heads, count), then, count / heads))
    block = attention.blocks[0] if attention else None
    reason, remedy = (error.what, error.remedy) if error else _nothing_left(attention)
    return Inspection(
        model=model,
        revision=revision,
        model_type=config.model_type,
        architectures=config.architectures,
        attention="MLA" if config.kv_lora_rank else attention_kind(config.num_heads, heads),
        num_layers=config.num_layers,
        layer_kinds=dict(Counter(config.layer_kinds)),
        sliding_window=config.sliding_window,
        num_heads=config.num_heads,
        num_kv_heads=heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        layout=attention.layout if attention else None,
        biases=block.biases if block else None,
        key_norm=block.key_norm if block else None,
        rope=attention.rope if attention else config.rope.kind,
        tied_embeddings=config.tie_word_embeddings,
        dtype=ELEMENT_TYPES[dtype].config_name,
        parameters=index.parameters if index else 0,
        size_bytes=index.size_bytes if index else 0,
        kv_bytes_per_token=now,
        legal_kv_heads=legal,
        savings=tuple(savings),
        convertible=bool(legal),
        becomes=equivalent.name if equivalent else None,
        reason=reason,
        remedy=remedy,
    )


def _kv_bytes(config: ModelConfig, element_bytes: int) -> int | None:
    try:
        return kv_bytes_per_token(config, element_bytes)
    except UnsupportedModelError:
        return None


def _understand(
    config: ModelConfig, index: CheckpointIndex | None
) -> tuple[Equivalent | None, Attention | None, CheckpointError | UnsupportedModelError | None]:
    if index is None:
        return (
            None,
            None,
            UnsupportedModelError(
                "it has no safetensors files, and headers of .bin files cannot be read remotely",
                remedy="download it, then inspect the folder",
            ),
        )
    try:
        equivalent = find_equivalent(config, index)
        if equivalent is not None:
            return equivalent, recognise(equivalent.index.tensors, equivalent.config), None
        return None, recognise(index.tensors, config), None
    except (UnsupportedModelError, CheckpointError) as error:
        return None, None, error


def _nothing_left(attention: Attention | None) -> tuple[str | None, str | None]:
    if attention is None or attention.poolable():
        return None, None
    if attention.num_kv_heads == 1:
        return "it has a single KV head; there is nothing left to pool", None
    return f"its class holds no number of KV heads below {attention.num_kv_heads}", None


def _dtype(config: ModelConfig, index: CheckpointIndex | None, attention: Attention | None) -> str:
    if attention and index:
        return index.tensors[attention.blocks[0].head_tensors[0].name].dtype
    if config.dtype:
        return weight_type(config.dtype).tag
    if index:
        counts = Counter(
            t.dtype for t in index.tensors.values() if ELEMENT_TYPES[t.dtype].is_weight
        )
        if counts:
            return counts.most_common(1)[0][0]
    return "F32"
