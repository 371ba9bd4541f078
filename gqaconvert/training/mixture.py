"""Which document comes next: sources drawn by weight, each in its own seeded order.

Draws depend on the seed and their number alone, so the whole state is a few counts, and any
number of processes that draw for themselves draw the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from gqaconvert.settings.uptrain import DataSettings
from gqaconvert.training.documents import open_documents
from gqaconvert.training.order import hash_counts
from gqaconvert.training.sources import Draw, OrderedSource, Place, Source
from gqaconvert.training.streamed import open_streamed


class Mixture:
    """Draws from several sources with probabilities in proportion to their weights.

    Args:
        sources: what is drawn from.
        weights: of each.
        seed: of the choice.
    """

    def __init__(self, sources: Sequence[Source], weights: Sequence[float], seed: int) -> None:
        self.sources = sources
        self._seed = seed
        total = sum(weights)
        self._ends = [end / total for end in accumulate(weights)][:-1]
        self._draws = 0

    @property
    def place(self) -> Place:
        """What the next draw depends on."""
        return {"draws": self._draws, "sources": [source.place for source in self.sources]}

    def draw(self) -> tuple[int, Draw]:
        """Return the number of the source drawn from and its next document, and move on."""
        share = hash_counts(self._seed, self._draws) / 2**64
        number = bisect_right(self._ends, share)
        self._draws += 1
        return number, self.sources[number].draw()

    def go_to(self, place: Place) -> None:
        """Make the next draw that of a place."""
        for source, inside in zip(self.sources, place["sources"], strict=True):
            source.go_to(inside)
        self._draws = int(place["draws"])


def open_mixture(settings: DataSettings) -> Mixture:
    """Open all sources of a mixture.

    Raises:
        UsageError: a source that does not exist or holds nothing.
        GqaconvertError: `datasets` cannot load it.
    """
    sources: list[Source] = []
    for number, each in enumerate(settings.datasets):
        # Distinct from those of the choice of sources, which have two.
        counts = (settings.seed, number, 0)
        if each.streaming:
            sources.append(open_streamed(each, counts, settings.shuffle_buffer))
        else:
            order = None if settings.shuffle_buffer == 1 else counts
            sources.append(OrderedSource(open_documents(each), order))
    return Mixture(sources, [each.weight for each in settings.datasets], settings.seed)
