"""How fast this machine, or a GPU by its data sheet, works: what a forecast reckons with."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gqaconvert.evaluation.bandwidth import measure_bandwidth
from gqaconvert.kv_cache.hardware import accelerator_of_device, find_accelerator

_SIZE = 1024
_BUFFER_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Speed:
    """Upper bounds of a device.

    Attributes:
        flops: operations a second of a large product in bf16.
        bytes_per_s: between memory and processor.
        basis: where the figures come from, in words.
    """

    flops: float
    bytes_per_s: float
    basis: str


def speed_of_device(device: str) -> Speed | None:
    """Measure a CPU in half a second, or look a GPU up; None for one that is not in the table."""
    import torch

    if device == "cuda":
        known = accelerator_of_device(torch.cuda.get_device_name())
        return _by_table(known.key) if known else None
    a, b = (torch.randn(_SIZE, _SIZE, dtype=torch.bfloat16) for _ in range(2))
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - started)
    bandwidth = measure_bandwidth("cpu", buffer_bytes=_BUFFER_BYTES, runs=2)
    threads = torch.get_num_threads()
    return Speed(
        2 * _SIZE**3 / best,
        bandwidth.bytes_per_s,
        f"measured here on {threads} CPU thread{'s' * (threads > 1)}",
    )


def speed_of_named(gpu: str) -> Speed | None:
    """Look up a GPU that is not here; None where the table lacks its speed.

    Raises:
        UsageError: no such GPU.
    """
    return _by_table(gpu)


def _by_table(gpu: str) -> Speed | None:
    known = find_accelerator(gpu)
    if known.flops is None or known.bandwidth is None:
        return None
    return Speed(known.flops, known.bandwidth, f"data sheet of {known.name}")
