"""Losses of a chunk of logits and their gradients, in closed form.

Softmaxes are in float32 whatever the model computes in. Buffers as large as the logits are few, and
each is used again in place: three in float32, four where next token and divergence are mixed,
beside the logits of student and teacher.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from gqaconvert.errors import UsageError


class TopK(NamedTuple):
    """A teacher's likeliest tokens at N positions; all others are one bucket, "the rest".

    Attributes:
        indices: (N, k), int64.
        log_probs: (N, k), at the temperature of the loss.
        rest: (N,), probability of the rest.
    """

    indices: torch.Tensor
    log_probs: torch.Tensor
    rest: torch.Tensor


@dataclass(frozen=True)
class LossWeights:
    """How the losses of one position add up.

    Attributes:
        next_token: weight of the cross entropy.
        distill: weight of the divergence × temperature².
        temperature: logits of both models are divided by it before the divergence.
        top_k: compare the teacher's k likeliest tokens and the rest; None for all tokens.
    """

    next_token: float
    distill: float
    temperature: float = 1.0
    top_k: int | None = None


class LogitLosses(NamedTuple):
    """Losses of C positions.

    Attributes:
        next_token: sum of cross entropies, scalar.
        distill: sum of divergences × temperature², scalar.
        gradient: (C, vocabulary), of the weighted sum by the logits; None where none is wanted or
            all weights are 0.
    """

    next_token: torch.Tensor
    distill: torch.Tensor
    gradient: torch.Tensor | None


def losses_of_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    teacher: torch.Tensor | TopK | None,
    weights: LossWeights,
    wanted: bool,
) -> LogitLosses:
    """Compute the losses of C positions.

    Args:
        logits: (C, vocabulary), left as they are.
        targets: (C,), int64.
        teacher: its logits (C, vocabulary), its top k, or None for no divergence.
        weights: of the losses.
        wanted: whether to compute the gradient.

    Raises:
        UsageError: teacher and student predict other tokens.
    """
    by_next = weights.next_token if wanted else 0.0
    by_distill = weights.distill if wanted and teacher is not None else 0.0
    gradient: torch.Tensor | None = None
    log_q = _log_softmax(logits, 1.0)
    next_token = -log_q.gather(-1, targets[:, None]).sum()
    if by_next:
        gradient = log_q.exp().mul_(by_next)
        gradient.scatter_add_(-1, targets[:, None], gradient.new_full((len(targets), 1), -by_next))
    if teacher is None:
        return LogitLosses(next_token, torch.zeros_like(next_token), gradient)
    temperature = weights.temperature
    if temperature != 1.0:
        del log_q
        log_q = _log_softmax(logits, temperature)
    if isinstance(teacher, TopK):
        divergence, difference = _top_k_divergence(log_q, teacher)
    else:
        if teacher.shape != logits.shape:
            raise UsageError(
                f"the teacher predicts {teacher.shape[-1]} tokens, the student {logits.shape[-1]}",
                remedy="a teacher with the student's tokenizer",
            )
        if weights.top_k is not None:
            top = top_k_of(teacher, weights.top_k, temperature)
            divergence, difference = _top_k_divergence(log_q, top)
        else:
            divergence, difference = _divergence(log_q, _log_softmax(teacher, temperature))
    if by_distill:
        # τ² of the loss, 1/τ of the logits.
        difference.mul_(by_distill * temperature)
        gradient = difference if gradient is None else gradient.add_(difference)
    return LogitLosses(next_token, divergence * temperature**2, gradient)


def top_k_of(logits: torch.Tensor, k: int, temperature: float = 1.0) -> TopK:
    """The k likeliest tokens of logits (N, vocabulary); all of them where k is larger."""
    log_probs = _log_softmax(logits, temperature)
    top = log_probs.topk(min(k, log_probs.shape[-1]), dim=-1)
    # The sum of what is left, not 1 minus what is not: exact however small.
    rest = log_probs.exp_().scatter_(-1, top.indices, 0.0).sum(-1)
    return TopK(top.indices, top.values, rest)


def _divergence(log_q: torch.Tensor, log_p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of KL(p ‖ q), and q − p (C, vocabulary). Both arguments are overwritten."""
    p = log_p.exp()
    # A token that the teacher rules out adds nothing, but 0 × −∞ would be no number.
    divergence = log_p.sub_(log_q).mul_(p).masked_fill_(p == 0, 0.0).sum()
    return divergence, log_q.exp_().sub_(p)


def _top_k_divergence(log_q: torch.Tensor, top: TopK) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of KL(p ‖ q) over k tokens and the rest, and its gradient; `log_q` is overwritten.

    The gradient is q − p on the k tokens, and q · (1 − p_rest / q_rest) on each other.
    """
    tiny = torch.finfo(log_q.dtype).tiny
    log_p, p_rest = top.log_probs.to(log_q.dtype), top.rest.to(log_q.dtype)
    p = log_p.exp()
    log_q_top = log_q.gather(-1, top.indices)
    others = log_q.exp_().scatter_(-1, top.indices, 0.0)
    q_rest = others.sum(-1).clamp_min(tiny)
    divergence = (p * (log_p - log_q_top)).masked_fill_(p == 0, 0.0).sum()
    divergence += (p_rest * (p_rest.clamp_min(tiny) / q_rest).log()).sum()
    others.mul_((1 - p_rest / q_rest)[:, None])
    return divergence, others.scatter_(-1, top.indices, log_q_top.exp() - p)


def _log_softmax(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    kind = softmax_type(logits.dtype)
    if temperature != 1.0:
        logits = logits.to(kind) / temperature
    return logits.log_softmax(-1, dtype=kind)


def softmax_type(kind: torch.dtype) -> torch.dtype:
    """Type in which logits of a type are made into probabilities and losses."""
    return torch.float64 if kind == torch.float64 else torch.float32
