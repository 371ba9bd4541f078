"""Turns the trained model into an ordinary checkpoint: gathered, cast, written aside, reloaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gqaconvert.checkpoint.index import read_index
from gqaconvert.checkpoint.reader import TensorReader
from gqaconvert.checkpoint.sidecars import (
    CARD,
    CONFIG,
    copy_sidecars,
    edit_config,
    find_sidecars,
    read_json_object,
    write_json,
)
from gqaconvert.checkpoint.staging import MANIFEST, StagedFolder
from gqaconvert.errors import VerificationError
from gqaconvert.modelling.classes import model_class, quiet_transformers
from gqaconvert.surgery.manifest import FORMAT
from gqaconvert.training.card import trained_card
from gqaconvert.training.sharding import gathered
from gqaconvert.training.state import plain_name
from gqaconvert.training.world import World


def export_model(
    model: Any,  # noqa: ANN401
    dtypes: Mapping[str, torch.dtype],
    start: Path,
    out: Path,
    facts: Mapping[str, Any],
    world: World,
    *,
    dtype: torch.dtype | None,
    overwrite: bool,
) -> None:
    """Write a trained model as a checkpoint; every process must call it.

    Args:
        model: of transformers, its parameters divided among the processes or not.
        dtypes: type of each tensor of its state in the start checkpoint.
        start: the checkpoint that was trained: its other files come along byte for byte.
        out: output folder.
        facts: what the card and the manifest say about the training.
        world: the processes; the first one writes.
        dtype: of all floating tensors, None for those in `dtypes`.
        overwrite: replace an earlier export.

    Raises:
        VerificationError: what was written does not load as what was trained.
        RefusedError: `out` is taken.
    """
    weights = {
        name: tensor.to(dtype or dtypes[name]) if tensor.is_floating_point() else tensor
        for name, tensor in gathered(_own_tensors(model), is_first=world.is_first)
    }
    for name, first in _tied_names(model).items():
        if world.is_first:  # the same object: transformers writes it once
            weights[name] = weights[first]
    if world.is_first:
        digest = hashlib.sha256(repr(sorted(facts.items())).encode()).hexdigest()
        with StagedFolder(out, digest, resume=False, overwrite=overwrite) as staged:
            _write(staged.path, model, weights, start, facts, dtype)
            _compare(staged.path, weights)
            staged.finish()
    world.wait()


def _own_tensors(model: Any) -> dict[str, torch.Tensor]:  # noqa: ANN401
    """Parameters and saved buffers by name, those that are tied once."""
    tied = _tied_names(model)
    state = {plain_name(name): tensor for name, tensor in model.state_dict().items()}
    return {name: tensor for name, tensor in state.items() if name not in tied}


def _tied_names(model: Any) -> dict[str, str]:  # noqa: ANN401
    """Names of parameters that are another one → the name of that one."""
    first: dict[int, str] = {}
    tied = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), plain_name(name))
        if known != plain_name(name):
            tied[plain_name(name)] = known
    return tied


def stored_dtypes(model: Any) -> dict[str, torch.dtype]:  # noqa: ANN401
    """Types of a model's tensors as loaded, before training widens them."""
    return {name: tensor.dtype for name, tensor in model.state_dict().items()}


def _write(
    folder: Path,
    model: Any,  # noqa: ANN401
    weights: dict[str, torch.Tensor],
    start: Path,
    facts: Mapping[str, Any],
    dtype: torch.dtype | None,
) -> None:
    with quiet_transformers():
        model.save_pretrained(folder, state_dict=dict(weights))  # it takes tied ones out
    # What the class writes beside the weights says float32, and drops keys it does not know.
    copy_sidecars(find_sidecars(start, read_index(start)), start, folder)
    config = (start / CONFIG).read_text(encoding="utf-8")
    if dtype is not None:
        config = edit_config(config, [((_dtype_key(start),), str(dtype).removeprefix("torch."))])
    (folder / CONFIG).write_text(config, encoding="utf-8")
    card = start / CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    (folder / CARD).write_text(trained_card(text, facts), encoding="utf-8")
    write_json(folder / MANIFEST, _manifest(folder, start, config, facts))


def _dtype_key(start: Path) -> str:
    return "torch_dtype" if "torch_dtype" in read_json_object(start / CONFIG) else "dtype"


def _manifest(folder: Path, start: Path, config: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The conversion's manifest with the hashes of what was trained, and what training did."""
    path = start / MANIFEST
    before: dict[str, Any] = read_json_object(path) if path.is_file() else {"format": FORMAT}
    index = read_index(folder)
    with TensorReader(folder) as reader:
        hashes = {
            name: hashlib.sha256(reader.read(index.tensors[name]).tobytes()).hexdigest()
            for name in before.get("sha256", {}).get("tensors", {})
            if name in index.tensors
        }
    return {
        **before,
        "gqaconvert": version("gqaconvert"),
        "uptrain": dict(facts),
        "sha256": {
            "raw_headers": {file.name: file.header_sha256 for file in index.files},
            "config.json": hashlib.sha256(config.encode()).hexdigest(),
            "tensors": hashes,
            "files": {},
        },
    }


def _compare(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Load what was written, and compare every tensor with what was trained."""
    with quiet_transformers():
        loaded, found = model_class(folder).from_pretrained(
            folder, dtype="auto", output_loading_info=True
        )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if found.get(kind):
            raise VerificationError(
                f"the export loads with {kind.replace('_', ' ')}: {sorted(map(str, found[kind]))}",
                at=str(folder),
            )
    for name, tensor in loaded.state_dict().items():
        if name not in weights or not torch.equal(tensor, weights[name]):
            raise VerificationError("the export loads as other weights", at=f"{folder} {name}")
