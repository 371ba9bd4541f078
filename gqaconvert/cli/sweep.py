"""`gqaconvert sweep`: convert to each number of KV heads and measure each: the trade-off curve."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gqaconvert.cli.completion import complete_model
from gqaconvert.cli.lists import listed, whole
from gqaconvert.cli.terminal import say, show_json, show_table
from gqaconvert.units import format_memory

if TYPE_CHECKING:
    from gqaconvert.evaluation.sweep_results import Sweep, SweepPoint


def sweep_command(
    model: Annotated[
        str,
        typer.Argument(
            help="Folder, Hub id or alias.", autocompletion=complete_model, show_default=False
        ),
    ],
    kv_heads: Annotated[
        str | None,
        typer.Option(help="Such as 16,8,4,2,1. Default: all legal ones.", show_default=False),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="Of pooling: mean, first, random; with a calibration svd, procrustes too."
            " Default: mean, and svd with a calibration.",
            show_default=False,
        ),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="For svd and procrustes: a file of `calibrate`, or a text, whose statistics are"
            " then kept in OUT; not the text that is measured on.",
            show_default=False,
        ),
    ] = None,
    calibration_tokens: Annotated[
        int, typer.Option(min=1, help="Of the calibration text that are read.")
    ] = 131072,
    fit_steps: Annotated[
        int, typer.Option(min=0, help="Of a local fit of each layer after svd or procrustes.")
    ] = 0,
    fit_windows: Annotated[
        int, typer.Option(min=2, help="Of 512 tokens that the fit reads.")
    ] = 128,
    fit_data: Annotated[
        str | None,
        typer.Option(
            "--data", help="Text of the fit. Default: that of the calibration.", show_default=False
        ),
    ] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            help="Cache kinds to measure too, such as quantised:int4,sliding:256,h2o:256.",
            show_default=False,
        ),
    ] = None,
    cache_of_all: Annotated[
        bool, typer.Option("--cache-of-all", help="Measure them on every conversion as well.")
    ] = False,
    text: Annotated[
        str, typer.Option(help="bundled, a file, or dataset:NAME[:CONFIG[:SPLIT]].")
    ] = "bundled",
    context: Annotated[int, typer.Option(min=2, help="Tokens a window.")] = 512,
    windows: Annotated[int, typer.Option(min=0, help="How many; 0 for the whole text.")] = 16,
    spread: Annotated[
        bool, typer.Option("--spread", help="Take them evenly over the text, not the first ones.")
    ] = False,
    batch: Annotated[int, typer.Option(min=1, help="Windows read at once.")] = 1,
    cache_windows: Annotated[
        int, typer.Option(min=1, help="Windows decoded through each cache kind.")
    ] = 2,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where to run.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the weights; auto as they are.")] = "auto",
    attn: Annotated[
        str, typer.Option(help="Attention: sdpa, packed, eager, flash_attention_2 or flex.")
    ] = "sdpa",
    predict: Annotated[
        Path | None,
        typer.Option(
            help="A calibration file: print what svd would lose in each layer, convert nothing.",
            show_default=False,
        ),
    ] = None,
    grouping: Annotated[
        Literal["adjacent", "similarity"],
        typer.Option(help="Of svd and procrustes, and of --predict."),
    ] = "adjacent",
    seed: Annotated[int, typer.Option(help="For --method random.")] = 0,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the converted folders.")] = False,
    out: Annotated[
        Path, typer.Option(help="Folder for sweep.json, the figures and the conversions.")
    ] = Path("sweep"),
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Convert and measure each in turn; a stopped sweep goes on where it was."""
    counts = listed(kv_heads, whole("--kv-heads"))
    if predict is not None:
        from gqaconvert.cli.sweep_predict import show_prediction

        show_prediction(model, predict, counts, grouping, revision, as_json=as_json)
        return
    from gqaconvert.evaluation.sweep import run_sweep
    from gqaconvert.evaluation.sweep_results import SweepSettings

    settings = SweepSettings(
        kv_heads=counts,
        methods=listed(method, str),
        caches=listed(cache, str),
        caches_of_all=cache_of_all,
        text=text,
        context=context,
        windows=windows or None,
        spread=spread,
        batch=batch,
        cache_windows=cache_windows,
        dtype=dtype,
        attn=attn,
        device=device,
        keep=keep,
        seed=seed,
        calibration=calibration,
        calibration_tokens=calibration_tokens,
        grouping=grouping,
        fit_steps=fit_steps,
        fit_windows=fit_windows,
        fit_data=fit_data,
    )
    sweep = run_sweep(model, settings, out, revision=revision, progress=say)
    from gqaconvert.reporting.figures.sweep import draw_sweep

    figures = [out / "sweep.svg", out / "sweep.png"]
    for path in figures:
        draw_sweep(sweep.to_json(), path)
    if as_json:
        show_json(sweep.to_json())
    else:
        _show(sweep)
    say(f"wrote {', '.join(str(path) for path in [out / 'sweep.json', *figures])}")


def _show(sweep: Sweep) -> None:
    tokens = next(point.kv_tokens for point in sweep.points)
    headers = [
        "KV heads", "method", "cache", f"KV of {tokens} tokens", "perplexity", "quality kept",
        "KL, nats", "top-1 agreement",
    ]  # fmt: skip
    show_table(headers, [_row(point) for point in sweep.points], (1, 2))
    for point in sweep.points:
        if point.unavailable:
            say(f"{point.cache_kind} with {point.kv_heads} KV heads: {point.unavailable}")
    calibrated = sweep.settings.get("calibration")
    if calibrated:
        say(f"note: {_calibrated_note(calibrated)}")
    if any(point.kind == "cache" for point in sweep.points):
        say(
            "note: through a cache, perplexity is that of tokens decoded one by one after"
            f" {sweep.settings['cache_prefill']} were read; quality kept is held to the source's"
            " own cache, measured in the same way"
        )


def _calibrated_note(facts: Mapping[str, Any]) -> str:
    parts = []
    if "texts" in facts:
        texts = ", ".join(facts["texts"])
        parts.append(f"svd and procrustes are calibrated on {facts['tokens']:,} tokens of {texts}")
    if "fit_steps" in facts:
        parts.append(f"each layer is then fitted for {facts['fit_steps']} steps")
    return " and ".join(parts) + "; mean, first and random see no text"


def _row(point: SweepPoint) -> list[str]:
    size = "-" if point.kv_bytes is None else format_memory(point.kv_bytes)
    quality = "-" if point.quality is None else f"{point.quality:.3f}"
    cache = "" if point.kind != "cache" else point.cache_kind
    return [
        str(point.kv_heads),
        point.method or "(source)",
        cache,
        size,
        _with_error(point.perplexity, point.perplexity_stderr, "{:.4g}"),
        quality,
        _with_error(point.kl, point.kl_stderr, "{:.3g}"),
        _with_error(point.top1, point.top1_stderr, "{:.3f}"),
    ]


def _with_error(value: float | None, stderr: float | None, form: str) -> str:
    if value is None:
        return "-"
    return form.format(value) + ("" if stderr is None else f" ± {stderr:.2g}")
