"""Perplexity of a model on windows of text: the exponential of the mean loss over scored tokens.

Bits a byte say the same without depending on the tokenizer. What is read through a compressed
cache is measured by `through_cache`.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from gqaconvert.corpus.windows import Window, fingerprint_windows
from gqaconvert.errors import GqaconvertError
from gqaconvert.evaluation.results import Measurement, library_versions
from gqaconvert.evaluation.scoring import Reader, score
from gqaconvert.evaluation.window_means import WindowMean
from gqaconvert.modelling.models import LoadedModel

METRIC = "perplexity"

_LARGEST_LOSS = 700.0
"""Beyond it the exponential overflows; such a model is broken anyway."""


def measure_perplexity(
    loaded: LoadedModel,
    windows: Sequence[Window],
    *,
    settings: Mapping[str, Any],
    batch_size: int = 1,
    reader: Reader | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Measurement:
    """Measure perplexity; equal to a plain loop over windows, and independent of `batch_size`.

    Args:
        loaded: the model.
        windows: what to read.
        settings: recorded as they are.
        batch_size: windows read at once.
        reader: of the same model, to use it again.
        progress: called with tokens scored and tokens in all.

    Raises:
        GqaconvertError: the model gives NaN.
    """
    loss = WindowMean()
    longest = max(len(window.token_ids) for window in windows)
    sums, counts = np.zeros(longest), np.zeros(longest, np.int64)
    total = sum(window.num_scored for window in windows)
    started = time.perf_counter()
    for scored in score(loaded, windows, batch_size=batch_size, reader=reader):
        nll = scored.nll.double().numpy()
        loss.add(float(nll.sum()), len(nll))
        place = slice(scored.window.first_scored, len(scored.window.token_ids))
        sums[place] += nll
        counts[place] += 1
        if progress is not None:
            progress(loss.tokens, total)
    seconds = time.perf_counter() - started
    if math.isnan(loss.mean):
        raise GqaconvertError(
            "its logits are not numbers", at=str(loaded.folder), remedy="--dtype float32"
        )
    value, stderr, num_bytes = _exp(loss.mean), loss.stderr, sum(w.num_bytes for w in windows)
    means = [each / count for each, count in zip(loss.totals, loss.counts, strict=True)]
    return Measurement(
        metric=METRIC,
        value=value,
        stderr=None if stderr is None else value * stderr,
        n=len(windows),
        unit="",
        settings=dict(settings),
        versions=library_versions(),
        weights_sha256=loaded.weights_sha256,
        detail={
            "nll": loss.mean,
            "nll_stderr": stderr,
            "tokens": loss.tokens,
            "bits_per_byte": _bits_per_byte(loss.mean * loss.tokens, num_bytes),
            "bytes": num_bytes,
            "by_position": _by_position(sums, counts),
            "by_window": {
                "lowest": _exp(min(means)),
                "median": _exp(statistics.median(means)),
                "highest": _exp(max(means)),
            },
            "windows_sha256": fingerprint_windows(windows),
            "dtype": loaded.dtype,
            "batch_size": batch_size,
            "seconds": seconds,
            "tokens_per_s": sum(len(window.token_ids) for window in windows) / seconds,
        },
    )


def _bits_per_byte(nats: float, num_bytes: int) -> float | None:
    return nats / math.log(2) / num_bytes if num_bytes else None


def _by_position(sums: Any, counts: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Perplexity by place in the window, in runs that double: 1, 2-3, 4-7, ..."""
    found, begin = [], 1
    while begin < len(sums):
        end = min(2 * begin, len(sums))
        tokens = int(counts[begin:end].sum())
        if tokens:
            perplexity = _exp(float(sums[begin:end].sum()) / tokens)
            found.append(
                {"first": begin, "last": end - 1, "perplexity": perplexity, "tokens": tokens}
            )
        begin = end
    return found


def _exp(nll: float) -> float:
    return math.exp(nll) if nll < _LARGEST_LOSS else math.inf
