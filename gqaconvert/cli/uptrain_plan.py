"""`uptrain --dry-run`: steps, memory by part, disk, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from gqaconvert.cli.terminal import say, show_json, show_table
from gqaconvert.errors import UnsupportedModelError
from gqaconvert.units import format_count

if TYPE_CHECKING:
    from pathlib import Path

    from gqaconvert.settings.recipe import Recipe
    from gqaconvert.training.memory import Devices
    from gqaconvert.training.resources import Resources


def show_plan(
    recipe: Recipe,
    accelerate_config: str | None,
    num_processes: int | None,
    gpu: str | None,
    *,
    json: bool,
) -> None:
    """Print what a run would take, and refuse it where it would not fit.

    Args:
        recipe: with a section `uptrain`.
        accelerate_config: name or path.
        num_processes: wanted; None for what the config says.
        gpu: the devices' name where they are not here.
        json: print JSON.

    Raises:
        RefusedError: it would not fit; not where the devices' memory is not known.
    """
    from gqaconvert.settings.recipes import accelerate_config as find_config
    from gqaconvert.training.memory_remedies import memory_shortage
    from gqaconvert.training.prepare import settings_of
    from gqaconvert.training.resources import estimate_resources

    settings = settings_of(recipe)
    config = find_config(accelerate_config) if accelerate_config else None
    devices, device_bytes = planned_devices(config, num_processes, gpu)
    resources = estimate_resources(recipe, devices, device_bytes)
    if resources is None:
        raise UnsupportedModelError(
            "the parameters of this class cannot be counted from its config",
            at=recipe.source.model,
            remedy="the run itself, which does not need the estimate",
        )
    if json:
        show_json(_content(recipe, resources))
    else:
        memory = resources.memory
        kind = "FSDP2" if devices.sharded else "DDP"
        processes = (
            "one process"
            if devices.num_processes == 1
            else f"{devices.num_processes} processes ({kind})"
        )
        say(
            f"{recipe.name}: {resources.steps:,} steps of {settings.batch_tokens:,} tokens ="
            f" {format_count(resources.tokens)} tokens, on {processes}"
        )
        show_table(["memory of one device", ""], [list(row) for row in memory.rows()])
        show_table(["disk", ""], [list(row) for row in resources.disk.rows()])
        say(f"{format_count(resources.flops.model)} FLOP a token, teacher included")
    shortage = memory_shortage(resources.memory)
    if shortage is not None:
        raise shortage


def planned_devices(
    config: Path | None, num_processes: int | None, gpu: str | None
) -> tuple[Devices, int | None]:
    """The devices of an uptraining; the memory of one where they are here, or named.

    Args:
        config: of accelerate.
        num_processes: wanted; None for what the config says.
        gpu: the devices' name where they are not here.
    """
    import torch

    from gqaconvert.kv_cache.hardware import find_accelerator
    from gqaconvert.training.launch import read_wanted
    from gqaconvert.training.memory import Devices
    from gqaconvert.training.resources import device_memory

    here = torch.cuda.device_count()
    wanted = read_wanted(config, num_processes, num_gpus=here + (gpu is not None))
    kind: Literal["cpu", "cuda"] = "cpu" if wanted.on_cpu and gpu is None else "cuda"
    devices = Devices(wanted.num_processes, wanted.sharded, kind)
    if gpu is not None:
        return devices, find_accelerator(gpu).memory_bytes
    if kind == "cuda" and not here:
        return devices, None
    return devices, device_memory(kind, wanted.num_processes)


def _content(recipe: Recipe, resources: Resources) -> dict[str, Any]:
    return {
        "recipe": recipe.name,
        "steps": resources.steps,
        "tokens": resources.tokens,
        "memory": dict(resources.memory.rows()),
        "memory_bytes": resources.memory.total,
        "device_bytes": resources.memory.device_bytes,
        "fits": resources.memory.fits if resources.memory.device_bytes else None,
        "disk": dict(resources.disk.rows()),
        "disk_bytes": resources.disk.total,
        "flop_per_token": resources.flops.model,
    }
