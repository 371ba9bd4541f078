"""What pooling loses in each layer: as a calibrated conversion recorded it, or by the weights."""

from __future__ import annotations

from dataclasses import dataclass

from gqaconvert.reporting.origins import made_by
from gqaconvert.reporting.saved import SavedRun

_RECORDED = {
    "key_energy_lost": "keys",
    "value_energy_lost": "values",
    "output_error": "attention output",
}


@dataclass(frozen=True, slots=True)
class LayerLosses:
    """Shares lost by layer.

    Attributes:
        layers: what each layer is called.
        lost: series → share lost of each layer, None where it is not known.
        meaning: what the shares are of.
        origin: where they come from.
    """

    layers: tuple[str, ...]
    lost: dict[str, tuple[float | None, ...]]
    meaning: str
    origin: str


def layer_losses(run: SavedRun) -> LayerLosses | None:
    """Return what pooling loses by layer, None where nothing saved tells."""
    return _recorded(run) or _of_averages(run)


def _recorded(run: SavedRun) -> LayerLosses | None:
    """Of a calibrated conversion: expected over the calibration text."""
    reports = (run.manifest or {}).get("layers")
    if not isinstance(reports, list) or not reports:
        return None
    layers = tuple(
        str(place if each.get("layer") is None else each["layer"])
        for place, each in enumerate(reports)
    )
    lost = {
        name: tuple(_number(each.get(key)) for each in reports) for key, name in _RECORDED.items()
    }
    lost = {name: each for name, each in lost.items() if any(one is not None for one in each)}
    method = (run.manifest or {})["plan"]["options"]["method"]
    if not lost:
        return None
    return LayerLosses(
        layers, lost,
        "share of the energy of keys and values, and expected squared error of the attention"
        f" output, on the calibration text (method {method}), before any fit or training",
        f"The conversion's gqaconvert.json. {made_by(run, 'convert', _source(run))}",
    )  # fmt: skip


def _of_averages(run: SavedRun) -> LayerLosses | None:
    """Of averaging adjacent heads: what the heads' norms tell, without any text."""
    if run.heads is None or run.manifest is None:
        return None
    plan = run.manifest["plan"]
    if plan["options"]["method"] != "mean":
        return None
    count = plan["kv_heads"]["after"]
    layers = run.heads["layers"]
    lost: dict[str, tuple[float | None, ...]] = {}
    for role in ("keys", "values"):
        kept = [
            next((1 - each["raw"] for each in layer[role]["pooled"] if each["kv_heads"] == count),
                 None) if layer[role] else None
            for layer in layers
        ]  # fmt: skip
        if any(one is not None for one in kept):
            lost[role] = tuple(kept)
    if not lost:
        return None
    names = tuple(
        str(place if layer["layer"] is None else layer["layer"])
        for place, layer in enumerate(layers)
    )
    return LayerLosses(
        names, lost,
        f"share of the weights' squared norm that averaging into {count} KV"
        f" head{'s' * (count > 1)} loses",
        f"Weights alone, no text. {made_by(run, 'inspect', _source(run) + ' --heads')}",
    )  # fmt: skip


def _source(run: SavedRun) -> str:
    return str((run.manifest or {})["source"]["name"])


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None
