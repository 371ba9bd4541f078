"""A model as training runs it: hidden states of whole sequences, logits of chosen positions.

Built anew for each forward pass from the model and the name of its body, since data parallelism
may have exchanged parameters in between.
"""

from __future__ import annotations

from typing import Any

import torch

from gqaconvert.errors import UsageError
from gqaconvert.modelling.head import (
    body_hidden,
    find_body,
    head_logits,
    head_parameters,
    plain_logits,
)

_SAME_STATES = {torch.float64: 1e-8, torch.float32: 1e-3}
_SAME_ROUNDED_STATES = 5e-2
"""Largest difference of a document's states alone and packed, in standard deviations of them."""

_FLATTENED = ("flash_attention_2", "flash_attention_3")
"""Attention that reads the bounds of documents off positions only where all lie in one row."""


class SplitModel:
    """Runs the body of a causal language model over sequences, and its head over positions.

    Where the two cannot run apart, "hidden states" are the logits themselves and the head does
    nothing: correct, and as large in memory as logits are.

    Args:
        model: of transformers, wrapped or not.
        body_name: from `find_body_name`.
    """

    def __init__(self, model: Any, body_name: str | None) -> None:  # noqa: ANN401
        self.model = model
        self.body = None if body_name is None else model.get_submodule(body_name)

    def hidden(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Hidden states (B, T, M) as the head takes them.

        Args:
            token_ids: (B, T).
            position_ids: (B, T), starting again at 0 with each document that is kept apart.
        """
        shape = token_ids.shape
        inputs = {}
        if position_ids is not None:
            if self.model.config.get_text_config()._attn_implementation in _FLATTENED:
                token_ids, position_ids = token_ids.reshape(1, -1), position_ids.reshape(1, -1)
            inputs["position_ids"] = position_ids
        if self.body is None:
            states = plain_logits(self.model, token_ids, **inputs)
        else:
            states = body_hidden(self.body, token_ids, **inputs)
        return states.reshape(*shape, states.shape[-1])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits (C, vocabulary) of hidden states (C, M)."""
        if self.body is None:
            return hidden
        return head_logits(self.model, self.body, hidden[None]).squeeze(0)

    def head_parameters(self) -> list[torch.nn.Parameter]:
        """Parameters that logits depend on beside the hidden states."""
        return [] if self.body is None else head_parameters(self.model, self.body)

    def vocabulary(self) -> int:
        """Count the tokens it predicts, by predicting one."""
        token = torch.zeros(1, 1, dtype=torch.long, device=self.model.device)
        with torch.no_grad():
            return int(self.logits(self.hidden(token)[0]).shape[-1])

    def check_documents_apart(self) -> None:
        """Try on random tokens that documents packed into one row do not see each other.

        Raises:
            UsageError: they do, as with layers that carry a state along or attention without masks.
        """
        lengths = ((5, 7), (8, 4))  # rows that differ, since masks of batches are where this fails
        vocabulary = int(self.model.config.get_text_config().vocab_size)
        generator = torch.Generator().manual_seed(0)
        token_ids = torch.randint(vocabulary, (2, 12), generator=generator).to(self.model.device)
        rows = [torch.cat([torch.arange(n) for n in row]) for row in lengths]
        positions = torch.stack(rows).to(token_ids.device)
        fault = None
        with torch.no_grad():
            try:
                packed = self.hidden(token_ids, positions)
                for row, (first, second) in enumerate(lengths):
                    alone = self.hidden(token_ids[row : row + 1, first:])[0].double()
                    apart = (packed[row, first:].double() - alone).abs().max() / alone.std()
                    if float(apart) > _SAME_STATES.get(packed.dtype, _SAME_ROUNDED_STATES):
                        fault = f"a document of {second} tokens changes with the one before it"
            except (TypeError, ValueError) as error:
                fault = str(error).splitlines()[0]
        if fault is not None:
            raise UsageError(
                f"{type(self.model).__name__} cannot keep packed documents apart: {fault}",
                at="uptrain.data.separate_documents",
                remedy="separate_documents: false",
            )


def find_body_name(model: Any) -> str | None:  # noqa: ANN401
    """Return the dotted name of a model's body, None where body and head cannot run apart.

    Args:
        model: a causal language model of transformers, whole and on one device.
    """
    training = model.training
    model.eval()  # dropout would make two runs differ
    try:
        body = find_body(model)
    finally:
        model.train(training)
    if body is None:
        return None
    return next((name for name, module in model.named_modules() if module is body), None)
