"""The best shared head: reduced rank regression of several heads on one, from products alone.

Values, keys without position and, with complex numbers, keys in one RoPE plane are the same
problem, so they share this function. It never sees weights, only their second moments.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[Any]
"""Real or complex, double precision."""

_NOTHING = 1e-13
"""Share of a head's mean square below which a dimension of the shared head holds only rounding."""


@dataclass(frozen=True)
class SharedHead:
    """One head in place of s, for any number of problems solved at once (leading axes).

    Head i of the group is taken as `maps[i] @ shared`, and the shared head is the sum over i of
    `basis[:, i] @ head i`. D is 1 and complex for one RoPE plane.

    Attributes:
        basis: (..., R, s, D).
        maps: (..., s, D, R).
        total: what all heads held, weighted by importance; one number over the leading axes.
        lost: what the shared head does not hold, in the same measure.
    """

    basis: Matrix
    maps: Matrix
    total: float
    lost: float


def fit_shared(gram: Matrix, importance: Matrix, rank: int | None = None) -> SharedHead:
    """Find the shared head that loses least.

    With y_i the output of head i, minimises Σ_i E (y_i - A_i v)ᴴ S_i (y_i - A_i v) over a shared v
    of R dimensions that is linear in the inputs, and over the maps A_i.

    Args:
        gram: (..., s, D, s, D), E[y_i y_jᴴ].
        importance: (..., s, D, D), S_i: how much an error of head i costs; Hermitian, not negative.
        rank: R, at most s*D; D by default.
    """
    *lead, count, width = importance.shape[:-1]
    rank = width if rank is None else rank
    flat = (*lead, count * width, count * width)
    _, vectors = np.linalg.eigh(weigh(gram, importance).reshape(flat))
    kept = vectors[..., : -rank - 1 : -1]  # the largest first
    by_head = kept.reshape(*lead, count, width, rank)
    basis = np.moveaxis(np.swapaxes(by_head.conj(), -1, -2) @ square_root(importance), -3, -2)
    basis = _scale(basis, gram)
    maps = refit(gram, basis)
    lost = weighted_error(gram, importance, basis, maps)
    return SharedHead(basis, maps, weighted_energy(gram, importance), lost)


def refit(gram: Matrix, basis: Matrix) -> Matrix:
    """Return the least-squares maps from a given shared head to the heads: (..., s, D, R)."""
    *lead, rank, count, width = basis.shape
    rows = basis.reshape(*lead, rank, count * width)
    products = gram.reshape(*lead, count * width, count * width)
    towards = products @ np.swapaxes(rows.conj(), -1, -2)
    inverse = np.linalg.pinv(rows @ towards, hermitian=True)
    return (towards @ inverse).reshape(*lead, count, width, rank)


def weighted_energy(gram: Matrix, importance: Matrix) -> float:
    """Return Σ_i E y_iᴴ S_i y_i, summed over the leading axes."""
    return float(np.sum(importance * np.swapaxes(_own(gram), -1, -2)).real)


def weighted_error(gram: Matrix, importance: Matrix, basis: Matrix, maps: Matrix) -> float:
    """Return Σ_i E (y_i - A_i v)ᴴ S_i (y_i - A_i v), summed over the leading axes; not negative."""
    *lead, rank, count, width = basis.shape
    rows = basis.reshape(*lead, rank, count * width)
    products = gram.reshape(*lead, count * width, count * width)
    towards = (products @ np.swapaxes(rows.conj(), -1, -2)).reshape(*lead, count, width, rank)
    shared = rows @ towards.reshape(*lead, count * width, rank)
    cross = towards @ np.swapaxes(maps.conj(), -1, -2)
    error = _own(gram) - cross - np.swapaxes(cross.conj(), -1, -2)
    error = error + maps @ shared[..., None, :, :] @ np.swapaxes(maps.conj(), -1, -2)
    return max(float(np.sum(importance * np.swapaxes(error, -1, -2)).real), 0.0)


def weigh(gram: Matrix, importance: Matrix) -> Matrix:
    """Return R_i gram_ij R_jᴴ with R_i the root of S_i, made exactly Hermitian."""
    roots = square_root(importance)
    across = np.swapaxes(gram, -3, -2)  # (..., s, s, D, D): one block a pair of heads
    right = np.swapaxes(roots.conj(), -1, -2)
    across = roots[..., :, None, :, :] @ across @ right[..., None, :, :, :]
    across = (across + np.swapaxes(np.swapaxes(across.conj(), -1, -2), -4, -3)) / 2
    return np.swapaxes(across, -3, -2)


def residual_energy(weighted: Matrix) -> float:
    """Return what the best shared head would lose, without finding it.

    Args:
        weighted: (..., s, D, s, D), from `weigh`.
    """
    *lead, count, width = weighted.shape[:-2]
    values = np.linalg.eigvalsh(weighted.reshape(*lead, count * width, count * width))
    return max(float(values[..., : count * width - width].sum()), 0.0)


def _own(gram: Matrix) -> Matrix:
    """Return the products of every head with itself: (..., s, D, D)."""
    return np.stack([gram[..., i, :, i, :] for i in range(gram.shape[-2])], axis=-3)


def square_root(matrices: Matrix) -> Matrix:
    """Return the Hermitian square roots of Hermitian matrices (..., D, D), none negative."""
    if matrices.shape[-1] == 1:
        single: Matrix = np.sqrt(np.maximum(matrices.real, 0.0)).astype(matrices.dtype)
        return single
    values, vectors = np.linalg.eigh(matrices)
    roots = np.sqrt(np.maximum(values, 0.0))[..., None, :]
    root: Matrix = (vectors * roots) @ np.swapaxes(vectors.conj(), -1, -2)
    return root


def _scale(basis: Matrix, gram: Matrix) -> Matrix:
    """Give every dimension of the shared head the mean square of the heads it stands for.

    Its size could be anything, as the maps undo it; this keeps low precision, a quantised cache
    and an optimiser's step where they were in the source.
    """
    *lead, rank, count, width = basis.shape
    rows = basis.reshape(*lead, rank, count * width)
    products = gram.reshape(*lead, count * width, count * width)
    mean = np.trace(products, axis1=-2, axis2=-1).real / max(count * width, 1)
    own = np.einsum("...ri,...ri->...r", rows @ products, rows.conj()).real
    usable = own > mean[..., None] * _NOTHING
    scale = np.sqrt(np.divide(mean[..., None], own, out=np.ones_like(own), where=usable))
    scaled: Matrix = basis * scale[..., None, None]
    return scaled
