"""Everything pooling needs to know of a layer: products of its heads with each other.

The M x M work is here and is done once a layer; every group, number of heads and method follows
from these small matrices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gqaconvert.errors import CheckpointError
from gqaconvert.surgery.calibrated.svd import Matrix
from gqaconvert.surgery.layer_heads import Floats, KeyFreedom, LayerHeads, LayerStatistics

Metric = Literal["plain", "attention"]
"""Which second moments weigh an error: of the inputs as they are, or of what attention reads."""

Precision = Literal["float64", "float32"]
"""Of the products with M x M matrices; everything after them is in float64."""

_RIDGE = 1e-6
"""Share of the mean square added to every input, so that few tokens leave no direction free."""


@dataclass(frozen=True)
class HeadProducts:
    """Products of heads with each other, E[y_i y_jᵀ], made when they are asked for.

    Attributes:
        weighted: (K, D, M+1), the heads times the second moments of their inputs.
        rows: (K, D, M+1), the heads.
    """

    weighted: NDArray[np.floating]
    rows: NDArray[np.floating]

    def among(self, heads: Sequence[int], dimensions: NDArray[np.intp] | None = None) -> Floats:
        """Return the products of some heads, in some of their dimensions: (s, D, s, D)."""
        left, right = self.weighted[list(heads)], self.rows[list(heads)]
        if dimensions is not None:
            left, right = left[:, dimensions], right[:, dimensions]
        count, width, inputs = right.shape
        product = left.reshape(-1, inputs) @ right.reshape(-1, inputs).T
        return product.astype(np.float64).reshape(count, width, count, width)


@dataclass(frozen=True)
class LayerGrams:
    """Products of the heads of one layer, weighted by what their inputs are.

    Attributes:
        freedom: of the keys.
        keys: of the keys, before positions.
        planes: (P, K, 1, K, 1), E[k_i conj(k_j)] of the keys read as one complex number a plane.
        queries: (K, D, D), E[q qᵀ] summed over the query heads that read key head i.
        values: of the values.
        outputs: (K, Dv, Dv), Σ OᵀO over the query heads that read value head i.
        averaged: of the values, in the metric of what attention averages; None where unknown.
    """

    freedom: KeyFreedom
    keys: HeadProducts
    planes: NDArray[np.complex128]
    queries: Floats
    values: HeadProducts
    outputs: Floats
    averaged: HeadProducts | None

    @property
    def num_kv_heads(self) -> int:
        """KV heads K."""
        return len(self.queries)

    def plane_problem(self, heads: Sequence[int]) -> tuple[Matrix, Matrix]:
        """Return gram and importance of some heads' keys in RoPE planes, for `fit_shared`."""
        energies = np.diagonal(self.queries[list(heads)], axis1=1, axis2=2)
        importance = energies[:, self.freedom.planes].sum(axis=2).T[:, :, None, None]
        gram = self.planes[:, list(heads)][:, :, :, list(heads)]
        return gram, importance.astype(np.complex128)

    def free_problem(self, heads: Sequence[int]) -> tuple[Matrix, Matrix]:
        """Return gram and importance of some heads' keys in dimensions without position."""
        free = self.freedom.free
        importance = self.queries[list(heads)][:, free[:, None], free]
        return self.keys.among(heads, free), importance

    def value_problem(self, heads: Sequence[int]) -> tuple[Matrix, Matrix]:
        """Return gram and importance of some heads' values."""
        return self.values.among(heads), self.outputs[list(heads)]


def layer_grams(
    heads: LayerHeads,
    statistics: LayerStatistics | None,
    metric: Metric = "attention",
    precision: Precision = "float64",
) -> LayerGrams:
    """Multiply the heads of a layer with each other.

    Args:
        heads: of the source.
        statistics: of its inputs; None takes every input and every query to count alike.
        metric: "attention" takes what attention averages for values and what it attends to for
            keys, where they were gathered.
        precision: of the products with M x M matrices.

    Raises:
        CheckpointError: weights or statistics that are not finite, statistics of another width.
        ValueError: dimensions of the keys that are neither in one plane nor free.
    """
    _check_freedom(heads)
    inputs, attended, averaged = _metrics(heads, statistics, metric)
    number = np.dtype(precision)
    key, value = heads.key.astype(number, copy=False), heads.value.astype(number, copy=False)
    keys, values = (
        HeadProducts(_times(rows, moments), rows)
        for rows, moments in ((key, attended), (value, averaged))
    )
    grams = LayerGrams(
        freedom=heads.freedom,
        keys=keys,
        planes=_plane_products(keys, heads.freedom.planes),
        queries=_query_moments(heads, inputs, number),
        values=values,
        outputs=_output_moments(heads),
        averaged=_averaged_values(values, statistics, metric),
    )
    parts = (keys.weighted, values.weighted, grams.queries, grams.outputs)
    if not all(np.isfinite(each).all() for each in parts):
        raise CheckpointError(
            "the attention's weights hold values that are not finite, or too large to multiply",
            remedy="repair or fetch the checkpoint again",
        )
    return grams


def _check_freedom(heads: LayerHeads) -> None:
    freedom = heads.freedom
    named = np.sort(np.concatenate([freedom.planes.ravel(), freedom.free]))
    if freedom.fixed is None and not np.array_equal(named, np.arange(heads.key.shape[1])):
        raise ValueError(f"planes and free dimensions name {named.tolist()} of a key's dimensions")
    if freedom.angles is not None and freedom.angles.shape != (len(freedom.planes),):
        raise ValueError(f"{freedom.angles.shape} angles for {len(freedom.planes)} planes")


def _metrics(
    heads: LayerHeads, statistics: LayerStatistics | None, metric: Metric
) -> tuple[Floats | None, Floats | None, Floats | None]:
    """Return the second moments to weigh queries, keys and values by."""
    if statistics is None:
        return None, None, None
    inputs = _usable(statistics.inputs, heads, "inputs")
    if metric == "plain":
        return inputs, inputs, inputs
    attended, averaged = inputs, inputs
    if statistics.attended is not None:
        attended = _usable(statistics.attended, heads, "attended")
    if statistics.averaged is not None:
        averaged = _usable(statistics.averaged, heads, "averaged")
    return inputs, attended, averaged


def _usable(moments: Floats, heads: LayerHeads, name: str) -> Floats:
    """Return second moments, symmetric and with every direction used a little."""
    width = heads.query.shape[2]
    if moments.shape != (width, width):
        raise CheckpointError(
            f"statistics of {moments.shape[0] - 1} inputs for a layer of {width - 1}",
            at=name,
            remedy="calibrate this model again",
        )
    mean = float(np.trace(moments)) / width
    if not np.isfinite(moments).all() or mean <= 0:
        raise CheckpointError(
            "statistics that are not finite, or all zero",
            at=name,
            remedy="calibrate this model again, in float32 or bfloat16",
        )
    usable = (moments + moments.T) / 2
    usable[np.diag_indices(width)] += _RIDGE * mean
    return usable


def _times(rows: NDArray[np.floating], moments: Floats | None) -> NDArray[np.floating]:
    """Return W C for heads (K, D, M+1)."""
    if moments is None:
        return rows
    flat = rows.reshape(-1, rows.shape[2])
    return (flat @ moments.astype(rows.dtype, copy=False)).reshape(rows.shape)


def _plane_products(keys: HeadProducts, planes: NDArray[np.intp]) -> NDArray[np.complex128]:
    """Return the products of heads read as complex numbers, plane by plane: (P, K, 1, K, 1)."""
    count = len(keys.rows)
    products = np.empty((len(planes), count, count), np.complex128)
    for number, plane in enumerate(planes):
        left = keys.weighted[:, plane].swapaxes(0, 1).reshape(2 * count, -1)
        right = keys.rows[:, plane].swapaxes(0, 1).reshape(2 * count, -1)
        both = (left @ right.T).astype(np.float64)
        rr, ri = both[:count, :count], both[:count, count:]
        ir, ii = both[count:, :count], both[count:, count:]
        products[number] = (rr + ii) + 1j * (ir - ri)
    return products[:, :, None, :, None]


def _query_moments(
    heads: LayerHeads, inputs: Floats | None, number: np.dtype[np.floating]
) -> Floats:
    """Return E[q qᵀ] (K, D, D); without statistics every query counts alike."""
    count, width = heads.key.shape[:2]
    if inputs is None:
        return np.broadcast_to(np.eye(width), (count, width, width)).copy()
    moments = np.zeros((count, width, width))
    queries = heads.query.reshape(count, -1, *heads.query.shape[1:])
    for head in range(count):
        rows = queries[head].astype(number, copy=False)  # (r, D, M+1), one at a time for memory
        moments[head] = np.sum(_times(rows, inputs) @ rows.swapaxes(1, 2), axis=0)
    return moments


def _output_moments(heads: LayerHeads) -> Floats:
    """Return Σ OᵀO (K, Dv, Dv)."""
    columns = heads.output.transpose(1, 2, 0).astype(np.float64, copy=False)  # (H, Dv, M)
    products = columns @ columns.swapaxes(1, 2)
    moments: Floats = products.reshape(heads.num_kv_heads, -1, *products.shape[1:]).sum(axis=1)
    return moments


def _averaged_values(
    values: HeadProducts, statistics: LayerStatistics | None, metric: Metric
) -> HeadProducts | None:
    """Return the products of values in the metric of the layer's output."""
    if statistics is None or statistics.averaged is None:
        return None
    if metric == "attention":
        return values
    return HeadProducts(_times(values.rows, statistics.averaged), values.rows)
