"""A teacher's likeliest next tokens at every position, written once and read by every later run.

A folder of shards and a description. A shard is two arrays that are mapped into memory: tokens
(S, T, k) in int32, and log-probabilities (S, T, k + 1) in float16, the last that of all other
tokens. The folder appears under its name when it is whole; an unfinished one is gone on with, shard
by shard.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gqaconvert.checkpoint.staging import MANIFEST, StagedFolder, check_space, staging_path
from gqaconvert.errors import CheckpointError, GqaconvertError, RefusedError, UsageError
from gqaconvert.training.batch import Batch
from gqaconvert.training.logit_losses import top_k_of
from gqaconvert.training.losses import default_chunk_tokens
from gqaconvert.training.teacher import Teacher
from gqaconvert.training.teacher_cache_files import (
    KINDS,
    VERSION,
    Identity,
    bytes_needed,
    cache_exists,
    check_identity,
    read_about,
    shard_paths,
)

_SHARD_BYTES = 2**28
_LOWEST = -1e4  # of float16 that survives as a number


class TeacherCache:
    """Reads a finished cache.

    Args:
        folder: from `write_teacher_cache`.
        fingerprint: what it must have been made of; None to take it as it is.

    Attributes:
        num_sequences: sequences held, numbered from 0.
        context: tokens a sequence, T.
        top_k: tokens kept at each position, k.
        temperature: of the probabilities.
        vocabulary: tokens the teacher chose from.

    Raises:
        UsageError: there is no cache.
        CheckpointError: it is damaged.
        RefusedError: it was made of something else.
    """

    def __init__(self, folder: Path, fingerprint: Identity | None = None) -> None:
        self._folder = folder
        about = read_about(folder)
        if fingerprint is not None:
            check_identity(about["fingerprint"], fingerprint, folder)
        self.num_sequences: int = about["num_sequences"]
        self.context: int = about["context"]
        self.top_k: int = about["top_k"]
        self.temperature: float = about["temperature"]
        self.vocabulary: int = about["vocabulary"]
        self._shard_sequences: int = about["shard_sequences"]
        self._shards: dict[int, tuple[Any, Any]] = {}

    def read(
        self, sequence_numbers: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what the teacher said about some sequences.

        Args:
            sequence_numbers: (B,), places in the global order.

        Returns:
            Tokens (B, T, k), int32, likeliest first; their log-probabilities (B, T, k), float16;
            that of all other tokens together (B, T), float16.

        Raises:
            UsageError: a sequence that the cache does not hold.
            CheckpointError: a shard is damaged.
        """
        indices, log_probs = [], []
        for number in sequence_numbers.tolist():
            if not 0 <= number < self.num_sequences:
                raise UsageError(
                    f"sequence {number} is not in the teacher's cache, which holds"
                    f" {self.num_sequences}",
                    at=str(self._folder),
                    remedy="a cache for the whole budget, or a smaller budget",
                )
            shard, row = divmod(number, self._shard_sequences)
            tokens, values = self._shard(shard)
            indices.append(np.array(tokens[row]))
            log_probs.append(np.array(values[row]))
        values = torch.from_numpy(np.stack(log_probs))
        return torch.from_numpy(np.stack(indices)), values[..., :-1], values[..., -1]

    def _shard(self, number: int) -> tuple[Any, Any]:
        if number not in self._shards:
            rows = min(self._shard_sequences, self.num_sequences - number * self._shard_sequences)
            arrays = []
            for path, kind, width in zip(
                shard_paths(self._folder, number), KINDS, _widths(self.top_k), strict=True
            ):
                expected = (rows, self.context, width)
                try:
                    array = np.load(path, mmap_mode="r")
                except (OSError, ValueError) as error:
                    raise CheckpointError(
                        f"the teacher's cache is damaged: {error}",
                        at=str(path),
                        remedy="remove the folder and make it again",
                    ) from error
                if array.shape != expected or array.dtype != kind:
                    raise CheckpointError(
                        f"the teacher's cache holds {array.dtype} {array.shape}, not"
                        f" {np.dtype(kind)} {expected}",
                        at=str(path),
                        remedy="remove the folder and make it again",
                    )
                arrays.append(array)
            self._shards[number] = (arrays[0], arrays[1])
        return self._shards[number]


def write_teacher_cache(
    folder: Path,
    teacher: Teacher,
    batches: Iterable[Batch],
    num_sequences: int,
    top_k: int,
    fingerprint: Identity,
    *,
    temperature: float = 1.0,
    shard_bytes: int = _SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> TeacherCache:
    """Run a teacher over sequences and keep its likeliest tokens; go on where a run stopped.

    Args:
        folder: where to.
        teacher: what is run.
        batches: sequences 0 to `num_sequences` − 1, in order, all of one length; more are not read.
        num_sequences: how many.
        top_k: tokens kept at each position; all of a smaller vocabulary.
        fingerprint: see `Identity`.
        temperature: of the probabilities.
        shard_bytes: size of a shard, roughly.
        progress: called with sequences done and sequences in all.

    Raises:
        RefusedError: the folder exists, an unfinished cache was made of something else, or there is
            too little space.
        GqaconvertError: the batches end too early.
    """
    top_k = min(top_k, teacher.vocabulary)
    if cache_exists(folder):
        raise RefusedError(
            "a teacher's cache is there already", at=str(folder), remedy="use it, or remove it"
        )
    options = {
        "version": VERSION,
        "fingerprint": dict(fingerprint),
        "num_sequences": num_sequences,
        "top_k": top_k,
        "temperature": temperature,
        "vocabulary": teacher.vocabulary,
    }
    with _stage(folder, {**options, "shard_bytes": shard_bytes}) as staged:
        writer = _Writer(staged, options, shard_bytes, folder)
        for batch in batches:
            if writer.wants(batch):
                _predict(teacher, batch, writer)
            if progress is not None:
                progress(min(int(batch.sequence_numbers.max()) + 1, num_sequences), num_sequences)
            if int(batch.sequence_numbers.max()) + 1 >= num_sequences:
                break
        writer.finish()
        staged.finish()
    return TeacherCache(folder, fingerprint)


class _Writer:
    """Fills shards in order."""

    def __init__(
        self, staged: StagedFolder, options: Mapping[str, Any], shard_bytes: int, folder: Path
    ) -> None:
        self._staged, self._options, self._shard_bytes = staged, options, shard_bytes
        self._folder = folder
        self._about: dict[str, Any] = {}
        self._arrays: list[Any] = []
        self._next = 0

    def wants(self, batch: Batch) -> bool:
        """Whether any sequence of a batch has still to be predicted."""
        if not self._about:
            self._begin(batch.token_ids.shape[1])
        numbers = [n for n in batch.sequence_numbers.tolist() if n < self._about["num_sequences"]]
        return any(not self._is_done(number // self._shard_sequences) for number in numbers)

    def add(self, number: int, tokens: torch.Tensor, log_probs: torch.Tensor) -> None:
        """Write one sequence: tokens (T, k), and log-probabilities (T, k + 1)."""
        shard, row = divmod(number, self._shard_sequences)
        if self._is_done(shard) or number >= self._about["num_sequences"]:
            return
        rows = min(
            self._shard_sequences, self._about["num_sequences"] - shard * self._shard_sequences
        )
        if row == 0:
            paths = shard_paths(self._staged.path, shard)
            widths = _widths(self._about["top_k"])
            self._arrays = [
                np.lib.format.open_memmap(path, "w+", kind, (rows, self._about["context"], width))
                for path, kind, width in zip(paths, KINDS, widths, strict=True)
            ]
            self._next = number
        if number != self._next or len(tokens) != self._about["context"]:
            raise GqaconvertError(
                f"sequence {number} of {len(tokens)} tokens comes where sequence {self._next} of"
                f" {self._about['context']} is due"
            )
        self._next += 1
        for array, values in zip(self._arrays, (tokens, log_probs), strict=True):
            array[row] = values.cpu().numpy()
        if row == rows - 1:
            for array in self._arrays:
                array.flush()
            self._arrays = []
            self._staged.record(f"shard {shard}", {})

    def finish(self) -> None:
        """Write the description, once all shards are there.

        Raises:
            GqaconvertError: they are not.
        """
        total = self._options["num_sequences"]
        shards = -(-total // self._shard_sequences) if self._about else 1
        if not self._about or not all(map(self._is_done, range(shards))):
            raise GqaconvertError(f"the sequences end before number {total}")
        text = json.dumps({"teacher_cache": self._about}, indent=2) + "\n"
        (self._staged.path / MANIFEST).write_text(text, encoding="utf-8")

    def _begin(self, context: int) -> None:
        sequence_bytes = bytes_needed(1, context, self._options["top_k"])
        self._shard_sequences = max(1, self._shard_bytes // sequence_bytes)
        self._about = {
            **self._options,
            "context": context,
            "shard_sequences": self._shard_sequences,
        }
        left = self._options["num_sequences"] - len(self._staged.done) * self._shard_sequences
        check_space(self._folder.parent, max(0, left) * sequence_bytes)

    def _is_done(self, shard: int) -> bool:
        return f"shard {shard}" in self._staged.done


def _predict(teacher: Teacher, batch: Batch, writer: _Writer) -> None:
    hidden, _ = teacher.hidden(batch)
    k = writer._options["top_k"]
    size = default_chunk_tokens(hidden.device.type)
    for number, states in zip(batch.sequence_numbers.tolist(), hidden, strict=True):
        tokens, values = [], []
        for chunk in states.split(size):
            top = top_k_of(teacher.logits(chunk), k, writer._options["temperature"])
            tokens.append(top.indices.int())
            both = torch.cat([top.log_probs, top.rest.log()[:, None]], dim=-1)
            values.append(both.clamp_min(_LOWEST).half())
        writer.add(number, torch.cat(tokens), torch.cat(values))


def _widths(top_k: int) -> tuple[int, int]:
    return top_k, top_k + 1


def _stage(folder: Path, options: Mapping[str, Any]) -> StagedFolder:
    text = json.dumps(options, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    try:
        return StagedFolder(folder, digest, resume=True, overwrite=False)
    except RefusedError as error:
        raise RefusedError(
            f"the teacher's cache cannot be written: {error.what}",
            at=error.at,
            remedy=f"another folder, or remove {staging_path(folder).name} to start again",
        ) from error
