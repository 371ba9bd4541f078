"""The processes a run consists of, and the check that they are those that were asked for.

accelerate falls back without a word: `accelerate launch --cpu --num_processes 2` runs one process,
FSDP on CPU becomes processes that know nothing of each other. A run on another world than the one
asked for would train something else, so it does not start.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from gqaconvert.errors import GqaconvertError, UsageError

if TYPE_CHECKING:
    from accelerate import Accelerator

T = TypeVar("T")

EXPECTED = "GQACONVERT_WORLD"
"""Environment variable in which `launch` says what it asked for: "PROCESSES" or
"PROCESSES:sharded"."""

_PATIENCE = timedelta(hours=2)
"""How long processes wait for the first one, which may be downloading a model."""


@dataclass(frozen=True)
class World:
    """The processes of a run.

    Attributes:
        num_processes: how many.
        process_index: which one this is.
        sharded: whether weights, gradients and optimiser are divided among them (FSDP2), rather
            than copied (DDP).
        device: of this process.
    """

    num_processes: int
    process_index: int
    sharded: bool
    device: torch.device

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and talks."""
        return self.process_index == 0

    @property
    def kind(self) -> str:
        """What to call it in words."""
        if self.num_processes == 1:
            return "one process"
        return f"{self.num_processes} processes, {'FSDP2' if self.sharded else 'DDP'}"

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a tensor of float64 over all processes, on the CPU."""
        if self.num_processes == 1:
            return values.cpu()
        values = values.to(self.device)
        torch.distributed.all_reduce(values)
        return values.cpu()

    def first_does(self, work: Callable[[], T]) -> T:
        """Let the first process do something while the others wait; all get its result or error.

        Args:
            work: gives something that can be pickled, or raises an error of this package.
        """
        if self.num_processes == 1:
            return work()
        outcome: list[Any] = [None]
        if self.is_first:
            try:
                outcome = [(True, work())]
            except GqaconvertError as error:
                outcome = [(False, (type(error), error.what, error.at, error.remedy))]
        torch.distributed.broadcast_object_list(outcome, src=0)
        succeeded, result = outcome[0]
        if succeeded:
            value: T = result
            return value
        kind, what, at, remedy = result
        raise kind(what, at=at, remedy=remedy)

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.num_processes > 1:
            torch.distributed.barrier()


def start_world(trackers: tuple[str, ...], folder: str) -> tuple[Accelerator, World]:
    """Start accelerate and return it with the world that came up.

    Args:
        trackers: of accelerate, by name.
        folder: where trackers write.

    Raises:
        UsageError: it is not the world that was asked for, or a tracker is not installed.
    """
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    try:
        # Precision is the recipe's affair, so that one recipe gives one result under any config.
        accelerator = Accelerator(
            mixed_precision="no",
            log_with=list(trackers) or None,
            project_dir=folder,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=_PATIENCE)],
        )
    except (ImportError, ValueError) as error:
        raise UsageError(
            f"accelerate cannot start: {str(error).splitlines()[0]}",
            remedy="install the tracker, or leave it out of uptrain.trackers",
        ) from error
    world = World(
        num_processes=accelerator.num_processes,
        process_index=accelerator.process_index,
        sharded=accelerator.num_processes > 1 and _asks_for_shards(os.environ),
        device=accelerator.device,
    )
    check_world(world, str(accelerator.distributed_type), os.environ)
    return accelerator, world


def check_world(world: World, distributed_type: str, environment: Mapping[str, str]) -> None:
    """Compare the world that came up with the one that was asked for.

    Args:
        world: what came up.
        distributed_type: what accelerate calls it.
        environment: of this process, in which launchers say what was asked for.

    Raises:
        UsageError: they differ, or DeepSpeed, Megatron or FSDP1 were asked for.
    """
    remedy = (
        "gqaconvert uptrain RECIPE --accelerate-config ddp|fsdp2 --num-processes N, which takes"
        " the route that works on this machine"
    )
    for flag, name in (("DEEPSPEED", "DeepSpeed"), ("MEGATRON_LM", "Megatron-LM")):
        if _is_true(environment.get(f"ACCELERATE_USE_{flag}")):
            raise UsageError(
                f"{name} keeps weights and steps to itself; this loop skips bad steps and saves"
                " states of its own",
                remedy="configs/accelerate/fsdp2.yaml shards as much",
            )
    if _is_true(environment.get("ACCELERATE_USE_FSDP")):
        if environment.get("FSDP_VERSION", "1") != "2":
            raise UsageError("FSDP1 was asked for", remedy="fsdp_version: 2 in the config")
        if distributed_type.rpartition(".")[2] != "FSDP":
            raise UsageError(
                f"FSDP was asked for, and accelerate came up as {distributed_type}", remedy=remedy
            )
    asked = _asked_processes(environment)
    if asked is not None and asked != world.num_processes:
        raise UsageError(
            f"{asked} processes were asked for, and {world.num_processes} came up", remedy=remedy
        )
    if asked is None and _was_asked_for_several(environment) and world.num_processes == 1:
        raise UsageError(
            "several processes were asked for, and accelerate started one", remedy=remedy
        )


def _asks_for_shards(environment: Mapping[str, str]) -> bool:
    return environment.get(EXPECTED, "").endswith(":sharded") or _is_true(
        environment.get("ACCELERATE_USE_FSDP")
    )


def _asked_processes(environment: Mapping[str, str]) -> int | None:
    for value in (environment.get(EXPECTED), environment.get("WORLD_SIZE")):
        if value:
            return int(value.partition(":")[0])
    return None


def _was_asked_for_several(environment: Mapping[str, str]) -> bool:
    # What `accelerate launch` sets for more than one process, and leaves out for one.
    return "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_PORT" in environment


def _is_true(value: Any) -> bool:  # noqa: ANN401
    return str(value).lower() in ("1", "true", "yes")
