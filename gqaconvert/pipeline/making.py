"""The stages that make models: source, calibrate, convert, verify, uptrain."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from gqaconvert.attention.estimation import estimate
from gqaconvert.attention.inspection import inspect
from gqaconvert.calibration.by_recipe import calibrates, convert_by_recipe
from gqaconvert.calibration.calibrate import calibrate
from gqaconvert.checkpoint.sidecars import read_json_object, write_json
from gqaconvert.errors import GqaconvertError, UsageError
from gqaconvert.evaluation.head_similarity import head_similarity
from gqaconvert.kv_cache.model_config import read_config
from gqaconvert.pipeline.experiment import Experiment
from gqaconvert.pipeline.stage import Finished
from gqaconvert.settings.budget import total_steps
from gqaconvert.settings.recipe import ReportSettings
from gqaconvert.settings.recipes import resolved_yaml
from gqaconvert.surgery.verify_model import verify
from gqaconvert.training.distilled import Distillation, distill
from gqaconvert.training.launch import launch, route_here
from gqaconvert.training.run import uptrain
from gqaconvert.units import format_bytes, format_count


class Interrupted(Exception):  # no error: the state is saved
    """The uptraining was stopped from outside, with its state saved."""


def find_source(experiment: Experiment, _anew: bool) -> Finished:
    """Find the source or download it; reckon memory, and compare its heads."""
    recipe, folder = experiment.recipe, experiment.folder
    found = experiment.source
    note_model(experiment, "source", found.folder)
    config = read_config(found.folder)
    wanted = recipe.convert.kv_heads
    counts = dict.fromkeys((int(config.num_kv_heads or wanted), wanted))
    answer = estimate(
        str(found.folder),
        context=[config.max_position_embeddings or 4096],
        kv_heads=list(counts),
        gpu=(recipe.report or ReportSettings()).gpu,
    )
    folder.estimate.write_text(json.dumps(answer.to_json(), indent=2) + "\n", encoding="utf-8")
    try:
        write_json(folder.heads, head_similarity(found.folder).to_json())
    except GqaconvertError as error:
        experiment.tell(f"heads were not compared: {error.what}")
    size = sum(file.size_bytes for file in found.index.files)
    note = f"{format_count(found.index.parameters)} parameters, {format_bytes(size)}"
    return Finished(note, roles={"source": found.name})


def gather_statistics(experiment: Experiment, anew: bool) -> Finished:
    """Gather the second moments of the calibration text."""
    recipe, path = experiment.recipe, experiment.folder.statistics
    wanted = recipe.convert
    done = calibrate(
        recipe.source.model,
        str(wanted.calibration),
        out=path,
        tokens=wanted.calibration_tokens,
        device=experiment.device,
        revision=recipe.source.revision,
        resume=not anew,
        overwrite=anew,
        progress=lambda layer, count: experiment.tell(f"calibrating: layer {layer} of {count}"),
    )
    return Finished(f"{format_count(done.identity.tokens)} tokens, {format_bytes(done.size_bytes)}")


def make_conversion(experiment: Experiment, anew: bool) -> Finished:
    """Pool the KV heads, and distil where the recipe says so without an uptraining."""
    folder, wanted = experiment.folder, experiment.recipe.convert
    distilled = bool(wanted.distill_steps)
    if distilled and not calibrates(wanted):
        raise UsageError(
            "the distillation reads text, and none is given",
            at="convert.distill_steps",
            remedy="convert.calibration: a text; not the one that is measured on",
        )
    pooled = folder.path / ".undistilled" if distilled else folder.converted
    made = convert_by_recipe(
        experiment.recipe,
        pooled,
        folder.statistics,
        device=experiment.device,
        tell=experiment.tell,
        overwrite=anew or pooled.exists(),  # left by a distillation that was interrupted
    )
    if not made.written or made.plan is None:
        return Finished("; ".join(made.notices), needed=False)
    if distilled:
        _distil(experiment, pooled, anew)
    note_model(experiment, "converted", folder.converted)
    before, after = made.plan.attention.num_kv_heads, made.plan.options.num_kv_heads
    note = f"{before} → {after} KV heads, {format_bytes(made.plan.size_bytes)}"
    return Finished(note, roles={"converted": folder.converted.name})


def verify_conversion(experiment: Experiment, _anew: bool) -> Finished:
    """Prove that the conversion is what it promised."""
    folder, recipe = experiment.folder, experiment.recipe
    if not folder.converted.exists():
        return Finished("nothing was converted", needed=False)
    trained = bool(recipe.convert.distill_steps)
    verified = verify(folder.converted, None if trained else experiment.source.folder, forward=True)
    checks = [{"name": check.name, "covered": check.covered} for check in verified.checks]
    write_json(folder.verification, {"checks": checks})
    return Finished(f"{len(checks)} checks")


def train(experiment: Experiment, anew: bool) -> Finished:
    """Train the conversion, here or in processes of their own; goes on where it was."""
    recipe, folder = experiment.recipe, experiment.folder
    if anew:
        folder.clear(keep_conversion=True)
        folder.recipe.write_text(resolved_yaml(recipe), encoding="utf-8")
    arguments = [str(folder.recipe), "--out", str(folder.path), "--resume", "auto"]
    route = route_here(
        experiment.processes.accelerate_config, experiment.processes.count, arguments
    )
    if route is not None:
        experiment.tell(f"starting {route.num_processes} processes")
        code = launch(route)
        if code == 130:
            raise Interrupted
        if code:
            raise GqaconvertError("the uptraining failed; what it printed says why", at=str(folder))
    else:
        with experiment.training_progress(total_steps(recipe)) as report:
            result = uptrain(
                recipe, folder.path, resume="auto", reports=(report,), tell=experiment.tell
            )
        if result.ending == "interrupted":
            raise Interrupted
    summary = read_json_object(folder.summary)
    note_model(experiment, "uptrained", folder.export)
    note = (
        f"{summary['steps']} steps, {format_count(summary['tokens'])} tokens,"
        f" {summary['tokens_per_s']:,.0f} tokens/s"
    )
    if summary["last_loss"] is not None:
        note += f"; held-out loss {summary['first_loss']:.3f} → {summary['last_loss']:.3f}"
    return Finished(note, roles={"uptrained": folder.export.name})


def note_model(experiment: Experiment, role: str, folder: Path) -> None:
    """Add the sizes of a model to `models.json`."""
    path = experiment.folder.models
    content: dict[str, Any] = read_json_object(path) if path.exists() else {}
    found = inspect(folder)
    content[role] = {
        "name": experiment.source.name if role == "source" else folder.name,
        "parameters": found.parameters,
        "weights_bytes": found.size_bytes,
        "num_heads": found.num_heads,
        "kv_heads": found.num_kv_heads,
        "kv_bytes_per_token": found.kv_bytes_per_token,
        "dtype": found.dtype,
    }
    write_json(path, content)


def _distil(experiment: Experiment, pooled: Path, anew: bool) -> None:
    recipe, target = experiment.recipe, experiment.folder.converted
    wanted = recipe.convert
    with experiment.training_progress(wanted.distill_steps) as report:
        done = distill(
            recipe.source.model,
            pooled,
            target,
            Distillation(str(wanted.calibration), wanted.distill_steps),
            revision=recipe.source.revision,
            overwrite=anew,
            reports=(report,),
        )
    if done.ending == "interrupted":
        raise Interrupted
    shutil.rmtree(pooled)
