"""Fresh initialisation, the lower bound of the GQA paper (arXiv 2305.13245, figure 4).

The paper's "Random" initialises heads from scratch; it does not pick a source head.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from gqaconvert.surgery.methods import GroupContext


def random(like: NDArray[Any], context: GroupContext) -> NDArray[Any]:
    """Draw a head as its class would: weights N(0, initializer_range²), biases 0, norm gains 1.

    Args:
        like: a head of the group; its shape and type are taken, not its values.
        context: the draw depends on its seed, tensor name and group alone, not on the order of
            work.
    """
    if context.role == "key_norm":
        return np.zeros_like(like) if context.tensor.endswith(".bias") else np.ones_like(like)
    if context.tensor.endswith(".bias"):
        return np.zeros_like(like)
    name = f"{context.seed}/{context.tensor}/{context.role}/{context.group}"
    entropy = int.from_bytes(hashlib.sha256(name.encode()).digest()[:16], "little")
    draw = np.random.Generator(np.random.Philox(entropy)).standard_normal(like.shape, np.float32)
    return (draw * np.float32(context.initializer_range)).astype(like.dtype)
