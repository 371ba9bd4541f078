"""Bytes of a model's weights, for any number of KV heads and any element type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gqaconvert.kv_cache.element_types import STORAGE_TYPES, StorageType
from gqaconvert.kv_cache.model_config import ModelConfig
from gqaconvert.kv_cache.parameters import count_parameters, kv_projection_parameters

Origin = Literal["headers", "config", "given", "unknown"]

_SIXTEEN_BITS = STORAGE_TYPES["fp16"]


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """What the headers beside a config say.

    Attributes:
        parameters: elements of floating type.
        size_bytes: of all tensors.
        dtype: of most of them, as config.json would name it; None to go by the config.
    """

    parameters: int
    size_bytes: int
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of one model.

    Attributes:
        config: the model.
        origin: where the count comes from: headers of the files, the config, the user, nowhere.
        parameters: of the model as it is; None when unknown.
        active: of these, what one token passes; None when unknown.
        matrices: of these, in matrices of layers, which quantisation makes smaller.
        size_bytes: as stored or as given, None when it follows from the element type.
        stored_as: element type of the weights as they are.
    """

    config: ModelConfig
    origin: Origin
    parameters: int | None
    active: int | None
    matrices: int | None
    size_bytes: int | None
    stored_as: StorageType

    def size(self, kv_heads: int, kind: StorageType | None, gpus: int = 1) -> int | None:
        """Return the bytes on one of several GPUs, None when unknown.

        K and V projections shrink with the number of KV heads, and are replicated with them;
        everything else is divided by the number of GPUs.

        Args:
            kv_heads: of the converted model.
            kind: element type, or None for the weights as they are.
            gpus: tensor-parallel degree.
        """
        whole = self._whole(kv_heads, kind)
        if whole is None or gpus == 1:
            return whole
        projections = self._projection_bytes(kv_heads, kind or self.stored_as)
        copies = max(1, gpus // kv_heads) if kv_heads else 1
        return -(-(whole + projections * (copies - 1)) // gpus)

    def active_share(self, kv_heads: int) -> float | None:
        """Return the share of the weights that one token passes, None when unknown."""
        if not self.parameters or self.active is None:
            return None if _has_experts(self.config) else 1.0
        less = self._fewer_parameters(kv_heads)
        return (self.active - less) / (self.parameters - less)

    def active_parameters(self, kv_heads: int) -> int | None:
        """Return how many parameters one token passes, None when unknown."""
        return None if self.active is None else self.active - self._fewer_parameters(kv_heads)

    def _whole(self, kv_heads: int, kind: StorageType | None) -> int | None:
        if self.size_bytes is not None and (kind is None or self.origin == "given"):
            less = self._fewer_parameters(kv_heads)
            each = self.stored_as.bits / 8
            if self.parameters and (self.origin == "given" or self.config.quantization):
                each = self.size_bytes / self.parameters  # of an unknown mixture of types
            return self.size_bytes - round(less * each)
        if self.parameters is None:
            return None
        kind = kind or self.stored_as
        less = self._fewer_parameters(kv_heads)
        if not kind.grouped:
            return kind.size_bytes(self.parameters - less)
        # Quantised weights leave embeddings, head, norms and biases in 16 bits.
        matrices = self.parameters if self.matrices is None else self.matrices
        rest = _SIXTEEN_BITS.size_bytes(self.parameters - matrices)
        return kind.size_bytes(matrices - less) + rest

    def _fewer_parameters(self, kv_heads: int) -> int:
        """Return what the conversion takes away; negative when KV heads are repeated."""
        now = self.config.num_kv_heads
        if not now or kv_heads == now:
            return 0
        before = kv_projection_parameters(self.config, now)
        return before - kv_projection_parameters(self.config, kv_heads)

    def _projection_bytes(self, kv_heads: int, kind: StorageType) -> int:
        if not kv_heads or not self.config.num_kv_heads:
            return 0
        return kind.size_bytes(kv_projection_parameters(self.config, kv_heads))


def weights_of(
    config: ModelConfig, stored: StoredWeights | None = None, given_bytes: int | None = None
) -> Weights:
    """Find out about a model's weights: what the user says, else the headers, else the config."""
    counted = count_parameters(config)
    dtype = (stored.dtype if stored else None) or config.dtype
    kind = STORAGE_TYPES[_NAMES.get(dtype or "", "fp16")]
    active = counted.active if counted else None
    matrices = counted.matrices if counted else None
    if given_bytes is not None:
        parameters = counted.total if counted else None
        return Weights(config, "given", parameters, active, matrices, given_bytes, kind)
    if stored is not None and config.quantization:  # packed elements tell nothing of their number
        parameters = counted.total if counted else None
        return Weights(config, "headers", parameters, active, matrices, stored.size_bytes, kind)
    if stored is not None:
        if matrices is None:
            vocabulary = config.vocab_size or 0
            ends = vocabulary * config.hidden_size * (1 if config.tie_word_embeddings else 2)
            matrices = max(0, stored.parameters - ends)
        if counted is not None:  # towers beside the language model, biases of quantisation
            active = stored.parameters - (counted.total - counted.active)
        else:
            active = None if _has_experts(config) else stored.parameters
        return Weights(
            config, "headers", stored.parameters, active, matrices, stored.size_bytes, kind
        )
    if counted is None:
        return Weights(config, "unknown", None, None, None, None, kind)
    return Weights(config, "config", counted.total, active, matrices, None, kind)


def _has_experts(config: ModelConfig) -> bool:
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((config.get(key) or 0) > 1 for key in keys if isinstance(config.get(key), int))


_NAMES: Mapping[str, str] = {
    "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}  # fmt: skip
