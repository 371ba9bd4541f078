"""Opens a checkpoint for surgery: finds it, reads headers and config, recognises attention."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from gqaconvert.attention.equivalents import find_equivalent
from gqaconvert.attention.geometry import Attention
from gqaconvert.attention.recognise import recognise
from gqaconvert.checkpoint.index import read_index
from gqaconvert.checkpoint.sidecars import CONFIG
from gqaconvert.checkpoint.sources import resolve_source
from gqaconvert.checkpoint.tensors import CheckpointIndex
from gqaconvert.kv_cache.model_config import ModelConfig, read_config
from gqaconvert.surgery.manifest import SourceIdentity


@dataclass(frozen=True)
class SourceCheckpoint:
    """A checkpoint that can be converted.

    Attributes:
        folder: where its files are.
        label: short name, from which output names are made.
        identity: what to call it in manifest and card.
        index: its headers.
        config: its config, or that of the equivalent class.
        config_text: the text that `config` was read from.
        becomes: the equivalent class that the output will have, such as "PhiForCausalLM"; None when
            the class stays.
        attention: its attention.
        notices: what the equivalent class does otherwise.
    """

    folder: Path
    label: str
    identity: SourceIdentity
    index: CheckpointIndex
    config: ModelConfig
    config_text: str
    becomes: str | None
    attention: Attention
    notices: tuple[str, ...] = ()


def open_source(model: str | Path, revision: str | None = None) -> SourceCheckpoint:
    """Find a model and read its headers; a Hub model is downloaded, a folder's weights not read.

    Args:
        model: folder, alias or Hub id.
        revision: branch, tag or commit of a Hub model.

    Raises:
        UsageError: no such model.
        UnsupportedModelError: it cannot be converted.
        CheckpointError: it is damaged.
    """
    source = resolve_source(str(model), revision)
    folder, identity = source.folder, SourceIdentity(source.label)
    if folder is None:
        from gqaconvert.checkpoint.hub import download_model  # imports huggingface_hub

        folder, commit = download_model(str(source.repo_id), revision)
        identity = SourceIdentity(str(source.repo_id), commit)
    config, index = read_config(folder), read_index(folder)
    config_text = (folder / CONFIG).read_text(encoding="utf-8")
    equivalent = find_equivalent(config, index)
    if equivalent is not None:
        config, index = equivalent.config, equivalent.index
        config_text = json.dumps(config.raw, indent=2) + "\n"
        identity = replace(identity, read_as=equivalent.name)
    attention = recognise(index.tensors, config)
    return SourceCheckpoint(
        folder=folder,
        label=source.label,
        identity=identity,
        index=index,
        config=config,
        config_text=config_text,
        becomes=equivalent.name if equivalent else None,
        attention=attention,
        notices=equivalent.notices if equivalent else (),
    )
