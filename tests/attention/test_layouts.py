"""Orders of head blocks, against orders written out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gqaconvert.attention.layouts import block_rows, head_order, pooled_sources


def spelled(layout, num_heads, num_kv_heads):
    return " ".join(
        f"{role}{number}" for role, number in head_order(layout, num_heads, num_kv_heads)
    )


@pytest.mark.parametrize(
    ("layout", "heads", "kv_heads", "expected"),
    [
        ("k", 4, 2, "k0 k1"),
        ("v", 4, 2, "v0 v1"),
        ("blocks", 4, 2, "q0 q1 q2 q3 k0 k1 v0 v1"),
        ("per_head", 2, 2, "q0 k0 v0 q1 k1 v1"),
        ("per_group", 4, 2, "q0 q1 k0 v0 q2 q3 k1 v1"),
        ("per_group", 2, 2, "q0 k0 v0 q1 k1 v1"),
        ("per_group", 3, 1, "q0 q1 q2 k0 v0"),
    ],
)
def test_order_of_blocks(layout, heads, kv_heads, expected):
    assert spelled(layout, heads, kv_heads) == expected


def test_per_head_holds_no_fewer_kv_heads():
    with pytest.raises(ValueError, match="not 2"):
        head_order("per_head", 4, 2)


def test_rows_of_a_block():
    assert block_rows("blocks", 8 * 16, 4, 2) == 16
    assert block_rows("k", 32, 4, 2) == 16
    with pytest.raises(ValueError, match="do not divide into 8 heads"):
        block_rows("per_group", 100, 4, 2)


@given(st.integers(1, 12), st.integers(1, 12))
def test_groups_are_neighbours_and_cover_each_head_once(wanted, size):
    groups = [pooled_sources(wanted * size, wanted, number) for number in range(wanted)]
    assert [head for group in groups for head in group] == list(range(wanted * size))
    assert {len(group) for group in groups} == {size}


@given(st.integers(1, 12), st.integers(1, 12))
def test_repeating_is_the_reverse_of_pooling(kv_heads, repeats):
    for number in range(kv_heads * repeats):
        (source,) = pooled_sources(kv_heads, kv_heads * repeats, number)
        assert number in pooled_sources(kv_heads * repeats, kv_heads, source)


@given(st.sampled_from([(layout, g) for layout in ("blocks", "per_group") for g in (1, 2, 4, 8)]))
def test_every_head_has_one_place(case):
    layout, kv_heads = case
    order = head_order(layout, 8, kv_heads)
    assert len(set(order)) == len(order) == 8 + 2 * kv_heads
