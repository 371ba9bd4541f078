"""What a group of heads would lose, keys and values together, fast enough to try thousands."""

from __future__ import annotations

import numpy as np

from gqaconvert.surgery.calibrated.grams import LayerGrams
from gqaconvert.surgery.calibrated.keys import averaged_key_energy
from gqaconvert.surgery.calibrated.svd import Matrix, residual_energy, weigh

_WIDEST = 128
"""Matrices up to this size are scored exactly; beyond it, on the strongest directions of each head
(an eigenvalue problem of this size takes a millisecond, and a group is one)."""


class GroupScore:
    """Scores groups of one layer.

    Args:
        grams: of the layer.
        size: heads a group will have in the end.
    """

    def __init__(self, grams: LayerGrams, size: int) -> None:
        everyone = range(grams.num_kv_heads)
        self._averaged = grams.keys if grams.freedom.fixed is not None else None
        if self._averaged is None:
            # As in `fit_keys`: half of it is the mean square of a score.
            self._planes = weigh(*grams.plane_problem(everyone)) / 2
            self._free = _strongest(weigh(*grams.free_problem(everyone)), size)
            self._key_total = _energy(self._planes) + _energy(self._free)
        else:
            self._key_total = averaged_key_energy(grams.keys, everyone)[0]
        self._values = _strongest(weigh(*grams.value_problem(everyone)), size)
        self._value_total = _energy(self._values)

    def __call__(self, group: tuple[int, ...]) -> float:
        """Return the share of keys lost plus the share of values lost, of the layer's."""
        picked = list(group)
        if len(picked) == 1:
            return 0.0
        if self._averaged is not None:
            keys = averaged_key_energy(self._averaged, picked)[1]
        else:
            keys = residual_energy(self._planes[:, picked][:, :, :, picked])
            keys += residual_energy(self._free[picked][:, :, picked])
        values = residual_energy(self._values[picked][:, :, picked])
        return _share(keys, self._key_total) + _share(values, self._value_total)


def _strongest(weighted: Matrix, size: int) -> Matrix:
    """Keep as many of the strongest directions of each head (K, D, K, D) as can be scored fast."""
    count, width = weighted.shape[:2]
    kept = min(width, max(_WIDEST // size, 8))
    if kept == width:
        return weighted
    _, vectors = np.linalg.eigh(np.stack([weighted[i, :, i, :] for i in range(count)]))
    strongest = vectors[:, :, width - kept :]
    across = weighted.swapaxes(1, 2)
    cut: Matrix = strongest.swapaxes(1, 2)[:, None] @ across @ strongest[None]
    return cut.swapaxes(1, 2)


def _energy(weighted: Matrix) -> float:
    return float(np.einsum("...idid->...", weighted).real.sum())


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0
