"""Pools one attention block as a whole: read, calibrated method, refinement, tensors out.

The streamed conversion, the one in memory and the prediction all come through here; how heads are
pooled is `calibrated`'s affair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, cast

import numpy as np

from gqaconvert.attention.freedom import BlockFreedom
from gqaconvert.checkpoint.reader import NUMPY_TYPES, Array
from gqaconvert.errors import CheckpointError
from gqaconvert.surgery.calibrated import Grouping, Method, pool_layer, predict_layer
from gqaconvert.surgery.calibrated.grams import Metric
from gqaconvert.surgery.layer_heads import Floats, LayerHeads, LayerReport, LayerStatistics
from gqaconvert.surgery.layer_tensors import (
    Read,
    mean_rows,
    move_rows,
    query_order,
    read_heads,
    rounded,
    write_heads,
)
from gqaconvert.surgery.plan import ConversionPlan, LayerPlan


class Refine(Protocol):
    """What may follow the pooling of a layer, such as a local fit; called in layer order."""

    @property
    def identity(self) -> str:
        """All that determines the result, in one string; a resumed run must have the same."""
        ...

    def __call__(
        self, layer: int, source: LayerHeads, pooled: LayerHeads, report: LayerReport
    ) -> LayerHeads:
        """Return better heads than `pooled`, with as many KV heads."""
        ...

    def facts(self, layer: int) -> Mapping[str, Any]:
        """Return what the report of a refined layer should say, such as errors before and after."""
        ...

    def passed(self, layer: int, pooled: LayerHeads) -> None:
        """Take note of a layer that an earlier run finished."""
        ...


@dataclass(frozen=True)
class Calibration:
    """What calibrated pooling needs beside the weights.

    Attributes:
        statistics: layer number → second moments; None for `procrustes` on weights alone.
        refine: what follows on pooling, if anything.
        identity: where the statistics come from, for the manifest.
    """

    statistics: Mapping[int, LayerStatistics] | None = None
    refine: Refine | None = None
    identity: Mapping[str, Any] | None = None

    def layer(self, layer: LayerPlan) -> LayerStatistics | None:
        """Return the statistics of a block.

        Raises:
            CheckpointError: there are none of this layer.
        """
        number = layer.block.layer
        if self.statistics is None:
            return None
        if number is None or number not in self.statistics:
            raise CheckpointError(
                f"the calibration holds nothing on layer {number}",
                at=layer.block.module,
                remedy="gqaconvert calibrate, with this version",
            )
        return self.statistics[number]


@dataclass(frozen=True)
class PooledLayer:
    """What comes out of one block.

    Attributes:
        tensors: name → content in the output's type.
        facts: what the manifest says of it.
    """

    tensors: Mapping[str, Array]
    facts: Mapping[str, Any]


def make_layer(
    plan: ConversionPlan, layer: LayerPlan, read: Read, calibration: Calibration
) -> PooledLayer:
    """Pool one block and return its tensors.

    Args:
        plan: the conversion.
        layer: one of `plan.layers`.
        read: gives the source's tensors.
        calibration: statistics, and what follows.

    Raises:
        CheckpointError: weights that are not finite, or statistics of another width.
    """
    source = read_finite(layer, read)
    pooled, report = pool_heads(
        source,
        calibration.layer(layer),
        layer.freedom,
        num_kv_heads=plan.options.num_kv_heads,
        method=cast(Method, plan.options.method),
        grouping=layer.grouping,
        metric=plan.options.metric,
        at=layer.block.module,
    )
    facts = describe(layer, report)
    number = layer.block.layer
    if calibration.refine is not None and number is not None:
        pooled = calibration.refine(number, source, pooled, report)
        facts |= calibration.refine.facts(number)
    arrays = layer_arrays(plan, layer, pooled, report, read)
    types = {tensor.output.name: tensor.output.dtype for tensor in plan.tensors}
    cast_arrays = {name: rounded(array, NUMPY_TYPES[types[name]]) for name, array in arrays.items()}
    for name, array in cast_arrays.items():
        if not np.isfinite(array.astype(np.float32, copy=False)).all():
            raise CheckpointError(
                f"{plan.options.method} gave values that are not finite in {types[name]}",
                at=name,
                remedy="--dtype bfloat16 or float32, or --method mean",
            )
    return PooledLayer({name: cast_arrays[name] for name in layer.outputs}, facts)


def pool_heads(
    source: LayerHeads,
    statistics: LayerStatistics | None,
    freedom: BlockFreedom,
    *,
    num_kv_heads: int,
    method: Method,
    grouping: Grouping,
    metric: str | None = None,
    at: str = "",
) -> tuple[LayerHeads, LayerReport]:
    """Pool heads within what is free in their block.

    Raises:
        CheckpointError: statistics of another width.
    """
    _check_width(source, statistics, at)
    pooled, report = pool_layer(
        source,
        statistics,
        num_kv_heads=num_kv_heads,
        method=method,
        grouping=grouping,
        metric=cast(Metric, metric or "attention"),
    )
    if freedom.values_fixed is not None:
        pooled = _with_mean_values(source, pooled, report)
        report = _of_mean_values(source, statistics, report, freedom.values_fixed)
    return pooled, report


def predict_heads(
    source: LayerHeads,
    statistics: LayerStatistics | None,
    freedom: BlockFreedom,
    *,
    num_kv_heads: Sequence[int],
    method: Method,
    grouping: Grouping,
    metric: str | None = None,
    at: str = "",
) -> dict[int, LayerReport]:
    """Return what `pool_heads` would report for several numbers of KV heads.

    Raises:
        CheckpointError: statistics of another width.
    """
    _check_width(source, statistics, at)
    reports = predict_layer(
        source,
        statistics,
        num_kv_heads=num_kv_heads,
        method=method,
        grouping=grouping,
        metric=cast(Metric, metric or "attention"),
    )
    if freedom.values_fixed is None:
        return reports
    return {
        number: _of_mean_values(source, statistics, report, freedom.values_fixed)
        for number, report in reports.items()
    }


def _check_width(source: LayerHeads, statistics: LayerStatistics | None, at: str) -> None:
    width = source.query.shape[-1]
    if statistics is not None and len(statistics.inputs) != width:
        raise CheckpointError(
            f"the calibration has inputs {len(statistics.inputs) - 1} wide,"
            f" the weights take {width - 1}",
            at=at,
            remedy="gqaconvert calibrate the model that is converted",
        )


def read_finite(layer: LayerPlan, read: Read) -> LayerHeads:
    """Read the heads of a block.

    Raises:
        CheckpointError: values that are not finite.
    """
    heads = read_heads(layer.block, layer.freedom, layer.outputs, read)
    for role in ("query", "key", "value", "output"):
        if not np.isfinite(getattr(heads, role).sum()):
            raise CheckpointError(
                f"{role} heads hold values that are not finite",
                at=layer.block.module,
                remedy="repair or fetch the checkpoint again; pooling would spread them",
            )
    return heads


def describe(layer: LayerPlan, report: LayerReport) -> dict[str, Any]:
    """Return a report as manifests hold it."""
    facts: dict[str, Any] = {"module": layer.block.module, "layer": layer.block.layer}
    return facts | {
        key: [list(group) for group in value] if key == "groups" else value
        for key, value in asdict(report).items()
    }


def _with_mean_values(source: LayerHeads, pooled: LayerHeads, report: LayerReport) -> LayerHeads:
    """Put averaged values in the place of folded ones, where a change of basis is not allowed."""
    value = np.stack([source.value[list(group)].mean(axis=0) for group in report.groups])
    output = source.output[:, query_order(report.groups, source.num_heads)]
    return replace(pooled, value=value, output=output)


def _of_mean_values(
    source: LayerHeads, statistics: LayerStatistics | None, report: LayerReport, reason: str
) -> LayerReport:
    """Say of averaged values what a report says of folded ones."""
    moment = np.eye(source.value.shape[-1]) if statistics is None else statistics.inputs
    lost = 0.0
    for group in report.groups:
        heads = source.value[list(group)]
        lost += sum(_energy(head - heads.mean(axis=0), moment) for head in heads)
    whole = sum(_energy(head, moment) for head in source.value)
    return replace(
        report,
        value_energy_lost=lost / whole if whole else 0.0,
        output_error=None,
        notes=(*report.notes, f"values averaged: {reason}"),
    )


def _energy(head: Floats, moment: Floats) -> float:
    return float(np.einsum("dm,dm->", head @ moment, head))


def layer_arrays(
    plan: ConversionPlan,
    layer: LayerPlan,
    pooled: LayerHeads,
    report: LayerReport,
    read: Read,
) -> dict[str, Array]:
    """Return all tensors that come out of a block, by name, before they are rounded.

    Args:
        plan: the conversion.
        layer: one of `plan.layers`.
        pooled: its shared heads.
        report: says how heads were moved.
        read: gives the source's tensors.
    """
    block = layer.block
    arrays: dict[str, Array] = dict(write_heads(pooled, block, plan.attention, layer.outputs))
    groups: Sequence[Sequence[int]] = report.groups
    norms = {tensor.name for tensor in block.head_tensors if tensor.role == "key_norm"}
    for name in layer.outputs:
        if name in norms:
            arrays[name] = mean_rows(read(name), groups, block.num_kv_heads)
        elif name not in arrays:
            arrays[name] = move_rows(read(name), groups, block.num_heads)
    return arrays
