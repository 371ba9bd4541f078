"""Group-wise quantisation: 64 numbers, one scale, one offset, and codes of 8, 4 or 2 bits.

Codes are packed for real, four of 2 bits or two of 4 to a byte, so that the bytes held are those of
`kv_cache.element_types`. Rounding is to nearest between the smallest and the largest of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_LARGEST_HALF = torch.finfo(torch.float16).max


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """Groups of 64 numbers.

    Attributes:
        codes: uint8, (..., 64 * bits / 8).
        step: distance of two codes, fp16, (...).
        low: what code 0 stands for, fp16, (...).
        bits: of a code.
    """

    codes: torch.Tensor
    step: torch.Tensor
    low: torch.Tensor
    bits: int

    def append(self, other: PackedGroups, dim: int) -> PackedGroups:
        """Return these groups and others behind them along `dim`."""
        return PackedGroups(
            torch.cat([self.codes, other.codes], dim),
            torch.cat([self.step, other.step], dim),
            torch.cat([self.low, other.low], dim),
            self.bits,
        )

    def select(self, rows: torch.Tensor) -> PackedGroups:
        """Return the given places of the first dimension."""
        return PackedGroups(self.codes[rows], self.step[rows], self.low[rows], self.bits)


def pack(numbers: torch.Tensor, bits: int) -> PackedGroups:
    """Quantise groups of 64 along the last dimension, (..., 64)."""
    levels = 2**bits - 1
    exact = numbers.float()
    low = exact.amin(dim=-1).clamp(-_LARGEST_HALF, _LARGEST_HALF).half()
    # From the offset as it is stored, so that its rounding costs nothing at the upper end.
    reach = (exact.amax(dim=-1) - low.float()).clamp(min=0)
    step = (reach / levels).clamp(max=_LARGEST_HALF).half()
    # Where all numbers are alike the step is 0 and every code, too.
    divisor = torch.where(step > 0, step.float(), torch.inf)[..., None]
    codes = ((exact - low.float()[..., None]) / divisor).round().clamp(0, levels).to(torch.uint8)
    shifts = _shifts(bits, numbers.device)
    codes = (torch.unflatten(codes, -1, (-1, len(shifts))) << shifts).sum(dim=-1, dtype=torch.uint8)
    return PackedGroups(codes, step, low, bits)


def unpack(groups: PackedGroups, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that groups stand for, (..., 64)."""
    codes = groups.codes
    if groups.bits < 8:
        codes = (codes[..., None] >> _shifts(groups.bits, codes.device)) & (2**groups.bits - 1)
        codes = codes.flatten(-2)
    numbers = codes.float()
    return (numbers * groups.step.float()[..., None] + groups.low.float()[..., None]).to(dtype)


def _shifts(bits: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=device)
