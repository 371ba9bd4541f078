"""What a calibrated conversion would lose, layer by layer, before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

from gqaconvert.checkpoint.reader import TensorReader
from gqaconvert.surgery.calibrated import Method
from gqaconvert.surgery.head_counts import check_count
from gqaconvert.surgery.layer_heads import LayerReport
from gqaconvert.surgery.layer_pooling import (
    Calibration,
    predict_heads,
    read_finite,
)
from gqaconvert.surgery.options import ConversionOptions
from gqaconvert.surgery.plan import ConversionPlan
from gqaconvert.surgery.planning import plan_conversion
from gqaconvert.surgery.source import open_source
from gqaconvert.surgery.statistics import StatisticsFile


def predict_conversion(
    model: str | Path,
    statistics: str | Path,
    kv_heads: Sequence[int],
    *,
    grouping: str = "adjacent",
    metric: str | None = None,
    revision: str | None = None,
) -> dict[int, dict[str, LayerReport]]:
    """Predict what `svd` loses at several numbers of KV heads.

    Args:
        model: folder, alias or Hub id.
        statistics: its calibration file.
        kv_heads: numbers to predict for.
        grouping: "adjacent" or "similarity".
        metric: as in `convert`.
        revision: of a Hub model.

    Returns:
        Number of KV heads → module → its report; blocks that can only be averaged are left out.

    Raises:
        UsageError: a number that the heads cannot be pooled into.
        RefusedError: a calibration of another model.
    """
    source = open_source(model, revision)
    moments = StatisticsFile(statistics)
    moments.check(source.folder)
    for number in kv_heads:
        check_count(source.attention, source.config, number)
    options = ConversionOptions(
        min(kv_heads), "svd", grouping=grouping, metric=metric, statistics_digest=moments.digest
    )
    plan = plan_conversion(source.index, source.config, source.attention, options)
    return predict_plan(plan, source.folder, Calibration(moments), kv_heads)


def predict_plan(
    plan: ConversionPlan, source: Path, calibration: Calibration, kv_heads: Sequence[int]
) -> dict[int, dict[str, LayerReport]]:
    """Return what pooling each whole layer of a plan would lose, for several numbers of KV heads.

    Args:
        plan: of any one of these numbers.
        source: the source folder.
        calibration: its statistics.
        kv_heads: the numbers.

    Returns:
        Number of KV heads → module → its report.
    """
    tensors = {tensor.output.name: tensor.sources[0] for tensor in plan.tensors}
    predicted: dict[int, dict[str, LayerReport]] = {number: {} for number in kv_heads}
    with TensorReader(source, plan.derived) as reader:
        for layer in plan.layers:
            reports = predict_heads(
                read_finite(layer, lambda name: reader.read(tensors[name])),
                calibration.layer(layer),
                layer.freedom,
                num_kv_heads=kv_heads,
                method=cast(Method, plan.options.method),
                grouping=layer.grouping,
                metric=plan.options.metric,
                at=layer.block.module,
            )
            for number, report in reports.items():
                predicted[number][layer.block.module] = report
    return predicted
