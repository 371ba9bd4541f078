"""Keeping the first head of a group: an ablation of the GQA paper (arXiv 2305.13245, figure 4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray


def first(heads: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Return the first of a group's heads, s arrays of one shape."""
    return heads[0]
