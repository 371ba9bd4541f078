"""Statistics of one finished layer, kept in float64 until the whole file can be written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from gqaconvert.surgery.layer_heads import LayerStatistics
from gqaconvert.surgery.statistics import KINDS


def write_layer(folder: Path, number: int, statistics: LayerStatistics) -> None:
    """Write the statistics of one layer into a folder."""
    matrices = {
        kind: np.ascontiguousarray(matrix)
        for kind in KINDS
        if (matrix := getattr(statistics, kind)) is not None
    }
    save_file(matrices, _path(folder, number))


def read_layer(folder: Path, number: int, tokens: int) -> LayerStatistics:
    """Read them back; `tokens` is how many they were taken over."""
    matrices = load_file(_path(folder, number))
    return LayerStatistics(
        inputs=matrices["inputs"],
        averaged=matrices.get("averaged"),
        attended=matrices.get("attended"),
        tokens=tokens,
    )


def _path(folder: Path, number: int) -> Path:
    return folder / f"layer-{number:05d}.safetensors"
