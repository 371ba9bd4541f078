"""The centre of a conversion: each tensor's fate, each config key that changes, each file.

Pure: made from headers, config and options, it can be printed (the dry run), hashed (the resume
check) and executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gqaconvert.attention.freedom import BlockFreedom
from gqaconvert.attention.geometry import Attention, AttentionBlock
from gqaconvert.attention.layouts import Head, Layout, head_order, pooled_sources
from gqaconvert.checkpoint.shards import Shard
from gqaconvert.checkpoint.tensors import Derived, StoredTensor
from gqaconvert.kv_cache.model_config import ModelConfig
from gqaconvert.kv_cache.sizes import kv_bytes_per_token
from gqaconvert.surgery.options import ConversionOptions
from gqaconvert.units import ELEMENT_TYPES

Action = Literal["copy", "cast", "derive", "pool", "repeat", "fold"]


@dataclass(frozen=True, slots=True)
class HeadChange:
    """How the head blocks of one tensor change.

    Attributes:
        role: "key", "value", "fused" or "key_norm".
        before, after: order of the blocks.
        num_heads: query heads H.
        num_kv_heads: KV heads before.
        wanted: KV heads after.
    """

    role: str
    before: Layout
    after: Layout
    num_heads: int
    num_kv_heads: int
    wanted: int

    def blocks(self) -> Iterator[tuple[Head, list[int]]]:
        """Yield each output block with the numbers of the source blocks it is made from."""
        position = {
            head: number
            for number, head in enumerate(
                head_order(self.before, self.num_heads, self.num_kv_heads)
            )
        }
        for head in head_order(self.after, self.num_heads, self.wanted):
            if head.role == "q":
                yield head, [position[head]]
            else:
                sources = pooled_sources(self.num_kv_heads, self.wanted, head.number)
                yield head, [position[Head(head.role, number)] for number in sources]


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """One output tensor.

    Attributes:
        output: name, type, shape and place in the output.
        action: what happens to it.
        sources: the source tensors it is made from; one, except for norms that are modules of their
            own.
        heads: for changed tensors, how their blocks change.
    """

    output: StoredTensor
    action: Action
    sources: tuple[StoredTensor, ...]
    heads: HeadChange | None = None


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One attention block that a calibrated method pools as a whole.

    Attributes:
        block: where its tensors are in the source.
        freedom: what may be changed in it.
        grouping: which KV heads share.
        outputs: names of the tensors that come out of it.
    """

    block: AttentionBlock
    freedom: BlockFreedom
    grouping: Literal["adjacent", "similarity"]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ConfigEdit:
    """One key of config.json: its path, the value before (None when absent) and after."""

    path: tuple[str, ...]
    before: Any
    after: Any


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """Everything a conversion will do.

    Attributes:
        options: what was asked for.
        attention: the source's attention.
        config: the source's config, or that of its equivalent class.
        source_fingerprint: identity of the source's headers.
        source_config_sha256: identity of its config.
        tensors: output tensors in output order.
        shards: output files.
        config_edits: keys that change.
        initializer_range: of the class, for `random`.
        dropped: source tensors with no output, and why.
        derived: source tensors that are computed, because the checkpoint is read as another class.
        layers: blocks that a calibrated method pools as a whole, in layer order.
        averaged: with a calibrated method, blocks that can only be averaged, and why.
    """

    options: ConversionOptions
    attention: Attention
    config: ModelConfig
    source_fingerprint: str
    source_config_sha256: str
    tensors: tuple[PlannedTensor, ...]
    shards: tuple[Shard, ...]
    config_edits: tuple[ConfigEdit, ...]
    initializer_range: float
    dropped: Mapping[str, str]
    derived: Mapping[str, Derived]
    layers: tuple[LayerPlan, ...] = ()
    averaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> frozenset[str]:
        """Names of the output tensors that are made a layer at a time."""
        return frozenset(name for layer in self.layers for name in layer.outputs)

    @property
    def size_bytes(self) -> int:
        """Bytes of all output weight files."""
        return sum(shard.size_bytes for shard in self.shards)

    @property
    def kv_element_bytes(self) -> int:
        """Bytes of an element of the cache, in the weights' type."""
        return max(ELEMENT_TYPES[tensor.output.dtype].size_bytes for tensor in self.changed())

    def kv_bytes_per_token(self, num_kv_heads: int) -> int:
        """Bytes a token adds to the cache with `num_kv_heads` heads."""
        return kv_bytes_per_token(self.config, self.kv_element_bytes, num_kv_heads)

    def digest(self) -> str:
        """SHA-256 of all that determines the output: plans of one digest write the same bytes."""
        parts = {
            "options": self.options.record(),
            "source": [self.source_fingerprint, self.source_config_sha256],
            "initializer_range": self.initializer_range,
            "config": [asdict(edit) for edit in self.config_edits],
            "headers": [hashlib.sha256(shard.header).hexdigest() for shard in self.shards],
            "tensors": [
                [
                    t.output.name,
                    t.action,
                    [s.name for s in t.sources],
                    asdict(t.heads) if t.heads else None,
                ]
                for t in self.tensors
            ],
        }
        if self.layers or self.averaged:
            parts["layers"] = [[layer.block.module, layer.grouping] for layer in self.layers]
        return digest_of(parts)

    def changed(self) -> Iterator[PlannedTensor]:
        """Yield the tensors whose heads change."""
        return (tensor for tensor in self.tensors if tensor.heads is not None)


def digest_of(content: Mapping[str, Any]) -> str:
    """SHA-256 of plain values, whatever the order of keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
