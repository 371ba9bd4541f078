"""Writes what was measured into the model cards of exported checkpoints, for readers and the Hub.

A section between two markers, and metadata in the front matter. Writing twice changes nothing; what
else a card says stays as it is.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from gqaconvert.checkpoint.sidecars import CARD
from gqaconvert.checkpoint.staging import MANIFEST
from gqaconvert.reporting import shapes
from gqaconvert.reporting.layout import lay_out
from gqaconvert.reporting.markdown import markdown_table
from gqaconvert.reporting.saved import EXPORTS, SOURCE, UPTRAINED, Measured, SavedRun, read_run
from gqaconvert.reporting.shapes import read_document
from gqaconvert.reporting.subjects import Subject, subjects_of, with_role
from gqaconvert.reporting.table import main_table
from gqaconvert.surgery.card import split_front_matter

BEGIN = "<!-- gqaconvert evaluation: begin -->"
END = "<!-- gqaconvert evaluation: end -->"

_SOURCE_CARD = "## Card of the source model"
_TASK = "text-generation"


def write_cards(run_folder: str | Path) -> list[Path]:
    """Write the evaluation into the cards of a run's checkpoints.

    Args:
        run_folder: with `results/`, and `converted/` or `model/` of ours.

    Returns:
        The cards; those of checkpoints that were not evaluated, or are not ours, are left alone.

    Raises:
        UsageError: no such folder, or nothing in it.
        CheckpointError: a saved file is damaged.
    """
    folder = Path(run_folder)
    run = read_run(folder)
    subjects = subjects_of(run)
    written = []
    for role, name in EXPORTS.items():
        checkpoint = folder / name
        subject = with_role(subjects, role)
        if subject is None or not (checkpoint / MANIFEST).is_file():
            continue
        if not run.measurements(subject.model):
            continue
        manifest = read_document(checkpoint / MANIFEST, shapes.MANIFEST)
        card = checkpoint / CARD
        old = card.read_text(encoding="utf-8") if card.is_file() else ""
        _write(card, evaluated_card(old, run, subject, manifest))
        written.append(card)
    return written


def evaluated_card(card: str, run: SavedRun, subject: Subject, manifest: Mapping[str, Any]) -> str:
    """Return a card with the evaluation in it.

    Args:
        card: as it was.
        run: what was measured.
        subject: the checkpoint.
        manifest: its `gqaconvert.json`.
    """
    metadata, body = split_front_matter(card)
    metadata = _metadata(metadata, subject, manifest)
    front = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    body = _with_section(body, _section(run, subject))
    return f"---\n{front}---\n\n{body.strip()}\n"


def _section(run: SavedRun, subject: Subject) -> str:
    """The section: the source beside the checkpoint, and where the figures come from."""
    # Published with the model: commands as settings tell them, without paths of this machine.
    subjects = subjects_of(replace(run, stages={}))
    table = main_table([s for s in subjects if s.role == SOURCE or s.model == subject.model])
    return "\n\n".join(
        [
            BEGIN,
            "## Evaluation",
            "× and ÷ set a figure against the source. ± is a standard error.",
            *markdown_table(lay_out(table), "Model"),
            END,
        ]
    )


def _with_section(body: str, section: str) -> str:
    """Put the section where it was, or before the card of the source model, or at the end."""
    before, begin, rest = body.partition(BEGIN)
    _, end, after = rest.partition(END)
    if begin and end:
        return f"{before}{section}{after}"
    head, divider, source_card = body.partition(_SOURCE_CARD)
    return f"{head.rstrip()}\n\n{section}\n\n{divider}{source_card}"


def _metadata(
    metadata: Mapping[str, Any], subject: Subject, manifest: Mapping[str, Any]
) -> dict[str, Any]:
    """Return front matter for the Hub.

    `base_model_relation` may be adapter, merge, quantized or finetune. None of them is a conversion
    without training, so it is left for the Hub there; uptraining is a finetune.
    """
    found = dict(metadata)
    source = str(manifest["source"]["name"])
    if "/" in source:
        found.setdefault("base_model", source)
    if subject.role == UPTRAINED and found.get("base_model"):
        found.setdefault("base_model_relation", "finetune")
    found.setdefault("pipeline_tag", _TASK)
    index = _model_index(subject, source)
    # One that came with the card of the source model speaks of other weights.
    found.pop("model-index", None)
    return found | ({"model-index": index} if index else {})


def _model_index(subject: Subject, source: str) -> list[dict[str, Any]]:
    from huggingface_hub import EvalResult
    from huggingface_hub.repocard_data import eval_results_to_model_index

    results = []
    for metric, one in sorted(subject.run.measurements(subject.model).items()):
        family = metric.partition("/")[0]
        if family not in ("perplexity", "task") or not math.isfinite(one.value):
            continue
        dataset = _dataset(one)
        results.append(
            EvalResult(
                task_type=_TASK,
                dataset_type=dataset.lower(),
                dataset_name=dataset,
                metric_type="perplexity" if family == "perplexity" else str(one.detail["score"]),
                metric_value=one.value,
                metric_name=_described(one),
                metric_args=_arguments(one),
            )
        )
    kv_heads = subject.kv_heads
    name = source.rpartition("/")[2] + ("" if kv_heads is None else f"-gqa{kv_heads}")
    return eval_results_to_model_index(name, results) if results else []


def _dataset(one: Measured) -> str:
    name = one.settings.get("task", one.settings.get("text", "text"))
    return plain_name(str(name))


def plain_name(name: str) -> str:
    """A text's name without any folder of this machine."""
    return name if name.startswith("dataset:") else Path(name).name


def _described(one: Measured) -> str:
    if one.stderr is None:
        return one.metric
    return f"{one.metric}, standard error {one.stderr:.3g} over {one.n}"


def _arguments(one: Measured) -> dict[str, Any]:
    kept = ("context", "stride", "windows", "limit", "fewshot", "dtype")
    return {key: one.settings[key] for key in kept if one.settings.get(key) is not None}


def _write(path: Path, text: str) -> None:
    """Write a file; it is there whole, or as it was."""
    descriptor, staged = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(staged).chmod(0o644)
        Path(staged).replace(path)
    except BaseException:
        Path(staged).unlink(missing_ok=True)
        raise
