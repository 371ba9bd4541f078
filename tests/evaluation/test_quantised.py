"""Packed caches: how close they read back, what is grouped with what, and that bits are bits."""

from __future__ import annotations

import pytest
import torch

from gqaconvert.evaluation.cache_kinds.packing import pack, unpack
from gqaconvert.evaluation.cache_kinds.quantised import PackedLayer


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def filled(bits: int, keys: torch.Tensor, values: torch.Tensor | None = None) -> PackedLayer:
    layer = PackedLayer(bits)
    layer.update(keys, keys if values is None else values)
    return layer


def read_back(layer: PackedLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention reads: all tokens but a new one."""
    new = torch.zeros_like(layer.keys[:, :, :0]) if layer.keys.dim() == 4 else None
    keys, values = layer.update(new, torch.zeros_like(layer.values[:, :, :0]))
    return keys, values


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_numbers_read_back_within_half_a_step(bits):
    numbers = noise(5, 3, 64) * torch.tensor([0.01, 1.0, 300.0])[:, None]
    packed = pack(numbers, bits)
    step = (numbers.amax(-1) - numbers.amin(-1)) / (2**bits - 1)
    error = (unpack(packed, torch.float32) - numbers).abs().amax(-1)
    # Scale and offset have 11 bits of their own.
    assert (error <= step / 2 + numbers.abs().amax(-1) * 2**-10).all()
    assert packed.codes.shape == (5, 3, 64 * bits // 8)
    assert packed.codes.dtype == torch.uint8
    assert {packed.step.dtype, packed.low.dtype} == {torch.float16}


def test_every_code_has_a_place_of_its_own():
    numbers = torch.arange(64.0)[None] % 4
    assert torch.equal(unpack(pack(numbers, 2), torch.float32), numbers)
    numbers = torch.arange(64.0)[None] % 16
    assert torch.equal(unpack(pack(numbers, 4), torch.float32), numbers)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_numbers_that_are_alike_come_back_as_they_were(bits):
    numbers = torch.tensor([0.0, -2.5, 1024.0])[:, None].expand(3, 64)
    assert torch.equal(unpack(pack(numbers, bits), torch.float32), numbers)


@pytest.mark.parametrize("size", [1e6, 1e-9])
def test_numbers_beyond_half_precision_stay_finite(size):
    assert torch.isfinite(unpack(pack(noise(1, 64) * size, 4), torch.float32)).all()


@pytest.mark.parametrize(
    "shape", [(1, 1, 128, 64), (2, 3, 192, 128), (2, 2, 64, 16), (1, 1, 64, 1)]
)
def test_shapes_come_back_in_order(shape):
    keys, values = noise(*shape), noise(*shape[:3], 2 * shape[3])
    got = read_back(filled(8, keys, values))
    for states, exact in zip(got, (keys, values), strict=True):
        assert states.shape == exact.shape
        assert (states - exact).abs().max() < 0.03


def test_a_block_is_packed_once_and_recent_tokens_wait():
    states = noise(1, 2, 150, 32)
    layer = filled(2, states[:, :, :70])
    assert layer.keys.shape[-2] == 6
    first = layer.packed_keys.codes.clone()
    for place in range(70, 150):
        keys, _ = layer.update(states[:, :, place : place + 1], states[:, :, place : place + 1])
        assert torch.equal(keys[:, :, -1], states[:, :, place])
        assert keys.shape[-2] == place + 1
    assert layer.packed_keys.codes.shape[1] == 2
    assert torch.equal(layer.packed_keys.codes[:, :1], first)
    assert layer.keys.shape[-2] == 150 - 128
    assert layer.get_seq_length() == 150
    # What waits is in memory of its own, not in that of the prompt.
    assert layer.keys.untyped_storage().nbytes() == layer.keys.numel() * 4


def test_a_prompt_is_packed_as_it_would_be_token_by_token():
    states = noise(2, 2, 130, 16)
    at_once = filled(4, states)
    one_by_one = filled(4, states[:, :, :1])
    for place in range(1, 130):
        one_by_one.update(states[:, :, place : place + 1], states[:, :, place : place + 1])
    assert torch.equal(at_once.packed_keys.codes, one_by_one.packed_keys.codes)
    assert torch.equal(at_once.packed_values.codes, one_by_one.packed_values.codes)


def test_a_loud_channel_of_keys_and_a_loud_token_of_values_disturb_no_other():
    keys, values = noise(1, 2, 64, 64), noise(1, 2, 64, 64)
    keys[0, 1, :, 7] *= 1000
    values[0, 1, 9, :] *= 1000
    got_keys, got_values = read_back(filled(4, keys, values))
    quiet = [channel for channel in range(64) if channel != 7]
    assert (got_keys - keys)[0, 1][:, quiet].abs().max() < 0.25
    others = [token for token in range(64) if token != 9]
    assert (got_values - values)[0, 1][others].abs().max() < 0.25


def test_a_beam_search_takes_packed_blocks_along():
    states = noise(3, 2, 70, 16)
    layer = filled(8, states)
    layer.reorder_cache(torch.tensor([2, 0, 0]))
    keys, _ = read_back(layer)
    assert (keys - states[[2, 0, 0]]).abs().max() < 0.03
