"""All stages of an experiment, in their order: what each depends on, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gqaconvert.calibration.by_recipe import calibrates
from gqaconvert.checkpoint.fingerprint import fingerprint_model
from gqaconvert.evaluation.bench_results import BENCH_FILE
from gqaconvert.evaluation.sweep_results import SWEEP_FILE
from gqaconvert.pipeline.experiment import Experiment
from gqaconvert.pipeline.folder import ExperimentFolder
from gqaconvert.pipeline.making import (
    find_source,
    gather_statistics,
    make_conversion,
    train,
    verify_conversion,
)
from gqaconvert.pipeline.measuring import (
    compare_conversions,
    measure_start,
    measure_trained,
    sweep_calibration,
    sweep_methods,
    time_models,
    write_report,
)
from gqaconvert.pipeline.record import digest_of, files_digest
from gqaconvert.pipeline.stage import Stage, StageName, command_line
from gqaconvert.settings.recipe import Recipe
from gqaconvert.training.prepare import identity

_NO_START = "the recipe names the model to train, uptrain.start"


def plan_stages(experiment: Experiment) -> list[Stage]:
    """List the stages of a recipe, those it does without too."""
    recipe, folder = experiment.recipe, experiment.folder
    source, convert = recipe.source, recipe.convert
    has_start = recipe.uptrain is not None and recipe.uptrain.start is not None
    gathers = calibrates(convert)
    makers: tuple[StageName, ...] = ("source", "calibrate", "convert")
    evaluate = recipe.evaluate.model_dump(mode="json") if recipe.evaluate else {}
    evaluate |= _suite_file(recipe) | {"device": experiment.device}
    # For the commands: "cpu" is what they take by default.
    device = experiment.device if experiment.device != "cpu" else None
    return [
        Stage(
            "source",
            command_line("inspect", source.model, heads=True, revision=source.revision),
            {**source.model_dump(mode="json"), "gpu": recipe.report.gpu if recipe.report else None,
             "kv_heads": convert.kv_heads},
            (),
            find_source,
            _source_fingerprint(experiment),
            always=True,
        ),
        Stage(
            "calibrate",
            command_line("calibrate", source.model, data=convert.calibration,
                         tokens=convert.calibration_tokens, out=folder.statistics, device=device,
                         revision=source.revision),
            {"tokens": convert.calibration_tokens, "text": _text_identity(convert.calibration)},
            ("source",),
            gather_statistics,
            lambda: files_digest([folder.statistics], folder.path),
            left_out=_NO_START if has_start else None if gathers
            else "no text to calibrate on",
        ),
        Stage(
            "convert",
            _convert_command(recipe, folder, device),
            convert.model_dump(mode="json", exclude={"calibration"})
            | {"calibration": _text_identity(convert.calibration)},
            ("source", "calibrate"),
            make_conversion,
            lambda: _model_fingerprint(folder.converted),
            left_out=_NO_START if has_start else None,
        ),
        Stage(
            "verify",
            command_line("verify", folder.converted,
                         source=None if convert.distill_steps else source.model, forward=True),
            {},
            makers,
            verify_conversion,
            lambda: files_digest([folder.verification], folder.path),
            left_out=_NO_START if has_start else None,
        ),
        Stage(
            "evaluate",
            _evaluate_command(recipe, folder, folder.converted, device),
            evaluate,
            makers,
            measure_start,
            lambda: _results_digest(folder, "converted"),
            left_out=None if recipe.evaluate else "the recipe has no section evaluate",
        ),
        Stage(
            "uptrain",
            command_line("uptrain", folder.recipe, out=folder.path),
            identity(recipe, "") if recipe.uptrain else {},
            makers,
            train,
            lambda: _model_fingerprint(folder.export),
            left_out=None if recipe.uptrain else "the recipe has no section uptrain",
        ),
        Stage(
            "evaluate-uptrained",
            _evaluate_command(recipe, folder, folder.export, device),
            evaluate,
            ("source", "uptrain"),
            measure_trained,
            lambda: _results_digest(folder, "model"),
            left_out=None if recipe.evaluate and recipe.uptrain else "nothing trained to measure",
        ),
        Stage(
            "bench",
            _bench_command(recipe, folder, device),
            (recipe.bench.model_dump(mode="json") if recipe.bench else {})
            | {"device": experiment.device},
            (*makers, "uptrain"),
            time_models,
            lambda: files_digest([folder.bench / BENCH_FILE], folder.path),
            left_out=None if recipe.bench else "the recipe has no section bench",
        ),
        Stage(
            "sweep",
            _sweep_command(recipe, folder, device),
            (recipe.sweep.model_dump(mode="json") if recipe.sweep else {}) | evaluate,
            ("source", "calibrate"),
            compare_conversions,
            lambda: files_digest([folder.sweep / SWEEP_FILE], folder.path),
            left_out=None if recipe.sweep else "the recipe has no section sweep",
        ),
        Stage(
            "report",
            command_line("report", folder.path),
            recipe.report.model_dump(mode="json") if recipe.report else {},
            ("source", "convert", "verify", "evaluate", "uptrain", "evaluate-uptrained", "bench",
             "sweep"),
            write_report,
            lambda: files_digest([folder.report / "report.html"], folder.path),
        ),
    ]  # fmt: skip


def _source_fingerprint(experiment: Experiment) -> Callable[[], str]:
    return lambda: experiment.source.weights_sha256


def _model_fingerprint(folder: Path) -> str | None:
    return fingerprint_model(folder) if folder.is_dir() else None


def _results_digest(folder: ExperimentFolder, model: str) -> str | None:
    """Of the figures of the source, too: all folders but that of the other model."""
    other = {"converted": "model", "model": "converted"}[model]
    files = sorted(folder.results.glob("*/*.json"))
    return files_digest([each for each in files if each.parent.name != other], folder.path)


def _text_identity(spec: str | None) -> Any:  # noqa: ANN401
    """A text by its content where it is a file, else by its name."""
    if spec is None:
        return None
    path = Path(spec).expanduser()
    return files_digest([path], path.parent) or spec


def _suite_file(recipe: Recipe) -> dict[str, Any]:
    if recipe.evaluate is None:
        return {}
    from gqaconvert.pipeline.measuring import suite_of

    return {"suite_content": digest_of(suite_of(recipe.evaluate).model_dump(mode="json"))}


def _convert_command(recipe: Recipe, folder: ExperimentFolder, device: str | None) -> str:
    wanted = recipe.convert
    return command_line(
        "convert", recipe.source.model, folder.converted, kv_heads=wanted.kv_heads,
        method=wanted.method,
        grouping=wanted.grouping if wanted.grouping != "adjacent" else None,
        seed=wanted.seed or None,
        dtype=wanted.dtype if wanted.dtype != "keep" else None,
        calibration=folder.statistics if calibrates(wanted) else wanted.calibration,
        data=wanted.calibration if wanted.fit_steps or wanted.distill_steps else None,
        fit_steps=wanted.fit_steps or None, distill_steps=wanted.distill_steps or None,
        device=device if wanted.fit_steps or wanted.distill_steps else None,
        revision=recipe.source.revision,
    )  # fmt: skip


def _evaluate_command(
    recipe: Recipe, folder: ExperimentFolder, model: Path, device: str | None
) -> str:
    section = recipe.evaluate
    if section is None:
        return ""
    options = section.changes()
    if "task_limit" in options:
        options["limit"] = options.pop("task_limit")
    return command_line(
        "evaluate", model, baseline=recipe.source.model, suite=section.suite,
        dtype=section.dtype if section.dtype != "auto" else None, results=folder.results,
        device=device, **options,
    )  # fmt: skip


def _bench_command(recipe: Recipe, folder: ExperimentFolder, device: str | None) -> str:
    section = recipe.bench
    if section is None:
        return ""
    final = folder.export if recipe.uptrain else folder.converted
    return command_line(
        "bench", recipe.source.model, final, context=section.contexts, batch=section.batches,
        new_tokens=section.new_tokens, repeats=section.repeats, attn=section.attn,
        device=device, out=folder.bench,
    )  # fmt: skip


def _sweep_command(recipe: Recipe, folder: ExperimentFolder, device: str | None) -> str:
    section = recipe.sweep
    if section is None:
        return ""
    evaluate = recipe.evaluate
    return command_line(
        "sweep", recipe.source.model, kv_heads=section.kv_heads or None,
        method=sweep_methods(recipe), calibration=sweep_calibration(recipe, folder),
        windows=section.windows, spread=bool(evaluate and evaluate.spread),
        context=evaluate.context if evaluate else None,
        text=evaluate.text if evaluate else None, device=device, out=folder.sweep,
    )  # fmt: skip
