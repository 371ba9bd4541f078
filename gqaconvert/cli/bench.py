"""`gqaconvert bench`: prefill and decode latency and cache bytes, against context and batch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gqaconvert.cli.completion import complete_model
from gqaconvert.cli.lists import listed, whole
from gqaconvert.cli.terminal import say, show_json, show_table
from gqaconvert.units import format_memory

if TYPE_CHECKING:
    from gqaconvert.evaluation.bench_results import Bench, BenchRow, Timing


def bench_command(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Folders, Hub ids or aliases.", autocompletion=complete_model, show_default=False
        ),
    ],
    context: Annotated[
        str, typer.Option(help="Tokens in the cache, such as 512,2k,8k.")
    ] = "512,2k,8k",
    batch: Annotated[str, typer.Option(help="Requests at a time, such as 1,8.")] = "1",
    new_tokens: Annotated[int, typer.Option(min=1, help="Steps of decoding in a repeat.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Over which medians are taken.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Repeats that do not count.")] = 1,
    fill: Annotated[
        Literal["random", "prompt"],
        typer.Option(
            help="Of the cache before decoding: random keys and values, or a prompt that is read."
        ),
    ] = "random",
    prefill_limit: Annotated[
        float, typer.Option(min=0, help="Leave out prefills foreseen to take more seconds.")
    ] = 20.0,
    cache: Annotated[
        str,
        typer.Option(
            "--cache-kind", help="Kinds of cache, such as dynamic,quantised:int4,sliding:1024."
        ),
    ] = "dynamic",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of torch. Default: its own.", show_default=False)
    ] = None,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to run.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the weights; auto as they are.")] = "auto",
    attn: Annotated[
        str, typer.Option(help="Attention: sdpa, packed, eager, flash_attention_2 or flex.")
    ] = "sdpa",
    out: Annotated[Path, typer.Option(help="Folder for bench.json and the figures.")] = Path(
        "bench"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time models side by side: first token, each further token, and what bandwidth allows."""
    from gqaconvert.evaluation.bench_results import BenchSettings
    from gqaconvert.kv_cache.question import parse_tokens

    settings = BenchSettings(
        contexts=listed(context, parse_tokens),
        batches=listed(batch, whole("--batch")),
        new_tokens=new_tokens,
        repeats=repeats,
        warmup=warmup,
        fill=fill,
        prefill_limit_s=prefill_limit,
        threads=threads,
    )
    from gqaconvert.evaluation.bench import run_bench
    from gqaconvert.evaluation.cache_kinds import cache_kind
    from gqaconvert.modelling.models import load_model

    kinds = [cache_kind(spec) for spec in listed(cache, str)]
    loaded = [load_model(name, dtype=dtype, device=device, attn=attn) for name in models]
    bench = run_bench(
        loaded, kinds, settings, out=out, progress=lambda text: say(f"measured {text}")
    )
    figures = _draw(bench, out)
    if as_json:
        show_json(bench.to_json())
    else:
        _show(bench)
    for note in bench.notes:
        say(f"note: {note}")
    say(f"wrote {', '.join(str(path) for path in [out / 'bench.json', *figures])}")


def _draw(bench: Bench, out: Path) -> list[Path]:
    from gqaconvert.reporting.figures.bench import draw_bench

    if not any(row.decode for row in bench.rows):
        return []
    paths = [out / "bench.svg", out / "bench.png"]
    for path in paths:
        draw_bench(bench.to_json(), path)
    return paths


def _show(bench: Bench) -> None:
    headers = [
        "model", "context", "batch", "first token", "per token", "tokens/s", "bound", "of bound",
        "cache", "by formula", "peak memory",
    ]  # fmt: skip
    show_table(headers, [_row(row) for row in bench.rows])
    typer.echo("")
    bandwidth = bench.bandwidth
    typer.echo(
        f"bandwidth {bandwidth.bytes_per_s / 1e9:.3g} GB/s, measured here (read"
        f" {bandwidth.read / 1e9:.3g}, copy {bandwidth.copy / 1e9:.3g}, triad"
        f" {bandwidth.triad / 1e9:.3g})"
    )
    for knee in bench.knees:
        where = "never" if knee.tokens is None else f"at {knee.tokens:,} tokens"
        typer.echo(
            f"knee of {knee.label}, batch {knee.batch}: {where}"
            " (reading the cache takes as long as reading the weights, by bytes)"
        )
    skipped = [row for row in bench.rows if row.skipped]
    for row in skipped:
        say(f"skipped: {row.label} at {row.context} tokens, batch {row.batch}: {row.skipped}")


def _row(row: BenchRow) -> list[str]:
    def shown(value: Any, text: str) -> str:  # noqa: ANN401
        return "-" if value is None else text.format(value)

    share = None if row.share_of_bound is None else 100 * row.share_of_bound
    peaks = [peak for peak in (row.prefill_peak_bytes, row.decode_peak_bytes) if peak]
    return [
        row.label,
        str(row.context),
        str(row.batch),
        _spread(row.prefill),
        _spread(row.decode),
        shown(row.tokens_per_s, "{:.4g}"),
        shown(row.bound_tokens_per_s, "{:.4g}"),
        shown(share, "{:.0f} %"),
        "-" if row.cache_bytes is None else format_memory(row.cache_bytes),
        "-" if row.cache_bytes_formula is None else format_memory(row.cache_bytes_formula),
        format_memory(max(peaks)) if peaks else "-",
    ]


def _spread(timing: Timing | None) -> str:
    if timing is None:
        return "-"
    scale, unit = (1, "s") if timing.median_s >= 1 else (1e3, "ms")
    low, middle, high = (
        f"{scale * value:.3g}" for value in (timing.min_s, timing.median_s, timing.max_s)
    )
    return f"{middle} {unit} ({low}–{high})"
