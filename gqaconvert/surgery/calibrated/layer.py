"""Pools the attention of one layer, and tells beforehand what that would lose.

Pure: heads and statistics in, heads and a report out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from gqaconvert.errors import UsageError
from gqaconvert.surgery.calibrated.grams import LayerGrams, Metric, Precision, layer_grams
from gqaconvert.surgery.calibrated.group_score import GroupScore
from gqaconvert.surgery.calibrated.grouping import Group, adjacent_groups, similar_groups
from gqaconvert.surgery.calibrated.keys import SharedKey, fit_keys, share_keys
from gqaconvert.surgery.calibrated.svd import SharedHead
from gqaconvert.surgery.calibrated.values import fit_values, output_error, share_values
from gqaconvert.surgery.layer_heads import LayerHeads, LayerReport, LayerStatistics

Method = Literal["procrustes", "svd"]
Grouping = Literal["adjacent", "similarity"]

REACH = 2048
"""A context to fit for, unless another is asked for: better than a model's longest where it is used
with less, and little worse beyond."""


def pool_layer(
    heads: LayerHeads,
    statistics: LayerStatistics | None,
    *,
    num_kv_heads: int,
    method: Method,
    grouping: Grouping = "adjacent",
    metric: Metric = "attention",
    precision: Precision = "float64",
    reach: int = REACH,
) -> tuple[LayerHeads, LayerReport]:
    """Let every group of KV heads of a layer share one.

    Query heads move with their KV heads so that groups are neighbours; queries and output columns
    absorb what the shared heads cannot be to each of them.

    Args:
        heads: of the source. With as many KV heads as wanted they come back as they are.
        statistics: of the layer's inputs; "procrustes" does without them, on weights alone.
        num_kv_heads: G, a divisor of K.
        method: "svd" is the least squares optimum, "procrustes" turns heads and averages them.
        grouping: which heads share.
        metric: what the errors of "svd" are weighed by: "attention" is better as it stands,
            "plain" the better start for a fit.
        precision: of products with M x M matrices.
        reach: tokens between a query and the keys it reads, at most: the context the model is for.
            Used by "svd" where the angles of RoPE are known.

    Raises:
        UsageError: G that does not divide K, or "svd" without statistics.
        CheckpointError: weights or statistics that are not finite, statistics of another width.
    """
    _check(heads, statistics, num_kv_heads, method)
    if num_kv_heads == heads.num_kv_heads:
        return heads, _unchanged(heads)
    grams = layer_grams(heads, statistics, metric, precision)
    fit = _fit(grams, num_kv_heads, method, grouping, reach)
    keys, queries, values, outputs = [], [], [], []
    for group, key, value in zip(fit.groups, fit.keys, fit.values, strict=True):
        shared_key, folded = share_keys(heads, group, key)
        shared_value, columns = share_values(heads, group, value)
        keys.append(shared_key)
        queries.append(folded)
        values.append(shared_value)
        outputs.append(columns)
    pooled = replace(
        heads,
        query=np.concatenate(queries),
        key=np.stack(keys),
        value=np.stack(values),
        output=np.concatenate(outputs, axis=1),
    )
    return pooled, _report(heads, statistics, grams, fit, metric)


def predict_layer(
    heads: LayerHeads,
    statistics: LayerStatistics | None,
    *,
    num_kv_heads: Sequence[int],
    method: Method,
    grouping: Grouping = "adjacent",
    metric: Metric = "attention",
    precision: Precision = "float64",
    reach: int = REACH,
) -> dict[int, LayerReport]:
    """Return what `pool_layer` would report, for several numbers of KV heads at little more cost.

    Raises:
        UsageError: as `pool_layer`.
        CheckpointError: as `pool_layer`.
    """
    for count in num_kv_heads:
        _check(heads, statistics, count, method)
    grams = None
    reports = {}
    for count in num_kv_heads:
        if count == heads.num_kv_heads:
            reports[count] = _unchanged(heads)
            continue
        grams = grams or layer_grams(heads, statistics, metric, precision)
        fit = _fit(grams, count, method, grouping, reach)
        reports[count] = _report(heads, statistics, grams, fit, metric)
    return reports


@dataclass(frozen=True)
class _Fit:
    """The shared heads of a layer, group by group."""

    groups: list[Group]
    keys: list[SharedKey]
    values: list[SharedHead]


def _check(
    heads: LayerHeads, statistics: LayerStatistics | None, num_kv_heads: int, method: Method
) -> None:
    if num_kv_heads < 1 or heads.num_kv_heads % num_kv_heads:
        raise UsageError(
            f"{heads.num_kv_heads} KV heads cannot become {num_kv_heads} groups of equal size",
            remedy=f"a divisor of {heads.num_kv_heads}",
        )
    if method == "svd" and statistics is None:
        raise UsageError(
            "svd needs statistics of what goes into attention: without them it is worse than the"
            " mean, as it keeps what is large in the weights, not what is used",
            remedy="calibrate the model first, or take another method",
        )


def _fit(
    grams: LayerGrams, num_groups: int, method: Method, grouping: Grouping, reach: int
) -> _Fit:
    count = grams.num_kv_heads
    if grouping == "similarity":
        groups = similar_groups(count, num_groups, GroupScore(grams, count // num_groups))
    else:
        groups = adjacent_groups(count, num_groups)
    return _Fit(
        groups,
        [fit_keys(grams, group, method, reach) for group in groups],
        [fit_values(grams, group, method) for group in groups],
    )


def _unchanged(heads: LayerHeads) -> LayerReport:
    groups = tuple((head,) for head in range(heads.num_kv_heads))
    return LayerReport(groups, 0.0, 0.0, 0.0)


def _report(
    heads: LayerHeads,
    statistics: LayerStatistics | None,
    grams: LayerGrams,
    fit: _Fit,
    metric: Metric,
) -> LayerReport:
    errors = [output_error(grams, *each) for each in zip(fit.groups, fit.values, strict=True)]
    known = [error for error in errors if error is not None]
    return LayerReport(
        groups=tuple(fit.groups),
        key_energy_lost=_share([(key.lost, key.total) for key in fit.keys]),
        value_energy_lost=_share([(value.lost, value.total) for value in fit.values]),
        output_error=_share(known) if known else None,
        notes=tuple(_notes(heads, statistics, metric)),
    )


def _share(parts: Sequence[tuple[float, float]]) -> float:
    whole = sum(total for _, total in parts)
    return sum(lost for lost, _ in parts) / whole if whole > 0 else 0.0


def _notes(heads: LayerHeads, statistics: LayerStatistics | None, metric: Metric) -> list[str]:
    notes = []
    if heads.freedom.fixed is not None:
        notes.append(f"keys were averaged as they are: {heads.freedom.fixed}")
    if statistics is not None and metric == "attention":
        if statistics.averaged is None:
            notes.append("values were weighed by the inputs: no moments of what attention averages")
        if statistics.attended is None:
            notes.append("keys were weighed by the inputs: no moments of what is attended to")
    return notes
