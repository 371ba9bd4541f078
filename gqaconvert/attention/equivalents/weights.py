"""Arithmetic on whole weights: rows of q, k and v, and norms folded into what follows them.

Done in twice the stored width, in which products are exact, and with sums whose order does not
depend on the machine, so that a verification finds the same bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gqaconvert.errors import CheckpointError

Array = NDArray[Any]

_ROWS = 512
_LARGEST_HALF = float(np.finfo(np.float16).max)


def wide(array: Array) -> Array:
    """Return the elements in a type in which the product of two of them is exact."""
    return array.astype(np.float32 if array.dtype.itemsize <= 2 else np.float64)


def per_head_rows(array: Array, part: int, num_heads: int) -> Array:
    """Pick q (0), k (1) or v (2) out of rows that are ordered [q, k, v] head by head.

    Args:
        array: weight (3*H*D, M) or bias (3*H*D,).
        part: which.
        num_heads: H.
    """
    rest = array.shape[1:]
    return array.reshape(num_heads, 3, -1, *rest)[:, part].reshape(-1, *rest)


def interleaved_heads(query: Array, key: Array, value: Array, num_heads: int) -> Array:
    """Join rows of q, k and v into the order [q, k, v] head by head."""
    rest = query.shape[1:]
    parts = [array.reshape(num_heads, -1, *rest) for array in (query, key, value)]
    return np.stack(parts, axis=1).reshape(-1, *rest)


def halves_from_pairs(array: Array, num_heads: int, rotary_dim: int) -> Array:
    """Reorder each head for RoPE that turns (i, i + R/2) together instead of (2i, 2i + 1).

    The same order in q and k leaves their products as they are.

    Args:
        array: rows (H*D, M).
        num_heads: H.
        rotary_dim: R, the rotated dimensions at the start of each head.
    """
    rest = array.shape[1:]
    heads = array.reshape(num_heads, -1, *rest)
    width = heads.shape[1]
    order = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, width)]
    return heads[:, order].reshape(-1, *rest)


def fold_gain(weight: Array, gain: Array) -> Array:
    """Fold a norm's gain (M,) into the weight (N, M) that reads its output."""
    return _in_range(wide(weight) * wide(gain), weight)


def fold_shift(weight: Array, shift: Array, bias: Array | None) -> Array:
    """Fold a norm's shift (M,) into the bias (N,) of the layer (N, M) that reads its output."""
    folded = np.empty(len(weight), np.float64)
    wide_shift = shift.astype(np.float64)
    for begin in range(0, len(weight), _ROWS):
        rows = weight[begin : begin + _ROWS].astype(np.float64)
        folded[begin : begin + _ROWS] = (rows * wide_shift).sum(axis=1)
    return _in_range(folded if bias is None else folded + bias.astype(np.float64), weight)


def _in_range(folded: Array, weight: Array) -> Array:
    if weight.dtype == np.float16 and folded.size and np.abs(folded).max() > _LARGEST_HALF:
        raise CheckpointError(
            "a weight with the gain of its norm folded in is too large for float16",
            remedy="store the source in bfloat16 or float32 first",
        )
    return folded
