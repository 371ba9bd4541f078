"""Requests of mixed length: their distribution, and what padding and pages waste on it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist

from gqaconvert.errors import UsageError

_SAMPLES = 1000
_PERCENTILE = re.compile(
    r"p([0-9]+(?:\.[0-9]+)?)\s*=\s*([0-9]+(?:\.[0-9]+)?)([km]?)", re.IGNORECASE
)
_REMEDY = "--lengths p50=500,p99=8000, or a file with one number of tokens a line"
_UNITS = {"": 1, "k": 1024, "m": 1024**2}


@dataclass(frozen=True, slots=True)
class Lengths:
    """Numbers of tokens of requests, prompt and answer together.

    Attributes:
        tokens: sorted; each stands for the same share of requests.
        told_as: how they were given, for output.
    """

    tokens: tuple[int, ...]
    told_as: str

    @property
    def mean(self) -> float:
        """Mean."""
        return sum(self.tokens) / len(self.tokens)

    @property
    def longest(self) -> int:
        """The longest, to which all are padded."""
        return self.tokens[-1]

    def average(self, of: Callable[[int], float]) -> float:
        """Return the mean of a function of the length."""
        return sum(of(count) for count in self.tokens) / len(self.tokens)


def read_lengths(text: str) -> Lengths:
    """Read `p50=500,p99=8000`, or a file of lengths: one a line, or a JSON list.

    Between percentiles lengths are taken to be log-normal: the logarithm grows evenly with the
    quantile of a normal distribution. The highest percentile given is the longest request.

    Raises:
        UsageError: not understood.
    """
    if "=" in text:
        return _from_percentiles(text)
    try:
        content = Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"no lengths in {text!r}: {error}", remedy=_REMEDY) from error
    try:
        raw = json.loads(content) if content.lstrip().startswith("[") else content.split()
        tokens = sorted(int(count) for count in raw)
    except (TypeError, ValueError) as error:
        raise UsageError(f"not a list of lengths: {error}", at=text, remedy=_REMEDY) from error
    if not tokens or tokens[0] < 1:
        raise UsageError("lengths must be positive", at=text, remedy=_REMEDY)
    return Lengths(tuple(tokens), f"{len(tokens)} lengths in {Path(text).name}")


def _from_percentiles(text: str) -> Lengths:
    points: list[tuple[float, float]] = []
    for part in text.split(","):
        match = _PERCENTILE.fullmatch(part.strip())
        if match is None or not 0 < float(match[1]) < 100:
            raise UsageError(f"{part.strip()!r} is no percentile", remedy=_REMEDY)
        length = float(match[2]) * _UNITS[match[3].lower()]
        if length < 1:
            raise UsageError(f"{part.strip()!r} is shorter than one token", remedy=_REMEDY)
        points.append((NormalDist().inv_cdf(float(match[1]) / 100), math.log(length)))
    points.sort()
    if len(points) < 2:
        raise UsageError("one percentile does not make a distribution", remedy=_REMEDY)
    for (left, low), (right, high) in pairwise(points):
        if left == right or high < low:
            raise UsageError("lengths must grow with the percentile", at=text, remedy=_REMEDY)
    quantiles = ((i + 0.5) / _SAMPLES for i in range(_SAMPLES))
    tokens = [_interpolate(points, NormalDist().inv_cdf(q)) for q in quantiles]
    longest = round(math.exp(points[-1][1]))
    tokens[-1] = longest  # so that it is there, however few requests are as long
    return Lengths(tuple(sorted(min(max(1, count), longest) for count in tokens)), text)


def _interpolate(points: Sequence[tuple[float, float]], place: float) -> int:
    # Below the first point the line between the first two goes on; above the last nothing does.
    right = next((i for i, (x, _) in enumerate(points) if x >= place), len(points) - 1) or 1
    (left, low), (end, high) = points[right - 1], points[right]
    return round(math.exp(low + (high - low) * (min(place, points[-1][0]) - left) / (end - left)))
