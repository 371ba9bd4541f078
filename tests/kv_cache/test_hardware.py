"""The table of GPUs, sizes, and tables of one's own."""

from __future__ import annotations

import pytest

from gqaconvert.errors import UsageError
from gqaconvert.kv_cache.hardware import accelerators, find_accelerator


def test_every_entry_says_where_its_figures_come_from():
    table = accelerators()
    assert {"a100-80gb", "h100-80gb", "l4", "t4", "mi300x"} <= set(table)
    for gpu in table.values():
        assert gpu.bandwidth
        assert gpu.flops
        assert len(gpu.source) > 8


@pytest.mark.parametrize("name", ["a100-80gb", "A100-80GB", "NVIDIA A100 80GB", "nvidia-a100-80gb"])
def test_a_name_is_found_however_it_is_written(name):
    gpu = find_accelerator(name)
    assert (gpu.memory_bytes, gpu.bandwidth, gpu.flops) == (80 * 2**30, 2039e9, 312e12)


def test_a_size_is_a_gpu_too():
    gpu = find_accelerator("24GiB")
    assert (gpu.memory_bytes, gpu.bandwidth, gpu.flops) == (24 * 2**30, None, None)
    assert find_accelerator("16GB").memory_bytes == 16 * 10**9


def test_an_unknown_name_is_answered_with_near_ones():
    with pytest.raises(UsageError, match="h100") as error:
        find_accelerator("h100")
    assert "h100-80gb" in error.value.remedy


def test_a_table_of_your_own_adds_and_wins(tmp_path):
    own = tmp_path / "gpus.yaml"
    own.write_text("Mine: {memory_gib: 10, bandwidth_gb_s: 5}\na10: {memory_gib: 1}\n")
    assert find_accelerator("mine", own).bandwidth == 5e9
    assert find_accelerator("a10", own).memory_bytes == 2**30
    assert find_accelerator("l4", own).memory_bytes == 24 * 2**30


@pytest.mark.parametrize(
    "content",
    ["", "- a", "x: 5", "x: {bandwidth_gb_s: 5}", "x: {memory_gib: -1}", "x: {memory_gib: a}",
     "x: {memory_gib: 1, speed: 2}", "x: [", "x: {memory_gib: true}"],
)  # fmt: skip
def test_a_table_that_is_none_is_refused_with_an_example(content, tmp_path):
    own = tmp_path / "gpus.yaml"
    own.write_text(content)
    with pytest.raises(UsageError) as error:
        accelerators(own)
    assert "memory_gib" in error.value.remedy
    with pytest.raises(UsageError):
        accelerators(tmp_path / "nowhere.yaml")
