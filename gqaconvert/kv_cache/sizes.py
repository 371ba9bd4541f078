"""Bytes of keys and values, layer by layer.

2 × layers × KV heads × head_dim × tokens × batch × bytes an element, for ordinary models. What
differs is in `CachedLayer`: windows, latents, index keys, cross attention. `cached_layers` reads
them off a config; the rest is arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from gqaconvert.errors import UnsupportedModelError
from gqaconvert.kv_cache.element_types import StorageType
from gqaconvert.kv_cache.layer_attention import LayerAttention, LayerKind
from gqaconvert.kv_cache.model_config import ModelConfig

_GROWING: frozenset[LayerKind] = frozenset({"full", "sliding", "chunked"})

_INDEX_WIDTH = {
    "deepseek_sparse_attention": "index_head_dim",
    "indexed_attention": "index_head_dim",
    "minimax_m3_sparse": "index_head_dim",
}
_OTHER_INDEX_WIDTH = "indexer_head_dim"


@dataclass(frozen=True, slots=True)
class CachedLayer:
    """What one layer, or the cross attention of one, keeps of a token.

    Attributes:
        heads: KV heads; 1 for a latent, which is not split into heads.
        key_elements: width of all its keys.
        value_elements: width of all its values.
        window: tokens kept at most, None for all.
        index_elements: width of the key by which an indexer picks tokens.
        of_source: keeps tokens of the encoder, once, instead of the decoder's.
    """

    heads: int
    key_elements: int
    value_elements: int
    window: int | None = None
    index_elements: int = 0
    of_source: bool = False

    def on_one_of(self, gpus: int) -> CachedLayer:
        """Return the share of one of several GPUs: whole heads, at least one.

        Fewer heads than GPUs are replicated, so that nothing more is saved.
        """
        heads = max(1, self.heads // gpus)
        return replace(
            self,
            heads=heads,
            key_elements=self.key_elements * heads // self.heads,
            value_elements=self.value_elements * heads // self.heads,
        )

    def tokens_kept(self, tokens: int, between_steps: bool = False) -> int:
        """Return how many of `tokens` are kept.

        Args:
            tokens: seen so far.
            between_steps: a full window lacks its oldest token while no step is running, as the
                next one pushes it out; transformers' caches drop it, engines with pages do not.
        """
        if self.window is None:
            return tokens
        return min(tokens, self.window - 1 if between_steps else self.window)


CachedLayers = Mapping[CachedLayer, int]
"""Layers that are alike → how many there are."""


def cached_layers(
    config: ModelConfig, kv_heads: int | None = None, *, as_transformers: bool = False
) -> CachedLayers:
    """Read what every layer keeps of a token.

    Args:
        config: the model.
        kv_heads: as if it had been converted to so many; as it is by default.
        as_transformers: where transformers' own code keeps more than the model needs, see
            `transformers_caches_all_heads`.

    Raises:
        UnsupportedModelError: a kind of cache whose size does not follow from the config.
    """
    layers: Iterable[LayerAttention] = config.layers
    if as_transformers and transformers_caches_all_heads(config):
        kv_heads = config.num_heads
    if kv_heads is not None and kv_heads != config.num_kv_heads:
        layers = _with_kv_heads(layers, config.num_kv_heads, kv_heads)
    counts = Counter[CachedLayer]()
    passes = _passes(config)
    of_images = config.get("cross_attention_layers") or ()
    for number, layer in enumerate(layers):
        if layer.kind == "compressed":
            raise UnsupportedModelError(
                f"{layer.type_name} layers keep fewer entries than tokens; how many is not known",
                at=config.at,
                remedy="measure the cache of the running model",
            )
        if layer.kind not in _GROWING or layer.shared:
            continue
        cached = _cached(layer, config)
        cross = replace(cached, window=None, of_source=True)
        if number in of_images:  # Mllama: these layers look at images alone
            counts[cross] += 1
            continue
        counts[cached] += passes.get(number, 1)
        if config.is_encoder_decoder:
            counts[cross] += 1
    return counts


def reads_a_source(config: ModelConfig) -> bool:
    """Whether some layers keep keys and values of an encoder's tokens, or of an image's."""
    return config.is_encoder_decoder or bool(config.get("cross_attention_layers"))


def _passes(config: ModelConfig) -> Mapping[int, int]:
    """Layers that a token passes several times, each time with a cache of its own."""
    count = len(config.layers)
    if config.text_model_type == "dory" and config.get("recurrent_kv_cache_mode") == "per_loop":
        first, last = config.get("n_input_layers"), count - config.get("n_output_layers")
        return dict.fromkeys(range(first, last), config.get("n_recurrent_loops"))
    if (passes := config.get("loop_num_passes")) is not None:
        looped = range(config.get("loop_layer_index_start"), config.get("loop_layer_index_end"))
        return dict.fromkeys(looped, passes)
    return {}


def _cached(layer: LayerAttention, config: ModelConfig) -> CachedLayer:
    index = 0
    if layer.type_name in _INDEX_WIDTH:
        index = config.get(_INDEX_WIDTH[layer.type_name]) or config.get(_OTHER_INDEX_WIDTH) or 0
    if config.kv_lora_rank:
        # Multi-head latent attention: one latent for all heads, and one rotary key beside it.
        return CachedLayer(1, config.kv_lora_rank, config.qk_rope_head_dim or 0, None, index)
    heads = layer.num_kv_heads
    return CachedLayer(heads, heads * layer.head_dim, heads * layer.v_head_dim, layer.window, index)


def transformers_caches_all_heads(config: ModelConfig) -> bool:
    """Whether transformers repeats the KV heads of this class before it caches them.

    Falcon's does, so its cache there is that of full multi-head attention; other engines keep the
    KV heads alone.
    """
    falcon = config.section.record.rules.get("kv_heads") == "falcon"
    return falcon and config.kv_heads_key != ("multi_query",)


def cache_bytes(
    layers: CachedLayers,
    tokens: int,
    element: StorageType,
    *,
    batch: int = 1,
    source_tokens: int = 0,
    page: int = 1,
    between_steps: bool = False,
) -> int:
    """Return the bytes of all keys and values, states of constant size left out.

    Args:
        layers: from `cached_layers`.
        tokens: seen so far, prompt and answer together, in each request.
        element: of the cache.
        batch: requests.
        source_tokens: that the encoder has read, in each request.
        page: tokens of a page; what is kept is rounded up to whole ones.
        between_steps: see `CachedLayer.tokens_kept`.
    """
    total = 0
    for layer, count in layers.items():
        seen = source_tokens if layer.of_source else tokens
        kept = layer.tokens_kept(seen, between_steps)
        rows = batch * -(-kept // page) * page
        # Keys and values are quantised apart, and each layer for itself.
        total += count * sum(
            element.size_bytes(rows * width)
            for width in (layer.key_elements, layer.value_elements, layer.index_elements)
        )
    return total


def token_bytes(layers: CachedLayers, element: StorageType) -> float:
    """Return what one more token of one request adds, before any window is full."""
    row = sum(
        count * (layer.key_elements + layer.value_elements + layer.index_elements)
        for layer, count in layers.items()
        if not layer.of_source
    )
    return element.size_bytes(row * 64) / 64


def kv_bytes_per_token(config: ModelConfig, element_bytes: int, kv_heads: int | None = None) -> int:
    """Return what one more token adds to the cache, before any window is full.

    Args:
        config: the model.
        element_bytes: bytes of one element of the cache.
        kv_heads: as if it had been converted to so many; as it is by default.

    Raises:
        UnsupportedModelError: a kind of cache whose size does not follow from the config.
    """
    plain = StorageType(f"{element_bytes} bytes", 8 * element_bytes)
    return int(token_bytes(cached_layers(config, kv_heads), plain))


def _with_kv_heads(
    layers: Iterable[LayerAttention], before: int, after: int
) -> list[LayerAttention]:
    """Return the layers as they are once `before` KV heads have become `after`."""
    return [replace(layer, num_kv_heads=layer.num_kv_heads * after // before) for layer in layers]
