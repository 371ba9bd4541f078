"""The loss on text that is not trained on: measured along the way, shared among the processes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from gqaconvert.corpus.text import load_text
from gqaconvert.corpus.windows import Window, spread, strided_windows
from gqaconvert.settings.along_the_way import HeldOutSettings
from gqaconvert.training.batch import Batch
from gqaconvert.training.world import World

CrossEntropy = Callable[[Batch], torch.Tensor]
"""A batch → sum over its counted tokens of the negative log-likelihood in nats, ()."""


class HeldOut:
    """Windows of a text, and the loss of a model on them.

    Args:
        settings: of the recipe.
        tokenizer: of the model.
        context: tokens a window where the settings do not say.
        micro_batch: windows read at once.
        world: the processes; each reads a part.

    Attributes:
        name: of the text, without folders.
        tokens: scored in all.
        sha256: of the text.
    """

    def __init__(
        self,
        settings: HeldOutSettings,
        tokenizer: Any,  # noqa: ANN401
        *,
        context: int,
        micro_batch: int,
        world: World,
    ) -> None:
        text = load_text(settings.text)
        windows = strided_windows(tokenizer, text, length=settings.context or context)
        self._windows = spread(windows, settings.windows)
        self._micro_batch = micro_batch
        self._world = world
        self.tokens = sum(window.num_scored for window in self._windows)
        self.name = text.name
        self.sha256 = hashlib.sha256(text.text.encode(errors="surrogatepass")).hexdigest()

    def loss(self, cross_entropy: CrossEntropy) -> float:
        """Mean negative log-likelihood in nats a token; every process must call it.

        Args:
            cross_entropy: of the model, through whatever wraps it.
        """
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            for batch in self._batches():
                total += cross_entropy(batch.to(self._world.device)).double().cpu()
        return float(self._world.total(total)) / self.tokens

    def _batches(self) -> Iterator[Batch]:
        """This process's share, in as many batches as every other's: divided models need that."""
        size = self._micro_batch
        step = size * self._world.num_processes
        for begin in range(0, len(self._windows), step):
            mine = begin + self._world.process_index * size
            rows = self._windows[mine : mine + size]
            yield _pad(rows, self._windows[0], size)


def _pad(rows: Sequence[Window], filler: Window, size: int) -> Batch:
    """Make a rectangle: short windows get a tail, missing ones a stand-in, that do not count."""
    length = max((len(row.token_ids) for row in rows), default=len(filler.token_ids))
    token_ids = torch.zeros(size, length, dtype=torch.long)
    counted = torch.zeros(size, length, dtype=torch.bool)
    for number in range(size):
        row = rows[number] if number < len(rows) else filler
        ids = torch.tensor(row.token_ids[:length])
        token_ids[number, : len(ids)] = ids
        if number < len(rows):
            counted[number, row.first_scored : len(ids)] = True
    numbers = torch.arange(size)
    return Batch(token_ids, counted, None, numbers, {})
