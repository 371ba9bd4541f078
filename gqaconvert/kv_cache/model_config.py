"""Reads config.json as transformers would, without importing it.

Counts, widths, layer kinds and where they are written. What a file leaves out comes from
`class_records`, what its class derives from `class_rules`. Weights are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gqaconvert.errors import CheckpointError
from gqaconvert.kv_cache.class_rules import Section
from gqaconvert.kv_cache.config_facts import (
    Rope,
    dtype_name,
    embeddings_tied,
    quantization_method,
    read_rope,
)
from gqaconvert.kv_cache.config_file import read_json
from gqaconvert.kv_cache.config_sections import FoundSection, find_text, section_at
from gqaconvert.kv_cache.layer_attention import LayerAttention, LayerKind, read_layers


@dataclass(frozen=True)
class ModelConfig:
    """A config.json, understood.

    Counts are those of the language model: of its decoder, where there is an encoder, too.

    Attributes:
        raw: the file as it is.
        at: where it is, for messages.
        model_type: as the file says.
        text_model_type: of the section that describes the language model.
        architectures: model classes the file names.
        text_path: keys leading to the section to edit; () is the file itself, also where
            transformers lifts a flat file of old into a section. The section may be absent from the
            file when its class defaults all of it.
        known: False when transformers has no such class and plain keys were read.
        class_name: config class of the language model, "" when not known.
        declares_kv_heads: the class has a field of its own for the number of KV heads,
            `kv_heads_key`. Classes without one take the key and ignore it. multi_query, which only
            knows one head or all, counts.
        kv_heads_key: keys, from the section, under which that number is written; None without such
            a field.
        num_layers: layers.
        hidden_size: width of the residual stream.
        num_heads: query heads; 0 in a model without attention.
        num_kv_heads: key-value heads, of full-attention layers where layers differ.
        head_dim: width of one query and key head, of full-attention layers where layers differ.
        head_dim_explicit: the file says so; otherwise it follows from the class, mostly hidden_size
            / num_heads.
        head_dim_key: key, in the section, under which it would be written.
        layers: attention of each layer.
        sliding_window: width of the window; None when no layer has one, whatever the file says.
        attention_chunk_size: width of chunks; None when no layer has them.
        tie_word_embeddings: input and output embeddings are one tensor.
        dtype: as the file says, such as "bfloat16", or None.
        is_encoder_decoder: there is an encoder and cross attention.
        kv_lora_rank: width of the latent of multi-head latent attention, None in other models.
        qk_rope_head_dim: width of the rotary key beside that latent.
        num_kv_shared_layers: last layers that use the keys and values of earlier ones.
        rope: positions.
        quantization: method named by quantization_config, or None.
        max_position_embeddings: context length it was made for, None without a limit.
        vocab_size: tokens.
    """

    raw: Mapping[str, Any]
    at: str
    model_type: str
    text_model_type: str
    architectures: tuple[str, ...]
    text_path: tuple[str, ...]
    known: bool
    class_name: str
    declares_kv_heads: bool
    kv_heads_key: tuple[str, ...] | None
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_explicit: bool
    head_dim_key: str
    layers: tuple[LayerAttention, ...]
    sliding_window: int | None
    attention_chunk_size: int | None
    tie_word_embeddings: bool
    dtype: str | None
    is_encoder_decoder: bool
    kv_lora_rank: int | None
    qk_rope_head_dim: int | None
    num_kv_shared_layers: int
    rope: Rope
    quantization: str | None
    max_position_embeddings: int | None
    vocab_size: int | None
    section: Section = field(repr=False, compare=False)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer."""
        return tuple(layer.kind for layer in self.layers)

    @property
    def text(self) -> Mapping[str, Any]:
        """The section `text_path` leads to, as it is in the file; empty when absent."""
        return section_at(self.raw, self.text_path)

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ANN401
        """Return what the language model's config object would hold under `key`.

        That is what is written, else what its class derives, else the class default.
        """
        return self.section.get(key, default)


def read_config(folder: Path) -> ModelConfig:
    """Read `config.json` in a folder.

    Raises:
        CheckpointError: no such file, not valid JSON, a key twice, or as `parse_config`.
    """
    path = folder / "config.json" if folder.is_dir() else folder
    return parse_config(read_json(path), str(path))


def parse_config(raw: Mapping[str, Any], at: str) -> ModelConfig:
    """Understand the content of a config.json.

    Raises:
        CheckpointError: a key that every model needs is missing or is no count.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError(
            "config.json does not name a model_type",
            at=f"{at} model_type",
            remedy='add "model_type", such as "llama"; transformers needs it, too',
        )
    if model_type == "mistral" and "layer_types" in raw:  # as AutoConfig does
        model_type = "ministral"
    try:
        return _assemble(raw, at, find_text(raw, model_type, at))
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"a key holds a value of the wrong kind: {error}",
            at=at,
            remedy="compare it with the config.json the model was published with",
        ) from error


def _assemble(raw: Mapping[str, Any], at: str, found: FoundSection) -> ModelConfig:
    top, section, path = found.whole, found.text, found.path
    written = section_at(raw, path)
    encoder_decoder = bool(section.get("is_encoder_decoder") or top.get("is_encoder_decoder"))
    attention = read_layers(section, written, encoder_decoder, ".".join((at, *path)))
    kinds = {layer.kind for layer in attention.layers}
    architectures = raw.get("architectures") or ()

    def whole(key: str) -> int | None:
        value = section.get(key)  # of another kind, it is left to config_faults
        return value if type(value) is int else None

    return ModelConfig(
        raw=raw,
        at=at,
        model_type=str(raw["model_type"]),
        text_model_type=section.record.model_type,
        architectures=tuple(architectures) if isinstance(architectures, list) else (),
        text_path=path,
        known=bool(section.record.name),
        class_name=section.record.name,
        declares_kv_heads=attention.kv_heads_key is not None,
        kv_heads_key=attention.kv_heads_key,
        num_layers=len(attention.layers),
        hidden_size=attention.hidden_size,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        head_dim_explicit=attention.head_dim_explicit,
        head_dim_key=section.record.field_name("head_dim"),
        layers=attention.layers,
        sliding_window=whole("sliding_window") if "sliding" in kinds else None,
        attention_chunk_size=whole("attention_chunk_size") if "chunked" in kinds else None,
        tie_word_embeddings=embeddings_tied(top, section),
        dtype=dtype_name(raw) or dtype_name(written),
        is_encoder_decoder=encoder_decoder,
        kv_lora_rank=whole("kv_lora_rank"),
        qk_rope_head_dim=whole("qk_rope_head_dim"),
        num_kv_shared_layers=sum(layer.shared for layer in attention.layers),
        rope=read_rope(section, written, attention.head_dim),
        quantization=quantization_method(raw) or quantization_method(written),
        max_position_embeddings=whole("max_position_embeddings"),
        vocab_size=whole("vocab_size"),
        section=section,
    )
