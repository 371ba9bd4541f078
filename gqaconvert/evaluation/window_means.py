"""Means over tokens with an honest error: tokens of one window are not independent of each other.

So the error is that of a ratio of sums over windows, (sum of values) ÷ (number of tokens), by the
usual linearisation; it needs two windows at least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class WindowMean:
    """Adds up windows; keeps two numbers of each."""

    totals: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, total: float, count: int) -> None:
        """Add the sum of a window's values and how many tokens they are of."""
        self.totals.append(total)
        self.counts.append(count)

    @property
    def tokens(self) -> int:
        """Tokens of all windows."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Mean over tokens, whichever window they are in."""
        return math.fsum(self.totals) / self.tokens

    @property
    def stderr(self) -> float | None:
        """Standard error of `mean`, None for a single window."""
        windows = len(self.counts)
        if windows < 2:
            return None
        mean = self.mean
        pairs = zip(self.totals, self.counts, strict=True)
        squares = math.fsum((total - mean * count) ** 2 for total, count in pairs)
        return math.sqrt(squares * windows / (windows - 1)) / self.tokens
