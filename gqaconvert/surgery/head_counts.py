"""Which numbers of KV heads a model can have, and with which degrees of tensor parallelism."""

from __future__ import annotations

from gqaconvert.attention.geometry import Attention
from gqaconvert.errors import UsageError
from gqaconvert.kv_cache.model_config import ModelConfig
from gqaconvert.surgery.options import ConversionOptions


def check_count(attention: Attention, config: ModelConfig, wanted: int) -> None:
    """Refuse a number of KV heads that the present ones cannot be pooled or repeated into.

    Raises:
        UsageError: with the numbers that are possible.
    """
    have = attention.num_kv_heads
    if attention.is_poolable(wanted) or attention.is_expandable(wanted):
        return
    at = f"{config.at} {'.'.join(config.kv_heads_key or ())}={have}"
    if wanted == have:
        raise UsageError(f"the model has {have} KV heads already; nothing to change", at=at)
    legal = [str(n) for n in attention.poolable()]
    verb = "pooled" if wanted < have else "repeated"
    if wanted > have:
        legal = [
            str(n) for n in range(have + 1, attention.num_heads + 1) if attention.is_expandable(n)
        ]
    raise UsageError(
        f"{have} KV heads cannot be {verb} into {wanted}",
        at=at,
        remedy="--kv-heads " + _choice(legal)
        if legal
        else f"a model with {'more' if wanted < have else 'fewer'} KV heads",
    )


def check_tensor_parallel(attention: Attention, options: ConversionOptions) -> None:
    """Refuse a degree of tensor parallelism that heads do not divide by.

    Raises:
        UsageError: saying which heads.
    """
    degree, wanted = options.tensor_parallel, options.num_kv_heads
    if attention.num_heads % degree:
        raise UsageError(
            f"{attention.num_heads} query heads do not divide by a tensor-parallel degree"
            f" of {degree}",
            remedy="a degree that divides the query heads",
        )
    if wanted % degree and degree % wanted:
        raise UsageError(
            f"{wanted} KV heads and a tensor-parallel degree of {degree} do not divide one another",
            remedy="--kv-heads equal to the degree or to a multiple of it",
        )


def _choice(values: list[str]) -> str:
    return values[0] if len(values) == 1 else ", ".join(values[:-1]) + " or " + values[-1]
