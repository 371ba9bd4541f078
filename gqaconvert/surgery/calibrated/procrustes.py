"""Turning heads towards each other before they are averaged (generalised Procrustes).

A head may be turned where the turn can be undone beside it: by one angle in each RoPE plane, by
any orthogonal matrix where there is no position. All from products of heads, never from weights.
After arXiv 2412.20677; also what `inspect --heads` compares heads by.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gqaconvert.surgery.calibrated.svd import Matrix, SharedHead, weighted_energy, weighted_error

Floats = NDArray[np.float64]
Complexes = NDArray[np.complex128]

_SWEEPS = 4
"""Rounds over all heads; the first, greedy one gives most of it."""


def plane_turns(products: Complexes) -> Complexes:
    """Find one phase a head and plane so that the sum of the turned heads is as long as can be.

    Args:
        products: (K, K, P), E[k_i conj(k_j)] in each plane.

    Returns:
        Phases (K, P) of length one: head i is multiplied by its own.
    """
    count, planes = products.shape[0], products.shape[2]
    phases = np.ones((count, planes), np.complex128)
    for sweep in range(_SWEEPS):
        for head in range(count):
            others = np.arange(head) if sweep == 0 else np.delete(np.arange(count), head)
            if len(others) and planes:
                towards = (products[head, others] * phases[others].conj()).sum(axis=0)
                length = np.abs(towards)
                phases[head] = np.divide(
                    towards.conj(), length, out=np.ones_like(towards), where=length > 0
                )
    return phases


def matrix_turns(products: Floats) -> Floats:
    """Find one orthogonal matrix a head so that the sum of the turned heads is as long as can be.

    Args:
        products: (K, K, D, D), E[v_i v_jᵀ].

    Returns:
        Matrices (K, D, D): head i is multiplied by its own from the left.
    """
    count, width = products.shape[0], products.shape[2]
    turns = np.broadcast_to(np.eye(width), (count, width, width)).copy()
    for sweep in range(_SWEEPS if width else 0):
        for head in range(count):
            others = range(head) if sweep == 0 else [n for n in range(count) if n != head]
            if others:
                towards = sum(products[head, n] @ turns[n].T for n in others)
                left, _, right = np.linalg.svd(towards)
                turns[head] = (left @ right).T
    return turns


def turned_planes_sum(products: Complexes, phases: Complexes) -> float:
    """Squared length of the sum of heads (K, K, P), each turned by its phases (K, P)."""
    return float(np.einsum("ip,ijp,jp->", phases, products, phases.conj()).real)


def turned_sum(products: Floats, turns: Floats) -> float:
    """Squared length of the sum of heads (K, K, D, D), each turned by its matrix (K, D, D)."""
    pairs = range(len(products))
    return float(
        sum(np.vdot(turns[i].T, products[i, j] @ turns[j].T) for i in pairs for j in pairs)
    )


def turned_planes(gram: Complexes, importance: Complexes) -> SharedHead:
    """Average heads after turning each by one phase in every plane.

    Args:
        gram: (P, s, 1, s, 1), E[k_i conj(k_j)].
        importance: (P, s, 1, 1): how much a head counts in the average.
    """
    weights = _shares(importance[:, :, 0, 0].real.T)  # (s, P)
    products = gram[:, :, 0, :, 0].transpose(1, 2, 0)
    phases = plane_turns(products * weights[:, None] * weights[None])
    basis = (phases * weights).T[:, None, :, None]
    maps = phases.conj().T[:, :, None, None]
    return _measured(gram, importance, basis, maps)


def turned_heads(gram: Floats, importance: Floats) -> SharedHead:
    """Average heads after turning each by an orthogonal matrix.

    Args:
        gram: (s, D, s, D), E[v_i v_jᵀ].
        importance: (s, D, D); its trace is how much a head counts in the average.
    """
    weights = _shares(np.trace(importance, axis1=1, axis2=2)[:, None])[:, 0]
    products = gram.transpose(0, 2, 1, 3) * np.outer(weights, weights)[:, :, None, None]
    turns = matrix_turns(products)
    basis = (turns * weights[:, None, None]).swapaxes(0, 1)
    return _measured(gram, importance, basis, turns.swapaxes(1, 2))


def _shares(weights: Floats) -> Floats:
    """Return weights (s, ...) as shares of their sum, equal ones where all are zero."""
    total = weights.sum(axis=0, keepdims=True)
    equal = np.full_like(weights, 1 / len(weights))
    shares: Floats = np.divide(weights, total, out=equal, where=total > 0)
    return shares


def _measured(gram: Matrix, importance: Matrix, basis: Matrix, maps: Matrix) -> SharedHead:
    total = weighted_energy(gram, importance)
    return SharedHead(basis, maps, total, weighted_error(gram, importance, basis, maps))
