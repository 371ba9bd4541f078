"""Layer by layer: how alike the heads are that are pooled, and what pooling loses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gqaconvert.figure_style import draw_svg, style
from gqaconvert.reporting.figures.heads import fill_heads, heads_height, roles_of
from gqaconvert.reporting.figures.panels import HEIGHT, WIDTH, Panel, ReportFigure, panel
from gqaconvert.reporting.layer_losses import LayerLosses, layer_losses
from gqaconvert.reporting.origins import made_by
from gqaconvert.reporting.saved import SavedRun
from gqaconvert.reporting.subjects import Subject

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def layers_figure(subjects: Sequence[Subject]) -> ReportFigure | None:
    """Draw head similarity and losses of every run that has them.

    Args:
        subjects: whose runs are drawn.
    """
    runs = {subject.run.name: subject.run for subject in subjects}
    panels: list[Panel] = []
    origins: list[str] = []
    captions: list[str] = []
    for run in runs.values():
        number = "" if not panels else f"-{len(panels) + 1}"
        of = f", {run.name}" if len(runs) > 1 else ""
        if run.heads is not None and roles_of(run.heads):
            panels += [_map(run.heads, role, f"heads-{role}{number}", of)
                       for role in roles_of(run.heads)]  # fmt: skip
            origins.append(_origin(run))
            captions.append(
                "Maps: cosine between the weights of every two KV heads of the source, near pairs"
                " first, as they are and after turning one towards the other; light pairs lose"
                " little when they are pooled, and what does not exceed noise is not alike at all."
            )
        losses = layer_losses(run)
        if losses is not None:
            panels.append(_losses(losses, f"losses{number}", of))
            origins.append(losses.origin)
            captions.append(f"Lines: {losses.meaning}; layers that stand out lose the most.")
    if not panels:
        return None
    return ReportFigure(
        name="layers",
        title="Layer by layer",
        caption=" ".join(dict.fromkeys(captions)),
        origin=" ".join(dict.fromkeys(origins)),
        panels=tuple(panels),
    )


def _map(heads: Mapping[str, Any], role: str, name: str, of: str) -> Panel:
    def fill(figure: Figure) -> None:
        fill_heads(figure, heads, [role])

    means = [_mean(layer[role]["raw"]) for layer in heads["layers"] if layer[role]]
    alt = (
        f"Heat map of {role}, a row a layer, a column a pair of heads; mean cosine of a layer as"
        f" they are from {min(means):.2f} to {max(means):.2f}."
    )
    height = min(6.0, max(HEIGHT, heads_height(heads)))
    return Panel(name, f"How alike {role} are{of}", alt, draw_svg(fill, (WIDTH, height)))


def _losses(losses: LayerLosses, name: str, of: str) -> Panel:
    def draw(axes: Axes) -> None:
        _draw_losses(axes, losses)

    worst = {
        series: max((value, layer) for value, layer in zip(values, losses.layers, strict=True)
                    if value is not None)
        for series, values in losses.lost.items()
    }  # fmt: skip
    alt = "; ".join(
        f"{series}: most in layer {layer}, {value:.2f}" for series, (value, layer) in worst.items()
    )
    return panel(name, f"What pooling loses{of}", f"Share lost by layer. {alt}.", draw)


def _draw_losses(axes: Axes, losses: LayerLosses) -> None:
    from matplotlib.ticker import MaxNLocator

    places = range(len(losses.layers))
    for number, (series, values) in enumerate(losses.lost.items()):
        colour, marker = style(number)
        known = [(place, value) for place, value in zip(places, values, strict=True)
                 if value is not None]  # fmt: skip
        axes.plot(
            [place for place, _ in known], [value for _, value in known], color=colour,
            marker=marker, label=series, markersize=4.5,
        )  # fmt: skip
    step = max(1, -(-len(losses.layers) // 12))
    axes.set_xticks(list(places)[::step], list(losses.layers[::step]))
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    axes.set_xlabel("layer")
    axes.set_ylabel("share lost")


def _origin(run: SavedRun) -> str:
    return made_by(run, "inspect", f"{(run.heads or {})['model']} --heads --json")


def _mean(matrix: Sequence[Sequence[float]]) -> float:
    values = [value for i, row in enumerate(matrix) for j, value in enumerate(row) if i != j]
    return sum(values) / len(values) if values else 0.0
