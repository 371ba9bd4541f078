"""`gqaconvert inspect --heads`: how alike the KV heads are, as a table, JSON and a heat map."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gqaconvert.cli.terminal import say, show_json, show_table

if TYPE_CHECKING:
    from gqaconvert.evaluation.head_similarity import HeadSimilarity, Likeness


def show_heads(model: str, revision: str | None, figure: Path | None, *, as_json: bool) -> None:
    """Compare the KV heads of every layer and print, and on request draw, what was found."""
    from gqaconvert.evaluation.head_similarity import head_similarity
    from gqaconvert.figure_style import check_figure_name

    if figure is not None:
        check_figure_name(figure)
    found = head_similarity(model, revision)
    if figure is not None:
        from gqaconvert.reporting.figures.heads import draw_heads

        draw_heads(found.to_json(), figure)
    if as_json:
        show_json(found.to_json())
    else:
        _show(found)
    for note in found.notes:
        say(f"note: {note}")
    if figure is not None:
        say(f"wrote {figure}")


def _show(found: HeadSimilarity) -> None:
    counts = list(
        dict.fromkeys(
            share.kv_heads
            for layer in found.layers
            for likeness in (layer.keys, layer.values)
            if likeness
            for share in likeness.pooled
        )
    )
    headers = [
        "layer",
        *(f"{role} {kind}" for role in ("K", "V") for kind in ("raw", "aligned", "noise")),
        *(f"{role}→{count}" for role in ("K", "V") for count in counts),
    ]
    rows = []
    for number, layer in enumerate(found.layers):
        cosines, kept = [], []
        for likeness in (layer.keys, layer.values):
            cosines += _cosines(likeness)
            kept += [_kept(likeness, count) for count in counts]
        rows.append([str(number if layer.layer is None else layer.layer), *cosines, *kept])
    show_table(headers, rows)
    say(
        "raw, aligned: mean cosine between the weights of two heads, as they are and turned towards"
        " each other (noise: what turning gives unrelated heads)"
    )
    if counts:
        say(
            "→N: share of the squared norm that averaging into N heads keeps, raw and aligned;"
            " unrelated heads keep N/K raw"
        )


def _cosines(likeness: Likeness | None) -> list[str]:
    if likeness is None:
        return ["-", "-", "-"]
    values = (likeness.mean("raw"), likeness.mean("aligned"), likeness.chance)
    return [f"{value:.3f}" for value in values]


def _kept(likeness: Likeness | None, count: int) -> str:
    for share in likeness.pooled if likeness else ():
        if share.kv_heads == count:
            return f"{share.raw:.2f} {share.aligned:.2f}"
    return "-"
