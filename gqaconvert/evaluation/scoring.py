"""Reads windows and scores their tokens, without ever holding the logits of a whole batch.

Logits take vocabulary × tokens: far more than everything else in a forward pass. So the body of the
model runs once, and its head runs over a few hundred positions at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers.utils.generic import ModelOutput

from gqaconvert.errors import UnsupportedModelError
from gqaconvert.evaluation.models import LoadedModel
from gqaconvert.evaluation.windows import Window, batches

CHUNK_TOKENS = {"cpu": 128, "cuda": 512}
"""Positions whose logits are held at a time: what stays near the processor, and keeps it busy."""

_TRIAL_TOKENS = 8
_SAME_LOGITS = {torch.float32: 1e-4, torch.float64: 1e-8}
_SAME_ROUNDED_LOGITS = 5e-2
"""Largest difference between logits in chunks and at once, in standard deviations of the logits."""


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

    The head runs through the class's own forward, in which the body is replaced for the moment by
    one that returns the hidden states already computed; so scales and caps that a class puts on
    its logits (Gemma 2, Cohere, Granite, ...) hold. Both ways are compared on a few tokens at the
    start; a class in which they differ is read with all logits of a batch at once.

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
        self.vocabulary = 0
        self._body = self._find_body()

    @property
    def in_chunks(self) -> bool:
        """Whether the head runs apart from the body."""
        return self._body is not None

    def read(self, windows: Sequence[Window]) -> Iterator[torch.Tensor]:
        """Yield logits of the scored positions, in order, window after window.

        Args:
            windows: alike in length and first scored token, see `windows.batches`.

        Yields:
            (C, vocabulary) in float32, C at most `chunk_tokens`.
        """
        token_ids = torch.tensor([window.token_ids for window in windows], device=self._device)
        first = windows[0].first_scored
        with torch.inference_mode():
            if self._body is not None:
                hidden = _hidden(self._body, token_ids)[:, first - 1 : -1].flatten(0, 1)
                for chunk in torch.split(hidden, self._chunk_tokens):
                    yield self._head(self._body, chunk[None]).squeeze(0).float()
            else:
                logits = self._plain(token_ids)[:, first - 1 : -1].flatten(0, 1)
                for chunk in torch.split(logits, self._chunk_tokens):
                    yield chunk.float()

    def targets(self, windows: Sequence[Window]) -> Iterator[torch.Tensor]:
        """Yield the scored tokens themselves, (C,), in the chunks of `read`."""
        scored = [token for window in windows for token in window.token_ids[window.first_scored :]]
        yield from torch.split(torch.tensor(scored, device=self._device), self._chunk_tokens)

    def _plain(self, token_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model(input_ids=token_ids, use_cache=False).logits
        return logits

    def _head(self, body: Any, hidden: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
        placeholder = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        with _replaced_forward(body, _BodyOutput(last_hidden_state=hidden)):
            return self._plain(placeholder)

    def _find_body(self) -> Any:  # noqa: ANN401
        """Return the module whose output the class gives to its head, None where none is found."""
        vocabulary = int(self._model.config.get_text_config().vocab_size)
        generator = torch.Generator().manual_seed(0)
        token_ids = torch.randint(vocabulary, (2, _TRIAL_TOKENS), generator=generator)
        token_ids = token_ids.to(self._device)
        with torch.inference_mode():
            expected = self._plain(token_ids).double()
            self.vocabulary = expected.shape[-1]
            inner = getattr(self._model, "model", None)
            for body in (self._model.base_model, self._model.get_decoder(), inner):
                if body in (None, self._model):
                    continue
                if self._agrees(body, token_ids, expected):
                    return body
        return None

    def _agrees(self, body: Any, token_ids: torch.Tensor, expected: torch.Tensor) -> bool:  # noqa: ANN401
        try:
            found = self._head(body, _hidden(body, token_ids)).double()
        except (AttributeError, TypeError, ValueError, IndexError, KeyError, RuntimeError):
            return False  # the body of this class returns something of its own
        if found.shape != expected.shape:
            return False
        spread = float((found - expected).abs().max() / expected.std())
        return spread <= _SAME_LOGITS.get(self._model.dtype, _SAME_ROUNDED_LOGITS)


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


def _hidden(body: Any, token_ids: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    output = body(input_ids=token_ids, use_cache=False, return_dict=True)
    hidden: torch.Tensor = output.last_hidden_state
    return hidden


@dataclass
class _BodyOutput(ModelOutput):
    """What heads read of a body's output; whatever else they ask for is None."""

    last_hidden_state: torch.Tensor | None = None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _replaced_forward(module: Any, output: _BodyOutput) -> Iterator[None]:  # noqa: ANN401
    def forward(*_: Any, **__: Any) -> _BodyOutput:  # noqa: ANN401
        return output

    module.forward = forward  # on the instance: hides that of the class
    try:
        yield
    finally:
        del module.forward
