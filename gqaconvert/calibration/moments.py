"""Accumulates the second moments of one layer's attention input, batch by batch.

Products of a batch are summed in float32, by blocks of a few thousand tokens, whose sums are added
in float64. A float32 sum of n terms of one sign errs by about sqrt(n) roundings, 4e-6 of itself for
4,096 terms, and the sum over batches adds nothing to it: far below the sampling error of the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from gqaconvert.calibration.attention_weights import Scale, WeightSums, on_scale
from gqaconvert.calibration.decoder_layers import LayerAttention
from gqaconvert.surgery.layer_heads import Floats, LayerStatistics

NEVER_REPORTED = "attention does not go through transformers' attention interface"

_BLOCK_TOKENS = 4096


@dataclass
class _Sum:
    total: torch.Tensor | None = None

    def add(self, product: torch.Tensor) -> None:
        self.total = product.double() if self.total is None else self.total.add_(product)

    def over(self, count: int) -> Floats:
        if self.total is None:
            raise ValueError("nothing was added")
        mean = self.total / count
        result: Floats = ((mean + mean.T) / 2).cpu().numpy()
        return np.ascontiguousarray(result)


class LayerMoments:
    """Second moments of the inputs of one attention block.

    Use `watching` around runs of the layer.

    Args:
        attention: the block.
        weighted: gather those that need attention weights too.
    """

    def __init__(self, attention: LayerAttention, *, weighted: bool = True) -> None:
        self.tokens = 0
        self.fault: str | None = None
        self._attention = attention
        self._weighted = weighted
        self._inputs, self._averaged, self._attended = _Sum(), _Sum(), _Sum()
        self._latest: torch.Tensor | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Add whatever the layer reads meanwhile."""

        def keep(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            self._latest = args[0].detach()

        with ExitStack() as stack:
            scale = (
                stack.enter_context(on_scale(self._attention.module)) if self._weighted else None
            )
            stack.callback(self._attention.projection.register_forward_pre_hook(keep).remove)

            def add(*_: object) -> None:
                self._add(scale)

            stack.callback(self._attention.module.register_forward_hook(add).remove)
            yield

    def statistics(self) -> LayerStatistics:
        """Return the moments of all that was read."""
        complete = self._weighted and self.fault is None
        return LayerStatistics(
            inputs=self._inputs.over(self.tokens),
            averaged=self._averaged.over(self.tokens) if complete else None,
            attended=self._attended.over(self.tokens) if complete else None,
            tokens=self.tokens,
        )

    def _add(self, scale: Scale | None) -> None:
        inputs, self._latest = self._latest, None
        if inputs is None:
            return
        extended = torch.cat([inputs.float(), inputs.new_ones(*inputs.shape[:-1], 1).float()], -1)
        self.tokens += extended.shape[:-1].numel()
        flat = extended.flatten(0, -2)
        for begin in range(0, len(flat), _BLOCK_TOKENS):
            block = flat[begin : begin + _BLOCK_TOKENS]
            self._inputs.add(block.T @ block)
        if scale is None or self.fault is not None:
            return
        self.fault = scale.fault or (NEVER_REPORTED if scale.last is None else None)
        if scale.last is not None and self.fault is None:
            self._add_weighted(extended, scale.last)
            scale.last = None

    def _add_weighted(self, extended: torch.Tensor, sums: WeightSums) -> None:
        """Add one call's moments; each batch row is one window, of up to a few thousand tokens."""
        for window, shared, received in zip(extended, sums.shared, sums.received, strict=True):
            self._averaged.add(window.T @ (shared @ window) / sums.heads)
            self._attended.add((window * received[:, None]).T @ window / sums.heads)
