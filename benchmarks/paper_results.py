"""What the runs of `paper.py` say: perplexities, paired differences, and verdicts on the claims.

A pure function of `paper.json`. Two runs are compared over the same windows, and a difference
counts once it is twice its error, in which the spread between seeds has a part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paper_protocol import MHA, NEXT_TOKEN, SOURCE

from gqaconvert.evaluation.window_means import WindowMean

AGREES, DIFFERS, OPEN, MISSING = "agrees", "does not agree", "not resolved", "not measured"
METHODS = ("mean", "first", "random")
SHARES = (0.0, 0.01, 0.02, 0.05, 0.1)
MAIN = 0.05

Point = Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, and what became of it here."""

    quote: str
    here: str
    verdict: str


def heads_name(heads: int) -> str:
    """The paper's names: MHA, GQA-4, MQA."""
    return "MHA" if heads == MHA else "MQA" if heads == 1 else f"GQA-{heads}"


def percent(share: float) -> str:
    """Whole percent, as "5 %"."""
    return f"{100 * share:.0f} %".replace("-", "−")


def signed(value: float) -> str:
    """A difference of losses."""
    return f"{value:+.3f}".replace("-", "−")


class Results:
    """The content of `paper.json`, by what one wants to know."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self._points = {self._key(point): point for point in content["points"]}
        self.source = self._points[MHA, SOURCE, 0.0, "", 0]

    @staticmethod
    def _key(point: Point) -> tuple[int, str, float, str, int]:
        loss = point["loss"] if point["share"] else ""
        return (point["kv_heads"], point["start"], point["share"], loss, point["seed"])

    def get(
        self, heads: int, start: str, share: float = 0.0, loss: str = NEXT_TOKEN, seed: int = 0
    ) -> Point | None:
        """A point, None if it was not made."""
        return self._points.get((heads, start, share, loss if share else "", seed))

    def curve(self, heads: int, start: str, loss: str = NEXT_TOKEN) -> dict[float, Point]:
        """Share → point, for those that were made."""
        points = {share: self.get(heads, start, share, loss) for share in SHARES}
        return {share: point for share, point in points.items() if point is not None}

    def perplexity(self, point: Point) -> float:
        """Over all windows."""
        return math.exp(point["nll"])

    def error(self, point: Point) -> float:
        """Standard error of a perplexity, the source's taken as exact: over the same windows."""
        return self.perplexity(point) * self.difference(point, self.source)[1]

    def difference(self, first: Point, second: Point) -> tuple[float, float]:
        """Loss of the first − that of the second, nats a token, and its error over windows."""
        mean = WindowMean()
        for a, b, count in zip(first["totals"], second["totals"], first["counts"], strict=True):
            mean.add(a - b, count)
        return mean.mean, mean.stderr or 0.0

    @property
    def seed_spread(self) -> float | None:
        """Standard deviation of the loss over seeds, nats a token, from pairs of runs."""
        squares = []
        for key, point in self._points.items():
            other = self._points.get((*key[:4], 1)) if key[4] == 0 else None
            if other is not None and point["share"]:
                squares.append((point["nll"] - other["nll"]) ** 2 / 2)
        return math.sqrt(sum(squares) / len(squares)) if squares else None

    def better(self, first: Point, second: Point) -> int:
        """1 where the first has clearly the lower loss, −1 where the second has, else 0."""
        value, error = self.difference(first, second)
        if first["share"] or second["share"]:
            error = math.hypot(error, math.sqrt(2) * (self.seed_spread or 0.0))
        return 0 if abs(value) <= 2 * error else -1 if value > 0 else 1

    def ms(self, heads: int, context: int) -> float | None:
        """Milliseconds of a decoding step."""
        for row in self.timing_rows(context):
            if row["kv_heads"] == heads:
                return 1e3 * float(row["median_s"])
        return None

    def timing_rows(self, context: int) -> list[Point]:
        """Rows of the timing at one context, by KV heads."""
        timing = self.content.get("timing") or {"rows": []}
        rows = [r for r in timing["rows"] if r["context"] == context and "median_s" in r]
        return sorted(rows, key=lambda row: row["kv_heads"])

    def say(self, point: Point | None) -> str:
        """A perplexity with its error, as tables have it."""
        if point is None:
            return ""
        value, error = self.perplexity(point), self.error(point)
        digits = 0 if error >= 2 else 1 if error >= 0.2 else 2
        return f"{value:.{digits}f}" + (f" ± {error:.{digits}f}" if error else "")


def claims(results: Results) -> list[Claim]:
    """The paper's claims, in its order."""
    return [
        _conversion(results), _after_conversion(results), _returns(results), _between(results),
        _groups(results),
    ]  # fmt: skip


def _conversion(results: Results) -> Claim:
    quote = (
        "Mean pooling appears to work best, followed by selecting a single head and then random"
        " initialization."
    )
    said, verdicts = [], []
    for heads in (1, 2):
        found = [results.get(heads, method, MAIN) for method in METHODS]
        points = [point for point in found if point is not None]
        if len(points) < len(METHODS):
            continue
        values = ", ".join(f"{m} {results.say(p)}" for m, p in zip(METHODS, points, strict=True))
        said.append(f"{heads_name(heads)} {values}")
        steps = [results.better(points[0], points[1]), results.better(points[1], points[2])]
        verdicts.append(DIFFERS if -1 in steps else OPEN if 0 in steps else AGREES)
    here = f"After {percent(MAIN)}: " + "; ".join(said) if said else ""
    return Claim(quote, here, _together(verdicts))


def _after_conversion(results: Results) -> Claim:
    quote = (
        "… GQA already achieves reasonable performance after conversion while MQA requires"
        " uptraining to be useful."
    )
    points = {heads: results.get(heads, "mean") for heads in (4, 2, 1)}
    ratios = {
        heads: math.exp(point["nll"] - results.source["nll"])
        for heads, point in points.items()
        if point is not None
    }
    if len(ratios) < len(points):
        return Claim(quote, "", MISSING)
    said = ", ".join(f"{heads_name(heads)} {value:.1f}" for heads, value in ratios.items())
    # "Reasonable" is read generously: a perplexity of at most twice the source's.
    verdict = AGREES if min(ratios[4], ratios[2]) <= 2 < ratios[1] else DIFFERS
    return Claim(quote, f"Perplexity ÷ the source's, by `mean`, before uptraining: {said}", verdict)


def _returns(results: Results) -> Claim:
    quote = "Both MQA and GQA gain from 5% uptraining with diminishing returns from 10%."
    said, verdicts = [], []
    for heads in (1, 2):
        curve = results.curve(heads, "mean")
        if not {0.0, MAIN, 0.1} <= curve.keys():
            continue
        first = results.difference(curve[MAIN], curve[0.0])[0]
        second = results.difference(curve[0.1], curve[MAIN])[0]
        said.append(
            f"{heads_name(heads)} {results.say(curve[0.0])} → {results.say(curve[MAIN])} →"
            f" {results.say(curve[0.1])} ({signed(first)}, then {signed(second)} nats)"
        )
        gains = results.better(curve[MAIN], curve[0.0]) == 1
        verdicts.append(AGREES if gains and second > first else DIFFERS)
    return Claim(quote, "0 → 5 → 10 %: " + "; ".join(said) if said else "", _together(verdicts))


def _between(results: Results) -> Claim:
    quote = (
        "… GQA achieves significant additional quality gains, achieving performance close to"
        " MHA-XXL with speed close to MQA."
    )
    mha, gqa, mqa = (
        results.get(MHA, SOURCE, MAIN), results.get(2, "mean", MAIN), results.get(1, "mean", MAIN),
    )  # fmt: skip
    long = max(results.content["protocol"]["bench_contexts"])
    times = [results.ms(heads, long) for heads in (MHA, 2, 1)]
    if mha is None or gqa is None or mqa is None or None in times:
        return Claim(quote, "", MISSING)
    slow, middle, quick = (float(value or 0.0) for value in times)
    way = results.difference(mqa, gqa)[0] / results.difference(mqa, mha)[0]
    pace = (slow - middle) / (slow - quick)
    here = (
        f"After {percent(MAIN)}: MHA {results.say(mha)}, GQA-2 {results.say(gqa)}, MQA"
        f" {results.say(mqa)}: GQA-2 goes {percent(way)} of the way from MQA to MHA in loss, and"
        f" {percent(pace)} of that from MHA to MQA in time"
    )
    if results.better(gqa, mqa) == 0:
        return Claim(quote, here, OPEN)
    return Claim(quote, here, AGREES if way >= 0.5 and pace >= 0.5 else DIFFERS)


def _groups(results: Results) -> Claim:
    quote = (
        "… increasing the number of groups from MQA only results in modest slowdowns initially,"
        " with increasing cost as we move closer to MHA."
    )
    long = max(results.content["protocol"]["bench_contexts"])
    times = {heads: results.ms(heads, long) for heads in (1, 2, 4, MHA)}
    known = {heads: value for heads, value in times.items() if value is not None}
    if len(known) < 4:
        return Claim(quote, "", MISSING)
    said = ", ".join(f"{value:.1f} ms with {heads}" for heads, value in known.items())
    agrees = known[2] - known[1] < known[MHA] - known[4] and known[1] < known[MHA]
    return Claim(quote, f"A step takes {said} KV heads", AGREES if agrees else DIFFERS)


def _together(verdicts: list[str]) -> str:
    """One verdict of several: the worst of them."""
    for verdict in (DIFFERS, OPEN, AGREES):
        if verdict in verdicts:
            return verdict
    return MISSING
