"""What a reader has to know about the figures of an estimate, a sentence each."""

from __future__ import annotations

from collections.abc import Iterator

from gqaconvert.kv_cache.layer_attention import LayerAttention
from gqaconvert.kv_cache.model_config import ModelConfig
from gqaconvert.kv_cache.parameters import intermediate_width
from gqaconvert.kv_cache.question import PREFILL_TOKENS, Question
from gqaconvert.kv_cache.sizes import reads_a_source, transformers_caches_all_heads
from gqaconvert.kv_cache.states import constant_state
from gqaconvert.kv_cache.weights import Weights


def estimate_notes(config: ModelConfig, question: Question, weights: Weights) -> tuple[str, ...]:
    """Return the notes, most important first; `question` is filled in."""
    return (
        *_about_weights(config, question, weights),
        *_about_layers(config, question),
        *_about_heads(config, question),
        *_about_memory(config, question, weights),
    )


def _about_weights(config: ModelConfig, question: Question, weights: Weights) -> Iterator[str]:
    if weights.origin == "unknown":
        yield (
            f"weights not counted: the parameters of {config.model_type} are not known from its"
            " config; give --weights-size"
        )
    if weights.origin == "given" and question.weights:
        yield "--weights-size wins over --weights"
    if weights.origin == "config" and config.text_path:
        yield f"weights are those of {'.'.join(config.text_path)}; towers beside it are not counted"
    if config.quantization and question.weights is None and weights.origin != "headers":
        yield (
            f"the config says the weights are quantised ({config.quantization}), but not how small"
            f" that makes them; counted as {weights.stored_as.name}: give --weights or"
            " --weights-size"
        )
    if config.dtype is None and weights.origin in ("config", "unknown"):
        yield f"the config names no dtype; {weights.stored_as.name} is assumed"
    share = weights.active_share(config.num_kv_heads)
    if share is None:
        yield "which of its experts a token passes is not known, so the decode bound is left out"
    elif share < 1:
        yield (
            f"a token passes {share:.0%} of the weights (experts); the decode bound reads only"
            " those, and larger batches read more"
        )


def _about_layers(config: ModelConfig, question: Question) -> Iterator[str]:
    count = config.num_layers
    for kind in ("sliding", "chunked"):
        windows = sorted({_window(layer) for layer in config.layers if layer.kind == kind})
        if windows:
            number = sum(layer.kind == kind for layer in config.layers)
            yield (
                f"{number} of {count} layers keep at most {' or '.join(f'{w:,}' for w in windows)}"
                " tokens, and stop growing there"
            )
    if config.kv_lora_rank:
        yield (
            f"multi-head latent attention: a token keeps a latent of {config.kv_lora_rank} and a"
            f" rotary key of {config.qk_rope_head_dim} a layer, whatever the number of heads;"
            " GPUs under --tp keep it whole"
        )
    if config.num_kv_shared_layers:
        yield (
            f"{config.num_kv_shared_layers} of {count} layers keep nothing and read the keys and"
            " values of earlier ones"
        )
    states = sum(layer.constant_state for layer in config.layers)
    if states:
        found = constant_state(config)
        told = "is not counted: the config does not tell its size"
        if found is not None:
            told = (
                f"({found.elements:,} elements a request, the recurrent ones in fp32) is counted"
                " beside the KV cache"
            )
        yield f"the state of constant size of {states} of {count} layers {told}"
    if reads_a_source(config):
        if question.source_tokens is None:
            source = "as many tokens as the context is taken to have; --source-tokens says else"
        else:
            source = f"{question.source_tokens:,} tokens"
        yield f"cross attention also keeps the encoder's keys and values, of {source}"


def _window(layer: LayerAttention) -> int:
    return layer.window or 0


def _about_heads(config: ModelConfig, question: Question) -> Iterator[str]:
    if transformers_caches_all_heads(config):
        yield (
            f"transformers caches all {config.num_heads} heads of this class, whatever the number"
            " of KV heads; other engines keep the KV heads alone, as counted here"
        )
    changed = set(question.kv_heads) != {config.num_kv_heads}
    if changed and not config.declares_kv_heads:
        yield (
            f"{config.model_type} has no number of KV heads; `gqaconvert inspect` tells whether it"
            " can become a class that has"
        )
    below = [
        f"{heads} on {gpus}"
        for gpus in question.degrees
        for heads in question.kv_heads
        if 0 < heads < gpus and not config.kv_lora_rank
    ]
    if below:
        yield (
            f"fewer KV heads than GPUs ({', '.join(below)}): every GPU keeps one whole head,"
            " replicated, so that nothing more is saved than with as many heads as GPUs"
        )
    if question.degrees != (1,):
        yield "bytes are those on each GPU; weights are divided by --tp, replicated K and V aside"


def _about_memory(config: ModelConfig, question: Question, weights: Weights) -> Iterator[str]:
    made_for = config.max_position_embeddings
    longest = max(question.contexts)
    if made_for is not None and longest > made_for:
        yield f"{longest:,} tokens are beyond the {made_for:,} positions the model was made for"
    grouped = [kind.name for kind in question.kv_types if kind.grouped]
    if grouped:
        yield (
            f"KV in {', '.join(grouped)} has a scale and a zero point of 16 bits for each group of"
            " 64 elements"
        )
    if question.weights is not None and question.weights.grouped and weights.origin != "given":
        yield (
            f"{question.weights.name} weights: matrices of layers, with scales and zero points;"
            " embeddings, head and norms stay in 16 bits"
        )
    if question.activations_bytes is None:
        if intermediate_width(config) or config.get("intermediate_size"):
            yield (
                f"activations = up to {PREFILL_TOKENS:,} prompt tokens at a time × (4 × hidden"
                " + 2 × intermediate) × 2 B + batch × vocabulary × 4 B"
            )
        else:
            yield "activations not counted: give --activations"
    if question.gpu is not None:
        yield (
            "fit: requests at a time = (memory − weights − activations − reserve) ÷ KV of one"
            f" request, in one piece or in pages of {question.page} tokens; longest: the context"
            " that fits at this batch"
        )
    if question.bandwidth or (question.gpu and question.gpu.bandwidth):
        yield (
            "tokens/s of each request ≤ bandwidth ÷ (weights + batch × KV); without the weights in"
            " brackets"
        )
