"""One row of an estimate: a combination of KV heads, context, batch, element type and GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from gqaconvert.kv_cache.capacity import (
    check_degree,
    kv_heads_per_gpu,
    longest_context,
    requests_that_fit,
)
from gqaconvert.kv_cache.element_types import StorageType
from gqaconvert.kv_cache.mixed import MixedLengths, mixed_lengths
from gqaconvert.kv_cache.model_config import ModelConfig
from gqaconvert.kv_cache.parameters import intermediate_width
from gqaconvert.kv_cache.question import PREFILL_TOKENS, Question
from gqaconvert.kv_cache.roofline import decode_tokens_per_s, prefill_seconds
from gqaconvert.kv_cache.sizes import (
    CachedLayer,
    CachedLayers,
    cache_bytes,
    cached_layers,
    token_bytes,
)
from gqaconvert.kv_cache.states import constant_state
from gqaconvert.kv_cache.weights import Weights


@dataclass(frozen=True, slots=True)
class Row:
    """One combination. Bytes are those on one GPU.

    Attributes:
        kv_heads: of the whole model.
        context: tokens of each request.
        batch: requests.
        kv_dtype: element type of the cache.
        tp: tensor-parallel degree.
        kv_heads_per_gpu: max(1, kv_heads ÷ tp).
        replicated: KV heads are fewer than GPUs, so that several keep the same.
        kv_bytes_per_token: what one more token of one request adds before windows are full.
        kv_bytes: keys and values of the batch.
        kv_bytes_in_transformers: the same where transformers itself runs the model.
        state_bytes: states of constant size of the batch; None when the config does not tell.
        weights_bytes: None when unknown.
        activations_bytes: working memory; None when unknown, and then not in the total.
        reserve_bytes: for the framework.
        total_bytes: weights + activations + KV + states + reserve; None without weights.
        memory_bytes: of the GPU.
        left_for_kv_bytes: memory − weights − activations − reserve; negative when these
            alone do not fit.
        fits: whether the total does.
        concurrent_requests: (memory − weights − activations − reserve) ÷ KV of one request, each
            holding its whole context in one piece.
        concurrent_requests_paged: the same in pages.
        longest_context: tokens that fit at this batch; None without a GPU or without a limit.
        decode_tokens_per_s_bound: of each request: bandwidth ÷ (weights + batch × KV).
        decode_tokens_per_s_bound_kv_only: the same without the weights.
        decode_tokens_per_s_bound_batch: of all requests of the batch together.
        prefill_s_bound: least time to read the batch's contexts.
        mixed: what requests of mixed length need; None without --lengths.
    """

    kv_heads: int
    context: int
    batch: int
    kv_dtype: str
    tp: int
    kv_heads_per_gpu: int
    replicated: bool
    kv_bytes_per_token: float
    kv_bytes: int
    kv_bytes_in_transformers: int
    state_bytes: int | None
    weights_bytes: int | None
    activations_bytes: int | None
    reserve_bytes: int
    total_bytes: int | None
    memory_bytes: int | None
    left_for_kv_bytes: int | None
    fits: bool | None
    concurrent_requests: int | None
    concurrent_requests_paged: int | None
    longest_context: int | None
    decode_tokens_per_s_bound: float | None
    decode_tokens_per_s_bound_kv_only: float | None
    decode_tokens_per_s_bound_batch: float | None
    prefill_s_bound: float | None
    mixed: MixedLengths | None


def activations(config: ModelConfig, question: Question, context: int, batch: int) -> int | None:
    """Return the working memory of a forward pass, None where the class is not covered.

    tokens read at a time × (4 × hidden + 2 × intermediate) × 2 bytes, and batch × vocabulary × 4
    bytes of logits. Attention scores are never held whole by the kernels in use.
    """
    if question.activations_bytes is not None:
        return question.activations_bytes
    width = intermediate_width(config) or config.get("intermediate_size")
    if type(width) is not int:
        return None
    tokens = min(PREFILL_TOKENS, context * batch)
    width_bytes = 2 * (4 * config.hidden_size + 2 * width)
    return tokens * width_bytes + batch * (config.vocab_size or 0) * 4


@dataclass(frozen=True, slots=True)
class _Cache:
    """The cache of one GPU."""

    layers: CachedLayers
    kind: StorageType
    source_tokens: int | None
    state_bytes: int

    def bytes_at(self, tokens: int, batch: int = 1, page: int = 1) -> int:
        source = tokens if self.source_tokens is None else self.source_tokens
        return cache_bytes(
            self.layers, tokens, self.kind, batch=batch, source_tokens=source, page=page
        )

    def request(self, tokens: int, page: int = 1) -> int:
        return self.bytes_at(tokens, page=page) + self.state_bytes


def estimate_row(
    config: ModelConfig,
    question: Question,
    weights: Weights,
    kv_heads: int,
    gpus: int,
    kind: StorageType,
    context: int,
    batch: int,
) -> Row:
    """Work out one combination; `question` is filled in.

    Raises:
        UsageError: the model cannot be split over so many GPUs.
        UnsupportedModelError: its cache does not follow from its config.
    """
    shared_by = 1 if config.kv_lora_rank else kv_heads
    if gpus > 1 and config.num_heads:
        check_degree(gpus, config.num_heads, shared_by)
    state = constant_state(config)
    state_bytes = 0 if state is None else -(-state.size_bytes(weights.stored_as) // gpus)
    layers = _on_one_of(cached_layers(config, kv_heads), gpus)
    cache = _Cache(layers, kind, question.source_tokens, state_bytes)
    theirs = _on_one_of(cached_layers(config, kv_heads, as_transformers=True), gpus)
    memory = question.gpu.memory_bytes if question.gpu else None
    weights_bytes = weights.size(kv_heads, question.weights, gpus)
    working, reserve = activations(config, question, context, batch), question.reserve.of(memory)
    kv_bytes = cache.bytes_at(context, batch)
    total = free = None
    if weights_bytes is not None:
        fixed = weights_bytes + (working or 0) + reserve
        total = fixed + kv_bytes + batch * state_bytes
        free = None if memory is None else memory - fixed
    speed = question.bandwidth or (question.gpu.bandwidth if question.gpu else None)
    bound = bound_kv = None
    if speed is not None:
        read = kv_bytes + batch * state_bytes
        bound_kv = decode_tokens_per_s(speed, 0, read)
        share = weights.active_share(kv_heads)
        if weights_bytes is not None and share is not None:
            bound = decode_tokens_per_s(speed, weights_bytes * share, read)
    flops, active = (
        question.gpu.flops if question.gpu else None,
        weights.active_parameters(kv_heads),
    )
    return Row(
        kv_heads=kv_heads,
        context=context,
        batch=batch,
        kv_dtype=kind.name,
        tp=gpus,
        kv_heads_per_gpu=kv_heads_per_gpu(shared_by, gpus),
        replicated=0 < shared_by < gpus,
        kv_bytes_per_token=_plain(token_bytes(layers, kind)),
        kv_bytes=kv_bytes,
        kv_bytes_in_transformers=_Cache(theirs, kind, question.source_tokens, 0).bytes_at(
            context, batch
        ),
        state_bytes=None if state is None else batch * state_bytes,
        weights_bytes=weights_bytes,
        activations_bytes=working,
        reserve_bytes=reserve,
        total_bytes=total,
        memory_bytes=memory,
        left_for_kv_bytes=free,
        fits=None if free is None or total is None or memory is None else total <= memory,
        concurrent_requests=None
        if free is None
        else requests_that_fit(free, cache.request(context)),
        concurrent_requests_paged=None
        if free is None
        else requests_that_fit(free, cache.request(context, question.page)),
        longest_context=None
        if free is None
        else longest_context(free - batch * state_bytes, lambda n: cache.bytes_at(n, batch)),
        decode_tokens_per_s_bound=bound,
        decode_tokens_per_s_bound_kv_only=bound_kv,
        decode_tokens_per_s_bound_batch=None if bound is None else bound * batch,
        prefill_s_bound=None
        if not flops or active is None
        else prefill_seconds(flops * gpus, active, context * batch),
        mixed=None
        if question.lengths is None
        else mixed_lengths(question.lengths, lru_cache(None)(cache.request), question.page, free),
    )


def _on_one_of(layers: CachedLayers, gpus: int) -> CachedLayers:
    shares: dict[CachedLayer, int] = {}
    for layer, count in layers.items():
        share = layer.on_one_of(gpus)
        shares[share] = shares.get(share, 0) + count
    return shares


def _plain(value: float) -> float:
    return int(value) if value == int(value) else value
