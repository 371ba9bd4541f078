"""Upper bounds of speed: what memory bandwidth and arithmetic allow, whatever the code does."""

from __future__ import annotations


def decode_tokens_per_s(bandwidth: float, weights_bytes: float, kv_bytes: float) -> float | None:
    """Return how many tokens a second each request of a batch can get at most.

    A decoding step reads all weights once and the whole cache of the batch, and gives one token to
    each request: bandwidth ÷ (weights + batch × KV of one request).

    Args:
        bandwidth: bytes a second of one GPU.
        weights_bytes: read in a step on that GPU; 0 for what the cache alone allows.
        kv_bytes: of the whole batch on that GPU.

    Returns:
        None when nothing is read.
    """
    read = weights_bytes + kv_bytes
    return bandwidth / read if read else None


def prefill_seconds(flops: float, active_parameters: float, tokens: int) -> float:
    """Return the least time for reading prompts of so many tokens, all requests together.

    Two operations a parameter and token; attention itself comes on top.
    """
    return 2 * active_parameters * tokens / flops
