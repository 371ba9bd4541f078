"""One model of a comparison: loaded when something has to be measured, and not before."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from gqaconvert.corpus.text import Text
from gqaconvert.corpus.windows import Window, chosen_windows
from gqaconvert.errors import UsageError
from gqaconvert.evaluation.scoring import Reader
from gqaconvert.evaluation.suite import Suite
from gqaconvert.kv_cache.model_config import read_config
from gqaconvert.modelling.models import (
    LoadedModel,
    ModelFolder,
    find_model,
    load_model,
    load_tokenizer,
)


@dataclass(frozen=True)
class Placement:
    """How models are loaded, the same for all of a comparison; see `models.load_model`."""

    dtype: str = "auto"
    device: str = "cpu"
    attn: str = "sdpa"
    revision: str | None = None


@dataclass
class MeasuredModel:
    """A model, what is measured on it, and the parts that are made on demand and used again.

    Attributes:
        found: where it is.
        placement: how it is loaded.
        text: what it is measured on.
        suite: how.
    """

    found: ModelFolder
    placement: Placement
    text: Text
    suite: Suite
    _kept: dict[str, LoadedModel] = field(default_factory=dict, repr=False)

    @property
    def loaded(self) -> LoadedModel:
        """The model itself; loads it."""
        if "model" not in self._kept:
            place = self.placement
            self._kept["model"] = load_model(
                self.found, dtype=place.dtype, device=place.device, attn=place.attn
            )
        return self._kept["model"]

    @cached_property
    def reader(self) -> Reader:
        """Reads windows; loads the model."""
        return Reader(self.loaded)

    @cached_property
    def tokenizer(self) -> Any:  # noqa: ANN401
        """Its tokenizer, for which the model need not be loaded."""
        return load_tokenizer(self.found.folder)

    @cached_property
    def windows(self) -> list[Window]:
        """What perplexity and divergence are measured on."""
        return chosen_windows(
            self.tokenizer,
            self.text,
            length=self.suite.context,
            stride=self.suite.stride,
            count=self.suite.windows,
            spread_out=self.suite.spread,
        )

    @cached_property
    def whole_windows(self) -> list[Window]:
        """What is read through cache kinds: windows beside each other, each with its own prompt."""
        return chosen_windows(
            self.tokenizer,
            self.text,
            length=self.suite.context,
            count=self.suite.cache_windows,
            spread_out=self.suite.spread,
        )

    def release(self) -> None:
        """Give its memory back; it is loaded again when it is needed again."""
        self._kept.clear()
        self.__dict__.pop("reader", None)
        gc.collect()
        if self.placement.device == "cuda":
            torch.cuda.empty_cache()


def find_models(
    models: list[str | Path], placement: Placement, text: Text, suite: Suite
) -> list[MeasuredModel]:
    """Find all models of a comparison, and check that they can read windows of this length.

    Raises:
        UsageError: no such model, one that reads fewer tokens, or two with the same name.
    """
    found: list[MeasuredModel] = []
    for model in models:
        folder = find_model(model, placement.revision if len(models) == 1 else None)
        limit = read_config(folder.folder).max_position_embeddings
        if limit is not None and suite.context > limit:
            raise UsageError(
                f"{folder.name} was made for {limit} tokens, not {suite.context}",
                at=str(folder.folder),
                remedy=f"--context {limit}",
            )
        clash = next((each for each in found if each.found.name == folder.name), None)
        if clash is not None and clash.found.weights_sha256 == folder.weights_sha256:
            continue
        if clash is not None:
            raise UsageError(
                f"two models are called {folder.name!r}, and results are filed by name",
                at=f"{clash.found.folder} and {folder.folder}",
                remedy="rename one of the folders",
            )
        found.append(MeasuredModel(folder, placement, text, suite))
    return found
