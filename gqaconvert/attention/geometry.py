"""What a model's attention looks like once understood: blocks, tensors, legal head counts.

Pure values; `attention.recognise` fills them from names, shapes and the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gqaconvert.attention.layouts import Layout
from gqaconvert.attention.specs import LegalCount

AttentionKind = Literal["MHA", "GQA", "MQA"]
KeyNorm = Literal["none", "per_head", "full_width", "per_kv_head", "per_kv_head_modules"]
"""Norms on the keys.

`per_head`: one gain of D shared by all heads (untouched). `full_width`: a gain of K*D, RMS over all
heads. `per_kv_head`: a gain of (K, D). `per_kv_head_modules`: one module a KV head."""


@dataclass(frozen=True, slots=True)
class HeadTensor:
    """A tensor with a block for each KV head, so that it changes with their number.

    Attributes:
        name: its key.
        layout: order of the blocks along `axis`.
        axis: the dimension that the blocks divide.
        role: what it is, for reports.
    """

    name: str
    layout: Layout
    role: Literal["key", "value", "fused", "key_norm"]
    axis: int = 0


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """One attention module.

    Attributes:
        module: dotted path without the projection, such as "model.layers.0.self_attn".
        layer: number of the layer, None where the path has none.
        num_heads: query heads H.
        num_kv_heads: KV heads K.
        head_dim: width D of a query or key head.
        v_head_dim: width of a value head.
        head_tensors: weights and biases that change with K.
        key_norm: kind of norm on the keys.
        norm_modules: with `per_kv_head_modules`, the tensors of the modules: one tuple a parameter,
            in head order.
        biases: which of q, k, v, o carry a bias, such as "qkv".
        stems: projection ("q", "k", "v", "o" or "qkv") → its name without ".weight"; without "v",
            keys serve as values.
    """

    module: str
    layer: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    head_tensors: tuple[HeadTensor, ...]
    key_norm: KeyNorm
    norm_modules: tuple[tuple[str, ...], ...]
    biases: str
    stems: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Attention:
    """All attention blocks of a language model.

    Attributes:
        model_type: class of the language model.
        layout: name of the layout spec.
        blocks: one for each module, in file order.
        certified: the contract matrix covers this class.
        legal_counts: restrictions beyond divisibility.
        caches_all_heads: transformers repeats KV heads before it caches them: the cache does not
            shrink there.
        rope: which dimensions RoPE turns together, or "none".
    """

    model_type: str
    layout: str
    blocks: tuple[AttentionBlock, ...]
    certified: bool
    legal_counts: tuple[LegalCount, ...]
    caches_all_heads: bool
    rope: Literal["halves", "adjacent", "none"]

    @property
    def num_heads(self) -> int:
        """Query heads H."""
        return self.blocks[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        """KV heads K."""
        return self.blocks[0].num_kv_heads

    @property
    def cached_heads(self) -> int:
        """KV heads that transformers caches."""
        return self.num_heads if self.caches_all_heads else self.num_kv_heads

    @property
    def kind(self) -> AttentionKind:
        """MHA, GQA or MQA."""
        return attention_kind(self.num_heads, self.num_kv_heads)

    def poolable(self) -> tuple[int, ...]:
        """KV head counts below the present one that the class can hold, largest first."""
        return tuple(n for n in range(self.num_kv_heads - 1, 0, -1) if self.is_poolable(n))

    def is_poolable(self, wanted: int) -> bool:
        """Whether K heads can be pooled into `wanted`."""
        return (
            0 < wanted < self.num_kv_heads
            and self.num_kv_heads % wanted == 0
            and self._allows(wanted)
        )

    def is_expandable(self, wanted: int) -> bool:
        """Whether K heads can be repeated into `wanted`."""
        return (
            self.num_kv_heads < wanted <= self.num_heads
            and wanted % self.num_kv_heads == 0
            and self.num_heads % wanted == 0
            and self._allows(wanted)
        )

    def _allows(self, wanted: int) -> bool:
        if "one" in self.legal_counts and wanted not in (1, self.num_heads):
            return False
        return not ("even" in self.legal_counts and wanted % 2)


def attention_kind(num_heads: int, num_kv_heads: int) -> AttentionKind:
    """Name attention by its head counts, as the GQA paper does (arXiv 2305.13245)."""
    if num_kv_heads == num_heads:
        return "MHA"
    return "MQA" if num_kv_heads == 1 else "GQA"
