"""Carries out the part of a plan that goes layer by layer: pool, refine, write, journal.

One layer at a time and in layer order, since what refines a layer may follow the hidden states.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from gqaconvert.checkpoint.reader import Array, TensorReader
from gqaconvert.checkpoint.staging import StagedFolder
from gqaconvert.checkpoint.tensors import StoredTensor
from gqaconvert.surgery.layer_pooling import Calibration, make_layer
from gqaconvert.surgery.layer_tensors import read_heads
from gqaconvert.surgery.plan import ConversionPlan, LayerPlan

Write = Callable[[StoredTensor, memoryview], None]


def execute_layers(
    plan: ConversionPlan,
    reader: TensorReader,
    staged: StagedFolder,
    write: Write,
    calibration: Calibration,
) -> Iterator[int]:
    """Make the layers of a plan that its journal does not call done.

    Args:
        plan: what to make.
        reader: of the source.
        staged: where the journal is.
        write: puts a tensor's bytes in their place.
        calibration: statistics, and what follows on pooling.

    Yields:
        The output bytes of each layer, made now or earlier.

    Raises:
        CheckpointError: weights that are not finite, or statistics of another width.
    """
    outputs = {tensor.output.name: tensor.output for tensor in plan.tensors}
    sources = {tensor.output.name: tensor.sources[0] for tensor in plan.tensors}

    def read(name: str) -> Array:
        return reader.read(sources[name])

    for layer in plan.layers:
        if layer_step(layer) in staged.done:
            _pass(plan, layer, staged, outputs, calibration)
        else:
            made = make_layer(plan, layer, read, calibration)
            hashes = {}
            for name, array in made.tensors.items():
                content = array.reshape(-1).view(np.uint8).data
                if len(content) != outputs[name].size_bytes:
                    raise ValueError(f"{name} takes {len(content)} bytes, not as planned")
                write(outputs[name], content)
                hashes[name] = hashlib.sha256(content).hexdigest()
            staged.record(layer_step(layer), {"sha256": hashes, "layer": dict(made.facts)})
        yield sum(outputs[name].size_bytes for name in layer.outputs)


def layer_step(layer: LayerPlan) -> str:
    """Return the name of a layer's step in the journal."""
    return f"layer {layer.block.module}"


def layer_reports(plan: ConversionPlan, staged: StagedFolder) -> list[dict[str, Any]]:
    """Return what the journal says of each block of a calibrated conversion, in layer order."""
    reports = [dict(staged.done[layer_step(layer)]["layer"]) for layer in plan.layers]
    for module, reason in plan.averaged.items():
        reports.append({"module": module, "averaged": reason})
    order = {block.module: number for number, block in enumerate(plan.attention.blocks)}
    return sorted(reports, key=lambda report: order[report["module"]])


def _pass(
    plan: ConversionPlan,
    layer: LayerPlan,
    staged: StagedFolder,
    outputs: dict[str, StoredTensor],
    calibration: Calibration,
) -> None:
    """Show a layer of an earlier run to what refines the next ones."""
    if calibration.refine is None or layer.block.layer is None:
        return
    block = replace(
        layer.block,
        num_kv_heads=plan.options.num_kv_heads,
        head_tensors=tuple(
            replace(tensor, layout=after.after)
            for tensor in layer.block.head_tensors
            for after in _changes(plan, tensor.name)
        ),
    )
    with TensorReader(staged.path) as reader:
        heads = read_heads(
            block,
            layer.freedom,
            layer.outputs,
            lambda name: reader.read(outputs[name]),
        )
    calibration.refine.passed(layer.block.layer, heads)


def _changes(plan: ConversionPlan, name: str) -> list[Any]:
    return [t.heads for t in plan.changed() if t.output.name == name]
