"""Runs the body of a language model and its head apart, so that logits can be made in chunks.

Logits take vocabulary × tokens: far more than everything else in a forward pass. The head runs
through the class's own forward, in which the body is replaced for the moment by one that returns
hidden states already computed; so scales and caps that a class puts on its logits (Gemma 2,
Cohere, Granite, ...) hold. Both ways are compared on a few tokens before anyone relies on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils.generic import ModelOutput

_TRIAL_TOKENS = 8
_SAME_LOGITS = {torch.float32: 1e-4, torch.float64: 1e-8}
_SAME_ROUNDED_LOGITS = 5e-2
"""Largest difference between logits in chunks and at once, in standard deviations of the logits."""


def find_body(model: Any) -> Any | None:  # noqa: ANN401
    """Return the module whose output the class gives to its head, None where none is found.

    Args:
        model: a causal language model of transformers, on one device.
    """
    token_ids = _trial_tokens(model)
    with torch.inference_mode():
        expected = plain_logits(model, token_ids).double()
        inner = getattr(model, "model", None)
        for body in (model.base_model, model.get_decoder(), inner):
            if body not in (None, model) and _agrees(model, body, token_ids, expected):
                return body
    return None


def plain_logits(model: Any, token_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:  # noqa: ANN401
    """Logits (B, T, vocabulary) of token ids (B, T), all at once.

    Args:
        model: a causal language model of transformers.
        token_ids: (B, T).
        inputs: further inputs of the class, such as `position_ids`.
    """
    logits: torch.Tensor = model(input_ids=token_ids, use_cache=False, **inputs).logits
    return logits


def body_hidden(body: Any, token_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:  # noqa: ANN401
    """Last hidden states (B, T, M) of token ids (B, T), as the head takes them.

    Args:
        body: what `find_body` found.
        token_ids: (B, T).
        inputs: further inputs of the class, such as `position_ids`.
    """
    output = body(input_ids=token_ids, use_cache=False, return_dict=True, **inputs)
    hidden: torch.Tensor = output.last_hidden_state
    return hidden


def head_logits(model: Any, body: Any, hidden: torch.Tensor) -> torch.Tensor:  # noqa: ANN401
    """Logits (B, C, vocabulary) of hidden states (B, C, M)."""
    placeholder = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    with _replaced_forward(body, _BodyOutput(last_hidden_state=hidden)):
        return plain_logits(model, placeholder)


def head_parameters(model: Any, body: Any) -> list[torch.nn.Parameter]:  # noqa: ANN401
    """Parameters that logits depend on beside the hidden states; a tied embedding is one."""
    inside = {id(parameter) for parameter in body.parameters()}
    own = [parameter for parameter in model.parameters() if id(parameter) not in inside]
    output = model.get_output_embeddings()
    tied = [] if output is None else [p for p in output.parameters() if id(p) in inside]
    return [*own, *tied]


def _trial_tokens(model: Any) -> torch.Tensor:  # noqa: ANN401
    vocabulary = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(vocabulary, (2, _TRIAL_TOKENS), generator=generator)
    return token_ids.to(model.device)


def _agrees(
    model: Any,  # noqa: ANN401
    body: Any,  # noqa: ANN401
    token_ids: torch.Tensor,
    expected: torch.Tensor,
) -> bool:
    try:
        found = head_logits(model, body, body_hidden(body, token_ids)).double()
    except (AttributeError, TypeError, ValueError, IndexError, KeyError, RuntimeError):
        return False  # the body of this class returns something of its own
    if found.shape != expected.shape:
        return False
    spread = float((found - expected).abs().max() / expected.std())
    return spread <= _SAME_LOGITS.get(model.dtype, _SAME_ROUNDED_LOGITS)


@dataclass
class _BodyOutput(ModelOutput):
    """What heads read of a body's output; whatever else they ask for is None."""

    last_hidden_state: torch.Tensor | None = None

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _replaced_forward(module: Any, output: _BodyOutput) -> Iterator[None]:  # noqa: ANN401
    def forward(*_: Any, **__: Any) -> _BodyOutput:  # noqa: ANN401
        return output

    own = module.__dict__.get("forward")  # libraries put theirs there, as we do
    module.forward = forward  # on the instance: hides that of the class
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
