"""Level 1 of verification: is a folder what its plan promised? Headers, shapes and samples.

Needs neither torch nor a full read.

`convert` runs it before the output gets its name; `verify` runs it again, and the levels of
`verify_model` on top.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gqaconvert.attention.recognise import recognise
from gqaconvert.checkpoint.index import read_index
from gqaconvert.checkpoint.reader import NUMPY_TYPES, Array, TensorReader
from gqaconvert.checkpoint.sidecars import CONFIG, Sidecars, edit_config, read_json_object
from gqaconvert.checkpoint.tensors import CheckpointIndex
from gqaconvert.errors import VerificationError
from gqaconvert.kv_cache.model_config import read_config
from gqaconvert.surgery.plan import ConversionPlan, PlannedTensor
from gqaconvert.surgery.pooling import changed_blocks

_PROBE_BYTES = 64
_COMPARE_BYTES = 8 << 20
_SMALL_BYTES = 1 << 20
_LARGE_RECOMPUTED = 8


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was checked and held: a name and what it covered."""

    name: str
    covered: str


def verify_against_plan(
    folder: Path,
    plan: ConversionPlan,
    source: Path,
    config_text: str,
    hashes: Mapping[str, str],
) -> list[Check]:
    """Check an output folder against its plan and its source.

    Args:
        folder: the output, staged or final.
        plan: what it was to become.
        source: the folder the plan's source tensors are in.
        config_text: the source's config.json, or that of its equivalent class.
        hashes: SHA-256 of each changed tensor as it was recorded; what a calibrated method made is
            held against these, since recomputing it would take the same linear algebra.

    Returns:
        What was checked.

    Raises:
        VerificationError: the first thing that is not as planned.
        CheckpointError: the output is damaged.
    """
    index = read_index(folder)
    checks = [
        _check_headers(index, plan),
        check_counts(folder, index, plan.options.num_kv_heads),
        _check_config(folder, plan, config_text),
    ]
    with TensorReader(source, plan.derived) as before, TensorReader(folder) as after:
        checks.append(_check_copied(plan, before, after))
        if {tensor.output.name for tensor in plan.changed()} - plan.whole:
            checks.append(_check_changed(plan, before, after))
        if plan.layers:
            checks.append(_check_layers(plan, after, hashes))
        if plan.derived:
            checks.append(_check_derived(plan, before, after))
    return checks


def check_counts(folder: Path, index: CheckpointIndex, num_kv_heads: int | None = None) -> Check:
    """Check that config, layout and shapes of a folder agree on the number of KV heads.

    Raises:
        VerificationError: another number.
        CheckpointError: config and tensors contradict each other.
    """
    config = read_config(folder)
    attention = recognise(index.tensors, config)
    if num_kv_heads is not None and attention.num_kv_heads != num_kv_heads:
        raise VerificationError(
            f"tensors hold {attention.num_kv_heads} KV heads, not {num_kv_heads}", at=str(folder)
        )
    return Check("shapes", f"{len(attention.blocks)} attention blocks agree with config.json")


def compare_copied(
    plan: ConversionPlan, source: Path, folder: Path, progress: Callable[[int], None]
) -> Check:
    """Compare every byte of every untouched tensor with the source (`verify --deep`).

    Raises:
        VerificationError: naming the first tensor that differs.
    """
    total = 0
    with TensorReader(source, plan.derived) as before, TensorReader(folder) as after:
        for tensor in _copied(plan):
            size = tensor.output.size_bytes
            for offset in range(0, size, _COMPARE_BYTES):
                _compare(tensor, before, after, offset, min(_COMPARE_BYTES, size - offset))
            total += size
            progress(size)
    return Check("untouched bytes", f"{total} bytes equal the source's")


def compare_sidecars(sidecars: Sidecars, source: Path, folder: Path) -> Check:
    """Compare the files beside the weights byte for byte.

    Raises:
        VerificationError: naming the first file that differs or is missing.
    """
    for name in sidecars.copied:
        if not (folder / name).is_file():
            raise VerificationError("file was not copied", at=str(folder / name))
        if (folder / name).read_bytes() != (source / name).read_bytes():
            raise VerificationError("file differs from the source's", at=str(folder / name))
    return Check("other files", f"{len(sidecars.copied)} equal the source's")


def _check_headers(index: CheckpointIndex, plan: ConversionPlan) -> Check:
    promised = {tensor.output.name: tensor.output for tensor in plan.tensors}
    absent = promised.keys() - index.tensors.keys()
    surplus = index.tensors.keys() - promised.keys()
    if absent or surplus:
        fault = "lacks" if absent else "has the surplus"
        raise VerificationError(
            f"output {fault} tensor {min(absent or surplus)!r}", at=str(index.folder)
        )
    for name, tensor in index.tensors.items():
        if tensor != promised[name]:
            raise VerificationError(
                f"tensor is {tensor.dtype} {list(tensor.shape)} at byte {tensor.begin},"
                f" planned was {promised[name].dtype} {list(promised[name].shape)}"
                f" at {promised[name].begin}",
                at=f"{index.folder}/{tensor.file} tensor {name!r}",
            )
    for file, shard in zip(index.files, sorted(plan.shards, key=lambda s: s.name), strict=True):
        if file.header_sha256 != hashlib.sha256(shard.header[8:]).hexdigest():
            raise VerificationError(
                "header differs from the planned one", at=f"{index.folder}/{file.name}"
            )
    return Check("headers", f"{len(promised)} tensors in {len(index.files)} files are as planned")


def _check_config(folder: Path, plan: ConversionPlan, config_text: str) -> Check:
    edited = edit_config(config_text, [(edit.path, edit.after) for edit in plan.config_edits])
    if read_json_object(folder / CONFIG) != json.loads(edited):
        raise VerificationError(
            "config.json differs from the source's in more than was planned",
            at=str(folder / CONFIG),
        )
    return Check("config", f"{len(plan.config_edits)} keys changed as planned, the others kept")


def _check_copied(plan: ConversionPlan, before: TensorReader, after: TensorReader) -> Check:
    count = 0
    for tensor in _copied(plan):
        size = tensor.output.size_bytes
        if size != tensor.sources[0].end - tensor.sources[0].begin:
            raise VerificationError("copied tensor changed its size", at=tensor.output.name)
        for offset in {0, max(0, size - _PROBE_BYTES)}:
            _compare(tensor, before, after, offset, min(_PROBE_BYTES, size))
        count += 1
    return Check("untouched tensors", f"both ends of {count} equal the source's")


def _check_changed(plan: ConversionPlan, before: TensorReader, after: TensorReader) -> Check:
    """Recompute one block of each changed tensor from the source; compare it with the disk's."""
    count = 0
    whole = plan.whole
    for tensor in plan.changed():
        if tensor.output.name in whole:
            continue
        change = tensor.heads
        total = sum(1 for _ in change.blocks()) if change else 0
        chosen = int.from_bytes(hashlib.sha256(tensor.output.name.encode()).digest()[:4]) % total
        expected = next(
            changed_blocks(plan, tensor, _rows_from(before, tensor), range(chosen, chosen + 1))
        )
        rows = tensor.output.shape[0] // total
        found = after.read_rows(tensor.output, chosen * rows, (chosen + 1) * rows)
        if (
            found.tobytes()
            != expected.astype(NUMPY_TYPES[tensor.output.dtype], copy=False).tobytes()
        ):
            raise VerificationError(
                f"block {chosen} of {total} is not what pooling the source gives",
                at=f"{tensor.output.file} tensor {tensor.output.name!r}",
            )
        count += 1
    return Check("changed tensors", f"a block of each of {count} recomputed from the source")


def _check_layers(plan: ConversionPlan, after: TensorReader, hashes: Mapping[str, str]) -> Check:
    """Hold what a calibrated method made against its recorded hashes; it is not recomputed."""
    outputs = {tensor.output.name: tensor.output for tensor in plan.tensors}
    count = 0
    for name in (name for layer in plan.layers for name in layer.outputs):
        content = after.read(outputs[name])
        at = f"{outputs[name].file} tensor {name!r}"
        if not np.isfinite(content.astype(np.float32, copy=False)).all():
            raise VerificationError("tensor holds values that are not finite", at=at)
        if hashlib.sha256(content.tobytes()).hexdigest() != hashes.get(name):
            raise VerificationError("tensor is not what the conversion wrote", at=at)
        count += 1
    return Check(
        "calibrated tensors",
        f"{count} in {len(plan.layers)} layers are finite and as recorded (not recomputed)",
    )


def compare_derived(plan: ConversionPlan, source: Path, folder: Path) -> Check:
    """Recompute every tensor that was rewritten for an equivalent class.

    Raises:
        VerificationError: naming the first tensor that differs.
    """
    with TensorReader(source, plan.derived) as before, TensorReader(folder) as after:
        return _check_derived(plan, before, after, every=True)


def _check_derived(
    plan: ConversionPlan, before: TensorReader, after: TensorReader, *, every: bool = False
) -> Check:
    """Recompute small rewritten tensors, and all or some of the large ones."""
    derived = [tensor for tensor in plan.tensors if tensor.action == "derive"]
    large = [tensor for tensor in derived if tensor.output.size_bytes > _SMALL_BYTES]
    # By hash: the same in every run, yet spread over layers and kinds.
    large.sort(key=lambda tensor: hashlib.sha256(tensor.output.name.encode()).digest())
    skipped = set() if every else {tensor.output.name for tensor in large[_LARGE_RECOMPUTED:]}
    for tensor in derived:
        if tensor.output.name in skipped:
            continue
        target = NUMPY_TYPES[tensor.output.dtype]
        expected = before.read(tensor.sources[0]).astype(target, copy=False)
        if after.read(tensor.output).tobytes() != expected.tobytes():
            raise VerificationError(
                "tensor is not what rewriting the source gives",
                at=f"{tensor.output.file} tensor {tensor.output.name!r}",
            )
    done = len(derived) - len(skipped)
    return Check("rewritten tensors", f"{done} of {len(derived)} recomputed from the source")


def _rows_from(reader: TensorReader, tensor: PlannedTensor) -> Callable[[int, int, int], Array]:
    return lambda number, begin, end: reader.read_rows(tensor.sources[number], begin, end)


def _copied(plan: ConversionPlan) -> list[PlannedTensor]:
    return [tensor for tensor in plan.tensors if tensor.action == "copy"]


def _compare(
    tensor: PlannedTensor, before: TensorReader, after: TensorReader, offset: int, length: int
) -> None:
    source, output = tensor.sources[0], tensor.output
    wanted = os.pread(before.descriptor(source.file), length, source.begin + offset)
    found = os.pread(after.descriptor(output.file), length, output.begin + offset)
    if wanted != found:
        raise VerificationError(
            f"bytes from {offset} of an untouched tensor differ from the source's",
            at=f"{output.file} tensor {output.name!r}",
        )
