"""How alike the KV heads of a checkpoint are, layer by layer, raw and after alignment.

Reads one layer at a time with numpy; no torch. `inspect --heads` shows it, `head_alignment` does
the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gqaconvert.attention.geometry import Attention, AttentionBlock
from gqaconvert.attention.layouts import Head, block_rows, head_order
from gqaconvert.checkpoint.reader import Array, TensorReader
from gqaconvert.errors import CheckpointError, UsageError
from gqaconvert.evaluation.head_alignment import (
    Floats,
    Freedom,
    aligned_similarity,
    chance_similarity,
    head_products,
    key_freedom,
    pooled_share,
    raw_similarity,
    value_freedom,
)
from gqaconvert.surgery.source import SourceCheckpoint, open_source

FORMAT = 1


@dataclass(frozen=True, slots=True)
class PooledShare:
    """How much of the heads' squared norm averaging keeps, 1 for equal heads.

    Attributes:
        kv_heads: heads left.
        raw: adjacent heads averaged as they are.
        aligned: turned towards each other first.
    """

    kv_heads: int
    raw: float
    aligned: float


@dataclass(frozen=True, slots=True)
class Likeness:
    """How alike the key or the value heads of one layer are.

    Attributes:
        raw: cosine between every two heads' weights, (K, K).
        aligned: the largest cosine that turning one of the two can reach.
        chance: what alignment reaches between heads of noise of the same shape.
        pooled: for each smaller number of heads.
    """

    raw: list[list[float]]
    aligned: list[list[float]]
    chance: float
    pooled: tuple[PooledShare, ...]

    def mean(self, kind: Literal["raw", "aligned"]) -> float:
        """Return the mean over pairs of different heads."""
        matrix = np.asarray(getattr(self, kind))
        return float(matrix[~np.eye(len(matrix), dtype=bool)].mean())


@dataclass(frozen=True, slots=True)
class LayerLikeness:
    """One layer.

    Attributes:
        layer: its number, None where its path has none.
        module: path of the attention module.
        kv_heads: K.
        keys: of the key projection; None where it has no weight of its own.
        values: of the value projection; None where keys serve as values.
    """

    layer: int | None
    module: str
    kv_heads: int
    keys: Likeness | None
    values: Likeness | None


@dataclass(frozen=True, slots=True)
class HeadSimilarity:
    """All layers of a checkpoint."""

    model: str
    model_type: str
    num_heads: int
    layers: tuple[LayerLikeness, ...]
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a mapping of plain values."""
        return {"format": FORMAT, **asdict(self)}


def head_similarity(
    model: str | Path,
    revision: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> HeadSimilarity:
    """Compare the KV heads of every layer.

    Args:
        model: folder, alias or Hub id.
        revision: branch, tag or commit of a Hub model.
        progress: called with layers done and layers in all.

    Raises:
        UsageError: no such model, or one with a single KV head.
        UnsupportedModelError: its attention is not understood.
        CheckpointError: it is damaged, or holds values that are not finite.
    """
    source = open_source(model, revision)
    attention = source.attention
    if attention.num_kv_heads < 2:
        raise UsageError(
            f"{source.identity.name} has a single KV head; there is nothing to compare",
            at=source.config.at,
        )
    layers = []
    blocks = sorted(attention.blocks, key=lambda block: (block.layer is None, block.layer or 0))
    with TensorReader(source.folder, source.index.derived) as reader:
        for number, block in enumerate(blocks):
            layers.append(_layer(block, source, reader))
            if progress:
                progress(number + 1, len(blocks))
    return HeadSimilarity(
        model=source.identity.name,
        model_type=attention.model_type,
        num_heads=attention.num_heads,
        layers=tuple(layers),
        notes=tuple(_notes(source)),
    )


def _layer(block: AttentionBlock, source: SourceCheckpoint, reader: TensorReader) -> LayerLikeness:
    attention, rope = source.attention, source.config.rope
    keys, values = _weights(block, "k", source, reader), _weights(block, "v", source, reader)
    turns = key_freedom(block.head_dim, attention.rope, rope.partial_rotary_factor)
    return LayerLikeness(
        layer=block.layer,
        module=block.module,
        kv_heads=block.num_kv_heads,
        keys=_likeness(keys, turns, attention) if keys else None,
        values=_likeness(values, value_freedom(block.v_head_dim), attention) if values else None,
    )


def _weights(
    block: AttentionBlock, role: Literal["k", "v"], source: SourceCheckpoint, reader: TensorReader
) -> list[Array]:
    """Read the weights of the key or value heads of a block, each (D, M)."""
    wanted = {"k": ("key", "fused"), "v": ("value", "fused")}[role]
    for held in block.head_tensors:
        tensor = source.index.tensors[held.name]
        if held.role not in wanted or len(tensor.shape) != 2:
            continue
        heads, kv_heads = block.num_heads, block.num_kv_heads
        rows = block_rows(held.layout, tensor.shape[0], heads, kv_heads)
        order = head_order(held.layout, heads, kv_heads)
        read = []
        for number in range(kv_heads):
            begin = order.index(Head(role, number)) * rows
            weights = reader.read_rows(tensor, begin, begin + rows).astype(np.float32)
            if not np.isfinite(weights).all():
                raise CheckpointError(
                    f"head {number} holds values that are not finite",
                    at=f"{tensor.file} tensor {tensor.name!r}",
                    remedy="repair or fetch the checkpoint again",
                )
            read.append(weights)
        return read
    return []


def _likeness(heads: list[Array], freedom: Freedom, attention: Attention) -> Likeness:
    products = head_products(heads)
    width, inputs = heads[0].shape
    counts = [n for n in attention.poolable() if len(heads) % n == 0 and n < len(heads)]
    return Likeness(
        raw=_plain(raw_similarity(products)),
        aligned=_plain(aligned_similarity(products, freedom)),
        chance=round(chance_similarity(width, inputs, freedom), 6),
        pooled=tuple(
            PooledShare(
                count,
                round(pooled_share(products, len(heads) // count), 6),
                round(pooled_share(products, len(heads) // count, freedom), 6),
            )
            for count in counts
        ),
    )


def _plain(matrix: Floats) -> list[list[float]]:
    return [[round(float(value), 6) for value in row] for row in matrix]


def _notes(source: SourceCheckpoint) -> list[str]:
    notes = []
    attention = source.attention
    if attention.rope == "none" and source.config.rope.kind != "none":
        notes.append("positions enter as ALiBi: keys may be turned freely, as values")
    if any(block.key_norm != "none" for block in attention.blocks):
        notes.append(
            "keys are normalised with gains after the projection, which a turn does not pass"
            " unless both gains of a plane are equal: take the aligned figures of keys as a bound"
        )
    if any("k" in block.biases or "v" in block.biases for block in attention.blocks):
        notes.append("biases are left out of the comparison")
    if attention.rope != "none" and source.config.rope.partial_rotary_factor is None:
        notes.append("layers turn different shares of a head; keys are aligned as if all of it")
    return notes
