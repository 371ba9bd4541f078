"""What is measured on one model: a list of steps, each with the settings its result is kept under.

Settings are known without loading the model, so that a result that is there is found at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gqaconvert.evaluation import divergence, kv_bytes, needle, perplexity
from gqaconvert.evaluation.cache_kinds import cache_kind
from gqaconvert.evaluation.divergence import LiveSource, measure_divergence
from gqaconvert.evaluation.kv_bytes import measure_kv_bytes
from gqaconvert.evaluation.measured_model import MeasuredModel
from gqaconvert.evaluation.needle import measure_needle
from gqaconvert.evaluation.perplexity import measure_perplexity
from gqaconvert.evaluation.results import Measurement
from gqaconvert.evaluation.saved_source import (
    SavedSource,
    open_saved,
    save_source,
    source_identity,
)
from gqaconvert.evaluation.suite import NeedleSuite
from gqaconvert.evaluation.tasks import measure_task, task_label
from gqaconvert.evaluation.through_cache import cache_metric, perplexity_through_cache


@dataclass(frozen=True)
class Step:
    """One measurement to make.

    Attributes:
        metric: its name.
        settings: what its result depends on beside the weights.
        measure: makes it.
    """

    metric: str
    settings: Mapping[str, Any]
    measure: Callable[[], Measurement]


def plan_steps(
    model: MeasuredModel, source: MeasuredModel | None, backend: str, results: Path
) -> list[Step]:
    """List what is measured, cheap and important things first.

    Args:
        model: to measure.
        source: what it is compared with; itself where it is the source.
        backend: what runs tasks.
        results: where the source's likeliest tokens are saved, if they are.

    Raises:
        UsageError: an unknown kind of cache.
    """
    steps = [_kv_bytes(model), _perplexity(model)]
    if source is not None and source is not model:
        steps.append(_divergence(model, source, results))
    steps += [_task(model, task, backend) for task in dict.fromkeys(model.suite.tasks)]
    if model.suite.needle is not None:
        steps.append(_needle(model, model.suite.needle))
    steps += [_cache(model, spec) for spec in dict.fromkeys(model.suite.cache)]
    return steps


def _placement(model: MeasuredModel) -> dict[str, Any]:
    place = model.placement
    return {"dtype": place.dtype, "device": place.device, "attn": place.attn}


def _text(model: MeasuredModel) -> dict[str, Any]:
    return {"text": model.text.name, "text_sha256": model.text.sha256}


def _windows(model: MeasuredModel) -> dict[str, Any]:
    suite = model.suite
    return {
        **_text(model),
        "context": suite.context,
        "stride": suite.stride or suite.context,
        "windows": suite.windows,
        **_spread(model),
        **_placement(model),
    }


def _spread(model: MeasuredModel) -> dict[str, Any]:
    """Said only where it is so: older results stay valid."""
    return {"spread": True} if model.suite.spread else {}


def _kv_bytes(model: MeasuredModel) -> Step:
    settings = {"contexts": list(model.suite.kv_contexts), **_placement(model)}
    return Step(
        kv_bytes.METRIC,
        settings,
        lambda: measure_kv_bytes(model.loaded, model.suite.kv_contexts, settings=settings),
    )


def _perplexity(model: MeasuredModel) -> Step:
    settings = _windows(model)
    return Step(
        perplexity.METRIC,
        settings,
        lambda: measure_perplexity(
            model.loaded,
            model.windows,
            settings=settings,
            batch_size=model.suite.batch,
            reader=model.reader,
        ),
    )


def _divergence(model: MeasuredModel, source: MeasuredModel, results: Path) -> Step:
    settings = {
        **_windows(model),
        "source_sha256": source.found.weights_sha256,
        "top_k": model.suite.top_k,
    }

    def measure() -> Measurement:
        compared = (
            _saved(model, source, results / ".sources" / source.found.name)
            if model.suite.top_k
            else LiveSource(source.loaded, source.reader)
        )
        return measure_divergence(
            model.loaded,
            model.windows,
            compared,
            settings=settings,
            batch_size=model.suite.batch,
            reader=model.reader,
        )

    return Step(divergence.METRIC, settings, measure)


def _saved(model: MeasuredModel, source: MeasuredModel, folder: Path) -> SavedSource:
    suite = model.suite
    identity = source_identity(source.found, model.windows, suite.top_k, _placement(source))
    saved = open_saved(folder, identity)
    if saved is None:
        saved = save_source(
            source.loaded,
            model.windows,
            folder,
            identity,
            batch_size=suite.batch,
            reader=source.reader,
        )
        source.release()
    return saved


def _task(model: MeasuredModel, task: str, backend: str) -> Step:
    suite = model.suite
    settings = {
        "task": task_label(task),
        "limit": suite.task_limit,
        "fewshot": suite.fewshot,
        "backend": backend,
        **_placement(model),
    }

    def measure() -> Measurement:
        return measure_task(
            model.loaded if backend == "hf" else model.found,
            task,
            settings=settings,
            backend=backend,
            dtype=model.placement.dtype,
            num_fewshot=suite.fewshot,
            limit=suite.task_limit,
            batch_size=suite.batch,
        )

    return Step(f"task/{task_label(task)}", settings, measure)


def _needle(model: MeasuredModel, probe: NeedleSuite) -> Step:
    settings = {**probe.model_dump(mode="json"), **_text(model), **_placement(model)}
    return Step(
        needle.METRIC,
        settings,
        lambda: measure_needle(
            model.loaded,
            model.text,
            lengths=probe.lengths,
            depths=probe.depths,
            repeats=probe.repeats,
            settings=settings,
            reader=model.reader,
        ),
    )


def _cache(model: MeasuredModel, spec: str) -> Step:
    suite, kind = model.suite, cache_kind(spec)
    prefill = max(1, suite.context - suite.cache_decode)
    settings = {
        **_text(model),
        "context": suite.context,
        "windows": suite.cache_windows,
        **_spread(model),
        "prefill": prefill,
        "kind": kind.name,
        **_placement(model),
    }
    return Step(
        cache_metric(kind),
        settings,
        lambda: perplexity_through_cache(
            model.loaded, model.whole_windows, kind, prefill=prefill, settings=settings
        ),
    )
