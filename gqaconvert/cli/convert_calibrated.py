"""The part of `convert` that runs the model: statistics of a text, the local fit, distillation."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gqaconvert.checkpoint.header import looks_like_safetensors
from gqaconvert.cli.terminal import byte_progress, say
from gqaconvert.errors import UsageError

if TYPE_CHECKING:
    from gqaconvert.surgery.convert import Conversion


@dataclass(frozen=True)
class ModelWork:
    """What the model has to be run for.

    Attributes:
        calibration: a calibration file or a text, None for none.
        tokens: of a text to gather statistics on.
        data: text of the fit and the distillation; None for that of the calibration.
        fit_steps: of each layer.
        fit_windows: of the text that the fit reads.
        distill_steps: of the whole model.
        context: tokens a window.
        device: "cpu" or "cuda".
    """

    calibration: str | None
    tokens: int
    data: str | None
    fit_steps: int
    fit_windows: int
    distill_steps: int
    context: int
    device: str

    @property
    def runs_the_model(self) -> bool:
        """Whether reading weights does not suffice."""
        text = self.calibration is not None and not self.is_file
        return bool(text or self.fit_steps or self.distill_steps)

    @property
    def is_file(self) -> bool:
        """Whether the calibration is a file of statistics, not a text."""
        path = Path(self.calibration or "")
        return path.suffix == ".safetensors" or looks_like_safetensors(path)

    def text(self) -> str:
        """The text of fit and distillation.

        Raises:
            UsageError: there is none.
        """
        if self.data is not None:
            return self.data
        if self.calibration is None or self.is_file:
            raise UsageError(
                "the fit and the distillation read text, and none is given",
                at="--fit-steps, --distill-steps",
                remedy="--data TEXT; not the text the model will be evaluated on",
            )
        return self.calibration


def convert_with_model(
    model: str, out: Path | None, work: ModelWork, options: dict[str, Any]
) -> tuple[Path, Conversion | None]:
    """Convert with statistics, fit and distillation, each where it is asked for.

    Args:
        model: folder, Hub id or alias.
        out: output folder, None for the default.
        work: what the model is run for.
        options: of `convert_calibrated`, those that do not concern the model's run.

    Returns:
        The output, and the conversion; None where an earlier run had finished it and only
        distillation was left.
    """
    from gqaconvert.checkpoint.staging import check_output
    from gqaconvert.surgery.naming import default_output_name
    from gqaconvert.surgery.source import open_source

    source = open_source(model, options["revision"])
    heads = source.attention.num_heads
    target = out or Path(default_output_name(source.label, heads, options["num_kv_heads"]))
    kept = target.parent / f"{source.label}.calibration.safetensors"
    if not work.distill_steps or options["dry_run"]:
        return target, _pool(model, target, work, kept, options)
    text = work.text()
    check_output(target, overwrite=options["overwrite"])
    pooled = target.parent / f".{target.name}.undistilled"
    conversion = None
    if not (options["resume"] and pooled.exists()):
        conversion = _pool(model, pooled, work, kept, options)
    _distill(model, pooled, target, text, work, options)
    shutil.rmtree(pooled)
    return target, None if conversion is None else replace(conversion, out=target)


def _pool(
    model: str, target: Path, work: ModelWork, kept: Path, options: dict[str, Any]
) -> Conversion:
    from gqaconvert.calibration.block_fit import FitOptions
    from gqaconvert.calibration.conversion import (
        CalibrationSource,
        LocalFitting,
        convert_calibrated,
    )

    calibration = fitting = None
    if work.calibration is not None:
        calibration = CalibrationSource(
            work.calibration, None if work.is_file else kept, work.tokens, work.context
        )
    if work.fit_steps:
        fit = FitOptions(steps=work.fit_steps)
        fitting = LocalFitting(fit, work.text(), work.fit_windows, work.context)
    with byte_progress("converting") as progress:
        return convert_calibrated(
            model, target, calibration=calibration, fitting=fitting, device=work.device,
            progress=progress, tell=say, **options,
        )  # fmt: skip


def _distill(
    model: str, pooled: Path, target: Path, text: str, work: ModelWork, options: dict[str, Any]
) -> None:
    from gqaconvert.cli.training_progress import training_progress
    from gqaconvert.training.distilled import Distillation, distill

    distillation = Distillation(text, work.distill_steps, work.context, 2 * work.context)
    with training_progress(work.distill_steps) as report:
        done = distill(
            model, pooled, target, distillation, revision=options["revision"],
            overwrite=options["overwrite"], reports=(report,),
        )  # fmt: skip
    if done.ending == "interrupted":
        say("interrupted; the state is saved: repeat the command with --resume")
        raise typer.Exit(130)
    say(f"distilled for {done.facts.step} steps, {done.facts.seconds:.0f} s")
