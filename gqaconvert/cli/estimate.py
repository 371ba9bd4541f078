"""`gqaconvert estimate`: memory, concurrency and speed, before anyone downloads the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gqaconvert.cli.completion import complete_gpu, complete_model
from gqaconvert.cli.estimate_table import show_estimate, show_gpus
from gqaconvert.cli.lists import listed, whole
from gqaconvert.cli.terminal import say, show_json


def estimate_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder (a config.json is enough), Hub id or alias.",
            autocompletion=complete_model,
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            help="Tokens a request, such as 4k,32k. Default: 4k and what the model was made for.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[str, typer.Option(help="Requests at a time, such as 1,8.")] = "1",
    kv_heads: Annotated[
        str | None,
        typer.Option(
            help="As if converted, such as 32,8,1. Default: as it is, and 8 and 1 where legal.",
            show_default=False,
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="Of the cache: fp32, fp16, bf16, fp8, int8, int4, int2. Default: the weights'.",
            show_default=False,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="A name in --gpus, or a size such as 24GiB.",
            autocompletion=complete_gpu,
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="Element type: fp16, int8, int4. Default: as is.", show_default=False),
    ] = None,
    weights_size: Annotated[
        str | None, typer.Option(help="Of the weights as they are, such as 14GB.")
    ] = None,
    activations: Annotated[str | None, typer.Option(help="Size, in place of the formula.")] = None,
    reserve: Annotated[
        str, typer.Option(help="Left to the framework: a size, or a share of the GPU.")
    ] = "10%",
    tp: Annotated[str, typer.Option(help="Tensor-parallel degrees, such as 1,2,4,8.")] = "1",
    page: Annotated[int, typer.Option(min=1, help="Tokens of a page of a paged cache.")] = 16,
    lengths: Annotated[
        str | None,
        typer.Option(help="Of mixed requests: p50=500,p99=8000, or a file.", show_default=False),
    ] = None,
    source_tokens: Annotated[
        str | None, typer.Option(help="Tokens an encoder reads. Default: the context.")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Bytes a second of the GPU, such as 2TB/s.")
    ] = None,
    hardware: Annotated[
        Path | None, typer.Option(help="A YAML table of your own GPUs.", show_default=False)
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of rows.")] = False,
    gpus: Annotated[bool, typer.Option("--gpus", help="List the GPUs known, and stop.")] = False,
) -> None:
    """Tell what a model needs before you download it: KV cache, memory, requests, speed."""
    if gpus:
        show_gpus(hardware)
        return
    if model is None:
        raise typer.BadParameter("a folder, Hub id or alias is needed", param_hint="MODEL")
    from gqaconvert.attention.estimation import estimate

    answer = estimate(
        model,
        context=listed(context, str),
        batch=listed(batch, whole("--batch")),
        kv_heads=listed(kv_heads, whole("--kv-heads")),
        kv_dtype=listed(kv_dtype, str),
        gpu=gpu,
        hardware=hardware,
        bandwidth=bandwidth,
        weights=weights,
        weights_size=weights_size,
        activations=activations,
        reserve=reserve,
        tp=listed(tp, whole("--tp")),
        page=page,
        lengths=lengths,
        source_tokens=source_tokens,
        revision=revision,
    )
    if as_json:
        show_json(answer.to_json())
    else:
        show_estimate(model, answer)
    for fault in answer.faults:
        say(f"warning: {fault}")
    if not as_json:
        for note in answer.notes:
            say(f"note: {note}")
