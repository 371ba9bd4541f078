"""Mixed lengths: percentiles and files, padding and pages."""

from __future__ import annotations

import json

import pytest

from gqaconvert.errors import UsageError
from gqaconvert.kv_cache.lengths import Lengths, read_lengths
from gqaconvert.kv_cache.mixed import mixed_lengths


def test_percentiles_come_out_as_they_went_in():
    lengths = read_lengths("p50=500,p99=8000")
    assert lengths.longest == 8000
    assert lengths.tokens[500] == pytest.approx(500, rel=0.01)
    assert sum(count >= 7999 for count in lengths.tokens) == pytest.approx(10, abs=1)
    assert 800 < lengths.mean < 1100  # of the log-normal through both, cut at the top: about 970


def test_more_percentiles_and_units():
    lengths = read_lengths("p99=4k, p50=1k,p90=2k")
    assert lengths.tokens[900] == pytest.approx(2048, rel=0.01)
    assert lengths.longest == 4096


@pytest.mark.parametrize("content", ["3\n1\n2\n", "[3, 1, 2]"])
def test_files(content, tmp_path):
    (tmp_path / "lengths.txt").write_text(content)
    lengths = read_lengths(str(tmp_path / "lengths.txt"))
    assert lengths.tokens == (1, 2, 3)
    assert (lengths.mean, lengths.longest) == (2, 3)


@pytest.mark.parametrize(
    "text",
    ["p50=500", "p50=0,p99=5", "p99=5,p50=8", "p50=1,p50=2", "p100=4,p5=2", "x=1,p5=3", "no-file"],
)
def test_what_is_no_distribution_is_refused(text):
    with pytest.raises(UsageError) as error:
        read_lengths(text)
    assert "p50=500,p99=8000" in error.value.remedy


@pytest.mark.parametrize("content", ["", "1\nx\n", "[0, 4]", json.dumps({"a": 1})])
def test_files_that_hold_no_lengths_are_refused(content, tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text(content)
    with pytest.raises(UsageError):
        read_lengths(str(path))


def test_padding_wastes_what_pages_save():
    # 100 bytes a token, requests of 10 and 30 tokens.
    def request(tokens: int, page: int) -> int:
        return 100 * -(-tokens // page) * page

    mixed = mixed_lengths(Lengths((10, 30), "two"), request, page=16, free_bytes=9000)
    assert mixed.needed_bytes == 2000
    assert mixed.padded_bytes == 3000
    assert mixed.padding_waste == pytest.approx(1 / 3)
    assert mixed.paged_bytes == (1600 + 3200) / 2
    assert mixed.page_waste == pytest.approx(400 / 2400)
    assert (mixed.concurrent_requests, mixed.concurrent_requests_paged) == (3, 3)
    roomy = mixed_lengths(Lengths((10, 30), "two"), request, page=1, free_bytes=9000)
    assert (roomy.concurrent_requests, roomy.concurrent_requests_paged) == (3, 4)
