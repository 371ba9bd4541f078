"""Evaluates models side by side: the same measurements, each written as soon as it is known.

What was measured before with the same settings on the same weights is read, not measured again. A
measurement that cannot be made says why, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from gqaconvert.corpus.text import load_text
from gqaconvert.errors import GqaconvertError
from gqaconvert.evaluation.divergence import check_tokenizers
from gqaconvert.evaluation.measured_model import MeasuredModel, Placement, find_models
from gqaconvert.evaluation.results import Measurement, ResultStore
from gqaconvert.evaluation.steps import Step, plan_steps
from gqaconvert.evaluation.suite import Suite, load_suite

_SAMPLE_CHARACTERS = 20_000

Outcome = Literal["measured", "kept", "unavailable"]


@dataclass(frozen=True)
class Event:
    """One thing that happened, for whoever shows progress.

    Attributes:
        model: its name.
        metric: what was asked for.
        outcome: "kept" is a measurement made before.
        measurement: None for "unavailable".
        reason: why it is unavailable.
    """

    model: str
    metric: str
    outcome: Outcome
    measurement: Measurement | None = None
    reason: str | None = None


@dataclass
class ModelResults:
    """All that is known of one model.

    Attributes:
        name: of the model.
        parameters: elements on disk.
        disk_bytes: of all weight files.
        measurements: by metric.
        unavailable: metric → why it could not be measured.
    """

    name: str
    parameters: int
    disk_bytes: int
    measurements: dict[str, Measurement] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)


@dataclass
class Evaluation:
    """A comparison.

    Attributes:
        baseline: name of the model that the others are compared with, None for none.
        suite: what was measured.
        models: in the order of rows, the baseline first.
    """

    baseline: str | None
    suite: Suite
    models: list[ModelResults]

    def to_json(self) -> dict[str, Any]:
        """Return a mapping of plain values."""
        return {
            "baseline": self.baseline,
            "suite": self.suite.model_dump(mode="json"),
            "models": [
                {
                    "name": model.name,
                    "parameters": model.parameters,
                    "disk_bytes": model.disk_bytes,
                    "measurements": {
                        metric: measurement.to_json()
                        for metric, measurement in model.measurements.items()
                    },
                    "unavailable": model.unavailable,
                }
                for model in self.models
            ],
        }


def evaluate(
    models: Sequence[str | Path],
    *,
    baseline: str | Path | None = None,
    suite: Suite | str = "quick",
    dtype: str = "auto",
    device: str = "cpu",
    attn: str = "sdpa",
    backend: str = "hf",
    results: str | Path = "results",
    revision: str | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> Evaluation:
    """Measure models and compare them.

    Args:
        models: folders, aliases or Hub ids.
        baseline: what the others are compared with, measured as well; the first model by default,
            where there are several.
        suite: what to measure.
        dtype: "auto" for that of each checkpoint, or a name such as "float32".
        device: "cpu" or "cuda".
        attn: attention implementation, a key of `models.ATTENTION`.
        backend: what runs tasks, "hf" or "vllm".
        results: folder of the JSON files.
        revision: branch, tag or commit, where there is one model and it is on the Hub.
        on_event: called as soon as something is known.

    Raises:
        UsageError: what was asked for makes no sense: no such model, text or suite, or tokenizers
            that differ.
        CheckpointError: a model is damaged.
    """
    suite = suite if isinstance(suite, Suite) else load_suite(suite)
    text = load_text(suite.text)
    placement = Placement(dtype, device, attn, revision)
    asked = [*([baseline] if baseline is not None else []), *models]
    found = find_models(list(dict.fromkeys(str(model) for model in asked)), placement, text, suite)
    source = found[0] if len(found) > 1 else None
    if source is not None:
        _check_tokenizers(source, found[1:])
    store = ResultStore(Path(results))
    rows = []
    for model in found:
        row = ModelResults(
            model.found.name,
            model.found.index.parameters,
            sum(file.size_bytes for file in model.found.index.files),
        )
        rows.append(row)
        for step in plan_steps(model, source, backend, store.folder):
            event = _carry_out(step, model, store)
            if event.measurement is not None:
                row.measurements[step.metric] = event.measurement
            else:
                row.unavailable[step.metric] = event.reason or ""
            if on_event is not None:
                on_event(event)
        # An exact divergence needs the source beside every model.
        if model is not source or suite.top_k:
            model.release()
    if source is not None:
        source.release()
    return Evaluation(source.found.name if source else None, suite, rows)


def _carry_out(step: Step, model: MeasuredModel, store: ResultStore) -> Event:
    name = model.found.name
    kept = store.get(name, step.metric, step.settings, model.found.weights_sha256)
    if kept is not None:
        return Event(name, step.metric, "kept", kept)
    try:
        measurement = step.measure()
    except torch.OutOfMemoryError:
        return Event(name, step.metric, "unavailable", reason="the GPU's memory is too small")
    except GqaconvertError as error:
        return Event(name, step.metric, "unavailable", reason=error.what)
    store.put(name, measurement)
    return Event(name, step.metric, "measured", measurement)


def _check_tokenizers(source: MeasuredModel, others: Sequence[MeasuredModel]) -> None:
    sample = source.text.text[:_SAMPLE_CHARACTERS]
    for model in others:
        check_tokenizers(source.tokenizer, model.tokenizer, sample, at=str(model.found.folder))
