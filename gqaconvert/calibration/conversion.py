"""A calibrated conversion in one call: statistics from a file or a text, pooling, the local fit."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from gqaconvert.calibration.block_fit import FitOptions
from gqaconvert.calibration.calibrate import calibrate, is_of
from gqaconvert.calibration.local_fit import LocalFit
from gqaconvert.errors import RefusedError, UsageError
from gqaconvert.surgery.convert import Conversion, convert


@dataclass(frozen=True)
class CalibrationSource:
    """Where statistics come from.

    Attributes:
        spec: a calibration file, or a text as in `load_text`.
        kept_at: where statistics of a text are kept, and found again; None for a file.
        tokens: read of a text.
        context: tokens a window of it.
    """

    spec: str
    kept_at: Path | None
    tokens: int = 131072
    context: int = 512


@dataclass(frozen=True)
class LocalFitting:
    """The local fit of a conversion.

    Attributes:
        options: steps and rates.
        data: text; None for that of the calibration.
        windows: of it that are read.
        context: tokens a window.
    """

    options: FitOptions
    data: str | None = None
    windows: int = 128
    context: int = 512


def convert_calibrated(
    model: str | Path,
    out: str | Path | None,
    *,
    num_kv_heads: int,
    method: str | None = None,
    grouping: str = "adjacent",
    calibration: CalibrationSource | None = None,
    fitting: LocalFitting | None = None,
    device: str = "cpu",
    seed: int = 0,
    dtype: str = "keep",
    max_shard_size: str | int | None = None,
    tensor_parallel: int = 1,
    revision: str | None = None,
    dry_run: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    hash_files: bool = False,
    progress: Callable[[int, int], None] | None = None,
    calibrating: Callable[[int, int], None] | None = None,
    tell: Callable[[str], None] | None = None,
) -> Conversion:
    """Convert a checkpoint with everything this package knows; `convert` has the rest.

    Args:
        model: folder, alias or Hub id.
        out: output folder.
        num_kv_heads: KV heads wanted.
        method: see `surgery.convert`.
        grouping: which heads share.
        calibration: statistics; needed by "svd".
        fitting: the local fit after pooling; None for none.
        device: "cpu" or "cuda", of calibration and fit.
        seed: for "random".
        dtype: of the output.
        max_shard_size: largest weight file.
        tensor_parallel: degree the result will be served with.
        revision: of a Hub model.
        dry_run: only plan and predict.
        resume: go on with an interrupted conversion, or calibration, of the same options.
        overwrite: replace an earlier output.
        workers: threads.
        hash_files: record SHA-256 of whole files.
        progress: of the conversion, in bytes.
        calibrating: of the calibration, in layers.
        tell: called with what the reader should know on the way.

    Raises:
        UsageError: a fit without text.
        RefusedError: statistics of something else are in the way.
        GqaconvertError: as its subclasses say.
    """
    say = tell or (lambda _: None)
    statistics = None
    if calibration is not None:
        statistics = (
            Path(calibration.spec)
            if calibration.kept_at is None
            else _gather(
                model, calibration, calibration.kept_at, device, revision, resume, calibrating, say
            )
        )
    fit: LocalFit | None = None
    if fitting is not None and not dry_run:
        text = fitting.data or _text_of(calibration)
        fit = LocalFit(
            model, text, fitting.options, windows=fitting.windows, context=fitting.context,
            device=device, revision=revision,
            progress=lambda number, count, report: say(
                f"layer {number + 1} of {count}: error {report.error_before:.3f} →"
                f" {report.error_after:.3f} after {report.kept_step} steps, {report.seconds:.1f} s"
            ),
        )  # fmt: skip
    with fit if fit is not None else nullcontext():
        return convert(
            model, out, num_kv_heads=num_kv_heads, method=method, grouping=grouping,
            statistics=statistics, refine=fit, seed=seed, dtype=dtype,
            metric="plain" if fitting is not None and statistics is not None else None,
            max_shard_size=max_shard_size, tensor_parallel=tensor_parallel, revision=revision,
            dry_run=dry_run, resume=resume, overwrite=overwrite, workers=workers,
            hash_files=hash_files, progress=progress,
        )  # fmt: skip


def _gather(
    model: str | Path,
    source: CalibrationSource,
    path: Path,
    device: str,
    revision: str | None,
    resume: bool,
    calibrating: Callable[[int, int], None] | None,
    say: Callable[[str], None],
) -> Path:
    """Take the statistics of a text, or find them where an earlier call kept them."""
    if path.exists():
        if not is_of(path, model, source.spec, tokens=source.tokens, context=source.context,
                     revision=revision):  # fmt: skip
            raise RefusedError(
                "a calibration of another model or text is in the way",
                at=str(path),
                remedy=f"--calibration {path} to use it, or remove it",
            )
        say(f"statistics: {path}, from before")
        return path
    done = calibrate(
        model, source.spec, out=path, tokens=source.tokens, context=source.context, device=device,
        revision=revision, resume=resume, progress=calibrating,
    )  # fmt: skip
    say(f"statistics: {path}, of {done.identity.tokens:,} tokens, {done.seconds:.0f} s")
    return path


def _text_of(calibration: CalibrationSource | None) -> str:
    if calibration is None or calibration.kept_at is None:
        raise UsageError(
            "the local fit reads text, and none is given", at="--fit-steps", remedy="--data TEXT"
        )
    return calibration.spec
