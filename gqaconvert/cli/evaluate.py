"""`gqaconvert evaluate`: models side by side, and kinds of cache for each."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gqaconvert.cli.completion import complete_model, complete_suite
from gqaconvert.cli.evaluate_table import show_evaluation
from gqaconvert.cli.terminal import say, show_json
from gqaconvert.reporting.numbers import figure

if TYPE_CHECKING:
    from gqaconvert.evaluation.evaluate import Event
    from gqaconvert.evaluation.suite import Suite


def evaluate_command(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Folders, Hub ids or aliases.", autocompletion=complete_model, show_default=False
        ),
    ],
    baseline: Annotated[
        str | None,
        typer.Option(help="Compared with it. Default: the first of several.", show_default=False),
    ] = None,
    suite: Annotated[
        str,
        typer.Option(
            help="quick, standard, or a YAML file; options below override it.",
            autocompletion=complete_suite,
        ),
    ] = "quick",
    text: Annotated[
        str | None,
        typer.Option(
            help="bundled, a .txt, .md, .jsonl or .parquet file, or dataset:NAME:CONFIG:SPLIT.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[int | None, typer.Option(min=2, help="Tokens a window.")] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens from one window to the next.")
    ] = None,
    windows: Annotated[
        int | None, typer.Option(min=0, help="Windows to read; 0 for the whole text.")
    ] = None,
    spread: Annotated[
        bool | None,
        typer.Option(
            "--spread/--no-spread",
            help="Take them evenly over the text, or the first ones. Default: the suite's.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Windows, and task examples, read at once.")
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Divergence from so many tokens of the baseline, kept on disk; 0: exact, with"
            " both models in memory.",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="lm-eval tasks, `continuation` (offline) or YAML files; none for none.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Examples of each task.")] = None,
    fewshot: Annotated[int | None, typer.Option(min=0, help="Examples shown first.")] = None,
    cache: Annotated[
        str | None,
        typer.Option(
            help="Kinds: dynamic, static, quantised:int8, sliding:512, h2o:512, snapkv:512,"
            " sinks:4+508, offloaded; none for none.",
            show_default=False,
        ),
    ] = None,
    cache_windows: Annotated[
        int | None, typer.Option(min=1, help="Windows read through each kind of cache.")
    ] = None,
    needle: Annotated[
        bool | None, typer.Option("--needle/--no-needle", help="Probe of long contexts.")
    ] = None,
    attn: Annotated[str, typer.Option(help="sdpa, eager, flash_attention_2 or flex.")] = "sdpa",
    dtype: Annotated[str, typer.Option(help="Of the weights: auto, float32, bfloat16.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    backend: Annotated[str, typer.Option(help="For tasks: hf, or vllm where installed.")] = "hf",
    results: Annotated[Path, typer.Option(help="Folder of the JSON files.")] = Path("results"),
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure perplexity, divergence, tasks and caches of models, and compare them."""
    asked: dict[str, Any] = {
        "text": text,
        "context": context,
        "stride": stride,
        "windows": windows,
        "spread": spread,
        "batch": batch,
        "top_k": top_k,
        "tasks": _listed(tasks),
        "task_limit": limit,
        "fewshot": fewshot,
        "cache": _listed(cache),
        "cache_windows": cache_windows,
    }
    chosen = _choose(suite, {key: value for key, value in asked.items() if value is not None})
    if needle is not None:
        chosen = _with_needle(chosen, needle)
    from gqaconvert.evaluation.evaluate import evaluate

    evaluation = evaluate(
        models,
        baseline=baseline,
        suite=chosen,
        dtype=dtype,
        device=device,
        attn=attn,
        backend=backend,
        results=results,
        revision=revision,
        on_event=_tell,
    )
    if as_json:
        show_json(evaluation.to_json())
    else:
        show_evaluation(evaluation)


def _choose(name: str, asked: dict[str, Any]) -> Suite:
    from gqaconvert.evaluation.suite import changed_suite

    if asked.get("windows") == 0:
        asked["windows"] = None
    return changed_suite(name, asked)


def _with_needle(suite: Suite, wanted: bool) -> Suite:
    from gqaconvert.evaluation.suite import NeedleSuite

    probe = (suite.needle or NeedleSuite()) if wanted else None
    return suite.model_copy(update={"needle": probe})


def _listed(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    parts = tuple(part.strip() for part in text.split(",") if part.strip())
    return () if parts == ("none",) else parts


def _tell(event: Event) -> None:
    measurement = event.measurement
    if measurement is None:
        say(f"{event.model}: {event.metric}: not measured: {event.reason}")
        return
    kept = " (kept from before)" if event.outcome == "kept" else ""
    value = figure(measurement.value, measurement.stderr)
    say(f"{event.model}: {event.metric} {value} {measurement.unit}".rstrip() + kept)
