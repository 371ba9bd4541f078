"""What fits: requests at a time, the longest context, and how tensor parallelism splits a model."""

from __future__ import annotations

from collections.abc import Callable

from gqaconvert.errors import UsageError

_LONGEST = 2**40
"""Contexts from here on count as unlimited: all layers have windows."""


def check_degree(gpus: int, num_heads: int, kv_heads: int) -> None:
    """Check that a model can be split over GPUs by heads.

    Raises:
        UsageError: query heads do not divide evenly, or KV heads can be neither divided nor
            replicated evenly.
    """
    if num_heads % gpus:
        legal = [str(n) for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise UsageError(
            f"{num_heads} query heads do not split evenly over {gpus} GPUs",
            remedy=f"--tp {', '.join(legal)}",
        )
    if kv_heads % gpus and gpus % kv_heads:
        raise UsageError(
            f"{kv_heads} KV heads can be neither divided nor replicated evenly over {gpus} GPUs",
            remedy=f"a --tp that divides {kv_heads}, or a multiple of it that divides {num_heads}",
        )


def kv_heads_per_gpu(kv_heads: int, gpus: int) -> int:
    """Return max(1, K / tp): below the degree heads are replicated, and nothing more is saved."""
    return max(1, kv_heads // gpus)


def requests_that_fit(free_bytes: float, request_bytes: float) -> int | None:
    """Return how many requests fit in what is left; None when a request takes nothing."""
    if request_bytes <= 0:
        return None
    return max(0, int(free_bytes // request_bytes))


def longest_context(free_bytes: float, bytes_at: Callable[[int], float]) -> int | None:
    """Return the most tokens whose cache fits.

    Args:
        free_bytes: left for the cache.
        bytes_at: bytes of the cache at a context; must not shrink.

    Returns:
        0 when not even one token fits, None when any number does.
    """
    if bytes_at(_LONGEST) <= free_bytes:
        return None
    fits, too_long = 0, _LONGEST
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if bytes_at(middle) <= free_bytes:
            fits = middle
        else:
            too_long = middle
    return fits
