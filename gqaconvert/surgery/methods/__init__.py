"""How the KV heads of one group become one head: one small pure function a file, all in `METHODS`.

A method takes the heads of one group in a wide type and returns the shared head. To add one, write
its file, name it here, and the test matrix runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from gqaconvert.surgery.methods.first import first
from gqaconvert.surgery.methods.mean import mean
from gqaconvert.surgery.methods.random import random

Heads = Sequence[NDArray[Any]]


@dataclass(frozen=True, slots=True)
class GroupContext:
    """What a method may know beside the heads.

    Attributes:
        tensor: name of the output tensor.
        group: number of the shared head.
        role: "key", "value" or "key_norm" ("fused" tensors are resolved to the first two); "weight"
            or "bias" follows from the name.
        seed: the conversion's.
        initializer_range: standard deviation with which the model's class initialises weights.
    """

    tensor: str
    group: int
    role: str
    seed: int
    initializer_range: float


Method = Callable[[Heads, GroupContext], NDArray[Any]]

METHODS: dict[str, Method] = {
    "mean": lambda heads, _: mean(heads),
    "first": lambda heads, _: first(heads),
    "random": lambda heads, context: random(heads[0], context),
}
"""Methods by the name the command line uses."""
