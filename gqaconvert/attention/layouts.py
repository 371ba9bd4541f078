"""How the heads of q, k and v lie along the rows of a weight.

A layout is an order of head blocks. Everything that reads, pools or repeats heads goes through
`head_order`, so a new layout is one more branch here and a line in a spec.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Role = Literal["q", "k", "v"]

Layout = Literal["k", "v", "blocks", "per_head", "per_group"]
"""`k` and `v`: the heads of one projection alone. `blocks`: all q heads, all k heads, all v heads.
`per_head`: q, k, v of the first head, then of the second (multi-head attention only). `per_group`:
for each KV head its query heads, k and v."""


class Head(NamedTuple):
    """One block of rows: which projection it belongs to and which head of it."""

    role: Role
    number: int


def head_order(layout: Layout, num_heads: int, num_kv_heads: int) -> list[Head]:
    """Return the blocks of a weight in row order.

    Args:
        layout: how the weight is laid out.
        num_heads: query heads H.
        num_kv_heads: KV heads K; `per_head` needs K = H.

    Raises:
        ValueError: `per_head` with K other than H.
    """
    queries = [Head("q", number) for number in range(num_heads)]
    keys = [Head("k", number) for number in range(num_kv_heads)]
    values = [Head("v", number) for number in range(num_kv_heads)]
    if layout == "k":
        return keys
    if layout == "v":
        return values
    if layout == "blocks":
        return queries + keys + values
    if layout == "per_head":
        if num_heads != num_kv_heads:
            raise ValueError(f"per_head holds as many KV heads as query heads, not {num_kv_heads}")
        return [head for triple in zip(queries, keys, values, strict=True) for head in triple]
    group_size = num_heads // num_kv_heads
    order = []
    for number in range(num_kv_heads):
        order += queries[number * group_size : (number + 1) * group_size]
        order += [keys[number], values[number]]
    return order


def block_rows(layout: Layout, rows: int, num_heads: int, num_kv_heads: int) -> int:
    """Return the rows one head takes in a weight of `rows` rows.

    Raises:
        ValueError: the rows do not divide into the blocks of this layout.
    """
    blocks = len(head_order(layout, num_heads, num_kv_heads))
    if rows % blocks:
        raise ValueError(f"{rows} rows do not divide into {blocks} heads")
    return rows // blocks


def pooled_sources(num_kv_heads: int, wanted: int, number: int) -> range:
    """Return the source KV heads that KV head `number` of `wanted` stands for.

    Groups are contiguous in every transformers class (`repeat_kv`). With `wanted` larger than
    `num_kv_heads` the range holds the one head that is repeated.
    """
    if wanted <= num_kv_heads:
        size = num_kv_heads // wanted
        return range(number * size, (number + 1) * size)
    source = number // (wanted // num_kv_heads)
    return range(source, source + 1)
