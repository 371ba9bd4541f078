"""Brings together what a run needs: checkpoint, student, teacher, optimiser, data, saved state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gqaconvert.calibration.by_recipe import convert_by_recipe
from gqaconvert.checkpoint.staging import check_space
from gqaconvert.errors import RefusedError, UsageError
from gqaconvert.modelling.layers import find_layers
from gqaconvert.modelling.models import (
    LoadedModel,
    find_model,
    fingerprint_model,
    load_model,
)
from gqaconvert.settings.recipe import Recipe
from gqaconvert.settings.uptrain import UptrainSettings
from gqaconvert.training.adapters import add_adapters
from gqaconvert.training.folder import RunFolder
from gqaconvert.training.objective import Objective
from gqaconvert.training.sharding import process_mesh, shard
from gqaconvert.training.stream import open_batches
from gqaconvert.training.teacher import Teacher, load_teacher
from gqaconvert.training.teacher_cache import TeacherCache, write_teacher_cache
from gqaconvert.training.teacher_cache_files import bytes_needed, cache_exists
from gqaconvert.training.world import World

_MAY_DIFFER = (
    "micro_batch", "checkpoints", "trackers", "held_out", "export_dtype", "attention",
    "activation_checkpointing", "compile", "safety", "data.workers", "loss.chunk_tokens",
)  # fmt: skip
"""Settings that a run may go on with changed: they do not say what is learnt from what."""


def settings_of(recipe: Recipe) -> UptrainSettings:
    """The section `uptrain` of a recipe.

    Raises:
        UsageError: it has none.
    """
    if recipe.uptrain is None:
        raise UsageError(
            "the recipe has no section uptrain, so there is nothing to train", at=recipe.name
        )
    return recipe.uptrain


def find_source(recipe: Recipe, world: World) -> Path:
    """Folder of the source model; a Hub model is downloaded once."""
    return world.first_does(lambda: find_model(recipe.source.model, recipe.source.revision).folder)


Tell = Callable[[str], None]
"""Told in words what takes its time."""


def find_start(recipe: Recipe, folder: RunFolder, world: World, tell: Tell) -> Path:
    """Folder of the checkpoint to train; the recipe's conversion is made where it is missing."""

    def find() -> Path:
        start = settings_of(recipe).start
        if start is not None:
            return find_model(start).folder
        if not folder.converted.exists():
            made = convert_by_recipe(
                recipe, folder.converted, folder.statistics, device=world.device.type, tell=tell
            )
            if not made.written:  # it has that many KV heads already
                return made.source.folder
        return folder.converted

    return world.first_does(find)


def load_student(start: Path, settings: UptrainSettings, world: World) -> LoadedModel:
    """Load the checkpoint to train, on the CPU, in its stored types."""
    loaded = load_model(start, attn=settings.attention)
    model = loaded.model
    model.config.use_cache = False
    if settings.lora is not None:
        if world.sharded:
            raise UsageError(
                "adapters cannot be merged into divided weights",
                at="uptrain.lora",
                remedy="--accelerate-config ddp, under which adapters need little memory",
            )
        add_adapters(model, settings.lora, settings.seed)
    if settings.activation_checkpointing:
        model.activation_checkpointing_enable()
    if settings.compile:
        for layer in find_layers(model)[1]:
            layer.compile()
    return loaded


def place(objective: Objective, settings: UptrainSettings, world: World) -> None:
    """Widen the weights to the type they train in, and put them where they train."""
    model = objective.model
    compute = None if settings.precision == "fp32" else torch.bfloat16
    held = torch.bfloat16 if settings.precision == "pure-bf16" else torch.float32
    if world.sharded:
        mesh = process_mesh(world.device, world.num_processes)
        shard(model, mesh, compute=compute, root=objective)
        # Widened when divided: no process ever holds the whole model in float32.
        model.to(held)
    else:
        model.to(device=world.device, dtype=held)
    objective.train()


def prepare_teacher(source: Path, settings: UptrainSettings, world: World) -> Teacher:
    """Load the source as teacher; its layers are divided where the student's are."""
    device = torch.device("cpu") if world.sharded else world.device
    teacher = load_teacher(source, settings.teacher, device=device, attn=settings.attention)
    if world.sharded:
        mesh = process_mesh(world.device, world.num_processes)
        shard(teacher.model, mesh, compute=None, root=teacher.module)
    return teacher


def prepare_cache(
    recipe: Recipe,
    source: Path,
    tokenizer: Any,  # noqa: ANN401
    total_steps: int,
    world: World,
) -> TeacherCache:
    """Open the cache of the source's predictions, made by the first process where missing."""
    settings = settings_of(recipe)
    folder = Path(str(settings.teacher.cache))
    count = total_steps * settings.batch_sequences
    identity = {
        "source": fingerprint_model(source),
        "data": settings.data.model_dump(mode="json", exclude={"workers"}),
    }

    def make() -> None:
        if cache_exists(folder):
            return
        check_space(
            folder, bytes_needed(count, settings.data.context, settings.teacher.cache_top_k)
        )
        teacher = load_teacher(
            source, settings.teacher, device=world.device, attn=settings.attention
        )
        with open_batches(
            settings.data,
            tokenizer,
            batch_sequences=settings.batch_sequences,
            micro_batch=settings.micro_batch,
        ) as batches:
            write_teacher_cache(
                folder,
                teacher,
                (batch.to(world.device) for batch in batches),
                count,
                settings.teacher.cache_top_k,
                identity,
                temperature=settings.loss.temperature,
            )

    world.first_does(make)
    return TeacherCache(folder, identity)


def identity(recipe: Recipe, start_sha256: str) -> dict[str, Any]:
    """What a run must keep when it goes on: plain values, by dotted key."""
    content = settings_of(recipe).model_dump(mode="json")
    flat = dict(_flatten(content, ""))
    kept = {
        key: value
        for key, value in flat.items()
        if not any(key == each or key.startswith(f"{each}.") for each in _MAY_DIFFER)
    }
    return {**kept, "source.model": recipe.source.model, "start": start_sha256}


def check_identity(before: Mapping[str, Any], now: Mapping[str, Any], at: Path) -> None:
    """Refuse to go on with a run as another one.

    Raises:
        RefusedError: settings differ that say what is learnt from what.
    """
    differing = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    if differing:
        shown = ", ".join(f"{key} {before.get(key)!r} → {now.get(key)!r}" for key in differing[:4])
        raise RefusedError(
            f"the saved run was another one: {shown}",
            at=str(at),
            remedy="the recipe saved beside it, or --overwrite to start again",
        )


def _flatten(value: Any, prefix: str) -> list[tuple[str, Any]]:  # noqa: ANN401
    if isinstance(value, Mapping):
        pairs: list[tuple[str, Any]] = []
        for key, part in value.items():
            pairs += _flatten(part, f"{prefix}{key}.")
        return pairs
    return [(prefix.removesuffix("."), value)]
