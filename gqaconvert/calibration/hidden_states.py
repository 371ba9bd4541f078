"""Hidden states between two layers, one tensor a batch: in memory, or in two files by turns.

With files, those that a layer reads stay whole until all that it writes are there, so that a killed
process can go on from the last finished layer.
"""

from __future__ import annotations

from pathlib import Path

import torch


class HiddenStates:
    """Hidden states of all batches: those that enter a layer, and those that left it so far.

    Args:
        first: what enters the first layer, one tensor a batch; on the CPU.
        folder: where to keep the files; None to keep all in memory.
        turn: which of the two files holds what is read, when going on with an earlier walk.
        keep: leave the content of the files as it is.
    """

    def __init__(
        self,
        first: list[torch.Tensor],
        folder: Path | None = None,
        *,
        turn: int = 0,
        keep: bool = False,
    ) -> None:
        self.turn = turn
        self._in_memory = folder is None
        if folder is None:
            self.turn = 0
            self._sides = [list(first), []]
            return
        self._sides = [_mapped(folder / f"hidden-{side}.bin", first) for side in (0, 1)]
        if not keep:
            for kept, tensor in zip(self._sides[turn], first, strict=True):
                kept.copy_(tensor)

    def __len__(self) -> int:
        return len(self._sides[self.turn])

    def read(self, batch: int) -> torch.Tensor:
        """Return what enters the present layer."""
        return self._sides[self.turn][batch]

    def write(self, batch: int, hidden: torch.Tensor) -> None:
        """Keep what leaves it; batches come in order."""
        if self._in_memory:
            self._sides[1 - self.turn][batch:] = [hidden.cpu()]
        else:
            self._sides[1 - self.turn][batch].copy_(hidden)

    def advance(self) -> None:
        """Go on to the next layer, which reads what the last one wrote."""
        if self._in_memory:
            self._sides[self.turn] = []
        self.turn = 1 - self.turn


def _mapped(path: Path, like: list[torch.Tensor]) -> list[torch.Tensor]:
    dtype = like[0].dtype
    count = sum(tensor.numel() for tensor in like)
    whole = torch.from_file(str(path), shared=True, size=count, dtype=dtype)
    parts, begin = [], 0
    for tensor in like:
        parts.append(whole[begin : begin + tensor.numel()].view(tensor.shape))
        begin += tensor.numel()
    return parts
