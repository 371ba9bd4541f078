"""The output's model card: what was done, above the source's own card and under its licence."""

from __future__ import annotations

from typing import Any

import yaml

from gqaconvert.attention.geometry import attention_kind
from gqaconvert.surgery.manifest import SourceIdentity
from gqaconvert.surgery.plan import ConversionPlan
from gqaconvert.units import format_memory


def build_card(plan: ConversionPlan, identity: SourceIdentity, source_card: str | None) -> str:
    """Return the README.md of a converted checkpoint.

    Args:
        plan: what was carried out.
        identity: name and revision of the source.
        source_card: its README.md, kept below with its metadata.
    """
    metadata, body = split_front_matter(source_card or "")
    if "/" in identity.name:
        metadata["base_model"] = identity.name
    metadata.setdefault("library_name", "transformers")
    tags = metadata.get("tags")
    metadata["tags"] = [*(tags if isinstance(tags, list) else []), "gqaconvert"]
    front = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    parts = [f"---\n{front}---\n", _summary(plan, identity)]
    if body.strip():
        parts.append(f"## Card of the source model\n\n{body.strip()}\n")
    return "\n".join(parts)


def split_front_matter(card: str) -> tuple[dict[str, Any], str]:
    """Split a card into its YAML metadata and its text; what does not parse stays in the text."""
    lines = card.splitlines(keepends=True)
    if not lines or lines[0].strip() != "---":
        return {}, card
    for number, line in enumerate(lines[1:], start=1):
        if line.strip() == "---":
            try:
                metadata = yaml.safe_load("".join(lines[1:number])) or {}
            except yaml.YAMLError:
                return {}, card
            if isinstance(metadata, dict):
                return metadata, "".join(lines[number + 1 :])
            break
    return {}, card


UNTOUCHED = " Every other weight is byte for byte the source's."
"""What the card of a conversion says, and that of a trained model cannot."""


def _others(identity: SourceIdentity) -> str:
    if identity.read_as is None:
        return UNTOUCHED
    return (
        " The source's class has no number of KV heads, so the checkpoint was rewritten as"
        f" `{identity.read_as}`, which computes the same with other weights."
    )


def _summary(plan: ConversionPlan, identity: SourceIdentity) -> str:
    attention, options = plan.attention, plan.options
    before, after = attention.num_kv_heads, options.num_kv_heads
    heads = attention.num_heads
    revision = f" at revision `{identity.revision}`" if identity.revision else ""
    verb = {"mean": "averaged", "first": "reduced to their first", "random": "freshly initialised"}
    verb |= {"procrustes": "aligned and averaged", "svd": "fitted to shared heads"}
    done = (
        f"The {before} key and value heads of each layer were {verb.get(options.method, 'pooled')}"
        f" in groups of {before // after} (method `{options.method}`)."
        if after < before
        else f"Each of the {before} key and value heads was repeated {after // before} times."
    )
    if plan.layers:
        done += (
            " Queries and output projections were changed with them; losses by layer are in"
            " `gqaconvert.json`."
        )
    lines = [
        f"# {identity.name} with {after} KV head{'s' * (after > 1)}",
        "",
        f"Made from `{identity.name}`{revision} with gqaconvert. {done}" + _others(identity),
        "",
        "| | source | this checkpoint |",
        "|---|---|---|",
        f"| attention | {attention_kind(heads, before)}, {heads} query and {before} KV heads"
        f" | {attention_kind(heads, after)}, {heads} query and {after} KV heads |",
        f"| KV cache a token | {format_memory(plan.kv_bytes_per_token(before))}"
        f" | {format_memory(plan.kv_bytes_per_token(after))} |",
        "",
    ]
    if after < before:
        lines += [
            "Pooling alone changes what the model computes. Unless it was trained further, expect"
            " worse text than the source's: evaluate before use.",
            "",
        ]
    return "\n".join(lines)
