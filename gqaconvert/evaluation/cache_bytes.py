"""Measures what a cache holds, from its tensors: the counterpart of the formula in `kv_cache`.

Two measures, as in `kv_cache`: memory taken, and elements kept. They differ where a tensor is a
view of a larger one, as keys in a window are. Single numbers (counters) are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from transformers import Cache, EncoderDecoderCache

STATES = frozenset({"conv_states", "recurrent_states"})
"""Where layers keep states of constant size, which are not keys and values."""


def cache_bytes(cache: Cache, *, states: bool = True) -> int:
    """Return the bytes of memory that a cache takes: of each storage once, whole.

    Args:
        cache: of transformers' form, of any kind.
        states: count states of linear attention and convolutions, too.
    """
    storages = {}
    for tensor in _tensors(cache, states):
        storage = tensor.untyped_storage()
        storages[storage.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def cache_bytes_kept(cache: Cache, *, states: bool = True) -> int:
    """Return the bytes of the elements that a cache keeps, views counted by what they show."""
    return sum(each.numel() * each.element_size() for each in _tensors(cache, states))


def _tensors(cache: Cache, states: bool) -> Iterator[torch.Tensor]:
    parts = [cache]
    if isinstance(cache, EncoderDecoderCache):
        parts = [cache.self_attention_cache, cache.cross_attention_cache]
    for part in parts:
        for layer in part.layers:
            for name, value in vars(layer).items():
                if states or name not in STATES:
                    yield from _inside(value)


def _inside(value: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401
    if isinstance(value, torch.Tensor):
        # Wrapper classes, as quanto's, have no memory of their own but tensors inside.
        if hasattr(value, "__tensor_flatten__"):
            names, _ = value.__tensor_flatten__()
            for name in names:
                yield from _inside(getattr(value, name))
        elif value.dim():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _inside(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _inside(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from _inside(getattr(value, each.name))
