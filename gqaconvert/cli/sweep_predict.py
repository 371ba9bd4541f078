"""`sweep --predict`: what `svd` would lose in each layer, for each number of KV heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from gqaconvert.cli.terminal import say, show_json, show_table
from gqaconvert.surgery.layer_heads import LayerReport


def show_prediction(
    model: str,
    statistics: Path,
    kv_heads: tuple[int, ...],
    grouping: str,
    revision: str | None,
    *,
    as_json: bool,
) -> None:
    """Print shares of energy lost and errors expected; nothing is written.

    Args:
        model: folder, alias or Hub id.
        statistics: its calibration file.
        kv_heads: numbers to predict for; all legal ones if empty.
        grouping: "adjacent" or "similarity".
        revision: of a Hub model.
        as_json: print JSON.
    """
    from gqaconvert.surgery.predict import predict_conversion
    from gqaconvert.surgery.source import open_source

    counts = kv_heads or open_source(model, revision).attention.poolable()
    found = predict_conversion(model, statistics, counts, grouping=grouping, revision=revision)
    if as_json:
        show_json(
            {
                str(count): {module: asdict(report) for module, report in layers.items()}
                for count, layers in found.items()
            }
        )
        return
    headers = ["layer", *(f"{name}, {n} heads" for n in found for name in ("K", "V", "output"))]
    modules = next(iter(found.values()), {})
    rows = [
        [module, *(cell for layers in found.values() for cell in _cells(layers[module]))]
        for module in modules
    ]
    rows.append(["mean", *(cell for layers in found.values() for cell in _mean(layers))])
    show_table(headers, rows)
    say(
        "K, V: share of their energy that the shared heads do not hold; output: squared error of"
        " the attention output that comes from V, relative to it"
    )
    notes = (note for layers in found.values() for each in layers.values() for note in each.notes)
    for note in dict.fromkeys(notes):
        say(f"note: {note}")


def _cells(report: LayerReport) -> list[str]:
    return [_percent(report.key_energy_lost), _percent(report.value_energy_lost),
            _percent(report.output_error)]  # fmt: skip


def _mean(layers: Mapping[str, LayerReport]) -> list[str]:
    reports = list(layers.values())
    errors = [each.output_error for each in reports if each.output_error is not None]
    return [
        _percent(sum(each.key_energy_lost for each in reports) / len(reports)),
        _percent(sum(each.value_energy_lost for each in reports) / len(reports)),
        _percent(sum(errors) / len(errors) if errors else None),
    ]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"
