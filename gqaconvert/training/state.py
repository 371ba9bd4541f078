"""The whole state of a run on disk: weights, optimiser, place in the data, what safety remembers.

Written aside and renamed, so that a folder `step-N` is always complete. torch's distributed
checkpoints let a run go on with another number of processes than it was saved with.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from gqaconvert.errors import CheckpointError, RefusedError, UsageError
from gqaconvert.training.world import World

_FACTS = "facts.json"
_TENSORS = "tensors"
_WRAPPERS = ("module.", "_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass
class RunFacts:
    """Everything about a run that is not a tensor.

    Attributes:
        step: updates and skipped steps so far.
        tokens: read so far, by all processes.
        counted: of these, how many were targets of the loss.
        cursor: place in the data, see `Batch.cursor`.
        skipped: steps skipped in all.
        skipped_in_a_row: steps skipped since the last update.
        norms: gradient norms of the latest updates, of which safety takes the median.
        held_out: losses on held-out text so far, as (step, loss).
        seconds: trained so far, over all sittings.
        source_loss: the source's loss on the held-out text; None where it was not measured.
        recipe: what determines the run, see `run.identity`.
    """

    step: int = 0
    tokens: int = 0
    counted: int = 0
    cursor: Mapping[str, Any] | None = None
    skipped: int = 0
    skipped_in_a_row: int = 0
    norms: list[float] = field(default_factory=list)
    held_out: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0
    source_loss: float | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)


def save_state(
    folder: Path,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    facts: RunFacts,
    world: World,
    *,
    keep: int,
) -> Path:
    """Save a state as `folder/step-N`; every process must call it.

    Args:
        folder: of all states of the run.
        model: whose parameters are saved, wrapped or not.
        optimiser: of these parameters.
        facts: the rest.
        world: the processes.
        keep: newest states left there.

    Returns:
        The state's folder.
    """
    final = folder / f"step-{facts.step:08d}"
    staged = folder / f".{final.name}.partial"
    if world.is_first:
        shutil.rmtree(staged, ignore_errors=True)
        staged.mkdir(parents=True)
    world.wait()
    with _no_word_about_one_process():
        state_dict_saver.save(
            _tensors(model, optimiser),
            storage_writer=FileSystemWriter(staged / _TENSORS),
            no_dist=world.num_processes == 1,
        )
    if world.is_first:
        text = json.dumps(asdict(facts), indent=1)
        with (staged / _FACTS).open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        staged.rename(final)
        _sync_folder(folder)
        for old in saved_states(folder)[:-keep]:
            shutil.rmtree(old)
    world.wait()
    return final


def saved_states(folder: Path) -> list[Path]:
    """Complete states in a folder, oldest first."""
    return sorted(folder.glob("step-*")) if folder.is_dir() else []


def find_state(folder: Path, resume: str | None) -> Path | None:
    """Choose the state to go on from.

    Args:
        folder: of all states of the run.
        resume: "auto" for the newest if there is any, a state's folder, or None to start anew.

    Raises:
        UsageError: no such state.
        RefusedError: states exist and nobody said whether to go on.
    """
    states = saved_states(folder)
    if resume == "auto":
        return states[-1] if states else None
    if resume is not None:
        path = Path(resume)
        if not (path / _FACTS).is_file():
            raise UsageError(
                "no saved state", at=resume, remedy="--resume auto, or one of: "
                + (", ".join(str(each) for each in states) or "none was saved yet"),
            )  # fmt: skip
        return path
    if states:
        raise RefusedError(
            f"this run has already been trained to step {_step_of(states[-1])}",
            at=str(folder.parent),
            remedy="--resume auto to go on, --overwrite to start again, or --out for another run",
        )
    return None


def read_facts(state: Path) -> RunFacts:
    """Read what is not a tensor.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = state / _FACTS
    try:
        return RunFacts(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"the saved state cannot be read: {error}",
            at=str(path),
            remedy="--resume with an older state of the run",
        ) from error


def load_state(
    state: Path, model: nn.Module, optimiser: torch.optim.Optimizer, world: World
) -> None:
    """Load weights and optimiser in place; every process must call it.

    Args:
        state: a folder that `save_state` returned, of any number of processes.
        model: with parameters of the same names and whole shapes.
        optimiser: of these parameters.
        world: the processes.

    Raises:
        CheckpointError: tensors are missing or damaged.
    """
    reader = FileSystemReader(state / _TENSORS)
    try:
        stored = set(reader.read_metadata().state_dict_metadata)
        _prepare_optimiser(model, optimiser, stored)
        with _no_word_about_one_process():
            state_dict_loader.load(
                _tensors(model, optimiser), storage_reader=reader, no_dist=world.num_processes == 1
            )
    except (OSError, RuntimeError, EOFError, CheckpointException) as error:
        raise CheckpointError(
            f"the saved state cannot be read: {str(error).splitlines()[0]}",
            at=str(state),
            remedy="--resume with an older state of the run",
        ) from error


def plain_name(name: str) -> str:
    """Name of a parameter without those of wrappers around its modules."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _tensors(model: nn.Module, optimiser: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All tensors by name: parameters, and what AdamW keeps of each."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{plain_name(name)}"] = parameter.detach()
        for key, value in optimiser.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"optimiser.{plain_name(name)}.{key}"] = value
    return tensors


def _prepare_optimiser(
    model: nn.Module, optimiser: torch.optim.Optimizer, stored: set[str]
) -> None:
    """Give the optimiser room for what was saved: it makes its tensors at the first step only."""
    step_device = "cpu"
    for group in optimiser.param_groups:
        if group.get("fused") or group.get("capturable"):
            step_device = "parameter"
    for name, parameter in model.named_parameters():
        prefix = f"optimiser.{plain_name(name)}."
        for key in (each.removeprefix(prefix) for each in stored if each.startswith(prefix)):
            if key == "step":
                device = parameter.device if step_device == "parameter" else "cpu"
                value = torch.zeros((), dtype=torch.float32, device=device)
            else:
                value = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            optimiser.state[parameter][key] = value


@contextmanager
def _no_word_about_one_process() -> Iterator[None]:
    """Torch warns that it saves in a single process, which is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _step_of(state: Path) -> int:
    return int(state.name.removeprefix("step-"))


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
