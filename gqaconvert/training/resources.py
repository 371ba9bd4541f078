"""What a run will take, from configs alone, and the refusal of one that cannot work out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from gqaconvert.attention.estimation import read_model_config
from gqaconvert.checkpoint.staging import check_space
from gqaconvert.errors import UnsupportedModelError
from gqaconvert.kv_cache.model_config import ModelConfig
from gqaconvert.settings.budget import total_steps
from gqaconvert.settings.recipe import Recipe
from gqaconvert.training.disk import DiskEstimate, estimate_disk
from gqaconvert.training.flops import TrainingFlops, flops_of
from gqaconvert.training.memory import Devices, MemoryEstimate, estimate_memory
from gqaconvert.training.memory_remedies import memory_shortage
from gqaconvert.training.model_facts import model_facts


@dataclass(frozen=True)
class Resources:
    """What a run will take.

    Attributes:
        memory: of one device, by part.
        disk: of the run folder, by part.
        flops: operations a token.
        steps: updates.
        tokens: read in all.
    """

    memory: MemoryEstimate
    disk: DiskEstimate
    flops: TrainingFlops
    steps: int
    tokens: int


def estimate_resources(
    recipe: Recipe, devices: Devices, device_bytes: int | None
) -> Resources | None:
    """Estimate what a recipe takes; None where the parameters of its class cannot be counted.

    Only config.json is read, from the Hub where the model is there.

    Args:
        recipe: with a section `uptrain`.
        devices: the processes.
        device_bytes: memory of one; None where it is not known.

    Raises:
        UsageError: no such model.
    """
    settings = recipe.uptrain
    if settings is None:
        raise ValueError("the recipe trains nothing")
    source: ModelConfig = read_model_config(recipe.source.model, recipe.source.revision)
    start = read_model_config(settings.start) if settings.start else source
    kv_heads = None if settings.start else recipe.convert.kv_heads
    teacher, student = model_facts(source), model_facts(start, kv_heads)
    if teacher is None or student is None:
        return None
    steps = total_steps(recipe)
    return Resources(
        memory=estimate_memory(settings, student, teacher, devices, device_bytes),
        disk=estimate_disk(settings, student, start.dtype or "float32", steps),
        flops=flops_of(settings, student, teacher),
        steps=steps,
        tokens=steps * settings.batch_tokens,
    )


def check_resources(recipe: Recipe, devices: Devices, device_bytes: int | None, out: Path) -> None:
    """Refuse a run that does not fit into the memory of its devices or onto the disk.

    Raises:
        RefusedError: it does not; the remedy names changes with which it would.
    """
    try:
        resources = estimate_resources(recipe, devices, device_bytes)
    except UnsupportedModelError:
        return  # a class that cannot be estimated may train all the same
    if resources is None:
        return
    shortage = memory_shortage(resources.memory)
    if shortage is not None:
        raise shortage
    check_space(out, resources.disk.total)


def device_memory(kind: Literal["cpu", "cuda"], processes_here: int) -> int:
    """Bytes one process can have: its GPU's, or its share of what is free on this machine."""
    if kind == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(0).total_memory)
    return int(psutil.virtual_memory().available) // processes_here
