"""Between the tensors of an attention block, in any layout, and `LayerHeads`.

Reading and writing are inverse to each other bit for bit: float64 holds every weight type exactly,
except float64 itself where a method rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import ml_dtypes
import numpy as np

from gqaconvert.attention.blocks import fused_layout_after
from gqaconvert.attention.freedom import BlockFreedom
from gqaconvert.attention.geometry import Attention, AttentionBlock
from gqaconvert.attention.layouts import Head, Layout, Role, head_order
from gqaconvert.checkpoint.reader import Array
from gqaconvert.surgery.layer_heads import Floats, KeyFreedom, LayerHeads

Read = Callable[[str], Array]
"""Name of a tensor → its content, in its stored type."""

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def read_heads(
    block: AttentionBlock, freedom: BlockFreedom, names: Iterable[str], read: Read
) -> LayerHeads:
    """Read one block into the form that calibrated methods work on.

    Args:
        block: where its tensors are, and in which layout.
        freedom: what is free in it.
        names: of all tensors, to tell which biases there are.
        read: gives their content.

    Returns:
        Its heads; without a value projection, the keys stand as values.
    """
    known = set(names)
    found: dict[Role, list[Floats]] = {}
    has_bias: dict[Role, bool] = {}
    for part, layout in _projections(block):
        stem = block.stems[part]
        weight, bias = f"{stem}.weight", f"{stem}.bias"
        columns = _wide(read(weight))
        last = _wide(read(bias))[:, None] if bias in known else np.zeros((len(columns), 1))
        rows = np.concatenate([columns, last], axis=1)
        order = head_order(layout, block.num_heads, block.num_kv_heads)
        if part == "q":
            order = [Head("q", number) for number in range(block.num_heads)]
        start = 0
        for head in order:
            width = block.v_head_dim if head.role == "v" else block.head_dim
            found.setdefault(head.role, []).append(rows[start : start + width])
            has_bias[head.role] = bias in known
            start += width
        if start != len(rows):
            raise ValueError(f"{weight} holds {len(rows)} rows, its heads take {start}")
    output = _wide(read(f"{block.stems['o']}.weight"))
    values, roles = found.get("v", found["k"]), has_bias.get("v", has_bias["k"])
    return LayerHeads(
        query=np.stack(found["q"]),
        key=np.stack(found["k"]),
        value=np.stack(values),
        output=output.reshape(len(output), block.num_heads, block.v_head_dim),
        has_bias=(has_bias["q"], has_bias["k"], roles),
        freedom=key_freedom(block, freedom),
    )


def write_heads(
    heads: LayerHeads, block: AttentionBlock, attention: Attention, names: Iterable[str]
) -> dict[str, Floats]:
    """Write heads as the block's tensors, in the layout that their number asks for.

    Args:
        heads: with G KV heads.
        block: the source's block.
        attention: the source's attention.
        names: of all tensors of the source.

    Returns:
        Name → content in float64, of q, k, v and their biases, and the output projection.
    """
    known, wanted = set(names), heads.num_kv_heads
    arrays: dict[Role, Floats] = {"q": heads.query, "k": heads.key, "v": heads.value}
    written: dict[str, Floats] = {}
    for part, layout in _projections(block):
        after = fused_layout_after(attention, layout, wanted) if part == "qkv" else layout
        order = head_order(after, block.num_heads, wanted)
        if part == "q":
            order = [Head("q", number) for number in range(block.num_heads)]
        rows = np.concatenate([arrays[head.role][head.number] for head in order])
        stem = block.stems[part]
        written[f"{stem}.weight"] = rows[:, :-1]
        if f"{stem}.bias" in known:
            written[f"{stem}.bias"] = rows[:, -1]
    written[f"{block.stems['o']}.weight"] = heads.output.reshape(len(heads.output), -1)
    return written


def key_freedom(block: AttentionBlock, freedom: BlockFreedom) -> KeyFreedom:
    """Return the freedom of a block's keys as calibrated methods take it."""
    return KeyFreedom(
        planes=np.array(freedom.planes(), np.intp).reshape(-1, 2),
        free=np.arange(freedom.rotary_dims, block.head_dim, dtype=np.intp),
        fixed=freedom.keys_fixed,
        angles=None if freedom.angles is None else np.array(freedom.angles),
    )


def query_order(groups: Sequence[Sequence[int]], num_heads: int) -> list[int]:
    """Return the source query heads in their new order, once KV heads stand in `groups`."""
    sources = [number for group in groups for number in group]
    size = num_heads // len(sources)
    return [number * size + each for number in sources for each in range(size)]


def move_rows(array: Array, groups: Sequence[Sequence[int]], num_heads: int) -> Array:
    """Move the rows of a tensor that has a block of them for each query head."""
    blocks = array.reshape(num_heads, -1, *array.shape[1:])
    return np.ascontiguousarray(blocks[query_order(groups, num_heads)].reshape(array.shape))


def mean_rows(array: Array, groups: Sequence[Sequence[int]], num_kv_heads: int) -> Floats:
    """Average the rows of a tensor with a block for each KV head over each group."""
    wide = _wide(array)
    blocks = wide.reshape(num_kv_heads, -1)
    pooled = np.stack([blocks[list(group)].mean(axis=0) for group in groups])
    shape = (len(groups), *wide.shape[1:]) if len(wide) == num_kv_heads else (-1, *wide.shape[1:])
    return pooled.reshape(shape)


def rounded(array: Array, dtype: np.dtype[np.generic]) -> Array:
    """Cast to a weight type, to the nearest value and to the even one between two.

    From float64 to bfloat16 through float32, as the cast alone goes, would round twice.
    """
    if dtype != _BFLOAT16 or array.dtype != np.float64:
        return array.astype(dtype, copy=False)
    single = array.astype(np.float32)
    # Round to odd: where float32 is not exact and its last bit is 0, take the neighbour on the
    # exact value's side, so that the second rounding sees on which side of a tie it lies.
    inexact = (single != array) & np.isfinite(single)
    even = (single.view(np.uint32) & 1) == 0
    toward = np.where(array > single, np.float32(np.inf), np.float32(-np.inf))
    odd = np.where(inexact & even, np.nextafter(single, toward), single)
    return odd.astype(dtype)


def tensor_names(block: AttentionBlock, names: Mapping[str, object]) -> list[str]:
    """Return the names that `write_heads` writes."""
    found = []
    for part in block.stems:
        kinds = ("weight",) if part == "o" else ("weight", "bias")
        found += [f"{block.stems[part]}.{kind}" for kind in kinds]
    return [name for name in found if name in names]


def _projections(block: AttentionBlock) -> list[tuple[str, Layout]]:
    """The stored projections of q, k and v with the order of their rows; q has one of its own."""
    if "qkv" in block.stems:
        layout = next(t.layout for t in block.head_tensors if t.role == "fused")
        return [("qkv", layout)]
    separate: list[tuple[str, Layout]] = [("q", "blocks"), ("k", "k"), ("v", "v")]
    return [(part, layout) for part, layout in separate if part in block.stems]


def _wide(array: Array) -> Floats:
    return array.astype(np.float64)
