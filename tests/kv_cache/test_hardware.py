"""The table of GPUs, sizes, and tables of one's own."""

from __future__ import annotations

import pytest

from gqaconvert.errors import UsageError
from gqaconvert.kv_cache.hardware import (
    accelerator_of_device,
    accelerators,
    find_accelerator,
)


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


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80gb"),
        ("NVIDIA H100 PCIe", "h100-80gb-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("Tesla V100-SXM2-16GB", "v100-16gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_the_name_a_driver_gives_is_found(name, key):
    assert accelerator_of_device(name).key == key


@pytest.mark.parametrize(
    "name",
    ["NVIDIA L40", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 Laptop GPU",
     "Quadro RTX 6000", "NVIDIA GH200 480GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "cpu",
     "AMD Instinct MI250X / MI250"],
)  # fmt: skip
def test_another_chip_of_a_like_name_is_not_taken_for_it(name):
    assert accelerator_of_device(name) is None
