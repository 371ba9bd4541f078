"""Mean pooling, the method of the GQA paper (arXiv 2305.13245, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def mean(heads: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Average the heads of one group.

    Args:
        heads: s arrays of one shape, in a type wide enough that summing s equal elements is exact;
            then equal heads average to themselves bit for bit.

    Returns:
        Their average, in the same type.
    """
    try:
        with np.errstate(over="raise"):
            return _average(heads)
    except FloatingPointError:
        # bfloat16 reaches as far as float32, so sums of its largest values need a longer exponent.
        return _average([head.astype(np.float64) for head in heads]).astype(heads[0].dtype)


def _average(heads: Sequence[NDArray[Any]]) -> NDArray[Any]:
    total = heads[0].copy()
    for head in heads[1:]:
        np.add(total, head, out=total)
    # Dividing, not multiplying by 1/s: s·x/s rounds to x exactly, and x·(1/3)·3 does not.
    np.divide(total, total.dtype.type(len(heads)), out=total)
    return total
