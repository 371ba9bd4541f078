"""What to change when training does not fit into memory: found by estimating again, not guessed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from gqaconvert.errors import RefusedError
from gqaconvert.settings.uptrain import LoraSettings, UptrainSettings
from gqaconvert.training.memory import (
    Devices,
    MemoryEstimate,
    estimate_memory,
    runs_teacher,
)
from gqaconvert.units import format_memory

_MOST_PROCESSES = 64
_SMALL_CHUNK = 128
_SHOWN = 3


@dataclass(frozen=True)
class _Change:
    words: str
    apply: Callable[[UptrainSettings], UptrainSettings]


def memory_shortage(estimate: MemoryEstimate) -> RefusedError | None:
    """Return the refusal of a run that does not fit, with changes that would make it fit.

    Single changes are tried first, then pairs, then three and more at once; what is shown has been
    estimated to fit. The changes that leave the result as it is come before those that do not:
    a smaller micro-batch, activations computed again, smaller chunks of logits, a teacher's cache;
    then more processes under FSDP2, and adapters.

    Returns:
        None when the run fits, or when the memory of a device is not known.
    """
    if estimate.fits or estimate.device_bytes is None:
        return None
    parts = ", ".join(f"{name} {size}" for name, size in estimate.rows()[:-2])
    fitting = list(_fitting(estimate))[:_SHOWN]
    return RefusedError(
        f"training needs about {format_memory(estimate.total)} on each device, which has"
        f" {format_memory(estimate.device_bytes)}: {parts}",
        at="uptrain",
        remedy="; or ".join(fitting)
        or f"a smaller model or larger devices: not even {_MOST_PROCESSES} of these would do",
    )


def _fitting(estimate: MemoryEstimate) -> Iterator[str]:
    """Name changes after which the run fits, the fewest first."""
    changes = list(_changes(estimate.settings))
    found = list(_smallest(estimate, estimate.settings, estimate.devices, changes))
    yield from found
    yield from _with_processes(estimate, changes)
    if not found and not estimate.devices.sharded:
        yield from _with_adapters(estimate, changes)


def _smallest(
    estimate: MemoryEstimate,
    settings: UptrainSettings,
    devices: Devices,
    changes: list[_Change],
    words: tuple[str, ...] = (),
) -> Iterator[str]:
    """Name all choices of as few changes as it takes; of none, when `settings` fit as they are."""
    for count in range(len(changes) + 1):
        fitting = []
        for chosen in combinations(changes, count):
            changed = settings
            for change in chosen:
                changed = change.apply(changed)
            again = estimate_memory(
                changed, estimate.student, estimate.teacher, devices, estimate.device_bytes
            )
            if again.fits:
                names = " and ".join((*words, *(change.words for change in chosen)))
                fitting.append(f"{names} ({format_memory(again.total)})")
        if fitting:
            yield from fitting
            return


def _changes(settings: UptrainSettings) -> Iterator[_Change]:
    """Changes of the recipe that leave what is learnt as it is."""
    if settings.micro_batch > 1:
        yield _Change("micro_batch: 1", lambda each: _with(each, micro_batch=1))
    if not settings.activation_checkpointing:
        yield _Change(
            "activation_checkpointing: true",
            lambda each: _with(each, activation_checkpointing=True),
        )
    if settings.loss.chunk_tokens is None or settings.loss.chunk_tokens > _SMALL_CHUNK:
        yield _Change(
            f"loss.chunk_tokens: {_SMALL_CHUNK}",
            lambda each: _with(each, loss=_with(each.loss, chunk_tokens=_SMALL_CHUNK)),
        )
    if runs_teacher(settings) and not (settings.loss.hidden or settings.loss.attention):
        yield _Change(
            "teacher.cache: FOLDER",
            lambda each: _with(each, teacher=_with(each.teacher, cache="FOLDER")),
        )


def _with_processes(estimate: MemoryEstimate, changes: list[_Change]) -> Iterator[str]:
    """Name the smallest numbers of processes under FSDP2 that fit: as is, and with changes."""
    if estimate.settings.lora is not None:
        return  # adapters are not divided
    devices = estimate.devices
    smallest = devices.num_processes * (2 if devices.sharded else 1)
    counts = [
        count
        for count in (smallest * 2**power for power in range(7))
        if 1 < count <= _MOST_PROCESSES and estimate.settings.batch_sequences % count == 0
    ]
    said = set()
    for possible in ([], changes):
        for count in counts:
            words = (f"{count} processes with FSDP2",)
            sharded = replace(devices, num_processes=count, sharded=True)
            first = next(_smallest(estimate, estimate.settings, sharded, possible, words), None)
            if first is not None:
                if first not in said:
                    yield first
                said.add(first)
                break


def _with_adapters(estimate: MemoryEstimate, changes: list[_Change]) -> Iterator[str]:
    settings = estimate.settings
    if settings.lora is not None or len(settings.stages) > 1 or settings.stages[0].train != "all":
        return
    adapted = _with(settings, lora=LoraSettings())
    first = next(_smallest(estimate, adapted, estimate.devices, changes, ("lora: {}",)), None)
    if first is not None:
        yield first


def _with(settings: Any, **changes: Any) -> Any:  # noqa: ANN401
    return settings.model_copy(update=changes)
