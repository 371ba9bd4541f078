"""Default names of outputs: the source's name and what became of it."""

from __future__ import annotations

import re

from gqaconvert.attention.geometry import attention_kind


def default_output_name(model: str, num_heads: int, num_kv_heads: int) -> str:
    """Return a folder name: "llama2-7b-gqa8", "-mqa" for one KV head, "-mha" for all.

    Args:
        model: folder, alias or Hub id; an ending that an earlier conversion gave is replaced.
        num_heads: query heads.
        num_kv_heads: KV heads of the output.
    """
    stem = re.sub(r"-(?:gqa\d+|mqa|mha)$", "", model.rstrip("/").rsplit("/", 1)[-1])
    kind = attention_kind(num_heads, num_kv_heads)
    return f"{stem}-{'gqa' + str(num_kv_heads) if kind == 'GQA' else kind.lower()}"
