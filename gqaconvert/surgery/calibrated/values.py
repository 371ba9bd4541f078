"""Values of a group as one shared value, folded into the output columns of its query heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gqaconvert.surgery.calibrated.grams import LayerGrams
from gqaconvert.surgery.calibrated.procrustes import turned_heads
from gqaconvert.surgery.calibrated.svd import (
    SharedHead,
    fit_shared,
    weighted_energy,
    weighted_error,
)
from gqaconvert.surgery.layer_heads import Floats, LayerHeads


def fit_values(grams: LayerGrams, group: Sequence[int], method: str) -> SharedHead:
    """Find the shared value of a group.

    Args:
        grams: of the layer.
        group: KV heads of the source.
        method: "svd" or "procrustes".
    """
    gram, importance = grams.value_problem(group)
    return fit_shared(gram, importance) if method == "svd" else turned_heads(gram, importance)


def output_error(
    grams: LayerGrams, group: Sequence[int], shared: SharedHead
) -> tuple[float, float] | None:
    """Return the squared error of the attention's output and its square, or None.

    Heads are taken not to depend on each other; None without moments of what attention averages.
    """
    if grams.averaged is None:
        return None
    gram, importance = grams.averaged.among(group), grams.outputs[list(group)]
    error = weighted_error(gram, importance, shared.basis, shared.maps)
    return error, weighted_energy(gram, importance)


def share_values(
    heads: LayerHeads, group: Sequence[int], shared: SharedHead
) -> tuple[Floats, Floats]:
    """Write the shared value of a group, and the output columns that read it.

    Returns:
        value (Dv, M+1) and output (M, s*r, Dv), columns of the group's first head first.
    """
    value = np.einsum("rsd,sdm->rm", shared.basis, heads.value[list(group)], optimize=True)
    per_head = heads.num_heads // heads.num_kv_heads
    columns = [
        heads.output[:, head * per_head : (head + 1) * per_head] @ shared.maps[place]
        for place, head in enumerate(group)
    ]
    return value, np.concatenate(columns, axis=1)
