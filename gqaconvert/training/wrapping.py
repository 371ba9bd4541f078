"""The objective as the processes of a run hold it: alone, copied (DDP) or divided (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gqaconvert.settings.uptrain import UptrainSettings
from gqaconvert.training.batch import Batch
from gqaconvert.training.losses import LossSums
from gqaconvert.training.objective import Objective
from gqaconvert.training.trainable import set_trainable, stage_at
from gqaconvert.training.world import World


class WrappedModel:
    """Calls an objective through whatever its world needs around it.

    Args:
        objective: the model with its loss; already divided where the world is sharded.
        world: the processes.
        settings: of the recipe.

    Attributes:
        stage: number of the present stage; -1 before the first.
    """

    def __init__(self, objective: Objective, world: World, settings: UptrainSettings) -> None:
        self._objective = objective
        self._world = world
        self._settings = settings
        self._wrapped: nn.Module = objective
        self.stage = -1

    def __call__(self, batch: Batch, normaliser: int, distill_weight: float) -> LossSums:
        """Sums of the loss over a batch on this device, with gradients."""
        with self._precision():
            sums: LossSums = self._wrapped(
                batch, normaliser=float(normaliser), distill_weight=distill_weight
            )
        return sums

    def cross_entropy(self, batch: Batch) -> torch.Tensor:
        """Sum of the negative log-likelihood of the counted tokens in nats, ()."""
        with self._precision():
            value: torch.Tensor = self._objective(batch, only_next_token=True).next_token
        return value

    def enter_stage(self, step: int, total_steps: int) -> None:
        """At the beginning of a stage choose what trains, and wrap the model for it."""
        number, stage = stage_at(self._settings.stages, step, total_steps)
        if number == self.stage:
            return
        self.stage = number
        if self._settings.lora is None:
            set_trainable(self._objective.model, stage.train)
        if self._world.num_processes == 1 or self._world.sharded:
            return
        # DDP plans its sums for the parameters that train when it is made; an earlier one goes.
        self._wrapped = self._objective
        device = self._world.device
        loss = self._settings.loss
        self._wrapped = nn.parallel.DistributedDataParallel(
            self._objective,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            find_unused_parameters=not (loss.next_token or loss.distill),
        )

    @contextmanager
    def synchronised(self, last: bool) -> Iterator[None]:
        """Sum gradients over processes with the last micro-batch only, where that saves work."""
        wrapped: Any = self._wrapped
        if isinstance(wrapped, nn.parallel.DistributedDataParallel) and not last:
            with wrapped.no_sync():
                yield
        else:
            yield

    def _precision(self) -> torch.autocast:
        # Divided weights are gathered in bfloat16 as they are; see `sharding.shard`.
        enabled = self._settings.precision == "bf16" and not self._world.sharded
        return torch.autocast(self._world.device.type, torch.bfloat16, enabled=enabled)
