"""How alike heads are before and after turning each into the others' basis. Pure, numpy alone.

A head may be turned without changing the model when the turn can be undone beside it: value heads
by any orthogonal matrix (undone in the output projection), key heads by one angle in each plane
that RoPE turns (undone in the query heads of the group) and freely in dimensions RoPE leaves alone.
Everything follows from the products of heads with each other, so the weights are needed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gqaconvert.surgery.calibrated.procrustes import (
    matrix_turns,
    plane_turns,
    turned_planes_sum,
    turned_sum,
)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Freedom:
    """Which turns of a head of D dimensions the model does not notice.

    Attributes:
        planes: pairs of dimensions, each of which may be turned by one angle: (P, 2).
        free: dimensions that may be mixed by any orthogonal matrix.
    """

    planes: NDArray[np.intp]
    free: NDArray[np.intp]


def value_freedom(width: int) -> Freedom:
    """Return the freedom of value heads: any orthogonal matrix."""
    return Freedom(np.empty((0, 2), np.intp), np.arange(width))


def key_freedom(
    width: int, rope: Literal["halves", "adjacent", "none"], rotary_factor: float | None = 1.0
) -> Freedom:
    """Return the freedom of key heads.

    Args:
        width: D.
        rope: which dimensions RoPE turns together.
        rotary_factor: share of the dimensions, the first ones, that it turns; None where layers
            differ, which is taken as all.
    """
    if rope == "none":
        return value_freedom(width)
    turned = int(width * (1.0 if rotary_factor is None else rotary_factor)) // 2 * 2
    first = np.arange(turned // 2)
    pairs = (first, first + turned // 2) if rope == "halves" else (2 * first, 2 * first + 1)
    return Freedom(np.stack(pairs, axis=1), np.arange(turned, width))


def head_products(heads: Sequence[NDArray[np.floating]]) -> Floats:
    """Return W_i W_jᵀ for all pairs of heads (D, M), as one array (K, K, D, D)."""
    count, width = len(heads), heads[0].shape[0]
    stacked = np.concatenate(heads).astype(np.float32, copy=False)
    products = (stacked @ stacked.T).astype(np.float64)
    return products.reshape(count, width, count, width).transpose(0, 2, 1, 3)


def raw_similarity(products: Floats) -> Floats:
    """Return the cosine between every two heads, as they are: (K, K)."""
    return _cosines(np.trace(products, axis1=2, axis2=3), products)


def aligned_similarity(products: Floats, freedom: Freedom) -> Floats:
    """Return the largest cosine that turning one head of each pair can reach: (K, K).

    Closed form for each pair by itself; three heads need not reach it at once.
    """
    reached = np.abs(_plane_products(products, freedom)).sum(axis=2)
    if len(freedom.free):
        free = products[:, :, freedom.free[:, None], freedom.free[None, :]]
        for row in range(len(products)):  # one row of pairs at a time keeps the copies small
            reached[row] += np.linalg.svd(free[row], compute_uv=False).sum(axis=-1)
    return _cosines(reached, products)


def pooled_share(products: Floats, group_size: int, freedom: Freedom | None = None) -> float:
    """Return how much of the heads' squared norm averaging adjacent groups keeps, 0 to 1.

    Equal heads keep all of it, unrelated ones 1 ÷ group size.

    Args:
        products: from `head_products`.
        group_size: heads that become one.
        freedom: turn the heads of a group towards each other first (generalised Procrustes: one
            turn a head, so that their sum is as long as can be found); None to leave them.
    """
    kept = 0.0
    for start in range(0, len(products), group_size):
        group = products[start : start + group_size, start : start + group_size]
        total = (
            float(np.trace(group, axis1=2, axis2=3).sum())
            if freedom is None
            else _turned_sum(group, freedom)
        )
        kept += total / group_size
    norms = float(np.einsum("iidd->", products))
    return kept / norms if norms else 1.0


def chance_similarity(width: int, inputs: int, freedom: Freedom) -> float:
    """Return what alignment reaches between two heads of independent normal noise (D, M)."""
    noise = np.random.default_rng(0)
    heads = [noise.standard_normal((width, inputs), dtype=np.float32) for _ in range(2)]
    return float(aligned_similarity(head_products(heads), freedom)[0, 1])


def _cosines(reached: Floats, products: Floats) -> Floats:
    norms = np.sqrt(np.einsum("iidd->i", products))
    lengths = np.outer(norms, norms)
    return np.divide(reached, lengths, out=np.zeros_like(lengths), where=lengths > 0)


def _plane_products(products: Floats, freedom: Freedom) -> NDArray[np.complex128]:
    """Products of heads read as complex vectors, one for each plane: (K, K, P)."""
    first, second = freedom.planes[:, 0], freedom.planes[:, 1]
    along = products[:, :, first, first] + products[:, :, second, second]
    across = products[:, :, second, first] - products[:, :, first, second]
    return along + 1j * across


def _turned_sum(products: Floats, freedom: Freedom) -> float:
    """Squared norm of the sum of heads (K, K, D, D), each turned towards the others."""
    planes = _plane_products(products, freedom)
    free = products[:, :, freedom.free[:, None], freedom.free[None, :]]
    return turned_planes_sum(planes, plane_turns(planes)) + turned_sum(free, matrix_turns(free))
