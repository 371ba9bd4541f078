"""Models of the zoo as evaluation sees them, without files or a tokenizer."""

from __future__ import annotations

from pathlib import Path

import zoo

from gqaconvert.modelling.models import LoadedModel


def load(name: str, attn: str = "sdpa", kv_heads: int | None = None) -> LoadedModel:
    """Build the model of an entry, by default with as few heads as its second legal count."""
    entry = {**zoo.ZOO, **zoo.MHA_ONLY, **zoo.REFUSED}[name]
    fewer = entry.legal[min(1, len(entry.legal) - 1)]
    model = zoo.build(name, num_kv_heads=kv_heads or fewer)
    if attn != "eager":
        model.set_attn_implementation(attn)
    return LoadedModel(
        name=name,
        folder=Path(name),
        model=zoo.text_model(model),
        tokenizer=None,
        dtype="float32",
        device="cpu",
        attn=attn,
        weights_sha256=name,
        parameters=0,
        disk_bytes=0,
    )
