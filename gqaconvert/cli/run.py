"""`gqaconvert run RECIPE`: from source to report, stage by stage, restartable."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gqaconvert.cli.recipe_options import (
    AccelerateConfig,
    NumProcesses,
    Overrides,
    PlannedGpu,
    RecipeName,
    RunOut,
)
from gqaconvert.cli.terminal import say, show_json

if TYPE_CHECKING:
    from gqaconvert.pipeline.experiment import Experiment
    from gqaconvert.pipeline.run import Run
    from gqaconvert.pipeline.stage import StageName

_STAGES = "source, calibrate, convert, verify, evaluate, uptrain, evaluate-uptrained, bench, sweep"


def run_command(
    recipe: RecipeName,
    out: RunOut = None,
    first: Annotated[
        str | None,
        typer.Option("--from", help=f"Do this stage and all after it again: {_STAGES} or report."),
    ] = None,
    last: Annotated[str | None, typer.Option("--until", help="Stop after this stage.")] = None,
    override: Overrides = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="For all but uptraining.")
    ] = "auto",
    accelerate_config: AccelerateConfig = None,
    num_processes: NumProcesses = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Start again where another recipe ran in the folder."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print stages, time, disk and memory, and stop.")
    ] = False,
    gpu: PlannedGpu = None,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Convert, verify, measure, uptrain, measure again, time and report: a recipe end to end.

    Stages that are done are kept, so a stopped run goes on when the command is repeated, and a
    changed recipe repeats what depends on the change.
    """
    from gqaconvert.settings.recipes import accelerate_config as find_config
    from gqaconvert.settings.recipes import load_recipe

    content = load_recipe(recipe, override or [])
    config = find_config(accelerate_config) if accelerate_config else None
    from gqaconvert.cli.training_progress import training_progress
    from gqaconvert.pipeline.experiment import Experiment, Processes
    from gqaconvert.pipeline.folder import experiment_folder
    from gqaconvert.pipeline.run import Bounds, run

    experiment = Experiment(
        content,
        experiment_folder(out, content.name or "run"),
        device=_device(device),
        processes=Processes(config, num_processes),
        tell=say,
        training_progress=training_progress,
    )
    bounds = Bounds(_stage(first), _stage(last))
    if dry_run:
        from gqaconvert.cli.run_plan import show_plan

        show_plan(experiment, bounds, gpu, json=json)
        return
    done = run(
        experiment,
        bounds,
        overwrite=overwrite,
        command=shlex.join(["gqaconvert", *sys.argv[1:]]),
    )
    _tell(done, experiment)
    if json:
        show_json(
            {
                "folder": str(done.folder.path),
                "done": list(done.done),
                "kept": list(done.kept),
                "interrupted": done.interrupted,
                "report": str(done.folder.report / "report.html"),
            }
        )
    if done.interrupted:
        raise typer.Exit(130)


def _stage(name: str | None) -> StageName | None:
    return name  # type: ignore[return-value]  # `Bounds` checks it


def _device(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _tell(done: Run, experiment: Experiment) -> None:
    if done.interrupted:
        say("interrupted; the state is saved: repeat the command to go on")
        return
    if done.kept:
        say(f"kept from before: {', '.join(done.kept)}")
    folder = done.folder
    if experiment.final.exists():
        say(f"model: {experiment.final}")
    report = folder.report / "report.html"
    if report.exists():
        say(f"report: {report}, {folder.report / 'report.md'}")
