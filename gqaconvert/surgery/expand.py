"""The exact reverse of pooling: repeats KV heads, for tests and for wider tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from gqaconvert.errors import UsageError
from gqaconvert.surgery.convert import Conversion, change_kv_heads
from gqaconvert.surgery.options import REPEAT, ConversionOptions
from gqaconvert.surgery.source import open_source


def expand(
    model: str | Path,
    out: str | Path | None = None,
    *,
    num_kv_heads: int,
    revision: str | None = None,
    dry_run: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    hash_files: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Repeat the KV heads of a checkpoint: the result computes the same, with a larger cache.

    Args:
        model: folder, alias or Hub id.
        out: output folder; by default the model's name with "-gqaN" or "-mha".
        num_kv_heads: KV heads wanted, a multiple of the source's that divides its query heads.
        revision: as in `convert`, like all that follow.
        dry_run: only plan.
        resume: go on with an interrupted run.
        overwrite: replace an earlier output.
        workers: threads.
        hash_files: hash whole files.
        progress: called with bytes done and in all.

    Raises:
        GqaconvertError: as its subclasses say; nothing is left behind then.
    """
    source = open_source(model, revision)
    if num_kv_heads < source.attention.num_kv_heads:
        raise UsageError(
            f"the model has {source.attention.num_kv_heads} KV heads, more than {num_kv_heads}",
            at=source.config.at,
            remedy=f"gqaconvert convert {model} --kv-heads {num_kv_heads} pools them",
        )
    return change_kv_heads(
        source, ConversionOptions(num_kv_heads, method=REPEAT), out,
        dry_run=dry_run, resume=resume, overwrite=overwrite,
        workers=workers, hash_files=hash_files, progress=progress,
    )  # fmt: skip
