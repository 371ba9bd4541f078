"""Which KV heads share one: groups of equal size whose shared heads lose least.

Heads are scored by what the best shared key and value would lose, never by their raw likeness,
which says nothing as long as each head has a basis of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations

Group = tuple[int, ...]
Score = Callable[[Group], float]
"""What a group of heads, in ascending order, would lose."""

_ROUNDS = 20
"""Rounds of swaps; a handful is enough in practice."""

_GAIN = 1e-9
"""A swap must gain this share of what is lost, so that rounding decides nothing."""


def adjacent_groups(count: int, num_groups: int) -> list[Group]:
    """Return neighbours together, as `repeat_kv` and mean pooling have them."""
    size = count // num_groups
    return [tuple(range(begin, begin + size)) for begin in range(0, count, size)]


def similar_groups(count: int, num_groups: int, score: Score) -> list[Group]:
    """Choose groups of equal size that lose little: greedy merging, then pairwise swaps.

    The result loses no more than adjacent groups do, and is the same each time.

    Args:
        count: KV heads K.
        num_groups: G, a divisor of K.
        score: what a group would lose; called once for every group looked at.

    Returns:
        Groups in the order of their first heads, each in ascending order.
    """
    adjacent = adjacent_groups(count, num_groups)
    if num_groups in (1, count):
        return adjacent
    lost = _Remembered(score)
    merged = merged_groups(count, count // num_groups, lost)
    start = min((merged, adjacent), key=lambda groups: sum(map(lost, groups)))
    return sorted(_swap(start, lost))


def merged_groups(count: int, size: int, lost: Score) -> list[Group]:
    """Merge heads into groups of a size greedily, by its prime factors so that all are equal."""
    groups: list[Group] = [(head,) for head in range(count)]
    for factor in _prime_factors(size):
        groups = _merge_by(factor, groups, lost)
    return groups


class _Remembered:
    """A score that looks at every group once."""

    def __init__(self, score: Score) -> None:
        self._score = score
        self._known: dict[Group, float] = {}

    def __call__(self, group: Group) -> float:
        if group not in self._known:
            self._known[group] = self._score(group)
        return self._known[group]


def _merge_by(factor: int, groups: Sequence[Group], lost: Score) -> list[Group]:
    """Merge `factor` groups at a time: the cheapest pair that is left, then what joins it best."""
    left = set(groups)
    merged = []
    pairs = sorted(combinations(groups, 2), key=lambda pair: (_extra(pair[0], pair[1], lost), pair))
    for first, second in pairs:
        if first not in left or second not in left:
            continue
        left -= {first, second}
        whole = _union(first, second)
        for _ in range(factor - 2):
            nearest = min(sorted(left), key=lambda group: _extra(whole, group, lost))
            left.remove(nearest)
            whole = _union(whole, nearest)
        merged.append(whole)
    return merged


def _swap(groups: Sequence[Group], lost: Score) -> list[Group]:
    """Exchange two heads of two groups as long as that loses less."""
    current = list(groups)
    for _ in range(_ROUNDS):
        changed = False
        for one, other in combinations(range(len(current)), 2):
            best = min(
                _exchanges(current[one], current[other]),
                key=lambda pair: lost(pair[0]) + lost(pair[1]),
            )
            before = lost(current[one]) + lost(current[other])
            if lost(best[0]) + lost(best[1]) < before * (1 - _GAIN):
                current[one], current[other] = best
                changed = True
        if not changed:
            break
    return current


def _exchanges(one: Group, other: Group) -> list[tuple[Group, Group]]:
    return [
        (_union(set(one) - {a}, {b}), _union(set(other) - {b}, {a})) for a in one for b in other
    ]


def _union(one: Sequence[int] | set[int], other: Sequence[int] | set[int]) -> Group:
    return tuple(sorted((*one, *other)))


def _extra(one: Group, other: Group, lost: Score) -> float:
    return lost(_union(one, other)) - lost(one) - lost(other)


def _prime_factors(number: int) -> list[int]:
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors
