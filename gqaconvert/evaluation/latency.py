"""Times prefill and decoding of one model at one context and batch; counts bytes of the cache.

`bench` repeats, interleaves and saves. To decode at a long context without reading a long prompt,
the cache can be filled with random keys and values of the right shape: the time of attention does
not depend on what they say.
"""

from __future__ import annotations

import inspect
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from gqaconvert.errors import GqaconvertError, UsageError
from gqaconvert.evaluation.bandwidth import synchronise
from gqaconvert.evaluation.cache_bytes import cache_bytes
from gqaconvert.evaluation.cache_kinds import CacheKind
from gqaconvert.evaluation.machine import watched_memory
from gqaconvert.modelling.models import LoadedModel

Fill = Literal["random", "prompt"]

_PROBE_TOKENS = 4
"""Read for real before the rest is filled in, so that every layer has set up its cache."""


@dataclass(frozen=True, slots=True)
class Prefill:
    """Time to the first token, of all requests of the batch together."""

    seconds: float
    peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class Decode:
    """Some steps of decoding.

    Attributes:
        seconds_per_token: wall time of a step; each gives one token to every request.
        cache_bytes: of the cache before the first step, measured.
        peak_bytes: most memory while decoding, models included; None where it is unknown.
        fill: how the cache came by its content.
    """

    seconds_per_token: float
    cache_bytes: int
    peak_bytes: int | None
    fill: Fill


@dataclass
class TimedModel:
    """One model under one cache kind; keeps the random content that its caches are filled with.

    Args:
        loaded: the model.
        kind: what its cache is.
        new_tokens: steps of decoding that are timed.
        seed: of prompts and of random content.
    """

    loaded: LoadedModel
    kind: CacheKind
    new_tokens: int = 16
    seed: int = 0
    _content: dict[tuple[object, ...], torch.Tensor] = field(default_factory=dict, repr=False)

    def reads_prompt(self, fill: Fill) -> bool:
        """Whether a prompt has to be read before decoding can be timed.

        Kinds that keep what draws attention have to see some.

        Raises:
            CacheUnavailable: the kind of cache does not work with this model.
        """
        return fill == "prompt" or _watches_attention(self.kind.make(self.loaded, 1))

    @torch.inference_mode()
    def prefill(self, context: int, batch: int) -> Prefill:
        """Read `context` tokens and give the first one of the answer.

        Raises:
            CacheUnavailable: the kind of cache does not work with this model.
        """
        prompt = self._prompt(context, batch)
        cache = self.kind.make(self.loaded, context + self.new_tokens)
        with watched_memory(self.loaded.device) as memory:
            synchronise(self.loaded.device)
            started = time.perf_counter()
            self._step(prompt, cache)
            synchronise(self.loaded.device)
            seconds = time.perf_counter() - started
        return Prefill(seconds, memory.peak_bytes)

    @torch.inference_mode()
    def decode(self, context: int, batch: int, fill: Fill = "random") -> Decode:
        """Decode `new_tokens` after `context` tokens.

        Raises:
            CacheUnavailable: the kind of cache does not work with this model.
        """
        cache, filled = self._filled(context, batch, fill)
        held = cache_bytes(cache)
        token = self._prompt(1, batch)
        with watched_memory(self.loaded.device) as memory:
            synchronise(self.loaded.device)
            started = time.perf_counter()
            for _ in range(self.new_tokens):
                token = self._step(token, cache)
            synchronise(self.loaded.device)
            seconds = time.perf_counter() - started
        return Decode(seconds / self.new_tokens, held, memory.peak_bytes, filled)

    def _step(self, token_ids: torch.Tensor, cache: Any) -> torch.Tensor:  # noqa: ANN401
        options: dict[str, Any] = {"cache": cache, "use_cache": True}
        if "logits_to_keep" in inspect.signature(self.loaded.model.forward).parameters:
            options["logits_to_keep"] = 1
        out = self.loaded.model(input_ids=token_ids, **options)
        token: torch.Tensor = out.logits[:, -1:].argmax(dim=-1)
        return token

    def _prompt(self, tokens: int, batch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        model = self.loaded.model
        # Some classes look up more than tokens in their embedding.
        vocabulary = min(
            model.get_input_embeddings().num_embeddings, model.config.get_text_config().vocab_size
        )
        drawn = torch.randint(0, vocabulary, (batch, tokens), generator=generator)
        return drawn.to(self.loaded.device)

    def _filled(self, context: int, batch: int, fill: Fill) -> tuple[Any, Fill]:
        cache = self.kind.make(self.loaded, context + self.new_tokens)
        if fill == "prompt" or context <= _PROBE_TOKENS or _watches_attention(cache):
            self._step(self._prompt(context, batch), cache)
            return cache, "prompt"
        shapes = self._shapes(batch)
        self._step(self._prompt(_PROBE_TOKENS, batch), cache)
        for number, (keys, values) in shapes.items():
            rest = context - _PROBE_TOKENS
            cache.update(self._random(keys, rest), self._random(values, rest), number)
        if cache.get_seq_length() != context:
            raise GqaconvertError(
                f"the {self.kind.name} cache of {self.loaded.name} cannot be filled:"
                f" it holds {cache.get_seq_length()} tokens for {context}",
                remedy="--fill prompt, which reads a prompt of that length",
            )
        return cache, "random"

    def _shapes(self, batch: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """One token's keys and values of every layer that caches them."""
        from transformers import DynamicCache  # at its side all layers show what they hold

        cache: Any = DynamicCache(config=self.loaded.model.config)
        self._step(self._prompt(1, batch), cache)
        return {
            number: (layer.keys, layer.values)
            for number, layer in enumerate(cache.layers)
            if isinstance(getattr(layer, "keys", None), torch.Tensor) and layer.keys.numel()
        }

    def _random(self, like: torch.Tensor, tokens: int) -> torch.Tensor:
        shape = (*like.shape[:-2], tokens, like.shape[-1])
        key = (shape, like.dtype)
        if key not in self._content:
            # One context at a time: what was drawn for another would only take memory.
            for old in [held for held in self._content if held[0][-2] != tokens]:  # type: ignore[index]
                del self._content[old]
            generator = torch.Generator(like.device).manual_seed(self.seed)
            drawn = torch.empty(shape, dtype=like.dtype, device=like.device)
            self._content[key] = drawn.normal_(generator=generator)
        return self._content[key]


def check_context(loaded: LoadedModel, tokens: int) -> str | None:
    """Refuse more tokens than a model has positions for; return a note where it is out of its own.

    Raises:
        UsageError: learned positions end before.
    """
    model = loaded.model
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding) and any(
            part in name.rsplit(".", 1)[-1] for part in ("pos", "wpe")
        ):
            if tokens > module.num_embeddings:
                raise UsageError(
                    f"{loaded.name} has learned positions for {module.num_embeddings} tokens;"
                    f" context and new tokens are {tokens}",
                    at=name,
                    remedy="a shorter --context",
                )
            return None
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and tokens > limit:
        return (
            f"{loaded.name} was made for {limit:,} tokens; beyond that the time is right, but what"
            " it says is not"
        )
    return None


def _watches_attention(cache: Any) -> bool:  # noqa: ANN401
    return any(hasattr(layer, "observe") for layer in cache.layers)
