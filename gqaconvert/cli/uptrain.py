"""`gqaconvert uptrain RECIPE`: trains a converted model, on one process or many."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gqaconvert.cli.push import Public, PushToHub, check_push, push
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
    from gqaconvert.checkpoint.hub_upload import UploadTarget
    from gqaconvert.settings.recipe import Recipe
    from gqaconvert.training.launch import Route
    from gqaconvert.training.run import Uptraining


def uptrain_command(
    recipe: RecipeName,
    accelerate_config: AccelerateConfig = None,
    num_processes: NumProcesses = None,
    override: Overrides = None,
    out: RunOut = None,
    resume: Annotated[
        str | None, typer.Option(help="auto, or a saved state's folder, to go on from it.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Forget an earlier run in the same folder.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print memory, disk and steps, and stop.")
    ] = False,
    gpu: PlannedGpu = None,
    push_to_hub: PushToHub = None,
    public: Public = False,
    json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    launched: Annotated[bool, typer.Option("--launched", hidden=True)] = False,
) -> None:
    """Bring the quality of a converted model back by training it, against its source or on text.

    The recipe says which model is converted how, what it is trained on and for how long. What is
    saved on the way lets an interrupted run go on: repeat the command with --resume auto.
    """
    from gqaconvert.settings.recipes import load_recipe

    overrides = override or []
    content = load_recipe(recipe, overrides)
    target = None
    if _is_first():  # of the processes of a run, only the first one uploads
        # What goes on with a run goes on with its upload.
        replace = overwrite or resume is not None
        target = check_push(push_to_hub, public=public, overwrite=replace)
    if dry_run:
        from gqaconvert.cli.uptrain_plan import show_plan

        show_plan(content, accelerate_config, num_processes, gpu, json=json)
        if target is not None:
            say(f"the trained model would be uploaded to {target.describe()}; no saved states")
        return
    route = None
    if not launched:
        route = _route(
            recipe, accelerate_config, num_processes, overrides, out, resume, push_to_hub,
            public=public, overwrite=overwrite,
        )  # fmt: skip
    if route is not None:
        from gqaconvert.training.launch import launch
        from gqaconvert.training.prepare import settings_of

        settings_of(content)
        say(f"starting {route.num_processes} processes ({'FSDP2' if route.sharded else 'DDP'})")
        code = launch(route)
        if code == 0 and json:
            _show_saved_summary(content, out)
        raise typer.Exit(code)
    _train_here(content, out, resume, target, overwrite=overwrite, json=json and not launched)


def _route(
    recipe: str,
    accelerate_config: str | None,
    num_processes: int | None,
    overrides: list[str],
    out: Path | None,
    resume: str | None,
    push_to_hub: str | None,
    *,
    public: bool,
    overwrite: bool,
) -> Route | None:
    from gqaconvert.settings.recipes import accelerate_config as find_config
    from gqaconvert.training.launch import route_here

    arguments = [recipe, *(part for each in overrides for part in ("--set", each))]
    if out is not None:
        arguments += ["--out", str(out)]
    if resume is not None:
        arguments += ["--resume", resume]
    if overwrite:
        arguments.append("--overwrite")
    if push_to_hub is not None:
        arguments += ["--push-to-hub", push_to_hub, *(["--public"] if public else [])]
    config = find_config(accelerate_config) if accelerate_config else None
    return route_here(config, num_processes, arguments)


def _train_here(
    recipe: Recipe,
    out: Path | None,
    resume: str | None,
    target: UploadTarget | None,
    *,
    overwrite: bool,
    json: bool,
) -> None:
    from gqaconvert.cli.training_progress import training_progress
    from gqaconvert.errors import GqaconvertError
    from gqaconvert.settings.budget import total_steps
    from gqaconvert.training.launch import leave_outcome
    from gqaconvert.training.run import uptrain

    try:
        with training_progress(total_steps(recipe)) as report:
            result = uptrain(
                recipe, out, resume=resume, overwrite=overwrite, reports=(report,), tell=say
            )
    except GqaconvertError as error:
        leave_outcome(error.exit_code)
        raise
    if result.ending == "interrupted":
        if _is_first():
            say(
                f"interrupted at step {result.facts.step}; the state is saved: repeat the command"
                " with --resume auto"
            )
        raise typer.Exit(leave_outcome(130))
    if _is_first():
        _tell(result)
        if json:
            show_json(dict(result.summary))
    if target is not None:
        steps = f"{result.facts.step} step{'s' * (result.facts.step != 1)}"
        try:
            push(result.folder.export, target, message=f"Uptrain for {steps} with gqaconvert")
        except GqaconvertError as error:
            leave_outcome(error.exit_code)
            raise


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _tell(result: Uptraining) -> None:
    summary = result.summary
    say(
        f"{result.ending} after {summary['steps']} steps, {summary['tokens']:,} tokens,"
        f" {summary['seconds']:.0f} s ({summary['tokens_per_s']:,.0f} tokens/s)"
    )
    if summary["first_loss"] is not None:
        say(
            f"held-out loss {summary['first_loss']:.3f} → {summary['last_loss']:.3f} nats a token;"
            f" source {summary['source_loss']:.3f}"
        )
    if summary["skipped_steps"]:
        say(f"{summary['skipped_steps']} steps were skipped, see {result.folder.metrics}")
    say(f"model: {result.folder.export}")
    say(f"losses: {result.folder.curve}, {result.folder.metrics}")


def _show_saved_summary(recipe: Recipe, out: Path | None) -> None:
    from gqaconvert.checkpoint.sidecars import read_json_object
    from gqaconvert.training.folder import run_folder

    show_json(read_json_object(run_folder(out, recipe.name or "run").summary))
