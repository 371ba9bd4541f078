"""Which heads share one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layer_zoo import halves, make_layer, make_statistics, mix_value, permute, repeat, scramble

from gqaconvert.surgery.calibrated.grams import layer_grams
from gqaconvert.surgery.calibrated.group_score import GroupScore
from gqaconvert.surgery.calibrated.grouping import (
    Group,
    adjacent_groups,
    merged_groups,
    similar_groups,
)
from gqaconvert.surgery.calibrated.keys import fit_keys
from gqaconvert.surgery.calibrated.values import fit_values
from gqaconvert.surgery.layer_heads import KeyFreedom, LayerStatistics


def distances(seed: int, count: int) -> Callable[[Group], float]:
    """Heads as points: a group loses the sum of squares from its middle."""
    points = np.random.default_rng(seed).standard_normal((count, 2))
    return lambda group: float(
        np.sum((points[list(group)] - points[list(group)].mean(axis=0)) ** 2)
    )


def test_adjacent_groups_are_neighbours() -> None:
    assert adjacent_groups(6, 2) == [(0, 1, 2), (3, 4, 5)]


@given(
    st.sampled_from([(6, 2), (6, 3), (8, 2), (8, 4), (9, 3), (12, 2), (10, 2), (14, 2)]),
    st.integers(0, 100),
)
def test_groups_are_equal_complete_and_no_worse_than_adjacent(
    counts: tuple[int, int], seed: int
) -> None:
    count, num_groups = counts
    score = distances(seed, count)
    groups = similar_groups(count, num_groups, score)
    assert sorted(head for group in groups for head in group) == list(range(count))
    assert {len(group) for group in groups} == {count // num_groups}
    assert groups == sorted(tuple(sorted(group)) for group in groups)
    adjacent = sum(map(score, adjacent_groups(count, num_groups)))
    assert sum(map(score, groups)) <= adjacent + 1e-12
    assert groups == similar_groups(count, num_groups, score)


@given(st.integers(0, 200))
def test_no_exchange_of_two_heads_is_left_that_helps(seed: int) -> None:
    score = distances(seed, 8)
    groups = similar_groups(8, 4, score)
    total = sum(map(score, groups))
    for one in groups:
        for other in groups:
            for a in one:
                for b in other:
                    if one < other:
                        first = tuple(sorted({*one, b} - {a}))
                        second = tuple(sorted({*other, a} - {b}))
                        changed = total - score(one) - score(other) + score(first) + score(second)
                        assert changed > total * (1 - 1e-6)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_merging_alone_finds_heads_that_stand_together(size: int) -> None:
    middles = np.repeat(np.arange(12 // size) * 10.0, size)
    order = np.random.default_rng(0).permutation(12)
    points = (middles + np.random.default_rng(1).uniform(0, 1, 12))[order]
    groups = merged_groups(12, size, lambda group: float(np.var(points[list(group)])))
    assert all(np.ptp(points[list(group)]) < 1 for group in groups)


def test_neighbours_are_kept_where_merging_goes_astray() -> None:
    """Pairs that look well lead into groups that no exchange of two heads repairs."""
    pairs, neighbours = {(0, 4), (1, 5), (2, 6), (3, 7)}, {(0, 1, 2, 3), (4, 5, 6, 7)}

    def score(group: Group) -> float:
        return 0.0 if len(group) == 1 or group in pairs | neighbours else 10.0

    assert similar_groups(8, 2, score) == sorted(neighbours)


def test_one_group_and_as_many_as_heads_need_no_score() -> None:
    def score(group: Group) -> float:
        raise AssertionError(group)

    assert similar_groups(4, 1, score) == [(0, 1, 2, 3)]
    assert similar_groups(3, 3, score) == [(0,), (1,), (2,)]


def test_scrambled_copies_find_each_other() -> None:
    heads = scramble(repeat(make_layer(0, num_heads=12, num_kv_heads=3), 4), 1)
    score = GroupScore(layer_grams(heads, make_statistics(0)), 4)
    groups = similar_groups(12, 3, score)
    assert sum(map(score, groups)) < 1e-9
    assert sum(map(score, adjacent_groups(12, 3))) > 0.1


@pytest.mark.parametrize(
    "freedom",
    [halves(6), halves(6, rotary=2), halves(6, rotary=0), replace(halves(6), fixed="a norm")],
    ids=["planes", "both", "free", "fixed"],
)
def test_the_score_is_what_the_shared_heads_lose(freedom: KeyFreedom) -> None:
    heads = make_layer(1, freedom=freedom)
    grams = layer_grams(heads, make_statistics(1))
    score, group = GroupScore(grams, 2), (0, 3)
    keys = [fit_keys(grams, [head], "svd", 16).total for head in range(4)]
    values = [fit_values(grams, [head], "svd").total for head in range(4)]
    expected = fit_keys(grams, group, "svd", 16).lost / sum(keys)
    expected += fit_values(grams, group, "svd").lost / sum(values)
    assert score(group) == pytest.approx(expected)
    assert score((2,)) == 0


def test_many_wide_heads_are_grouped_by_their_strong_directions_in_seconds() -> None:
    """32 heads that share the strong half of their values with 15 others, the weak with 15 more."""
    noise = np.random.default_rng(2)
    heads = make_layer(2, num_heads=32, num_kv_heads=32, value_width=16)
    strong = noise.standard_normal((2, 8, 25))[np.repeat([0, 1], 16)]
    weak = 0.01 * noise.standard_normal((2, 8, 25))[np.tile([0, 1], 16)]
    strong[:, :, 12:] = weak[:, :, :12] = 0
    value = np.concatenate([strong, weak], axis=1)
    key = np.repeat(heads.key[:1], 32, axis=0)
    heads = replace(heads, key=key, value=value, output=np.repeat(heads.output[:, :1], 32, axis=1))
    order = [int(head) for head in noise.permutation(32)]
    for head in range(32):
        heads = mix_value(heads, head, noise.standard_normal((16, 16)) + 2 * np.eye(16))
    even = LayerStatistics(np.eye(25), None, None, 1)
    grams = layer_grams(permute(heads, order), even)
    begin = time.process_time()
    groups = similar_groups(32, 2, GroupScore(grams, 16))
    assert time.process_time() - begin < 20
    assert {frozenset(order[head] // 16 for head in group) for group in groups} == {
        frozenset({0}),
        frozenset({1}),
    }
