"""Measures how fast this machine's memory is read and written: what bounds decoding.

As STREAM does (https://www.cs.virginia.edu/stream/ref.html): large arrays, simple loops, best of
several runs; here by torch, with its threads, so that it is the bandwidth the model could get.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

DEFAULT_BUFFER_BYTES = 1 << 28
"""Of each of three arrays: several times the last cache of most machines."""

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes a second, best of several runs.

    Attributes:
        read: sum of one array.
        copy: one array into another; what is read and what is written both count.
        triad: a = b + s·c; three arrays count.
        buffer_bytes: size of each array.
        cache_bytes: last cache of the processor, None where unknown; what fits there is read
            faster.
        threads: of torch; None on a GPU.
        device: "cpu" or "cuda".
    """

    read: float
    copy: float
    triad: float
    buffer_bytes: int
    cache_bytes: int | None
    threads: int | None
    device: str

    @property
    def bytes_per_s(self) -> float:
        """The fastest of the three: a bound must not be too low."""
        return max(self.read, self.copy, self.triad)


def measure_bandwidth(
    device: str = "cpu", *, buffer_bytes: int = DEFAULT_BUFFER_BYTES, runs: int = 5
) -> Bandwidth:
    """Measure the bandwidth between memory and processor.

    Args:
        device: "cpu" or "cuda".
        buffer_bytes: size of each of three float32 arrays.
        runs: of each loop, after one to warm up.
    """
    size = max(1, buffer_bytes // 4)
    a, b, c = (torch.full((size,), value, device=device) for value in (0.0, 1.0, 2.0))
    moved = 4 * size
    return Bandwidth(
        read=moved / _fastest(lambda: b.sum(), device, runs),
        copy=2 * moved / _fastest(lambda: a.copy_(b), device, runs),
        triad=3 * moved / _fastest(lambda: torch.add(b, c, alpha=3.0, out=a), device, runs),
        buffer_bytes=moved,
        cache_bytes=last_cache_bytes(device),
        threads=torch.get_num_threads() if device == "cpu" else None,
        device=device,
    )


def last_cache_bytes(device: str = "cpu") -> int | None:
    """Return the size of the processor's last cache, None where it cannot be found out."""
    if device != "cpu":
        return int(torch.cuda.get_device_properties(0).L2_cache_size)
    sizes = []
    for path in _CACHES.glob("index*/size"):
        text = path.read_text().strip()
        scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
        digits = text.rstrip("KMG")
        if digits.isdecimal():
            sizes.append(int(digits) * scale)
    return max(sizes, default=None)


def synchronise(device: str) -> None:
    """Wait for what the device was told to do; a CPU has done it already."""
    if device != "cpu":
        torch.cuda.synchronize()


def _fastest(loop: Callable[[], object], device: str, runs: int) -> float:
    best = float("inf")
    for _ in range(runs + 1):
        synchronise(device)
        started = time.perf_counter()
        loop()
        synchronise(device)
        best = min(best, time.perf_counter() - started)
    return best
