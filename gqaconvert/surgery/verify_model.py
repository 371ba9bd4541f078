"""The verb `verify`: level 1, the class on the meta device, on request bytes and forward pass."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqaconvert.attention.recognise import recognise
from gqaconvert.checkpoint.index import read_index
from gqaconvert.checkpoint.reader import TensorReader
from gqaconvert.checkpoint.sidecars import find_sidecars, read_json_object
from gqaconvert.checkpoint.staging import MANIFEST
from gqaconvert.checkpoint.tensors import CheckpointIndex
from gqaconvert.errors import CheckpointError, UsageError, VerificationError
from gqaconvert.kv_cache.model_config import read_config
from gqaconvert.surgery.class_checks import check_class, check_forward
from gqaconvert.surgery.manifest import FORMAT, hash_file
from gqaconvert.surgery.options import ConversionOptions
from gqaconvert.surgery.plan import ConversionPlan
from gqaconvert.surgery.planning import plan_conversion
from gqaconvert.surgery.source import SourceCheckpoint, open_source
from gqaconvert.surgery.verify import (
    Check,
    check_counts,
    compare_copied,
    compare_derived,
    compare_sidecars,
    verify_against_plan,
)


@dataclass(frozen=True, slots=True)
class Verification:
    """What held, check by check."""

    out: Path
    checks: tuple[Check, ...]


def verify(
    out: str | Path,
    source: str | Path | None = None,
    *,
    revision: str | None = None,
    deep: bool = False,
    forward: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Prove that a folder is what its conversion promised.

    Args:
        out: a converted checkpoint.
        source: what it was made from; without it, the output is checked against its own manifest.
        revision: of a Hub source.
        deep: compare every untouched byte and file with the source, or without one recompute all
            hashes in the manifest.
        forward: load the model, and check logits, cached generation and the shape of the cache.
        progress: called with bytes compared and bytes in all.

    Raises:
        VerificationError: the first thing that does not hold.
        CheckpointError: the output is damaged.
        UsageError: not a converted folder, or a source it was not made from.
    """
    folder = Path(out)
    if not folder.is_dir():
        raise UsageError("no such folder", at=str(folder))
    manifest = _read_manifest(folder)
    index = read_index(folder)
    wanted = int(manifest["plan"]["kv_heads"]["after"])
    checks = [
        check_counts(folder, index, wanted),
        _check_hashes(folder, index, manifest, whole=deep),
    ]
    origin: SourceCheckpoint | None = None
    if source is not None and "uptrain" in manifest:
        raise UsageError(
            "its weights were trained after the conversion, so none of them is the source's",
            at=str(folder),
            remedy=f"gqaconvert verify {folder} without --source, and gqaconvert evaluate",
        )
    if source is not None:
        origin = open_source(source, revision)
        plan = _planned_again(manifest, origin)
        checks += verify_against_plan(
            folder, plan, origin.folder, origin.config_text, manifest["sha256"]["tensors"]
        )
        if deep:
            checks += _compare_all(folder, plan, origin, progress)
    checks.append(check_class(folder, origin.folder if origin and not origin.becomes else None))
    if forward:
        attention = recognise(index.tensors, read_config(folder))
        checks += check_forward(folder, attention.cached_heads)
    return Verification(folder, tuple(dict.fromkeys(checks)))


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not (folder / MANIFEST).is_file():
        raise UsageError(
            f"not a converted checkpoint: it has no {MANIFEST}",
            at=str(folder),
            remedy="the folder that `convert` or `expand` wrote",
        )
    manifest = read_json_object(folder / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise UsageError(
            f"manifest of format {manifest.get('format')!r}, this version reads {FORMAT}",
            at=str(folder / MANIFEST),
            remedy="the version of gqaconvert that it names",
        )
    try:
        ConversionOptions(**manifest["plan"]["options"])
        known = [manifest["plan"]["sha256"], manifest["source"]["headers_sha256"]]
        hashes = [manifest["sha256"][key] for key in ("config.json", "raw_headers", "tensors")]
        complete = all(known) and all(hashes) and int(manifest["plan"]["kv_heads"]["after"]) > 0
    except (KeyError, TypeError, ValueError):
        complete = False
    if not complete:
        raise CheckpointError(
            "manifest is incomplete", at=str(folder / MANIFEST), remedy="convert the source again"
        )
    return manifest


def _planned_again(manifest: dict[str, Any], source: SourceCheckpoint) -> ConversionPlan:
    if source.index.fingerprint() != manifest["source"]["headers_sha256"]:
        raise UsageError(
            f"this is not the source that the output was made from ({manifest['source']['name']})",
            at=str(source.folder),
            remedy="the checkpoint that the output's gqaconvert.json names",
        )
    options = ConversionOptions(**manifest["plan"]["options"])
    plan = plan_conversion(source.index, source.config, source.attention, options)
    if plan.digest() != manifest["plan"]["sha256"]:
        raise VerificationError(
            "planning the same conversion again gives another plan",
            at=str(source.config.at),
            remedy=f"gqaconvert {manifest['gqaconvert']}, which wrote the output; or convert again",
        )
    return plan


def _check_hashes(
    folder: Path, index: CheckpointIndex, manifest: dict[str, Any], *, whole: bool
) -> Check:
    hashes = manifest["sha256"]
    if hash_file(folder / "config.json") != hashes["config.json"]:
        raise VerificationError(
            "config.json was changed after the conversion", at=str(folder / "config.json")
        )
    for file in index.files:
        if file.header_sha256 != hashes["raw_headers"].get(file.name):
            raise VerificationError(
                "header was changed after the conversion", at=str(folder / file.name)
            )
    count = 0
    with TensorReader(folder) as reader:
        for name, expected in hashes["tensors"].items():
            if name not in index.tensors:
                raise CheckpointError(f"tensor {name!r} is missing", at=str(folder))
            found = hashlib.sha256(reader.read(index.tensors[name]).tobytes()).hexdigest()
            if found != expected:
                raise VerificationError(
                    "tensor was changed after the conversion",
                    at=f"{folder / index.tensors[name].file} tensor {name!r}",
                )
            count += 1
    if whole:
        for name, expected in hashes["files"].items():
            if hash_file(folder / name) != expected:
                raise VerificationError(
                    "file was changed after the conversion", at=str(folder / name)
                )
    files = f", {len(hashes['files'])} whole files" if whole and hashes["files"] else ""
    return Check("hashes", f"config, {len(index.files)} headers, {count} changed tensors{files}")


def _compare_all(
    folder: Path,
    plan: ConversionPlan,
    source: SourceCheckpoint,
    progress: Callable[[int, int], None] | None,
) -> list[Check]:
    total = sum(t.output.size_bytes for t in plan.tensors if t.action == "copy")
    done = 0

    def report(size: int) -> None:
        nonlocal done
        done += size
        if progress:
            progress(done, total)

    checks = [
        compare_copied(plan, source.folder, folder, report),
        compare_sidecars(find_sidecars(source.folder, source.index), source.folder, folder),
    ]
    return [*checks, compare_derived(plan, source.folder, folder)] if plan.derived else checks
