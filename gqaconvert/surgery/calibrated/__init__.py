"""Calibrated pooling: `pool_layer` and `predict_layer` on the heads of one layer."""

from gqaconvert.surgery.calibrated.layer import Grouping, Method, pool_layer, predict_layer

__all__ = ["Grouping", "Method", "pool_layer", "predict_layer"]
