"""An experiment while it runs: its recipe, its folder, where it runs and whom it tells."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from gqaconvert.modelling.models import ModelFolder, find_model
from gqaconvert.pipeline.folder import ExperimentFolder
from gqaconvert.settings.recipe import Recipe
from gqaconvert.training.loop import Report

TrainingProgress = Callable[[int], AbstractContextManager[Report]]
"""Gives, for so many steps, whom to tell of every line of the metrics."""


def _silent(_: int) -> AbstractContextManager[Report]:
    return nullcontext(lambda _: None)


@dataclass(frozen=True)
class Processes:
    """On how many processes the uptraining runs; see `training.launch`.

    Attributes:
        accelerate_config: None for this process, or plain DDP on several.
        count: None for what the config says.
    """

    accelerate_config: Path | None = None
    count: int | None = None


@dataclass(frozen=True)
class Experiment:
    """What the stages share.

    Attributes:
        recipe: what is done.
        folder: where it is kept.
        device: "cpu" or "cuda", for everything but uptraining, which takes what there is.
        processes: of the uptraining.
        tell: told in words what happens.
        training_progress: shows the steps of the uptraining.
    """

    recipe: Recipe
    folder: ExperimentFolder
    device: str = "cpu"
    processes: Processes = field(default_factory=Processes)
    tell: Callable[[str], None] = lambda _: None
    training_progress: TrainingProgress = _silent

    @cached_property
    def source(self) -> ModelFolder:
        """The source; downloads it where it is on the Hub."""
        return find_model(self.recipe.source.model, self.recipe.source.revision)

    @property
    def start(self) -> Path:
        """The model that is trained, or would be: the conversion, or what the recipe names."""
        uptrain = self.recipe.uptrain
        if uptrain is not None and uptrain.start is not None:
            return find_model(uptrain.start).folder
        if self.folder.converted.exists():
            return self.folder.converted
        return self.source.folder  # it had that many KV heads already

    @property
    def final(self) -> Path:
        """The model that the experiment is for."""
        return self.folder.export if self.recipe.uptrain is not None else self.start
