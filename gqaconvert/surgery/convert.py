"""Converts a checkpoint folder: plan, stream, verify, and only then give the output its name."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

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
from gqaconvert.surgery.manifest import build_manifest, hash_file
from gqaconvert.surgery.naming import default_output_name
from gqaconvert.surgery.options import ConversionOptions
from gqaconvert.surgery.plan import ConversionPlan
from gqaconvert.surgery.planning import plan_conversion
from gqaconvert.surgery.source import SourceCheckpoint, open_source
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
    """

    plan: ConversionPlan | None
    source: SourceCheckpoint
    out: Path
    written: bool
    checks: tuple[Check, ...] = ()
    notices: tuple[str, ...] = ()
    seconds: float = 0.0
    sidecars: Sidecars = field(default_factory=lambda: Sidecars((), {}))


def convert(
    model: str | Path,
    out: str | Path | None = None,
    *,
    num_kv_heads: int,
    method: str = "mean",
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
        method: "mean", "first" or "random" (GQA paper, arXiv 2305.13245).
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
    options = ConversionOptions(
        num_kv_heads=num_kv_heads,
        method=method,
        seed=seed,
        dtype=None if dtype == "keep" else weight_type(dtype).tag,
        max_shard_bytes=_size(max_shard_size),
        tensor_parallel=tensor_parallel,
    )
    return change_kv_heads(
        source, options, out,
        dry_run=dry_run, resume=resume, overwrite=overwrite,
        workers=workers, hash_files=hash_files, progress=progress,
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
) -> Conversion:
    """Carry out `convert` and `expand` on an opened source."""
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
        *_notices(plan, source),
        *(f"not copied: {k} {v}" for k, v in sidecars.left_out.items()),
    )
    _refuse_overlap(target, source.folder)
    check_output(target, overwrite=overwrite)
    needed = plan.size_bytes + sidecars.size_bytes(source.folder) + _SMALL_FILES_BYTES
    if not resume:
        check_space(target.parent, needed)
    if dry_run:
        return Conversion(plan, source, target, written=False, notices=notices, sidecars=sidecars)
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
            plan, source.folder, staged, workers=workers or DEFAULT_WORKERS, progress=report
        )
        _write_small_files(staged.path, plan, source, sidecars, hashes, hash_files=hash_files)
        for file, content in added.content.items():
            (staged.path / file).write_text(content, encoding="utf-8")
        checks = verify_against_plan(staged.path, plan, source.folder, source.config_text)
        staged.finish()
    seconds = time.monotonic() - started
    return Conversion(plan, source, target, True, tuple(checks), notices, seconds, sidecars)


def _write_small_files(
    folder: Path,
    plan: ConversionPlan,
    source: SourceCheckpoint,
    sidecars: Sidecars,
    tensor_hashes: dict[str, str],
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
        {name: hash_file(folder / name) for name in names},
    )  # fmt: skip
    write_json(folder / MANIFEST, manifest)


def _notices(plan: ConversionPlan, source: SourceCheckpoint) -> list[str]:
    notices = []
    attention, options = plan.attention, plan.options
    if not attention.certified:
        notices.append(
            f"{attention.model_type} is recognised by its names and shapes but is not in the test"
            " matrix; run `gqaconvert verify --forward` on the output"
        )
    degree = options.tensor_parallel
    if degree > options.num_kv_heads:
        notices.append(
            f"{degree} GPUs share {options.num_kv_heads} KV heads: each head is held"
            f" {degree // options.num_kv_heads} times, so nothing more is saved than with"
            f" --kv-heads {degree}"
        )
    if any(block.key_norm == "full_width" for block in attention.blocks):
        notices.append(
            "keys are normalised over all heads together; with pooled heads that norm sees other"
            " values, so even equal heads give slightly other results"
        )
    if attention.caches_all_heads:
        notices.append(
            f"transformers repeats the KV heads of {attention.model_type} before it caches them:"
            " there the cache does not shrink, only in engines that keep KV heads as they are"
        )
    if source.becomes:
        notices.append(
            f"the class of {source.identity.name} cannot hold fewer KV heads; the output is the"
            f" equivalent {source.becomes}"
        )
    notices += source.notices
    if not source.config.known:
        notices.append(
            f"transformers has no class {source.config.model_type};"
            " only names and shapes were checked"
        )
    return notices


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
