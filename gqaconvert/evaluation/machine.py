"""The machine that a measurement runs on: its memory, its threads, and what to call it."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


def describe_machine() -> dict[str, Any]:
    """Return what a figure should be read with: processor, cores, threads, GPU."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "processor": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "system": platform.system(),
    }


def free_bytes(device: str) -> int | None:
    """Return the memory that is free on a device, None where the system does not say."""
    if device != "cpu":
        return int(torch.cuda.mem_get_info()[0])
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


@contextlib.contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Let torch use so many threads while the block runs; None leaves them."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class MemoryWatch:
    """Filled in when `watched_memory` ends."""

    peak_bytes: int | None = None


@contextlib.contextmanager
def watched_memory(device: str) -> Iterator[MemoryWatch]:
    """Find the most memory in use while the block runs.

    On a GPU what torch has allocated there; on a CPU what the process holds in memory (since it
    started, where the system does not let the mark be set back).
    """
    gc.collect()
    watch = MemoryWatch()
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        yield watch
        watch.peak_bytes = torch.cuda.max_memory_allocated()
        return
    # Linux starts its high-water mark anew when told so (man 5 proc_pid_clear_refs).
    mark = Path("/proc/self/clear_refs")
    with contextlib.suppress(OSError):
        mark.write_text("5")
    yield watch
    watch.peak_bytes = _peak_resident()


def _peak_resident() -> int | None:
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
