"""One micro-batch of packed sequences: what data gives, and what the loss takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class Batch:
    """Sequences that one device reads at once.

    Attributes:
        token_ids: (B, T), int64.
        counted: (B, T), bool: whether a token counts as a target. A token is predicted from those
            before it, so column 0 never counts, nor does the first token of a document when
            documents are kept apart.
        position_ids: (B, T), int64, starting again at 0 with each document, when documents are kept
            apart; else None.
        sequence_numbers: (B,), int64: places in the global order, the same whatever the number of
            processes.
        cursor: where reading stands after the last of these sequences: plain JSON values, from
            which a stream of any number of processes goes on.
    """

    token_ids: torch.Tensor
    counted: torch.Tensor
    position_ids: torch.Tensor | None
    sequence_numbers: torch.Tensor
    cursor: Mapping[str, Any]

    @property
    def num_counted(self) -> int:
        """Tokens that count as targets."""
        return int(self.counted.sum())

    def to(self, device: torch.device | str) -> Batch:
        """Return the same batch on a device."""
        positions = self.position_ids
        return replace(
            self,
            token_ids=self.token_ids.to(device, non_blocking=True),
            counted=self.counted.to(device, non_blocking=True),
            position_ids=None if positions is None else positions.to(device, non_blocking=True),
        )
