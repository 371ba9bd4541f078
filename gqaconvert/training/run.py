"""`uptrain`: from a recipe to a trained checkpoint, in every process of a run alike."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from gqaconvert.checkpoint.sidecars import write_json
from gqaconvert.errors import GqaconvertError
from gqaconvert.modelling.models import LoadedModel
from gqaconvert.settings.budget import total_steps
from gqaconvert.settings.recipe import Recipe
from gqaconvert.settings.recipes import resolved_yaml
from gqaconvert.settings.uptrain import UptrainSettings
from gqaconvert.training.adapters import merge_adapters
from gqaconvert.training.curve import draw_curve
from gqaconvert.training.export import export_model, stored_dtypes
from gqaconvert.training.flops import speed_of
from gqaconvert.training.folder import RunFolder, run_folder
from gqaconvert.training.held_out import HeldOut
from gqaconvert.training.interruption import Interruption
from gqaconvert.training.loop import Ending, Job, Loop, Report
from gqaconvert.training.memory import Devices, runs_teacher
from gqaconvert.training.metrics import read_metrics
from gqaconvert.training.objective import Objective, cross_entropy_of
from gqaconvert.training.optimiser import make_optimiser
from gqaconvert.training.prepare import (
    check_identity,
    find_source,
    find_start,
    identity,
    load_student,
    place,
    prepare_cache,
    prepare_teacher,
    settings_of,
)
from gqaconvert.training.resources import check_resources, device_memory
from gqaconvert.training.state import RunFacts, find_state, load_state, read_facts
from gqaconvert.training.stream import open_batches
from gqaconvert.training.summary import facts_of_training, summarise
from gqaconvert.training.teacher import Teacher
from gqaconvert.training.teacher_cache import TeacherCache
from gqaconvert.training.world import World, start_world
from gqaconvert.units import weight_type


@dataclass(frozen=True)
class Uptraining:
    """What a run came to.

    Attributes:
        folder: of the run; `folder.export` is the trained model, unless it was interrupted.
        ending: why it stopped.
        facts: where it stands.
        summary: what `summary.json` says; empty on processes other than the first.
    """

    folder: RunFolder
    ending: Ending
    facts: RunFacts
    summary: Mapping[str, Any]


def uptrain(
    recipe: Recipe,
    out: str | Path | None = None,
    *,
    resume: str | None = None,
    overwrite: bool = False,
    reports: tuple[Report, ...] = (),
    tell: Callable[[str], None] | None = None,
) -> Uptraining:
    """Train a converted model; call it in every process of a run.

    Args:
        recipe: with a section `uptrain`.
        out: folder of the run; by default `runs/NAME`.
        resume: "auto" to go on from the newest saved state if there is any, or a state's folder.
        overwrite: forget an earlier run in the same folder.
        reports: who hears of every line of the metrics, on the first process.
        tell: told in words what takes its time before the first step, on the first process.

    Raises:
        RefusedError: an earlier run is in the way, or goes on as another one; or there is too
            little memory or disk.
        UsageError: a recipe, model, text or world that cannot be had.
        GqaconvertError: too many steps in a row were skipped; the last good state is kept.
    """
    settings = settings_of(recipe)
    folder = run_folder(out, recipe.name or "run")
    accelerator, world = start_world(settings.trackers, str(folder.path))
    torch.manual_seed(settings.seed)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    check_resources(recipe, *_devices(world), folder.path)
    state = world.first_does(lambda: _claim(folder, recipe, resume, overwrite=overwrite))
    source = find_source(recipe, world)
    start = find_start(recipe, folder, world, tell or (lambda _: None))
    loaded = load_student(start, settings, world)
    dtypes = stored_dtypes(loaded.model)
    run_identity = identity(recipe, loaded.weights_sha256)
    facts = RunFacts(recipe=run_identity)
    if state is not None:
        facts = read_facts(state)
        check_identity(facts.recipe, run_identity, state)
        facts.skipped_in_a_row = 0
    steps = total_steps(recipe)
    teacher: Teacher | TeacherCache | None = None
    if runs_teacher(settings):
        teacher = prepare_teacher(source, settings, world)
    elif settings.loss.needs_teacher:
        teacher = prepare_cache(recipe, source, loaded.tokenizer, steps, world)
    objective = Objective(
        loaded.model,
        settings.loss,
        teacher=teacher,
        separate_documents=settings.data.separate_documents,
    )
    place(objective, settings, world)
    optimiser = make_optimiser(objective.model, settings)
    if state is not None:
        load_state(state, objective.model, optimiser, world)
    held_out = _held_out(settings, loaded, world)
    if held_out is not None and facts.source_loss is None:
        known = teacher if isinstance(teacher, Teacher) else None
        facts.source_loss = _source_loss(held_out, known, source, settings, world)
    with open_batches(
        settings.data,
        loaded.tokenizer,
        batch_sequences=settings.batch_sequences,
        micro_batch=settings.micro_batch,
        process_index=world.process_index,
        num_processes=world.num_processes,
        cursor=facts.cursor,
    ) as batches:
        job = Job(
            recipe, world, folder, objective, optimiser, batches, held_out, facts, steps,
            speed_of(recipe, loaded, world),
        )  # fmt: skip
        if settings.trackers:
            accelerator.init_trackers(recipe.name or "gqaconvert", config=dict(run_identity))
            reports = (*reports, lambda line: _track(accelerator, line))
        try:
            with Interruption() as interruption:
                ending = Loop(job, reports).run(interruption)
        finally:
            if settings.trackers:
                accelerator.end_training()
    if world.is_first and facts.step:
        draw_curve(read_metrics(folder.metrics), folder.curve)
    if ending == "unstable":
        raise GqaconvertError(
            f"{facts.skipped_in_a_row} steps in a row had to be skipped",
            at=str(folder.metrics),
            remedy="a lower uptrain.lr, then --overwrite; or --resume auto, since the last good"
            " state is kept",
        )
    summary = summarise(job, ending, loaded, start)
    if ending != "interrupted":
        dtype = settings.export_dtype
        export_model(
            merge_adapters(objective.model) if settings.lora else objective.model,
            dtypes,
            start,
            folder.export,
            facts_of_training(job, summary),
            world,
            dtype=None if dtype == "keep" else getattr(torch, weight_type(dtype).config_name),
            overwrite=True,  # an earlier export of this very run
        )
    if world.is_first:
        write_json(folder.summary, summary)
    return Uptraining(folder, ending, facts, summary)


def _claim(
    folder: RunFolder, recipe: Recipe, resume: str | None, *, overwrite: bool
) -> Path | None:
    """Choose the saved state to go on from, and leave the recipe in the folder."""
    if overwrite:
        folder.clear()
    state = find_state(folder.states, resume)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.recipe.write_text(resolved_yaml(recipe), encoding="utf-8")
    return state


def _devices(world: World) -> tuple[Devices, int]:
    """The devices of this world, and the memory of this one."""
    kind: Literal["cpu", "cuda"] = "cuda" if world.device.type == "cuda" else "cpu"
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Devices(world.num_processes, world.sharded, kind), device_memory(kind, here)


def _held_out(settings: UptrainSettings, loaded: LoadedModel, world: World) -> HeldOut | None:
    if settings.held_out is None:
        return None
    return HeldOut(
        settings.held_out,
        loaded.tokenizer,
        context=settings.data.context,
        micro_batch=settings.micro_batch,
        world=world,
    )


def _source_loss(
    held_out: HeldOut,
    teacher: Teacher | None,
    source: Path,
    settings: UptrainSettings,
    world: World,
) -> float:
    """Loss of the source on the held-out text: the line to reach."""
    model = teacher or prepare_teacher(source, settings, world)
    return held_out.loss(lambda batch: cross_entropy_of(model, batch))


def _track(accelerator: Any, line: Mapping[str, Any]) -> None:  # noqa: ANN401
    numbers = {
        f"{line['kind']}/{key}": value
        for key, value in line.items()
        if isinstance(value, int | float) and key != "step"
    }
    accelerator.log(numbers, step=line["step"])
