"""The section `convert` of a recipe, carried out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gqaconvert.calibration.block_fit import FitOptions
from gqaconvert.calibration.conversion import (
    CalibrationSource,
    LocalFitting,
    convert_calibrated,
)
from gqaconvert.checkpoint.header import looks_like_safetensors
from gqaconvert.settings.recipe import ConvertSettings, Recipe
from gqaconvert.surgery.convert import Conversion


def convert_by_recipe(
    recipe: Recipe,
    out: Path,
    statistics: Path,
    *,
    device: str,
    tell: Callable[[str], None],
    overwrite: bool = False,
) -> Conversion:
    """Make the conversion that a recipe describes, its distillation left out.

    Args:
        recipe: what is converted how.
        out: output folder; an unfinished one of the same options is gone on with.
        statistics: where those of a calibration text are kept, and found again.
        device: "cpu" or "cuda", of calibration and fit.
        tell: told in words what takes its time.
        overwrite: replace an earlier output, and forget an unfinished one.

    Raises:
        GqaconvertError: as `convert_calibrated` says.
    """
    wanted = recipe.convert
    tell(f"converting {recipe.source.model} to {wanted.kv_heads} KV heads ({wanted.method})")
    calibration = None
    if wanted.calibration is not None:
        kept = statistics if calibrates(wanted) else None
        calibration = CalibrationSource(wanted.calibration, kept, wanted.calibration_tokens)
    fitting = LocalFitting(FitOptions(steps=wanted.fit_steps)) if wanted.fit_steps else None
    return convert_calibrated(
        recipe.source.model,
        out,
        num_kv_heads=wanted.kv_heads,
        method=wanted.method,
        grouping=wanted.grouping,
        calibration=calibration,
        fitting=fitting,
        device=device,
        seed=wanted.seed,
        dtype=wanted.dtype,
        revision=recipe.source.revision,
        resume=not overwrite,
        overwrite=overwrite,
        calibrating=lambda done, count: tell(f"calibrating: layer {done} of {count}"),
        tell=tell,
    )


def calibrates(wanted: ConvertSettings) -> bool:
    """Whether statistics have to be gathered from a text, rather than read from a file."""
    spec = wanted.calibration
    return spec is not None and not looks_like_safetensors(Path(spec))
