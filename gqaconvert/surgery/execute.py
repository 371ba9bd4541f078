"""Carries out a plan: copies untouched byte ranges in the kernel, pools the rest, in threads.

Each piece of work writes bytes that no other writes, and is noted in the journal when done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from gqaconvert.checkpoint.copying import OutputFile
from gqaconvert.checkpoint.reader import NUMPY_TYPES, Array, TensorReader
from gqaconvert.checkpoint.shards import Shard
from gqaconvert.checkpoint.staging import StagedFolder
from gqaconvert.checkpoint.tensors import StoredTensor
from gqaconvert.surgery.execute_layers import execute_layers
from gqaconvert.surgery.layer_pooling import Calibration
from gqaconvert.surgery.plan import ConversionPlan, PlannedTensor
from gqaconvert.surgery.pooling import changed_blocks

PIECE_BYTES = 128 << 20
"""Work is cut into pieces of about this size: the unit of threads, progress and journal."""

_CAST_ROWS_BYTES = 8 << 20
_WRITE_BYTES = 8 << 20

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class CopyRun:
    """Source bytes that move as they are: `begin` to `end` of `file`, to `position`."""

    file: str
    begin: int
    end: int
    position: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Work on one output file that one thread does in one go.

    Attributes:
        step: its name in the journal.
        shard: output file.
        copies: byte ranges to move.
        computed: tensors to pool, repeat, cast or derive.
        size_bytes: output bytes written.
    """

    step: str
    shard: str
    copies: tuple[CopyRun, ...]
    computed: tuple[PlannedTensor, ...]
    size_bytes: int


def work_digest(plan: ConversionPlan) -> str:
    """SHA-256 of the output and of how the work is cut: what a journal's steps refer to."""
    return hashlib.sha256(f"{plan.digest()}/{PIECE_BYTES}".encode()).hexdigest()


def pieces(plan: ConversionPlan) -> list[Piece]:
    """Cut the work of a plan into pieces, in output order, whole layers left out. Pure."""
    whole = plan.whole
    by_name = {
        tensor.output.name: tensor for tensor in plan.tensors if tensor.output.name not in whole
    }
    return [piece for shard in plan.shards for piece in _shard_pieces(shard, by_name)]


def execute(
    plan: ConversionPlan,
    source: Path,
    staged: StagedFolder,
    *,
    workers: int,
    progress: Progress,
    calibration: Calibration | None = None,
) -> dict[str, str]:
    """Write all weight files of a plan into a staged folder.

    Layers that are pooled as a whole are made one after the other in this thread, so that memory
    holds one of them and linear algebra has the processors, while the threads copy the rest.

    Args:
        plan: what to write.
        source: the source folder.
        staged: where; steps already in its journal are not done again.
        workers: threads.
        progress: called with the bytes of each finished piece.
        calibration: for plans with whole layers.

    Returns:
        SHA-256 of the bytes of each pooled or repeated tensor, by name.

    Raises:
        CheckpointError: values that are not finite, or a source that changes while being read.
        OSError: the device fails or is full.
    """
    todo = []
    for piece in pieces(plan):
        if piece.step in staged.done:
            progress(piece.size_bytes)
        else:
            todo.append(piece)
    with (
        TensorReader(source, plan.derived) as reader,
        _Targets(staged.path, plan.shards) as targets,
    ):

        def work(piece: Piece) -> None:
            target = targets[piece.shard]
            for run in piece.copies:
                target.copy(reader.descriptor(run.file), run.begin, run.end, run.position)
            hashes = {
                tensor.output.name: digest
                for tensor in piece.computed
                if (digest := _write_computed(plan, tensor, reader, target))
            }
            staged.record(piece.step, {"sha256": hashes})
            progress(piece.size_bytes)

        pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="convert")
        try:
            futures = [pool.submit(work, piece) for piece in todo]
            for size in execute_layers(
                plan, reader, staged, targets.write, calibration or Calibration()
            ):
                progress(size)
                if any(future.done() and future.exception() for future in futures):
                    break
            finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            # Also on Ctrl-C: what runs is finished and journaled, what waits is left for a resume.
            pool.shutdown(cancel_futures=True)
        for future in finished:
            future.result()
    hashes: dict[str, str] = {}
    for facts in staged.done.values():
        hashes |= facts.get("sha256", {})
    return hashes


class _Targets:
    """The output files, headers written."""

    def __init__(self, folder: Path, shards: tuple[Shard, ...]) -> None:
        self._files = {
            shard.name: OutputFile(folder / shard.name, shard.size_bytes) for shard in shards
        }
        for shard in shards:
            self._files[shard.name].write(shard.header, 0)

    def __enter__(self) -> _Targets:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def __getitem__(self, name: str) -> OutputFile:
        return self._files[name]

    def write(self, tensor: StoredTensor, content: memoryview) -> None:
        self._files[tensor.file].write(content, tensor.begin)


def _shard_pieces(shard: Shard, by_name: dict[str, PlannedTensor]) -> Iterator[Piece]:
    copies: list[CopyRun] = []
    computed: list[PlannedTensor] = []
    filled = number = 0
    for placed in shard.tensors:
        tensor = by_name.get(placed.name)
        if tensor is None:
            continue
        copied = tensor.action == "copy"
        # A tensor may be larger than a piece: its first run fills the room left, the others a piece
        # each.
        for part in _cut(tensor, room=PIECE_BYTES - filled) if copied else (tensor,):
            if isinstance(part, CopyRun):
                _append(copies, part)
                filled += part.end - part.begin
            else:
                computed.append(part)
                filled += part.output.size_bytes
            if filled >= PIECE_BYTES:
                yield _piece(shard, number, copies, computed, filled)
                copies, computed, filled, number = [], [], 0, number + 1
    if copies or computed:
        yield _piece(shard, number, copies, computed, filled)


def _piece(
    shard: Shard, number: int, copies: list[CopyRun], computed: list[PlannedTensor], size: int
) -> Piece:
    return Piece(f"{shard.name}#{number}", shard.name, tuple(copies), tuple(computed), size)


def _cut(tensor: PlannedTensor, room: int) -> Iterator[CopyRun]:
    source, position = tensor.sources[0], tensor.output.begin
    begin, length = source.begin, room
    while begin < source.end:
        end = min(begin + length, source.end)
        yield CopyRun(source.file, begin, end, position)
        position += end - begin
        begin, length = end, PIECE_BYTES


def _append(copies: list[CopyRun], run: CopyRun) -> None:
    """Join a run with the one before where both are neighbours in source and output."""
    if copies:
        last = copies[-1]
        if (
            last.file == run.file
            and last.end == run.begin
            and last.position + (last.end - last.begin) == run.position
        ):
            copies[-1] = CopyRun(last.file, last.begin, run.end, last.position)
            return
    copies.append(run)


def _write_computed(
    plan: ConversionPlan, tensor: PlannedTensor, reader: TensorReader, target: OutputFile
) -> str | None:
    """Write one tensor block by block; return its hash if its heads changed."""
    changed = tensor.heads is not None

    def read_rows(number: int, begin: int, end: int) -> Array:
        return reader.read_rows(tensor.sources[number], begin, end)

    blocks = changed_blocks(plan, tensor, read_rows) if changed else _cast(tensor, reader)
    digest, position = hashlib.sha256(), tensor.output.begin
    for content in _gathered(blocks):
        target.write(content, position)
        position += len(content)
        if changed:
            digest.update(content)
    return digest.hexdigest() if changed else None


def _gathered(blocks: Iterable[Array]) -> Iterator[bytearray]:
    """Join small blocks, since small writes cost as much as large ones."""
    gathered = bytearray()
    for block in blocks:
        gathered += block.reshape(-1).view("u1").data
        if len(gathered) >= _WRITE_BYTES:
            yield gathered
            gathered = bytearray()
    if gathered:
        yield gathered


def _cast(tensor: PlannedTensor, reader: TensorReader) -> Iterator[Array]:
    source, target = tensor.sources[0], NUMPY_TYPES[tensor.output.dtype]
    if tensor.action == "derive" or source.strides is not None or not source.shape:
        yield reader.read(source).astype(target)
        return
    rows = source.shape[0]
    step = max(1, _CAST_ROWS_BYTES * rows // max(1, source.size_bytes))
    bounds = chain(range(0, rows, step), [rows])
    begin = next(bounds)
    for end in bounds:
        yield reader.read_rows(source, begin, end).astype(target)
        begin = end
