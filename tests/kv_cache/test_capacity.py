"""What fits, how models split over GPUs, and the bounds that bandwidth sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gqaconvert.errors import UsageError
from gqaconvert.kv_cache.capacity import (
    check_degree,
    kv_heads_per_gpu,
    longest_context,
    requests_that_fit,
)
from gqaconvert.kv_cache.roofline import decode_tokens_per_s, prefill_seconds


def test_two_terabytes_a_second_and_a_gigabyte_of_cache():
    assert decode_tokens_per_s(2e12, 0, 1e9) == 2000
    assert round(decode_tokens_per_s(2e12, 14e9, 1e9)) == 133


def test_nothing_to_read_has_no_bound():
    assert decode_tokens_per_s(2e12, 0, 0) is None


def test_prefill_takes_two_operations_a_parameter_and_token():
    assert prefill_seconds(300e12, 7e9, 1000) == pytest.approx(14e12 / 300e12)


@pytest.mark.parametrize(("free", "each", "count"), [(8, 2, 4), (8, 3, 2), (1, 2, 0), (-5, 2, 0)])
def test_requests_are_counted_whole(free, each, count):
    assert requests_that_fit(free, each) == count


def test_requests_that_take_nothing_are_not_limited():
    assert requests_that_fit(8, 0) is None


@given(free=st.integers(0, 10**6), each=st.integers(1, 1000))
def test_the_longest_context_fits_and_one_more_token_does_not(free, each):
    longest = longest_context(free, lambda tokens: tokens * each)
    assert longest * each <= free < (longest + 1) * each


def test_windows_alone_have_no_longest_context():
    assert longest_context(100, lambda tokens: min(tokens, 50)) is None
    assert longest_context(-1, lambda tokens: min(tokens, 50)) == 0


@pytest.mark.parametrize(("kv_heads", "gpus", "each"), [(8, 1, 8), (8, 4, 2), (8, 8, 1), (1, 8, 1)])
def test_kv_heads_on_each_gpu(kv_heads, gpus, each):
    check_degree(gpus, 32, kv_heads)
    assert kv_heads_per_gpu(kv_heads, gpus) == each


def test_query_heads_must_divide():
    with pytest.raises(UsageError, match="9 query heads do not split") as error:
        check_degree(2, 9, 3)
    assert error.value.remedy == "--tp 1, 3, 9"


def test_kv_heads_must_divide_or_be_replicated_evenly():
    with pytest.raises(UsageError, match="6 KV heads can be neither"):
        check_degree(4, 12, 6)
