"""`gqaconvert inspect`: what a checkpoint is, and what it can become."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gqaconvert.cli.completion import complete_model
from gqaconvert.cli.terminal import say, show_json, show_table
from gqaconvert.units import format_bytes, format_count, format_memory

if TYPE_CHECKING:
    from gqaconvert.attention.inspection import Inspection


def inspect_command(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder, Hub id or alias.", autocompletion=complete_model, show_default=False
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the Hub.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    heads: Annotated[
        bool,
        typer.Option("--heads", help="Read K and V and tell how alike the KV heads are."),
    ] = False,
    figure: Annotated[
        Path | None,
        typer.Option(help="With --heads: draw a heat map; .png, .svg or .pdf.", show_default=False),
    ] = None,
    aliases: Annotated[bool, typer.Option("--aliases", help="List the aliases and stop.")] = False,
) -> None:
    """Tell what a model is, and what it can become.

    Attention, KV cache and legal --kv-heads, from headers and config; weights are not read.
    """
    if aliases:
        from gqaconvert.checkpoint.sources import ALIASES

        show_table(
            ["alias", "Hub id"], [[alias, target] for alias, target in sorted(ALIASES.items())]
        )
        return
    if model is None:
        raise typer.BadParameter("a folder, Hub id or alias is needed", param_hint="MODEL")
    if figure is not None and not heads:
        raise typer.BadParameter("only --heads has a figure", param_hint="--figure")
    if heads:
        from gqaconvert.cli.inspect_heads import show_heads

        show_heads(model, revision, figure, as_json=as_json)
        return
    from gqaconvert.attention.inspection import inspect

    inspection = inspect(model, revision)
    if as_json:
        show_json(inspection.to_json())
        return
    _show(inspection)


def _show(found: Inspection) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.layer_kinds.items())
    window = f", window {found.sliding_window}" if found.sliding_window else ""
    kv_bytes = format_memory(found.kv_bytes_per_token) if found.kv_bytes_per_token else "unknown"
    facts = [
        ["class", f"{', '.join(found.architectures) or '?'} ({found.model_type})"],
        *([["becomes", f"{found.becomes}, its equal, when converted"]] if found.becomes else []),
        [
            "attention",
            f"{found.attention}: {found.num_heads} query and {found.num_kv_heads} KV heads"
            f" of {found.head_dim}",
        ],
        ["layers", f"{found.num_layers} ({kinds}{window})"],
        ["layout", found.layout or "not understood"],
        [
            "biases",
            (", ".join(found.biases) if found.biases else "none")
            if found.biases is not None
            else "?",
        ],
        ["key norm", (found.key_norm or "?").replace("_", " ")],
        ["RoPE", _ROPE.get(found.rope, found.rope)],
        [
            "weights",
            f"{format_count(found.parameters)} parameters, {format_bytes(found.size_bytes)},"
            f" {found.dtype}",
        ],
        ["KV cache", f"{kv_bytes} a token in {found.dtype}"],
    ]
    for name, value in facts:
        typer.echo(f"{name:<10} {value}")
    typer.echo("")
    if found.savings:
        rows = [
            [
                str(found.num_kv_heads),
                found.attention,
                kv_bytes,
                "1",
                "(as it is)",
            ]
        ]
        rows += [
            [
                str(saving.kv_heads),
                saving.attention,
                format_memory(saving.kv_bytes_per_token),
                f"1/{1 / saving.share_of_cache:g}",
                f"--kv-heads {saving.kv_heads}",
            ]
            for saving in found.savings
        ]
        show_table(
            ["KV heads", "kind", "KV bytes a token", "cache", "convert with"], rows, (0, 1, 4)
        )
    elif found.reason:
        say(f"cannot be converted: {found.reason}")
        if found.remedy:
            say(f"try: {found.remedy}")


_ROPE = {
    "halves": "pairs i with i + D/2",
    "adjacent": "pairs 2i with 2i + 1",
    "none": "none",
    "rotary": "yes",
    "alibi": "none (ALiBi)",
}
