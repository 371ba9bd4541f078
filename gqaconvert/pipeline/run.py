"""`run`: the stages of a recipe in their order, each skipped when nothing it depends on changed."""

from __future__ import annotations

import fcntl
import gc
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from gqaconvert.errors import RefusedError, UsageError
from gqaconvert.evaluation.machine import describe_machine
from gqaconvert.evaluation.results import library_versions
from gqaconvert.pipeline.experiment import Experiment
from gqaconvert.pipeline.folder import ExperimentFolder
from gqaconvert.pipeline.making import Interrupted
from gqaconvert.pipeline.record import (
    ExperimentRecord,
    StageRecord,
    digest_of,
    read_record,
    save_record,
)
from gqaconvert.pipeline.stage import STAGE_NAMES, Finished, Stage, StageName
from gqaconvert.pipeline.stages import plan_stages
from gqaconvert.settings.recipe import Recipe
from gqaconvert.settings.recipes import load_recipe, resolved_yaml
from gqaconvert.training.prepare import identity

Prospect = Literal["to do", "kept", "left out", "not asked for"]


@dataclass(frozen=True)
class Bounds:
    """Which stages are asked for.

    Attributes:
        first: this one and all after it are done again, even if nothing changed.
        last: none after it is done.

    Raises:
        UsageError: no such stage, or the last comes before the first.
    """

    first: StageName | None = None
    last: StageName | None = None

    def __post_init__(self) -> None:
        for flag, name in (("--from", self.first), ("--until", self.last)):
            if name is not None and name not in STAGE_NAMES:
                raise UsageError(f"no stage {name!r}", at=flag, remedy=", ".join(STAGE_NAMES))
        if self.first and self.last and _place(self.last) < _place(self.first):
            raise UsageError(f"--until {self.last} comes before --from {self.first}")

    def forces(self, name: StageName) -> bool:
        """Whether a stage is done again in any case."""
        return self.first is not None and _place(name) >= _place(self.first)

    def reaches(self, name: StageName) -> bool:
        """Whether a stage is asked for."""
        return self.last is None or _place(name) <= _place(self.last)


@dataclass(frozen=True)
class Run:
    """What an experiment came to.

    Attributes:
        folder: of it.
        record: of all stages, those of earlier runs included.
        done: stages done this time.
        kept: stages found done.
        interrupted: the uptraining was stopped; the same call goes on.
    """

    folder: ExperimentFolder
    record: ExperimentRecord
    done: tuple[StageName, ...]
    kept: tuple[StageName, ...]
    interrupted: bool = False


def run(
    experiment: Experiment,
    bounds: Bounds | None = None,
    *,
    overwrite: bool = False,
    command: str = "",
) -> Run:
    """Carry out a recipe from source to report, or go on where an earlier run stopped.

    A stage is done when its settings, the texts it reads and the outcomes of the stages before it
    are those of the last time, and what it left is still there unchanged.

    Args:
        experiment: recipe, folder, device.
        bounds: stages asked for; all by default.
        overwrite: start again from models of another recipe that are in the folder.
        command: recorded, for the report.

    Raises:
        RefusedError: the folder holds the training of another recipe, or another run is at work
            there; or what the stages say.
        GqaconvertError: as the stages say; those before are kept.
    """
    bounds = bounds or Bounds()
    folder, recipe = experiment.folder, experiment.recipe
    folder.path.mkdir(parents=True, exist_ok=True)
    with _alone(folder.path):
        if not overwrite:
            refuse_other_training(recipe, folder)
        record = _opened(experiment, command)
        folder.recipe.write_text(resolved_yaml(recipe), encoding="utf-8")
        done: list[StageName] = []
        kept: list[StageName] = []
        stages = plan_stages(experiment)
        for stage in stages:
            if stage.left_out is not None:
                record.stages.pop(stage.name, None)
        for stage in stages:
            if stage.left_out is not None or not bounds.reaches(stage.name):
                continue
            inputs = inputs_of(stage, record)
            forced = bounds.forces(stage.name)
            if not forced and not stage.always and is_kept(stage, record, inputs):
                kept.append(stage.name)
                continue
            anew = forced or overwrite or _replaces(stage)
            experiment.tell(f"[{len(done) + len(kept) + 1}] {stage.name}")
            # A stage that is cut off must not look done, and a report does not tell of itself.
            record.stages.pop(stage.name, None)
            save_record(record, folder.record)
            try:
                record.stages[stage.name] = _carried_out(stage, experiment, inputs, anew, record)
            except Interrupted:
                return Run(folder, record, tuple(done), tuple(kept), interrupted=True)
            finally:
                _release_memory()
            save_record(record, folder.record)
            done.append(stage.name)
    return Run(folder, record, tuple(done), tuple(kept))


def prospects(
    experiment: Experiment, bounds: Bounds | None = None
) -> list[tuple[Stage, Prospect, StageRecord | None]]:
    """Say what `run` would do: each stage, whether it is to do, and what is known of it."""
    bounds = bounds or Bounds()
    record = read_record(experiment.folder.record) or _new_record(experiment.recipe)
    found: list[tuple[Stage, Prospect, StageRecord | None]] = []
    changed: set[StageName] = set()
    for stage in plan_stages(experiment):
        known = record.stages.get(stage.name)
        prospect: Prospect = "to do"
        if stage.left_out is not None:
            prospect = "left out"
        elif not bounds.reaches(stage.name):
            prospect = "not asked for"
        elif not bounds.forces(stage.name) and not changed & set(stage.after):
            offline = stage.always and known is not None  # a look at a model that may be far away
            if offline or is_kept(stage, record, inputs_of(stage, record)):
                prospect = "kept"
        if prospect == "to do":
            changed.add(stage.name)
        found.append((stage, prospect, known))
    return found


def inputs_of(stage: Stage, record: ExperimentRecord) -> str:
    """SHA-256 of all that the outcome of a stage depends on."""
    before = {
        name: record.stages[name].fingerprint for name in stage.after if name in record.stages
    }
    return digest_of({"settings": dict(stage.settings), "after": before})


def is_kept(stage: Stage, record: ExperimentRecord, inputs: str) -> bool:
    """Whether a stage was done from these inputs and its outcome is still there."""
    known = record.stages.get(stage.name)
    if known is None or known.inputs != inputs:
        return False
    return known.outcome == "not needed" or known.fingerprint == stage.fingerprint()


def refuse_other_training(recipe: Recipe, folder: ExperimentFolder) -> None:
    """Refuse to touch what another recipe trained in this folder: it may have taken days.

    Raises:
        RefusedError: with the keys that differ.
    """
    if recipe.uptrain is None or not folder.recipe.is_file():
        return
    if not (folder.export.exists() or folder.states.exists()):
        return
    before, now = _learnt(load_recipe(folder.recipe)), _learnt(recipe)
    differing = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    if differing:
        shown = ", ".join(f"{key} {before.get(key)!r} → {now.get(key)!r}" for key in differing[:4])
        raise RefusedError(
            f"the folder holds the training of another recipe: {shown}",
            at=str(folder.path),
            remedy="another --out, or --overwrite to start again",
        )


def _learnt(recipe: Recipe) -> Mapping[str, Any]:
    if recipe.uptrain is None:
        return {}
    convert = recipe.convert.model_dump(mode="json")
    learnt = {f"convert.{key}": value for key, value in convert.items()}
    for key, value in identity(recipe, "").items():
        learnt[key if key == "source.model" else f"uptrain.{key}"] = value
    return learnt


def _opened(experiment: Experiment, command: str) -> ExperimentRecord:
    known = read_record(experiment.folder.record)
    fresh = _new_record(experiment.recipe)
    return replace(
        fresh,
        command=command,
        machine=describe_machine(),
        versions=library_versions("accelerate"),
        roles=known.roles if known else {},
        stages=known.stages if known else {},
    )


def _new_record(recipe: Recipe) -> ExperimentRecord:
    name = recipe.name or "run"
    return ExperimentRecord(name, (recipe.report.title if recipe.report else None) or name)


def _replaces(stage: Stage) -> bool:
    """Whether what a stage left earlier gives way; training goes on, or refuses by itself."""
    return stage.name != "uptrain" and stage.fingerprint() is not None


def _carried_out(
    stage: Stage, experiment: Experiment, inputs: str, anew: bool, record: ExperimentRecord
) -> StageRecord:
    started, clock = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), time.monotonic()
    finished: Finished = stage.work(experiment, anew)
    _take_roles(record, finished)
    seconds = time.monotonic() - clock
    experiment.tell(f"    {finished.note} ({seconds:.0f} s)")
    return StageRecord(
        inputs=inputs,
        fingerprint=(stage.fingerprint() or "") if finished.needed else "",
        started=started,
        seconds=round(seconds, 1),
        command=stage.command,
        outcome="done" if finished.needed else "not needed",
        note=finished.note,
    )


def _release_memory() -> None:
    """Give back what a stage held: the next may need it, in processes of its own too."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _take_roles(record: ExperimentRecord, finished: Finished) -> None:
    roles = {**record.roles, **finished.roles}
    record.roles.clear()
    record.roles.update({role: roles[role] for role in _ROLES if role in roles})


_ROLES = ("source", "converted", "uptrained")


def _place(name: StageName) -> int:
    return STAGE_NAMES.index(name)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold the folder: two runs in it would undo each other's work."""
    lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RefusedError(
                "another run is at work in this folder",
                at=str(folder),
                remedy="wait for it, or another --out",
            ) from error
        yield
    finally:
        os.close(lock)
