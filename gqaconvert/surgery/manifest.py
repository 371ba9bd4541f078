"""`gqaconvert.json`: what was done to a checkpoint, from what, and hashes that prove it."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gqaconvert.checkpoint.sidecars import Sidecars
from gqaconvert.checkpoint.tensors import CheckpointIndex
from gqaconvert.surgery.plan import ConversionPlan

FORMAT = 1


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """Where a checkpoint came from, without any path of the machine it was on.

    Attributes:
        name: Hub id, alias or folder name.
        revision: commit of a Hub model.
        read_as: the equivalent class that it was read as, where its own cannot hold fewer KV heads.
    """

    name: str
    revision: str | None = None
    read_as: str | None = None


def build_manifest(
    plan: ConversionPlan,
    identity: SourceIdentity,
    source: CheckpointIndex,
    sidecars: Sidecars,
    config_text: str,
    tensor_hashes: Mapping[str, str],
    file_hashes: Mapping[str, str],
    calibrated: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the content of `gqaconvert.json`.

    Args:
        plan: what was carried out.
        identity: name and revision of the source.
        source: its headers.
        sidecars: files copied and left out.
        config_text: the new config.json.
        tensor_hashes: SHA-256 of each tensor whose heads changed.
        file_hashes: SHA-256 of whole files, where they were asked for.
        calibrated: of a calibrated conversion, `layers` with a report each, and the `calibration`.
    """
    attention = plan.attention
    return {
        "format": FORMAT,
        "gqaconvert": version("gqaconvert"),
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "source": {
            "name": identity.name,
            "revision": identity.revision,
            "read_as": identity.read_as,
            "headers_sha256": plan.source_fingerprint,
            "config_sha256": plan.source_config_sha256,
            "files": {file.name: file.size_bytes for file in source.files},
        },
        "plan": {
            "sha256": plan.digest(),
            "options": plan.options.record(),
            "model_type": attention.model_type,
            "layout": attention.layout,
            "num_heads": attention.num_heads,
            "head_dim": attention.blocks[0].head_dim,
            "kv_heads": {"before": attention.num_kv_heads, "after": plan.options.num_kv_heads},
            "attention_blocks": len(attention.blocks),
            "tensors": dict(Counter(tensor.action for tensor in plan.tensors)),
            "config": [
                {"key": ".".join(edit.path), "before": edit.before, "after": edit.after}
                for edit in plan.config_edits
            ],
            "dropped": dict(plan.dropped),
            "left_out": dict(sidecars.left_out),
        },
        "sha256": {
            "raw_headers": {
                shard.name: hashlib.sha256(shard.header[8:]).hexdigest() for shard in plan.shards
            },
            "config.json": hashlib.sha256(config_text.encode()).hexdigest(),
            "tensors": dict(sorted(tensor_hashes.items())),
            "files": dict(file_hashes),
        },
        **(calibrated or {}),
    }


def hash_file(path: Path) -> str:
    """SHA-256 of a whole file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
