"""The verb `calibrate`: text in, second moments of every attention input out, in one file.

The model is gone through layer by layer. Finished layers and the hidden states after them lie in a
folder beside the output until the file is whole, so that a killed run goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from gqaconvert.calibration.attention_weights import weighing
from gqaconvert.calibration.decoder_layers import LayerAttention, find_attention
from gqaconvert.calibration.layer_file import read_layer, write_layer
from gqaconvert.calibration.moments import LayerMoments
from gqaconvert.calibration.opening import opened
from gqaconvert.calibration.walk import Visit, Walk
from gqaconvert.calibration.windows import calibration_text, spread_windows, token_batches
from gqaconvert.checkpoint.fingerprint import fingerprint_model
from gqaconvert.checkpoint.staging import StagedFolder, check_space
from gqaconvert.corpus.windows import Window, fingerprint_windows
from gqaconvert.errors import RefusedError
from gqaconvert.modelling.models import load_tokenizer
from gqaconvert.surgery.layer_heads import LayerStatistics
from gqaconvert.surgery.source import SourceCheckpoint, open_source
from gqaconvert.surgery.statistics import (
    StatisticsFile,
    StatisticsIdentity,
    TextIdentity,
    Widths,
    merge,
    statistics_bytes,
    write_statistics,
)

Gathered = Literal["plain", "all"]
"""Only the inputs' moments, or those that need attention weights too."""

_WEIGHTED = ("averaged", "attended")
_BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Calibration:
    """What a calibration did.

    Attributes:
        out: the file.
        identity: of model and text.
        layers: number of layers with attention.
        size_bytes: of all matrices.
        seconds: it took, those of an interrupted run left out.
        notes: what could not be gathered and why.
    """

    out: Path
    identity: StatisticsIdentity
    layers: int
    size_bytes: int
    seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Work:
    """All that a run is made of; two runs of equal digest do the same."""

    source: SourceCheckpoint
    identity: StatisticsIdentity
    windows: list[Window]
    gathered: Gathered
    dtype: str
    merged: StatisticsFile | None

    def digest(self) -> str:
        facts = [
            self.identity.weights_sha256,
            fingerprint_windows(self.windows),
            self.gathered,
            self.dtype,
            self.merged.digest if self.merged else None,
        ]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def calibrate(
    model: str | Path,
    data: str,
    *,
    out: str | Path,
    tokens: int = 131072,
    context: int = 512,
    statistics: Gathered = "all",
    merge_with: str | Path | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    stream: bool | None = None,
    revision: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_size: Callable[[int], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Gather the second moments that calibrated conversions need.

    Args:
        model: folder, alias, Hub id or `tiny`.
        data: the text, as in `calibration_text`; never the one that the model is evaluated on.
        out: the file to write.
        tokens: to read, in windows spread evenly over the text; fewer where it has fewer.
        context: tokens a window.
        statistics: "plain" for the inputs alone; "all" for what attention averages and where it
            looks too.
        merge_with: an earlier file of the same model, whose statistics are joined in by tokens.
        device: "cpu" or "cuda".
        dtype: of the weights and hidden states, by default the checkpoint's.
        stream: keep decoder layers on disk; None to decide by memory.
        revision: branch, tag or commit of a Hub model.
        resume: go on with an interrupted run of the same options.
        overwrite: replace the file, and forget an interrupted run.
        on_size: called with the bytes of the file, before anything is computed.
        progress: called with layers done and layers in all.

    Raises:
        UsageError: counts, text or device that make no sense.
        UnsupportedModelError: a class that cannot be converted or gone through layer by layer.
        RefusedError: the file exists, `merge_with` is of another model, or the interrupted run had
            other options.
    """
    started = time.perf_counter()
    path = Path(out)
    if path.exists() and (path.is_dir() or not overwrite):
        raise RefusedError(
            "calibration file exists", at=str(path), remedy="--overwrite, or another --out"
        )
    work = _plan(model, data, tokens, context, statistics, dtype, merge_with, revision)
    staging = path.with_name(f"{path.name}-layers")
    with (
        StagedFolder(staging, work.digest(), resume=resume, overwrite=overwrite) as staged,
        opened(work.source, dtype=dtype, device=device, stream=stream) as loaded,
    ):
        attention = find_attention(loaded)
        expected = statistics_bytes(_widths(attention, statistics))
        if on_size is not None:
            on_size(expected)
        check_space(path.parent, 3 * expected)  # layers, whole file; hidden states take less
        notes = _gather(work, staged, loaded, attention, progress)
        widths: dict[int, dict[str, int]] = {
            number: staged.done[f"layer {number}"]["widths"] for number in sorted(attention)
        }
        if work.merged is not None:
            widths = {n: {k: w for k, w in kinds.items() if k in work.merged.widths[n]}
                      for n, kinds in widths.items()}  # fmt: skip
        pairs = _merged(staged.path, widths, work)
        write_statistics(path, work.identity, pairs, widths=widths, overwrite=overwrite)
    return Calibration(
        out=path,
        identity=work.identity,
        layers=len(widths),
        size_bytes=statistics_bytes(widths),
        seconds=time.perf_counter() - started,
        notes=notes,
    )


def is_of(
    path: str | Path,
    model: str | Path,
    data: str,
    *,
    tokens: int = 131072,
    context: int = 512,
    revision: str | None = None,
) -> bool:
    """Whether a file holds what `calibrate` would gather on this model, text and windows.

    Raises:
        CheckpointError: no calibration file.
        UsageError: no such model or text.
    """
    work = _plan(model, data, tokens, context, "all", "auto", None, revision)
    return StatisticsFile(path).identity == work.identity


def _plan(
    model: str | Path,
    data: str,
    tokens: int,
    context: int,
    gathered: Gathered,
    dtype: str,
    merge_with: str | Path | None,
    revision: str | None,
) -> _Work:
    source = open_source(model, revision)
    merged = None
    if merge_with is not None:
        merged = StatisticsFile(merge_with)
        merged.check(source.folder)
        if merged.identity.context != context:
            raise RefusedError(
                f"statistics of windows of {merged.identity.context} and {context} tokens do not"
                " mix",
                at=str(merge_with),
                remedy=f"--context {merged.identity.context}",
            )
    text = calibration_text(data)
    tokenizer = load_tokenizer(source.folder)
    windows = spread_windows(tokenizer, text, tokens=tokens, context=context)
    count = sum(len(window.token_ids) for window in windows)
    texts: tuple[TextIdentity, ...] = (TextIdentity(text.name, text.sha256, count),)
    if merged is not None:
        texts = (*merged.identity.texts, *texts)
    index = source.index
    identity = StatisticsIdentity(
        model=source.label,
        model_type=source.config.model_type,
        source_fingerprint=index.fingerprint(),
        weights_sha256=fingerprint_model(source.folder),
        texts=texts,
        tokens=sum(each.tokens for each in texts),
        context=context,
    )
    return _Work(source, identity, windows, gathered, dtype, merged)


def _gather(
    work: _Work,
    staged: StagedFolder,
    loaded: Any,  # noqa: ANN401
    attention: dict[int, LayerAttention],
    progress: Callable[[int, int], None] | None,
) -> tuple[str, ...]:
    """Go through the layers that no earlier run has finished."""
    begin = 0
    while f"layer {begin}" in staged.done:
        begin += 1
    context = len(work.windows[0].token_ids)
    batches = token_batches(work.windows, max(1, _BATCH_TOKENS // context))
    last = max(attention)
    with weighing(loaded), torch.inference_mode():
        walk = Walk(loaded, batches, folder=staged.path, begin=begin, turn=begin % 2)
        for visit in walk:
            if visit.number > last:
                break
            facts = _visit(visit, attention.get(visit.number), staged.path, work.gathered)
            staged.record(f"layer {visit.number}", facts)
            if progress is not None:
                progress(visit.number + 1, last + 1)
    faults: dict[str, list[str]] = {}
    for number in sorted(attention):
        fault = staged.done[f"layer {number}"]["fault"]
        if fault:
            faults.setdefault(fault, []).append(str(number))
    return tuple(
        f"layers {', '.join(numbers)}: moments of the inputs alone, as {fault}"
        for fault, numbers in faults.items()
    )


def _visit(
    visit: Visit, attention: LayerAttention | None, folder: Path, gathered: Gathered
) -> dict[str, Any]:
    """Run a layer over all batches; write what it reads, where it has attention."""
    if attention is None:
        for batch in range(len(visit)):
            visit.leave(batch, visit.run(batch))
        return {}
    moments = LayerMoments(attention, weighted=gathered == "all")
    with moments.watching():
        for batch in range(len(visit)):
            visit.leave(batch, visit.run(batch))
    found = moments.statistics()
    write_layer(folder, visit.number, found)
    kinds = ("inputs", *(kind for kind in _WEIGHTED if getattr(found, kind) is not None))
    return {"widths": dict.fromkeys(kinds, len(found.inputs)), "fault": moments.fault}


def _merged(folder: Path, widths: Widths, work: _Work) -> Iterator[tuple[int, LayerStatistics]]:
    tokens = sum(len(window.token_ids) for window in work.windows)
    for number in widths:
        found = read_layer(folder, number, tokens)
        yield number, found if work.merged is None else merge(work.merged[number], found)


def _widths(attention: dict[int, LayerAttention], gathered: Gathered) -> Widths:
    kinds = ("inputs", *_WEIGHTED) if gathered == "all" else ("inputs",)
    return {number: dict.fromkeys(kinds, each.width + 1) for number, each in attention.items()}
