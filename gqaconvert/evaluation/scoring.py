"""Reads windows and scores their tokens, without ever holding the logits of a whole batch.

Logits take vocabulary × tokens: far more than everything else in a forward pass. So the body of the
model runs once, and its head runs over a few hundred positions at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from gqaconvert.corpus.windows import Window, batches
from gqaconvert.errors import UnsupportedModelError
from gqaconvert.modelling.head import body_hidden, find_body, head_logits, plain_logits
from gqaconvert.modelling.models import LoadedModel

CHUNK_TOKENS = {"cpu": 128, "cuda": 512}
"""Positions whose logits are held at a time: what stays near the processor, and keeps it busy."""


@dataclass(frozen=True)
class Scored:
    """What a model made of one window.

    Attributes:
        window: what was read.
        nll: negative log-likelihood in nats of each scored token, (S,), float32, on the CPU.
    """

    window: Window
    nll: torch.Tensor


class Reader:
    """Runs the body of a model over windows, and its head over chunks of positions.

    A class whose body and head cannot run apart is read with all logits of a batch at once, see
    `modelling.head`.

    Args:
        loaded: the model.
        chunk_tokens: positions whose logits are held at a time; that of the device by default.

    Attributes:
        vocabulary: how many tokens it predicts.

    Raises:
        UnsupportedModelError: the model is no causal language model.
    """

    def __init__(self, loaded: LoadedModel, *, chunk_tokens: int | None = None) -> None:
        if getattr(loaded.model.config, "is_encoder_decoder", False):
            raise UnsupportedModelError(
                "an encoder-decoder gives no likelihood of a plain text", at=str(loaded.folder)
            )
        self._model = loaded.model
        self._device = loaded.device
        self._chunk_tokens = chunk_tokens or CHUNK_TOKENS[loaded.device]
        self._body = find_body(self._model)
        self.vocabulary = self._count_vocabulary()

    @property
    def in_chunks(self) -> bool:
        """Whether the head runs apart from the body."""
        return self._body is not None

    # As a decorator, unlike a block, it ends at each yield: readers of two models that take turns
    # would otherwise leave their caller in inference mode.
    @torch.inference_mode()
    def read(self, windows: Sequence[Window]) -> Iterator[torch.Tensor]:
        """Yield logits of the scored positions, in order, window after window.

        Args:
            windows: alike in length and first scored token, see `windows.batches`.

        Yields:
            (C, vocabulary) in float32, C at most `chunk_tokens`.
        """
        token_ids = torch.tensor([window.token_ids for window in windows], device=self._device)
        first = windows[0].first_scored
        if self._body is not None:
            hidden = body_hidden(self._body, token_ids)[:, first - 1 : -1].flatten(0, 1)
            for chunk in torch.split(hidden, self._chunk_tokens):
                yield head_logits(self._model, self._body, chunk[None]).squeeze(0).float()
        else:
            logits = plain_logits(self._model, token_ids)[:, first - 1 : -1].flatten(0, 1)
            for chunk in torch.split(logits, self._chunk_tokens):
                yield chunk.float()

    def _count_vocabulary(self) -> int:
        token = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        with torch.inference_mode():
            return int(plain_logits(self._model, token).shape[-1])

    def targets(self, windows: Sequence[Window]) -> Iterator[torch.Tensor]:
        """Yield the scored tokens themselves, (C,), in the chunks of `read`."""
        scored = [token for window in windows for token in window.token_ids[window.first_scored :]]
        yield from torch.split(torch.tensor(scored, device=self._device), self._chunk_tokens)


def score(
    loaded: LoadedModel,
    windows: Sequence[Window],
    *,
    batch_size: int = 1,
    reader: Reader | None = None,
) -> Iterator[Scored]:
    """Score every window, in order.

    Args:
        loaded: the model.
        windows: what to read.
        batch_size: windows read at once; changes speed and memory, not results.
        reader: of the same model, to use it again.
    """
    reader = reader or Reader(loaded)
    for batch in batches(windows, batch_size):
        losses = []
        for logits, targets in zip(reader.read(batch), reader.targets(batch), strict=True):
            losses.append(functional.cross_entropy(logits, targets, reduction="none").cpu())
        sizes = [window.num_scored for window in batch]
        for window, nll in zip(batch, torch.split(torch.cat(losses), sizes), strict=True):
            yield Scored(window, nll)
