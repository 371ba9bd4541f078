"""Converts a checkpoint folder: plan, stream, verify, and only then give the output its name."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gqaconvert.checkpoint.index import SAFETENSORS_INDEX
from gqaconvert.checkpoint.shards import index_json, needs_index
from gqaconvert.checkpoint.sidecars import (
    CARD,
    CONFIG,
    Sidecars,
    copy_sidecars,
    edit_config,
    find_sidecars,
    write_json,
)
from gqaconvert.checkpoint.staging import MANIFEST, StagedFolder, check_output, check_space
from gqaconvert.errors import RefusedError, UsageError
from gqaconvert.surgery.card import build_card
from gqaconvert.surgery.execute import execute, work_digest
from gqaconvert.surgery.execute_layers import layer_reports
from gqaconvert.surgery.layer_heads import LayerReport
from gqaconvert.surgery.layer_pooling import Calibration, Refine
from gqaconvert.surgery.manifest import build_manifest, hash_file
from gqaconvert.surgery.naming import default_output_name
from gqaconvert.surgery.notices import notices_of
from gqaconvert.surgery.options import ConversionOptions
from gqaconvert.surgery.plan import ConversionPlan
from gqaconvert.surgery.planning import plan_conversion
from gqaconvert.surgery.predict import predict_plan
from gqaconvert.surgery.source import SourceCheckpoint, open_source
from gqaconvert.surgery.statistics import StatisticsFile
from gqaconvert.surgery.tokenizer_files import lacking_tokenizer_files
from gqaconvert.surgery.verify import Check, verify_against_plan
from gqaconvert.units import parse_bytes, weight_type

_SMALL_FILES_BYTES = 1 << 20

DEFAULT_WORKERS = 4
"""Threads mostly wait for the device, so their best number does not follow from that of cores."""


@dataclass(frozen=True)
class Conversion:
    """What a conversion did, or with `dry_run` would do.

    Attributes:
        plan: tensors, config keys and files; None when there was nothing to change.
        source: the checkpoint it was made from.
        out: the output folder.
        written: whether the output exists now.
        checks: what level 1 of verification covered.
        notices: what the reader should know.
        seconds: wall time.
        layers: of a calibrated conversion, module → what pooling it loses; filled in by a dry run.
    """

    plan: ConversionPlan | None
    source: SourceCheckpoint
    out: Path
    written: bool
    checks: tuple[Check, ...] = ()
    notices: tuple[str, ...] = ()
    seconds: float = 0.0
    sidecars: Sidecars = field(default_factory=lambda: Sidecars((), {}))
    layers: Mapping[str, LayerReport] = field(default_factory=dict)


def convert(
    model: str | Path,
    out: str | Path | None = None,
    *,
    num_kv_heads: int,
    method: str | None = None,
    grouping: str = "adjacent",
    statistics: str | Path | None = None,
    metric: str | None = None,
    refine: Refine | None = None,
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
) -> Conversion:
    """Pool the KV heads of a checkpoint into fewer, leaving an ordinary checkpoint.

    Args:
        model: folder, alias or Hub id.
        out: output folder; by default the model's name with "-gqaN" or "-mqa", in the working
            directory.
        num_kv_heads: KV heads wanted; must divide the source's.
        method: "mean", "first" or "random" (GQA paper, arXiv 2305.13245); "procrustes" or "svd",
            which change q and o as well. "svd" with `statistics`, else "mean".
        grouping: which KV heads share, for "procrustes" and "svd": "adjacent" or "similarity".
        statistics: a calibration file of this model.
        metric: what "svd" weighs errors by, see `calibrated`; by default what is best as it is, or
            before `refine`.
        refine: what is done to each layer once it is pooled, such as a local fit.
        seed: for "random".
        dtype: "keep", or a type for all floating tensors.
        max_shard_size: largest weight file, such as "5GB"; by default the source's division is
            kept.
        tensor_parallel: degree the result will be served with, to be checked.
        revision: branch, tag or commit of a Hub model.
        dry_run: only plan.
        resume: go on with an interrupted conversion of the same options.
        overwrite: replace an output that an earlier conversion wrote.
        workers: threads; four by default.
        hash_files: record SHA-256 of whole files, which reads them once more.
        progress: called with bytes done and bytes in all.

    Raises:
        GqaconvertError: as its subclasses say; nothing is left behind then.
    """
    if num_kv_heads < 1:
        raise UsageError(f"{num_kv_heads} is not a number of KV heads", remedy="1 or more")
    source = open_source(model, revision)
    if num_kv_heads > source.attention.num_kv_heads:
        raise UsageError(
            f"the model has {source.attention.num_kv_heads} KV heads, fewer than {num_kv_heads}",
            at=source.config.at,
            remedy=f"gqaconvert expand {model} --kv-heads {num_kv_heads} repeats them",
        )
    moments = _open_statistics(statistics, source)
    if refine is not None and metric is None:
        metric = "plain"  # the others throw away what a fit could not get back
    options = ConversionOptions(
        num_kv_heads=num_kv_heads,
        method=method or ("mean" if moments is None else "svd"),
        seed=seed,
        dtype=None if dtype == "keep" else weight_type(dtype).tag,
        max_shard_bytes=_size(max_shard_size),
        tensor_parallel=tensor_parallel,
        grouping=grouping,
        metric=metric,
        statistics_digest=None if moments is None else moments.digest,
        refined=None if refine is None else refine.identity,
    )
    identity = None if moments is None else moments.identity.record()
    return change_kv_heads(
        source, options, out,
        dry_run=dry_run, resume=resume, overwrite=overwrite,
        workers=workers, hash_files=hash_files, progress=progress,
        calibration=Calibration(moments, refine, identity),
    )  # fmt: skip


def change_kv_heads(
    source: SourceCheckpoint,
    options: ConversionOptions,
    out: str | Path | None,
    *,
    dry_run: bool,
    resume: bool,
    overwrite: bool,
    workers: int | None,
    hash_files: bool,
    progress: Callable[[int, int], None] | None,
    calibration: Calibration | None = None,
) -> Conversion:
    """Carry out `convert` and `expand` on an opened source."""
    calibration = calibration or Calibration()
    started = time.monotonic()
    attention = source.attention
    name = default_output_name(source.label, attention.num_heads, options.num_kv_heads)
    target = Path(out) if out is not None else Path(name)
    if options.num_kv_heads == attention.num_kv_heads:
        notice = (
            f"{source.identity.name} has {attention.num_kv_heads} KV heads already; nothing to do"
        )
        return Conversion(None, source, target, written=False, notices=(notice,))
    plan = plan_conversion(source.index, source.config, attention, options)
    sidecars = find_sidecars(source.folder, source.index)
    notices = (
        *notices_of(plan, source),
        *(f"not copied: {k} {v}" for k, v in sidecars.left_out.items()),
    )
    _refuse_overlap(target, source.folder)
    check_output(target, overwrite=overwrite)
    needed = plan.size_bytes + sidecars.size_bytes(source.folder) + _SMALL_FILES_BYTES
    if not resume:
        check_space(target.parent, needed)
    if dry_run:
        wanted = options.num_kv_heads
        layers = predict_plan(plan, source.folder, calibration, [wanted])[wanted]
        return Conversion(
            plan, source, target, written=False, notices=notices, sidecars=sidecars, layers=layers
        )
    added = lacking_tokenizer_files(source.folder, source.becomes)
    notices += added.notices
    with StagedFolder(target, work_digest(plan), resume=resume, overwrite=overwrite) as staged:
        done = 0

        def report(size: int) -> None:
            nonlocal done
            done += size
            if progress:
                progress(done, plan.size_bytes)

        hashes = execute(
            plan, source.folder, staged, workers=workers or DEFAULT_WORKERS, progress=report,
            calibration=calibration,
        )  # fmt: skip
        facts: dict[str, Any] = {}
        if options.is_calibrated:
            facts = {"layers": layer_reports(plan, staged), "calibration": calibration.identity}
        _write_small_files(
            staged.path, plan, source, sidecars, hashes, facts, hash_files=hash_files
        )
        for file, content in added.content.items():
            (staged.path / file).write_text(content, encoding="utf-8")
        checks = verify_against_plan(staged.path, plan, source.folder, source.config_text, hashes)
        staged.finish()
    seconds = time.monotonic() - started
    return Conversion(plan, source, target, True, tuple(checks), notices, seconds, sidecars)


def _write_small_files(
    folder: Path,
    plan: ConversionPlan,
    source: SourceCheckpoint,
    sidecars: Sidecars,
    tensor_hashes: dict[str, str],
    calibrated: dict[str, Any],
    *,
    hash_files: bool,
) -> None:
    copy_sidecars(sidecars, source.folder, folder)
    edited = edit_config(
        source.config_text, [(edit.path, edit.after) for edit in plan.config_edits]
    )
    (folder / CONFIG).write_text(edited, encoding="utf-8")
    card = source.folder / CARD
    source_card = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else None
    (folder / CARD).write_text(build_card(plan, source.identity, source_card), encoding="utf-8")
    if needs_index(plan.shards):
        index = index_json(plan.shards, source.index.index_metadata)
        write_json(folder / SAFETENSORS_INDEX, index)
    names = [shard.name for shard in plan.shards] if hash_files else []
    manifest = build_manifest(
        plan, source.identity, source.index, sidecars, edited, tensor_hashes,
        {name: hash_file(folder / name) for name in names}, calibrated,
    )  # fmt: skip
    write_json(folder / MANIFEST, manifest)


def _open_statistics(path: str | Path | None, source: SourceCheckpoint) -> StatisticsFile | None:
    if path is None:
        return None
    found = StatisticsFile(path)
    found.check(source.folder)
    return found


def _refuse_overlap(out: Path, source: Path) -> None:
    target, origin = out.resolve(), source.resolve()
    if target == origin or origin in target.parents or target in origin.parents:
        raise RefusedError(
            "output and source folders lie within one another; the source is never written to",
            at=str(out),
            remedy="an OUT outside the source",
        )


def _size(value: str | int | None) -> int | None:
    return parse_bytes(value) if isinstance(value, str) else value
