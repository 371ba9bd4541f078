"""The source model as a teacher: frozen, in evaluation mode, never given a gradient.

It is no submodule of what is trained, so wrappers of the student do not see it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gqaconvert.modelling.models import ModelFolder, load_model
from gqaconvert.settings.uptrain import TeacherSettings
from gqaconvert.training.batch import Batch
from gqaconvert.training.matching import MatchedStates, StateRecorder
from gqaconvert.training.split_model import SplitModel, find_body_name


class Teacher:
    """A frozen model.

    Args:
        model: of transformers, on one device; it is put into evaluation mode and frozen.

    Attributes:
        module: what runs: to shard a teacher, shard the layers in it and then it as their root,
            whose own parameters must stay whole after its forward pass, because the head runs then
            (the default of torch's `fully_shard` for a root).
        vocabulary: tokens it predicts.
    """

    def __init__(self, model: Any) -> None:  # noqa: ANN401
        model.eval()
        model.requires_grad_(False)
        self.module = TeacherModule(model, find_body_name(model))
        self.vocabulary = self._split().vocabulary()
        self._recorder = StateRecorder()

    @property
    def model(self) -> Any:  # noqa: ANN401
        """The model of transformers."""
        return self.module.model

    def record(self, *, hidden: bool, attention: bool) -> None:
        """Keep hidden states after each layer, or outputs of attention, from now on.

        Raises:
            UsageError: they cannot be found in this class.
        """
        self._recorder.close()
        self._recorder = StateRecorder.of(self.model, hidden=hidden, attention=attention)

    def hidden(self, batch: Batch) -> tuple[torch.Tensor, MatchedStates]:
        """Run over a batch on its device.

        Returns:
            Hidden states (B, T, M) for `logits`, and what `record` asked for.
        """
        with torch.no_grad(), self._recorder:
            states = self.module(batch.token_ids, batch.position_ids)
        return states, self._recorder.take()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (C, vocabulary) of some of the hidden states, (C, M)."""
        with torch.no_grad():
            return self._split().logits(hidden)

    def check_documents_apart(self) -> None:
        """See `SplitModel.check_documents_apart`."""
        self._split().check_documents_apart()

    def _split(self) -> SplitModel:
        return self.module.split()


class TeacherModule(torch.nn.Module):
    """The body of a teacher as a module of its own, for whoever wraps modules.

    Args:
        model: of transformers.
        body_name: from `find_body_name`.
    """

    def __init__(self, model: Any, body_name: str | None) -> None:  # noqa: ANN401
        super().__init__()
        self.model = model
        self._body_name = body_name

    def split(self) -> SplitModel:
        """The model with its head apart."""
        return SplitModel(self.model, self._body_name)

    def forward(self, token_ids: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
        """Hidden states (B, T, M) of tokens (B, T)."""
        return self.split().hidden(token_ids, position_ids)


def load_teacher(
    model: Any,  # noqa: ANN401
    settings: TeacherSettings,
    *,
    device: torch.device | str = "cpu",
    attn: str = "sdpa",
) -> Teacher:
    """Load a teacher.

    Args:
        model: folder, alias, Hub id, `tiny` or what `find_model` found; or a model of transformers,
            which is frozen, converted to the type of the settings and moved.
        settings: how its weights are held.
        device: where to.
        attn: attention implementation, a key of `modelling.models.ATTENTION`.

    Raises:
        UsageError: no such model or attention implementation.
        GqaconvertError: it cannot be loaded.
    """
    if isinstance(model, str | Path | ModelFolder):
        model = load_model(model, dtype=settings.dtype, attn=attn).model
    return Teacher(model.to(device=device, dtype=getattr(torch, settings.dtype)))
