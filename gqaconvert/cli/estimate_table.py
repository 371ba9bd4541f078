"""What `gqaconvert estimate` prints for people: facts, one table of combinations, GPUs.

Columns that say nothing, as everything is the same in them, are left out, so that a line stays
within a hundred characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from gqaconvert.cli.terminal import show_table
from gqaconvert.units import format_count, format_memory

if TYPE_CHECKING:
    from gqaconvert.kv_cache.estimate import Estimate
    from gqaconvert.kv_cache.estimate_rows import Row


def show_gpus(hardware: Path | None) -> None:
    """Print the table of GPUs, with the source of the figures."""
    from gqaconvert.kv_cache.hardware import accelerators

    rows = [
        [
            gpu.key,
            format_memory(gpu.memory_bytes),
            f"{gpu.bandwidth / 1e9:,.0f} GB/s" if gpu.bandwidth else "?",
            f"{gpu.flops / 1e12:g}" if gpu.flops else "?",
            gpu.source,
        ]
        for gpu in accelerators(hardware).values()
    ]
    show_table(["--gpu", "memory", "bandwidth", "bf16 TFLOP/s", "source"], rows, (0, 4))


def show_estimate(model: str, answer: Estimate) -> None:
    """Print the facts and the table of an estimate; notes are left to the caller."""
    for name, value in _facts(model, answer):
        typer.echo(f"{name:<10} {value}")
    typer.echo("")
    columns = [column for column in _COLUMNS if column.is_wanted(answer)]
    rows = [[column.cell(answer, row) for column in columns] for row in answer.rows]
    show_table([column.header for column in columns], rows, (0,))
    if any(row.fits is False for row in answer.rows):
        typer.echo("! = more than the GPU has")
    if answer.question.lengths is not None:
        typer.echo("")
        _show_mixed(answer)
    typer.echo("")


def _facts(model: str, answer: Estimate) -> Iterator[tuple[str, str]]:
    from gqaconvert.attention.geometry import attention_kind

    config, question, weights = answer.config, answer.question, answer.weights
    heads = (
        f"{config.num_heads} query and {config.num_kv_heads} KV heads of {config.head_dim}"
        if config.num_heads
        else "no attention"
    )
    if config.kv_lora_rank:
        heads = f"MLA: {config.num_heads} heads, a latent of {config.kv_lora_rank}"
    elif config.num_heads:
        heads = f"{attention_kind(config.num_heads, config.num_kv_heads)}: {heads}"
    name = config.architectures[0] if config.architectures else config.model_type
    yield "model", model
    yield "class", f"{name}, {config.num_layers} layers, {heads}"
    size = weights.size(config.num_kv_heads, question.weights)
    if size is None:
        yield "weights", "not counted"
    else:
        count = f"{format_count(weights.parameters)} parameters, " if weights.parameters else ""
        stored = f" in {(question.weights or weights.stored_as).name}"
        origin = {
            "headers": "from the headers of its files",
            "config": "counted from its config",
            "given": "as given",
        }[weights.origin]
        if weights.origin == "given" or (config.quantization and not question.weights):
            stored = ""
        yield "weights", f"{count}{format_memory(size)}{stored}, {origin}"
    if question.gpu is not None:
        gpu = question.gpu
        speed = question.bandwidth or gpu.bandwidth
        yield (
            "GPU",
            f"{gpu.name}: {format_memory(gpu.memory_bytes)}"
            + (f", {speed / 1e9:,.0f} GB/s" if speed else "")
            + f"; {format_memory(question.reserve.of(gpu.memory_bytes))} reserved (--reserve)",
        )
    fixed = {
        "KV heads": [] if config.kv_lora_rank else [f"{n:,}" for n in question.kv_heads if n],
        "context": [f"{n:,}" for n in question.contexts],
        "batch": [f"{n:,}" for n in question.batches],
        "KV in": [kind.name for kind in question.kv_types],
    }
    said = [f"{name} {values[0]}" for name, values in fixed.items() if len(values) == 1]
    if said:
        yield "all rows", ", ".join(said)


@dataclass(frozen=True)
class _Column:
    """One column: whether it says anything here, and its cells."""

    header: str
    is_wanted: Callable[[Estimate], bool]
    cell: Callable[[Estimate, Row], str]


def _any(attribute: str) -> Callable[[Estimate], bool]:
    return lambda answer: any(getattr(row, attribute) is not None for row in answer.rows)


def _always(_: Estimate) -> bool:
    return True


def _count(value: int | None) -> str:
    return "any" if value is None else f"{value:,}"


def _memory(value: float | None) -> str:
    return "?" if value is None else format_memory(value)


def _speed(answer: Estimate, row: Row) -> str:
    alone = row.decode_tokens_per_s_bound_kv_only
    inside = f" ({_rounded(alone)})" if alone is not None else ""
    bound = row.decode_tokens_per_s_bound
    return ("?" if bound is None else _rounded(bound)) + inside


def _rounded(value: float) -> str:
    if value >= 999.5:
        return f"{value / 1000:.2g}k" if value < 9950 else f"{value / 1000:,.0f}k"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _tokens(value: int) -> str:
    """4k for 4,096, as --context takes it."""
    return f"{value // 1024:,}k" if value >= 1024 and value % 1024 == 0 else f"{value:,}"


def _heads(answer: Estimate, row: Row) -> str:
    from gqaconvert.attention.geometry import attention_kind

    if answer.config.kv_lora_rank or not answer.config.num_heads:
        return f"{row.kv_heads}"
    return f"{row.kv_heads} {attention_kind(answer.config.num_heads, row.kv_heads)}"


def _total(answer: Estimate, row: Row) -> str:
    return _memory(row.total_bytes) + ("" if row.fits is not False else "!")


def _longest(answer: Estimate, row: Row) -> str:
    longest = row.longest_context
    return _tokens(longest // 1024 * 1024) if longest and longest >= 1024 else _count(longest)


def _differ_in_pages(answer: Estimate) -> bool:
    return any(row.concurrent_requests != row.concurrent_requests_paged for row in answer.rows)


_COLUMNS = (
    _Column("heads", lambda a: len(a.question.kv_heads) > 1, _heads),
    _Column("GPUs", lambda a: len(a.question.degrees) > 1, lambda a, r: f"{r.tp}"),
    _Column(
        "on each",
        lambda a: (
            a.question.degrees != (1,)
            and a.rows[0].kv_heads_per_gpu > 0
            and not a.config.kv_lora_rank
        ),
        lambda a, r: f"{r.kv_heads_per_gpu}" + (" copy" if r.replicated else ""),
    ),
    _Column("KV in", lambda a: len(a.question.kv_types) > 1, lambda a, r: r.kv_dtype),
    _Column("context", lambda a: len(a.question.contexts) > 1, lambda a, r: _tokens(r.context)),
    _Column("batch", lambda a: len(a.question.batches) > 1, lambda a, r: f"{r.batch:,}"),
    _Column("KV/token", _always, lambda a, r: _memory(r.kv_bytes_per_token)),
    _Column("KV cache", _always, lambda a, r: _memory(r.kv_bytes)),
    _Column(
        "state",
        lambda a: any(row.state_bytes for row in a.rows),
        lambda a, r: _memory(r.state_bytes),
    ),
    _Column("weights", _any("weights_bytes"), lambda a, r: _memory(r.weights_bytes)),
    _Column("total", _any("total_bytes"), _total),
    _Column(
        "fit",
        _any("fits"),
        lambda a, r: _count(r.concurrent_requests),
    ),
    _Column(
        "in pages",
        lambda a: _any("fits")(a) and _differ_in_pages(a),
        lambda a, r: _count(r.concurrent_requests_paged),
    ),
    _Column("longest", _any("fits"), _longest),
    _Column("≤ tok/s", _any("decode_tokens_per_s_bound_kv_only"), _speed),
)


def _show_mixed(answer: Estimate) -> None:
    """Print what mixed lengths need, once for all contexts and batches."""
    lengths, question = answer.question.lengths, answer.question
    if lengths is None:
        return
    typer.echo(
        f"requests of mixed length ({lengths.told_as}): mean {lengths.mean:,.0f} tokens,"
        f" longest {lengths.longest:,}"
    )
    columns = [column for column in _COLUMNS[:4] if column.is_wanted(answer)]
    header = [column.header for column in columns]
    header += ["needed", "padded", "wasted", "fit"]
    header += [f"in {question.page}-token pages", "wasted", "fit"]
    rows: dict[tuple[object, ...], list[str]] = {}
    for row in answer.rows:
        mixed, key = row.mixed, (row.kv_heads, row.tp, row.kv_dtype)
        if mixed is None or key in rows:
            continue
        known = row.fits is not None
        rows[key] = [
            *(column.cell(answer, row) for column in columns),
            _memory(mixed.needed_bytes),
            _memory(mixed.padded_bytes),
            f"{mixed.padding_waste:.0%}",
            _count(mixed.concurrent_requests) if known else "?",
            _memory(mixed.paged_bytes),
            f"{mixed.page_waste:.1%}",
            _count(mixed.concurrent_requests_paged) if known else "?",
        ]
    show_table(header, list(rows.values()))
