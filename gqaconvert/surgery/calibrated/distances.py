"""One key for several, fitted over the distances at which attention reads them.

A RoPE plane that hardly turns on the way from a key to its query is hardly a position: such planes
may mix, and a shared key that lets them loses far less than one complex number a plane can. How
much they mix is weighed by distance, so that fast planes stay apart by themselves, and dimensions
without position mix freely.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gqaconvert.surgery.calibrated.svd import Matrix, SharedHead
from gqaconvert.surgery.layer_heads import Floats, KeyFreedom

_ROUNDS = 60
_SETTLED = 1e-3
"""A round that gains less than this share of what is lost is the last."""

_POINTS = 512
"""Distances that the mean is taken over."""

_NOTHING = 1e-12
"""Share of the scores below which nothing is lost but rounding."""

_RIDGE = 1e-10
"""Share of the mean eigenvalue added before a matrix is inverted."""


@dataclass(frozen=True)
class Turns:
    """Means over distances of what RoPE does to a key on its way to a query.

    With k read as one complex number a plane, RoPE multiplies it by a factor e a plane.

    Attributes:
        planes: (P, 2), as in `KeyFreedom`.
        free: (F,).
        single: (P,), the mean of e_a.
        opposed: (P, P), the mean of e_a conj(e_b).
        joint: (P, P), the mean of e_a e_b.
    """

    planes: NDArray[np.intp]
    free: NDArray[np.intp]
    single: NDArray[np.complex128]
    opposed: NDArray[np.complex128]
    joint: NDArray[np.complex128]

    def mean(self, products: Floats, back: bool = False) -> Floats:
        """Return the mean over distances of R X Rᵀ, or of Rᵀ X R, for X (..., D, D)."""
        single, opposed, joint = self.single, self.opposed, self.joint
        if back:
            single, opposed, joint = single.conj(), opposed.conj(), joint.conj()
        (real, imaginary), free = self.planes.T, self.free

        def part(rows: NDArray[np.intp], columns: NDArray[np.intp]) -> Floats:
            return products[..., rows[:, None], columns]

        rr, ri = part(real, real), part(real, imaginary)
        ir, ii = part(imaginary, real), part(imaginary, imaginary)
        one = ((rr + ii) + 1j * (ir - ri)) * opposed / 2
        two = ((rr - ii) + 1j * (ir + ri)) * joint / 2
        down = (part(real, free) + 1j * part(imaginary, free)) * single[:, None]
        across = (part(free, real) + 1j * part(free, imaginary)) * single
        averaged = products.copy()
        averaged[..., real[:, None], real] = (one + two).real
        averaged[..., imaginary[:, None], imaginary] = (one - two).real
        averaged[..., imaginary[:, None], real] = (one + two).imag
        averaged[..., real[:, None], imaginary] = (two - one).imag
        averaged[..., real[:, None], free], averaged[..., imaginary[:, None], free] = (
            down.real,
            down.imag,
        )
        averaged[..., free[:, None], real], averaged[..., free[:, None], imaginary] = (
            across.real,
            across.imag,
        )
        return averaged


def mean_turns(freedom: KeyFreedom, angles: Floats, reach: int) -> Turns:
    """Return what RoPE does on average over distances of 1 to `reach` tokens.

    Distances are drawn evenly in their logarithm: from 1 to 10 as often as from 100 to 1000.

    Args:
        freedom: of the keys.
        angles: (P,), radians a token.
        reach: the model's context.
    """
    distances = np.geomspace(1, max(reach, 2), _POINTS)
    factors = np.exp(-1j * np.outer(angles, distances))  # the key stands before its query
    return Turns(
        planes=freedom.planes,
        free=freedom.free,
        single=factors.mean(axis=1),
        opposed=factors @ factors.conj().T / _POINTS,
        joint=factors @ factors.T / _POINTS,
    )


def mix_planes(gram: Floats, queries: Floats, turns: Turns, start: SharedHead) -> SharedHead:
    """Let the planes of a shared key mix, by alternating least squares.

    Minimises the mean over distances of Σ_i E (qᵀ R k_i - qᵀ A_i R v)² over a shared key v that is
    linear in the keys, and over the maps A_i; queries become A_iᵀ q. A start that loses nothing is
    kept.

    Args:
        gram: (s, D, s, D), E[k_i k_jᵀ] before positions.
        queries: (s, D, D), E[q qᵀ] summed over the query heads of each key.
        turns: from `mean_turns`.
        start: of whole keys, from one complex number a plane.
    """
    across = gram.swapaxes(1, 2)  # (s, s, D, D)
    own = turns.mean(np.stack([gram[i, :, i] for i in range(len(gram))]))
    total = float(np.sum(queries * own))
    basis, maps = start.basis.swapaxes(0, 1), start.maps  # (s, D, D) both
    towards, shared = _reads(across, basis, turns)
    lost = _lost(total, queries, maps, towards, shared)
    for _ in range(_ROUNDS):
        if lost <= _NOTHING * total:
            break
        new_maps = _divide(towards.swapaxes(1, 2), shared).swapaxes(1, 2)
        weighted = new_maps.swapaxes(1, 2) @ queries
        normal = turns.mean(np.sum(weighted @ new_maps, axis=0), back=True)
        new_basis = _divide(turns.mean(weighted, back=True), normal)
        towards, shared = _reads(across, new_basis, turns)
        new_lost = _lost(total, queries, new_maps, towards, shared)
        if new_lost >= lost:
            break
        gained, basis, maps, lost = lost - new_lost, new_basis, new_maps, new_lost
        if gained < _SETTLED * lost:
            break
    return _scaled(SharedHead(basis.swapaxes(0, 1), maps, total, max(lost, 0.0)), gram, turns)


def _reads(across: Floats, basis: Floats, turns: Turns) -> tuple[Floats, Floats]:
    """Return the means over distances of E[R k_i (R v)ᵀ] (s, D, D) and E[R v (R v)ᵀ] (D, D)."""
    towards = np.stack([np.sum(row @ basis.swapaxes(1, 2), axis=0) for row in across])
    return turns.mean(towards), turns.mean(np.sum(basis @ towards, axis=0))


def _lost(total: float, queries: Floats, maps: Floats, towards: Floats, shared: Floats) -> float:
    read = queries @ maps
    return total - 2 * float(np.sum(read * towards)) + float(np.sum(read * (maps @ shared)))


def _divide(products: Floats, positive: Floats) -> Floats:
    """Return positive⁻¹ products, of a symmetric matrix with next to nothing in places."""
    width = len(positive)
    symmetric = (positive + positive.T) / 2
    symmetric[np.diag_indices(width)] += _RIDGE * max(float(np.trace(symmetric)) / width, 1e-300)
    return np.asarray(np.linalg.solve(symmetric, products), np.float64)


def _scaled(key: SharedHead, gram: Floats, turns: Turns) -> SharedHead:
    """Give every plane the mean square of the keys it stands for; it passes RoPE."""
    count, width = gram.shape[:2]
    products = gram.reshape(count * width, count * width)
    rows: Matrix = key.basis.reshape(width, count * width)
    energy = np.einsum("ri,ri->r", rows @ products, rows)
    wanted = np.einsum("idid->d", gram) / count
    for pair in turns.planes:
        energy[pair], wanted[pair] = energy[pair].mean(), wanted[pair].mean()
    usable = (energy > 0) & (wanted > 0)
    scale = np.sqrt(np.divide(wanted, energy, out=np.ones_like(energy), where=usable))
    return SharedHead(key.basis * scale[:, None, None], key.maps / scale, key.total, key.lost)
