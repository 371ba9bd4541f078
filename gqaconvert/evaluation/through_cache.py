"""Perplexity through a cache: read a prompt, then one token at a time, so that the cache is read.

Only tokens predicted from what the cache gives back are scored; the prompt itself, and the token
right after it, never see a compressed cache. The ordinary cache gives the plain perplexity of the
same tokens, so kinds are compared with `dynamic`, not with perplexity over whole windows.
"""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import Cache

from gqaconvert.corpus.windows import Window, batches, fingerprint_windows
from gqaconvert.errors import GqaconvertError, UsageError
from gqaconvert.evaluation.bandwidth import synchronise
from gqaconvert.evaluation.cache_bytes import cache_bytes, cache_bytes_kept
from gqaconvert.evaluation.cache_kinds import CacheKind
from gqaconvert.evaluation.results import Measurement, library_versions
from gqaconvert.evaluation.window_means import WindowMean
from gqaconvert.modelling.models import LoadedModel

_LARGEST_LOSS = 700.0
"""Beyond it the exponential overflows; such a model is broken anyway."""


def cache_metric(kind: CacheKind) -> str:
    """Name under which results of a kind are kept."""
    return f"cache/{kind.name}"


def perplexity_through_cache(
    loaded: LoadedModel,
    windows: Sequence[Window],
    kind: CacheKind,
    *,
    prefill: int,
    settings: Mapping[str, Any] | None = None,
    batch_size: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> Measurement:
    """Measure perplexity of the tokens after a prompt, decoding through a cache of this kind.

    Args:
        loaded: the model.
        windows: texts; those that end with the prompt or one token after it are left out.
        kind: of the cache, made anew for each batch of windows.
        prefill: tokens of each window that are read at once, at least 1.
        settings: recorded as they are; by default what is given here.
        batch_size: windows decoded together; each step reads one token of each.
        progress: called with tokens decoded and tokens in all.

    Returns:
        Perplexity, with bytes of the cache at the end of the longest window and decoding speed
        (the median step, the first of each batch left out) in `detail`.

    Raises:
        UsageError: no window is long enough.
        CacheUnavailable: the kind does not work with this model.
        GqaconvertError: the model gives NaN.
    """
    if prefill < 1:
        raise UsageError(f"a prompt of {prefill} tokens", remedy="at least 1")
    read = [window for window in windows if len(window.token_ids) > _first_scored(window, prefill)]
    if not read:
        raise UsageError(
            f"no window has a token to score after a prompt of {prefill} and the one behind it",
            remedy="a shorter prompt or longer windows",
        )
    loss, steps = WindowMean(), list[float]()
    held: dict[str, int] = {}
    total = sum(len(window.token_ids) - 1 - prefill for window in read)
    done = 0
    for batch in batches(read, batch_size):
        length = len(batch[0].token_ids)
        made = kind.make(loaded, length)
        nll, seconds = _decode(loaded, batch, made, prefill)
        for row in nll.double():
            loss.add(float(row.sum()), len(row))
        steps += [each / len(batch) for each in seconds[1:] or seconds]
        if length - 1 > held.get("tokens_seen", 0):
            held = _held(made, length, len(batch))
        done += len(batch) * (length - 1 - prefill)
        if progress is not None:
            progress(done, total)
    if math.isnan(loss.mean):
        raise GqaconvertError(
            f"its logits are not numbers when it reads through {kind.name}",
            at=str(loaded.folder),
            remedy="--dtype float32",
        )
    value = math.exp(loss.mean) if loss.mean < _LARGEST_LOSS else math.inf
    stderr = loss.stderr
    return Measurement(
        metric=cache_metric(kind),
        value=value,
        stderr=None if stderr is None else value * stderr,
        n=len(read),
        unit="",
        settings=dict(settings) if settings is not None else _settings(kind, prefill, batch_size),
        versions=library_versions("optimum-quanto", "hqq"),
        weights_sha256=loaded.weights_sha256,
        detail={
            "kind": kind.name,
            "keeps": kind.describe,
            "nll": loss.mean,
            "nll_stderr": stderr,
            "tokens": loss.tokens,
            "prefill": prefill,
            **held,
            "decode_tokens_per_s": 1 / statistics.median(steps),
            "windows_sha256": fingerprint_windows(windows),
            "dtype": loaded.dtype,
            "batch_size": batch_size,
        },
    )


def _first_scored(window: Window, prefill: int) -> int:
    return max(window.first_scored, prefill + 1)


@torch.inference_mode()
def _decode(
    loaded: LoadedModel, batch: Sequence[Window], cache: Cache, prefill: int
) -> tuple[torch.Tensor, list[float]]:
    """Losses of the scored tokens, (windows, tokens), and seconds of each step."""
    tokens = torch.tensor([window.token_ids for window in batch], device=loaded.device)
    first = _first_scored(batch[0], prefill)
    options: dict[str, Any] = {"cache": cache, "use_cache": True}
    if "logits_to_keep" in inspect.signature(loaded.model.forward).parameters:
        options["logits_to_keep"] = 1
    loaded.model(input_ids=tokens[:, :prefill], **options)
    losses, seconds = [], []
    for place in range(prefill, tokens.shape[1] - 1):
        synchronise(loaded.device)
        started = time.perf_counter()
        logits = loaded.model(input_ids=tokens[:, place : place + 1], **options).logits
        synchronise(loaded.device)
        seconds.append(time.perf_counter() - started)
        if place + 1 >= first:
            losses.append(
                torch.nn.functional.cross_entropy(
                    logits[:, -1].float(), tokens[:, place + 1], reduction="none"
                )
            )
    return torch.stack(losses, dim=1).cpu(), seconds


def _held(cache: Cache, length: int, batch_size: int) -> dict[str, int]:
    """What a cache holds of one text after all its tokens but the last."""
    return {
        "cache_bytes": cache_bytes(cache) // batch_size,
        "cache_bytes_kept": cache_bytes_kept(cache) // batch_size,
        "tokens_seen": length - 1,
    }


def _settings(kind: CacheKind, prefill: int, batch_size: int) -> dict[str, Any]:
    return {"kind": kind.name, "prefill": prefill, "batch_size": batch_size}
