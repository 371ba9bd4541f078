"""What requests of mixed length need: padded to the longest, and in pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gqaconvert.kv_cache.capacity import requests_that_fit
from gqaconvert.kv_cache.lengths import Lengths


@dataclass(frozen=True, slots=True)
class MixedLengths:
    """Requests of mixed length; bytes of one request on one GPU.

    Attributes:
        mean_tokens: mean length.
        longest_tokens: longest.
        needed_bytes: mean of what requests need.
        padded_bytes: what each takes when all are padded to the longest.
        padding_waste: share of that which holds nothing.
        paged_bytes: mean of what they take in pages.
        page_waste: share of that which holds nothing.
        concurrent_requests: that fit padded; None without a GPU.
        concurrent_requests_paged: that fit in pages, as long as they are mixed alike.
    """

    mean_tokens: float
    longest_tokens: int
    needed_bytes: float
    padded_bytes: float
    padding_waste: float
    paged_bytes: float
    page_waste: float
    concurrent_requests: int | None
    concurrent_requests_paged: int | None


def mixed_lengths(
    lengths: Lengths,
    request_bytes: Callable[[int, int], int],
    page: int,
    free_bytes: float | None,
) -> MixedLengths:
    """Compare padding and pages.

    Args:
        lengths: of requests.
        request_bytes: (tokens, tokens of a page) → bytes of one request.
        page: tokens of a page.
        free_bytes: left for caches on a GPU, None when unknown.
    """
    needed = lengths.average(lambda tokens: request_bytes(tokens, 1))
    paged = lengths.average(lambda tokens: request_bytes(tokens, page))
    padded = request_bytes(lengths.longest, 1)
    return MixedLengths(
        mean_tokens=lengths.mean,
        longest_tokens=lengths.longest,
        needed_bytes=needed,
        padded_bytes=padded,
        padding_waste=1 - needed / padded if padded else 0.0,
        paged_bytes=paged,
        page_waste=1 - needed / paged if paged else 0.0,
        concurrent_requests=None if free_bytes is None else requests_that_fit(free_bytes, padded),
        concurrent_requests_paged=None
        if free_bytes is None
        else requests_that_fit(free_bytes, paged),
    )
