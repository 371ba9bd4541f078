"""Keys of a group as one shared key, folded into the queries that read it.

In a RoPE plane a key may be multiplied by one complex number, without position by any matrix;
where neither passes (a norm behind the projection), keys are averaged and queries stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gqaconvert.surgery.calibrated.distances import mean_turns, mix_planes
from gqaconvert.surgery.calibrated.grams import HeadProducts, LayerGrams
from gqaconvert.surgery.calibrated.procrustes import turned_heads, turned_planes
from gqaconvert.surgery.calibrated.svd import Matrix, SharedHead, fit_shared
from gqaconvert.surgery.layer_heads import Floats, KeyFreedom, LayerHeads


@dataclass(frozen=True)
class SharedKey:
    """How one key stands for those of a group of s heads.

    Attributes:
        shared: of whole keys, basis (D, s, D) and maps (s, D, D); None where keys are averaged.
        total: the mean square of the scores that the keys gave, as if queries did not depend on
            keys; where they are averaged, the keys' own.
        lost: what the shared key does not give of it.
    """

    shared: SharedHead | None
    total: float
    lost: float


def fit_keys(grams: LayerGrams, group: Sequence[int], method: str, reach: int) -> SharedKey:
    """Find the shared key of a group.

    Args:
        grams: of the layer.
        group: KV heads of the source.
        method: "svd" or "procrustes".
        reach: tokens between a query and the keys it reads, at most.
    """
    freedom = grams.freedom
    if freedom.fixed is not None:
        return SharedKey(None, *averaged_key_energy(grams.keys, group))
    if method == "procrustes":
        planes = turned_planes(*grams.plane_problem(group))
        free = turned_heads(*grams.free_problem(group))
    else:
        planes = fit_shared(*grams.plane_problem(group))
        free = fit_shared(*grams.free_problem(group))
    whole = _whole_keys(planes, free, freedom)
    if method == "svd" and freedom.angles is not None:
        turns = mean_turns(freedom, freedom.angles, reach)
        whole = mix_planes(grams.keys.among(group), grams.queries[list(group)], turns, whole)
    return SharedKey(whole, whole.total, whole.lost)


def averaged_key_energy(keys: HeadProducts, group: Sequence[int]) -> tuple[float, float]:
    """Return the energy of a group's keys, and what their average does not hold of it."""
    weighted, rows = keys.weighted[list(group)], keys.rows[list(group)]
    own = float(np.sum(weighted * rows, dtype=np.float64))
    kept = float(np.sum(weighted.sum(axis=0) * rows.sum(axis=0), dtype=np.float64)) / len(group)
    return own, max(own - kept, 0.0)


def share_keys(heads: LayerHeads, group: Sequence[int], key: SharedKey) -> tuple[Floats, Floats]:
    """Write the shared key of a group, and the queries that read it.

    Returns:
        key (D, M+1) and queries (s*r, D, M+1), those of the group's first head first.
    """
    per_head = heads.num_heads // heads.num_kv_heads
    queries = [heads.query[head * per_head : (head + 1) * per_head] for head in group]
    keys = heads.key[list(group)]
    if key.shared is None:
        return keys.mean(axis=0), np.concatenate(queries)
    folded = [maps.T @ each for maps, each in zip(key.shared.maps, queries, strict=True)]
    shared = np.einsum("asb,sbm->am", key.shared.basis, keys, optimize=True)
    return shared, np.concatenate(folded)


def _whole_keys(planes: SharedHead, free: SharedHead, freedom: KeyFreedom) -> SharedHead:
    """Write one complex number a plane, and matrices of free dimensions, as real matrices."""
    count, width = free.maps.shape[0], 2 * len(freedom.planes) + len(freedom.free)
    basis, maps = np.zeros((count, width, width)), np.zeros((count, width, width))
    _write_planes(basis, planes.basis[:, 0, :, 0].T, freedom)
    _write_planes(maps, planes.maps[:, :, 0, 0].T, freedom)
    among_free = (slice(None), freedom.free[:, None], freedom.free)
    basis[among_free] = free.basis.swapaxes(0, 1)
    maps[among_free] = free.maps
    # A score in a plane is Re(q conj(k)), on average half of |q|²|k|².
    total, lost = planes.total / 2 + free.total, planes.lost / 2 + free.lost
    return SharedHead(basis.swapaxes(0, 1), maps, total, lost)


def _write_planes(matrices: Floats, numbers: Matrix, freedom: KeyFreedom) -> None:
    """Write numbers (s, P) as what multiplying by them does to (real, imaginary) pairs."""
    real, imaginary = freedom.planes.T
    matrices[:, real, real] = matrices[:, imaginary, imaginary] = numbers.real
    matrices[:, imaginary, real] = numbers.imag
    matrices[:, real, imaginary] = -numbers.imag
