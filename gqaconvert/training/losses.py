"""Losses over hidden states, chunk by chunk, so that no logits of a whole batch ever exist.

Logits of a chunk of positions are made, turned into losses and into the gradients of the chunk's
hidden states and of the head's parameters, and dropped. Nothing is computed twice: three products
with the head's weight, as in the plain way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from gqaconvert.errors import GqaconvertError
from gqaconvert.training.logit_losses import (
    LossWeights,
    TopK,
    losses_of_logits,
    softmax_type,
)

CHUNK_TOKENS = {"cpu": 1024, "cuda": 1024}
"""Positions whose logits are held at a time: enough for the head's gradient, which is written once
a chunk, to cost little beside the products."""


class LossSums(NamedTuple):
    """Sums over the positions of a micro-batch that predict a counted target; scalar tensors.

    A tuple, so that wrappers for data parallelism find the tensors in it.

    Attributes:
        next_token: cross entropy of the next token, nats.
        distill: KL divergence from the teacher × temperature²; 0 when it was not asked for.
        hidden: relative squared error of hidden states, mean over layers.
        attention: the same of attention outputs.
        counted: positions, int64.
        total: what is minimised: the weighted sum of the four over the normaliser. The only one
            with a gradient.
    """

    next_token: torch.Tensor
    distill: torch.Tensor
    hidden: torch.Tensor
    attention: torch.Tensor
    counted: torch.Tensor
    total: torch.Tensor


Head = Callable[[torch.Tensor], torch.Tensor]
"""Hidden states (C, M) → logits (C, vocabulary)."""

TeacherRows = Callable[[slice], torch.Tensor | TopK]
"""A range of the N positions → the teacher's logits (C, vocabulary) there, or its top k."""


class ChunkedSums(NamedTuple):
    """What `chunked_loss` returns: scalar tensors in float32 (float64 for a float64 model).

    Attributes:
        weighted: weighted sum, with a gradient.
        next_token: sum of cross entropies.
        distill: sum of divergences × temperature².
    """

    weighted: torch.Tensor
    next_token: torch.Tensor
    distill: torch.Tensor


def chunked_loss(
    hidden: torch.Tensor,
    targets: torch.Tensor,
    head: Head,
    parameters: Sequence[torch.Tensor],
    *,
    weights: LossWeights,
    teacher: TeacherRows | None = None,
    chunk_tokens: int | None = None,
) -> ChunkedSums:
    """Sum the losses of N positions.

    Where gradients are enabled, those of `hidden` and `parameters` are computed at once, and a
    backward pass only scales them; it can therefore be run once.

    Args:
        hidden: (N, M), what the head takes.
        targets: (N,), int64, the tokens to predict.
        head: makes logits; it may read `parameters` and nothing else that needs a gradient.
        parameters: tensors the logits depend on; those that need no gradient are skipped.
        weights: of the losses.
        teacher: gives its predictions of a range of positions; None for no divergence.
        chunk_tokens: positions a chunk; that of the device by default.

    Raises:
        UsageError: the teacher predicts other tokens than the head.
    """
    run = _Run(
        head=head,
        targets=targets,
        weights=weights,
        teacher=teacher,
        chunk_tokens=chunk_tokens or default_chunk_tokens(hidden.device.type),
    )
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if torch.is_grad_enabled() and (hidden.requires_grad or trained):
        return ChunkedSums(*_ChunkedLoss.apply(hidden, run, *trained))
    with torch.no_grad():
        return run(hidden, None, ())[0]


def default_chunk_tokens(device_type: str) -> int:
    """Positions whose logits are held at a time on a kind of device."""
    return CHUNK_TOKENS.get(device_type, CHUNK_TOKENS["cuda"])


@dataclass(frozen=True)
class _Run:
    head: Head
    targets: torch.Tensor
    weights: LossWeights
    teacher: TeacherRows | None
    chunk_tokens: int

    def __call__(
        self,
        hidden: torch.Tensor,
        hidden_gradient: torch.Tensor | None,
        parameters: Sequence[torch.Tensor],
    ) -> tuple[ChunkedSums, list[torch.Tensor | None]]:
        """Go through all chunks.

        Args:
            hidden: (N, M).
            hidden_gradient: (N, M), filled with the gradient; None where none is wanted.
            parameters: of which gradients are wanted.

        Returns:
            The sums, and gradients of the parameters, None for one that logits do not depend on.
        """
        kind = softmax_type(hidden.dtype)
        next_token, distill = (torch.zeros((), dtype=kind, device=hidden.device) for _ in range(2))
        gradients: list[torch.Tensor | None] = [None] * len(parameters)
        wanted = hidden_gradient is not None or bool(parameters)
        for begin in range(0, len(hidden), self.chunk_tokens):
            rows = slice(begin, begin + self.chunk_tokens)
            chunk = hidden[rows].detach().requires_grad_(hidden_gradient is not None)
            with torch.set_grad_enabled(wanted):
                logits = self.head(chunk)
            of_chunk = losses_of_logits(
                logits.detach(), self.targets[rows], self._teacher(rows), self.weights, wanted
            )
            next_token += of_chunk.next_token
            distill += of_chunk.distill
            if of_chunk.gradient is None:
                continue
            inputs = [*([] if hidden_gradient is None else [chunk]), *parameters]
            found = list(
                torch.autograd.grad(
                    logits, inputs, of_chunk.gradient.to(logits.dtype), allow_unused=True
                )
            )
            if hidden_gradient is not None:
                hidden_gradient[rows] = found.pop(0)
            _accumulate(gradients, found)
            del logits, of_chunk, found  # or they would stay while the next chunk is made
        weighted = self.weights.next_token * next_token + self.weights.distill * distill
        return ChunkedSums(weighted, next_token, distill), gradients

    def _teacher(self, rows: slice) -> torch.Tensor | TopK | None:
        if self.teacher is None:
            return None
        with torch.no_grad():
            return self.teacher(rows)


class _ChunkedLoss(torch.autograd.Function):
    """Ties the gradients that `_Run` finds into autograd.

    Parameters are inputs of their own, so that whoever waits for their gradients (accumulation,
    hooks of data parallelism, sharding) gets them as from any other operation, once a backward
    pass and summed with those of other uses, such as a tied embedding's.
    """

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        hidden: torch.Tensor,
        run: _Run,
        *parameters: torch.Tensor,
    ) -> ChunkedSums:
        of_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        sums, found = run(hidden.detach(), of_hidden, parameters)
        ctx.gradients = (
            of_hidden,
            None,
            *(
                torch.zeros_like(parameter) if gradient is None else gradient.to(parameter.dtype)
                for parameter, gradient in zip(parameters, found, strict=True)
            ),
        )
        ctx.mark_non_differentiable(sums.next_token, sums.distill)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, weighted: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        if ctx.gradients is None:
            raise GqaconvertError(
                "a second backward pass through one loss",
                remedy="compute the loss again, or add losses up before the only pass",
            )
        gradients: tuple[torch.Tensor | None, ...] = ctx.gradients
        ctx.gradients = None  # so that accumulation can take them over instead of copying
        if weighted.device.type == "cpu" and float(weighted) == 1.0:
            return gradients  # a pass over the head's gradient saved; on a GPU asking costs more
        return tuple(each if each is None else each.mul_(weighted) for each in gradients)


def _accumulate(gradients: list[torch.Tensor | None], found: Sequence[torch.Tensor | None]) -> None:
    """Add up in float32 at least: hundreds of chunks would drown in bfloat16's rounding."""
    for place, gradient in enumerate(found):
        if gradient is None:
            continue
        held = gradients[place]
        if held is None:
            gradients[place] = gradient.to(softmax_type(gradient.dtype))
        else:
            held.add_(gradient)
