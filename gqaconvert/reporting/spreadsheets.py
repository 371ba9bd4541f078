"""The figures of a report as CSV: raw numbers, units in the headers, errors in their own column."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

from gqaconvert.reporting.document import Document
from gqaconvert.reporting.layer_losses import layer_losses
from gqaconvert.reporting.saved import SavedRun
from gqaconvert.reporting.table import Table

Value = str | int | float | None


def spreadsheets(document: Document, runs: Sequence[SavedRun]) -> Mapping[str, str]:
    """Return name of a file → its content; files without a row are left out.

    Args:
        document: of the report.
        runs: it is made of.
    """
    made = {
        "models.csv": _models(document.table),
        "caches.csv": _caches(document),
        "layers.csv": _layers(runs),
        "bench.csv": _bench(runs),
        "losses.csv": _losses(runs),
    }
    return {name: _written(rows) for name, rows in made.items() if len(rows) > 1}


def _written(rows: Iterable[Sequence[Value]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def _models(table: Table) -> list[list[Value]]:
    header: list[Value] = ["run", "role", "model", "num_key_value_heads"]
    for column in table.columns:
        header.append(column.key)
        if column.has_error:
            header.append(f"{column.key}_stderr")
    rows = [header]
    for place, subject in enumerate(table.subjects):
        row: list[Value] = [subject.run.name, subject.role, subject.model, subject.kv_heads]
        for column in table.columns:
            cell = column.cells[place]
            row += [cell.value, cell.stderr] if column.has_error else [cell.value]
        rows.append(row)
    return rows


def _caches(document: Document) -> list[list[Value]]:
    rows: list[list[Value]] = [[
        "run", "role", "model", "cache_kind", "perplexity", "perplexity_stderr",
        "times_ordinary_cache", "quality_kept", "cache_bytes", "tokens_seen",
        "share_of_source_bytes", "decode_tokens_per_s",
    ]]  # fmt: skip
    for row in document.caches:
        detail = row.one.detail
        rows.append([
            row.subject.run.name, row.subject.role, row.subject.model, row.kind, row.one.value,
            row.one.stderr, row.times_ordinary, row.quality, detail["cache_bytes"],
            detail["tokens_seen"], row.share_of_source, detail["decode_tokens_per_s"],
        ])  # fmt: skip
    return rows


def _layers(runs: Sequence[SavedRun]) -> list[list[Value]]:
    rows: list[list[Value]] = [["run", "layer", "series", "share_lost"]]
    for run in runs:
        losses = layer_losses(run)
        if losses is None:
            continue
        for series, values in losses.lost.items():
            rows += [[run.name, layer, series, value]
                     for layer, value in zip(losses.layers, values, strict=True)]  # fmt: skip
    return rows


def _bench(runs: Sequence[SavedRun]) -> list[list[Value]]:
    rows: list[list[Value]] = [[
        "run", "model", "cache_kind", "context_tokens", "batch", "cache_bytes",
        "decode_step_median_s", "decode_step_min_s", "decode_step_max_s", "tokens_per_s",
        "bound_tokens_per_s", "skipped",
    ]]  # fmt: skip
    for run in runs:
        for row in (run.bench or {"rows": []})["rows"]:
            decode = row["decode"] or {}
            rows.append([
                run.name, row["model"], row["cache_kind"], row["context"], row["batch"],
                row["cache_bytes"], decode.get("median_s"), decode.get("min_s"),
                decode.get("max_s"), row["tokens_per_s"], row["bound_tokens_per_s"],
                row["skipped"],
            ])  # fmt: skip
    return rows


def _losses(runs: Sequence[SavedRun]) -> list[list[Value]]:
    keys = ("kind", "step", "tokens", "loss", "next_token", "held_out_loss", "source_loss")
    units = ("kind", "step", "tokens", "loss_nats", "next_token_loss_nats", "held_out_loss_nats",
             "source_loss_nats")  # fmt: skip
    rows: list[list[Value]] = [["run", *units]]
    for run in runs:
        rows += [[run.name, *(line.get(key) for key in keys)] for line in run.metrics]
    return rows
