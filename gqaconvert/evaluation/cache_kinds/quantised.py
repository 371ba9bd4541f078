"""`quantised:int8|int4|int2[:own|quanto|hqq]`: keys and values in fewer bits.

`own` follows KIVI (arXiv 2402.02750): keys are quantised channel by channel over 64 tokens, as some
channels are large throughout; values token by token. The last tokens, up to 63, wait in full
precision until a block of 64 is whole; what is quantised once is never quantised again. KIVI itself
keeps at least the last 128 values in full precision, and its groups may be of 32.
`quanto` and `hqq` are transformers' `QuantizedCache`, which keeps up to 128 tokens in full
precision and then quantises all of them anew. No backend has fused kernels here: each step unpacks
the cache, so tokens a second say little about what an engine would reach.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch
from transformers import Cache, QuantizedCache
from transformers.cache_utils import DynamicLayer

from gqaconvert.errors import UsageError
from gqaconvert.evaluation.cache_kinds.kind import CacheKind, CacheUnavailable
from gqaconvert.evaluation.cache_kinds.layers import decoder_config, swap_layers
from gqaconvert.evaluation.cache_kinds.packing import PackedGroups, pack, unpack
from gqaconvert.kv_cache.element_types import GROUP_ELEMENTS
from gqaconvert.modelling.models import LoadedModel

BITS = {"int8": 8, "int4": 4, "int2": 2}
"""Element types that a cache can be quantised to."""

BACKENDS = ("own", "quanto", "hqq")
"""Who quantises."""

_BLOCK = GROUP_ELEMENTS  # tokens quantised at once, so that a channel of them is a group


class PackedLayer(DynamicLayer):
    """Blocks of 64 tokens in packed groups, and up to 63 tokens as they came.

    Keys of a block are grouped along its tokens, (B, blocks, K * D, 64); its values along the
    elements of a token, (B, blocks, K * D, 64) as well. Where a token has fewer than 64 elements in
    all, a group spans several tokens.
    """

    is_croppable = False

    def __init__(self, bits: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bits = bits
        self.seen = 0
        self.packed_keys: PackedGroups | None = None
        self.packed_values: PackedGroups | None = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens, and return all: packed ones as they read back, new ones as they came."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        self.seen += key_states.shape[-2]
        read_keys = self._with_packed(self.packed_keys, keys, _keys_from_groups)
        read_values = self._with_packed(self.packed_values, values, _values_from_groups)
        whole = keys.shape[-2] // _BLOCK * _BLOCK
        if whole:
            self.packed_keys = self._append(self.packed_keys, _groups_of_keys(keys[:, :, :whole]))
            self.packed_values = self._append(
                self.packed_values, _groups_of_values(values[:, :, :whole])
            )
            # Copies, not views: the memory of what is packed must go.
            self.keys = keys[:, :, whole:].clone()
            self.values = values[:, :, whole:].clone()
        return read_keys, read_values

    def get_seq_length(self) -> int:
        """Tokens held, packed or not."""
        return self.seen

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.seen = 0
        self.packed_keys = self.packed_values = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Follow a beam search."""
        super().reorder_cache(beam_idx)
        if self.packed_keys is not None and self.packed_values is not None:
            rows = beam_idx.to(self.packed_keys.codes.device)
            self.packed_keys = self.packed_keys.select(rows)
            self.packed_values = self.packed_values.select(rows)

    def crop(self, tokens_to_remove: int) -> None:
        """Cannot be done: a block is packed as a whole."""
        raise UsageError(
            f"a quantised cache cannot take back {abs(tokens_to_remove)} tokens",
            remedy="the kind dynamic",
        )

    def _append(self, packed: PackedGroups | None, groups: torch.Tensor) -> PackedGroups:
        new = pack(groups, self.bits)
        return new if packed is None else packed.append(new, dim=1)

    def _with_packed(
        self,
        packed: PackedGroups | None,
        recent: torch.Tensor,
        restore: Any,  # noqa: ANN401
    ) -> torch.Tensor:
        if packed is None:
            return recent
        past = restore(unpack(packed, recent.dtype), recent.shape[1])
        return torch.cat([past, recent], dim=-2)


def _groups_of_keys(keys: torch.Tensor) -> torch.Tensor:
    """(B, K, T, D) → (B, blocks, K * D, 64): one channel of one head over a block of tokens."""
    blocks = torch.unflatten(keys, 2, (-1, _BLOCK))
    return blocks.permute(0, 2, 1, 4, 3).flatten(2, 3)


def _keys_from_groups(groups: torch.Tensor, heads: int) -> torch.Tensor:
    blocks = torch.unflatten(groups, 2, (heads, -1))
    return blocks.permute(0, 2, 1, 4, 3).flatten(2, 3)


def _groups_of_values(values: torch.Tensor) -> torch.Tensor:
    """(B, K, T, D) → (B, blocks, K * D, 64): elements of one token, then of the next."""
    blocks = torch.unflatten(values, 2, (-1, _BLOCK)).permute(0, 2, 3, 1, 4)
    return torch.unflatten(blocks.flatten(2), 2, (-1, GROUP_ELEMENTS))


def _values_from_groups(groups: torch.Tensor, heads: int) -> torch.Tensor:
    blocks = torch.unflatten(groups.flatten(2), 2, (_BLOCK, heads, -1))
    return blocks.permute(0, 3, 1, 2, 4).flatten(2, 3)


def quantised(element: str, backend: str = "own") -> CacheKind:
    """Return the kind with elements of 8, 4 or 2 bits.

    Args:
        element: a key of `BITS`.
        backend: one of `BACKENDS`.
    """
    bits = BITS[element]
    if backend == "own":
        return CacheKind(
            f"quantised:{element}",
            f"{element}, keys by channel and values by token in groups of 64; up to 63 recent"
            " tokens in full precision",
            lambda loaded, _tokens: swap_layers(loaded, full=lambda: PackedLayer(bits)),
        )
    return CacheKind(
        f"quantised:{element}:{backend}",
        f"{element} by {backend} in groups of 64; up to 128 recent tokens in full precision",
        lambda loaded, _tokens: _library_cache(loaded, bits, backend),
    )


_PACKAGES: Mapping[str, tuple[str, str, tuple[int, ...], int]] = {
    # backend: (package, module, bits it has, axis; those transformers' documentation advises)
    "quanto": ("optimum-quanto", "optimum.quanto", (4, 2), 0),
    "hqq": ("hqq", "hqq", (8, 4, 2), 1),
}


def _library_cache(loaded: LoadedModel, bits: int, backend: str) -> Cache:
    package, module, has_bits, axis = _PACKAGES[backend]
    if bits not in has_bits:
        raise CacheUnavailable(
            f"{package} has no cache of {bits} bits",
            remedy=f"quantised:int{bits}, or {', '.join(f'int{each}' for each in has_bits)}",
        )
    if not _installed(module):
        raise CacheUnavailable(
            f"the package {package} is not installed",
            remedy=f"pip install 'gqaconvert[{backend}]'",
        )
    swap_layers(loaded, full=lambda: PackedLayer(bits), window=_refuse_window)
    return QuantizedCache(
        backend=backend,
        config=decoder_config(loaded),
        nbits=bits,
        axis_key=axis,
        axis_value=axis,
        q_group_size=GROUP_ELEMENTS,
    )


def _refuse_window(_window: int) -> DynamicLayer:
    raise CacheUnavailable(
        "transformers' quantised caches take no layers with windows", remedy="the backend own"
    )


def _installed(module: str) -> bool:
    parent = module.partition(".")[0]
    return find_spec(parent) is not None and (parent == module or find_spec(module) is not None)
