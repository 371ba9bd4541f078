"""Tiny random models of the classes that transformers ships, to test conversions on.

The entries are in zoo.yaml: ZOO holds what can be converted, MHA_ONLY what cannot hold fewer KV
heads, REFUSED what must not be converted. What they claim is checked in test_zoo.py.
Nothing here knows gqaconvert.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
import yaml
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

Layout = Literal["split", "blocks", "per_group", "per_head"]

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,  # not hidden_size / num_attention_heads: whoever assumes that fails
    "max_position_embeddings": 64,
    "sliding_window": 6,  # shorter than the prompts, so that it matters
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""Common sizes, applied where a config class has the field and the entry does not say otherwise."""

NUM_HEADS = 4
"""Query heads of every model."""

_FIRST_WORD = 7  # ids below are special somewhere: padding, end, image placeholders
_LAST_WORD = 90
_NOISE = 0.1
_SPLIT = ("model.layers.*.self_attn.k_proj.weight", "model.layers.*.self_attn.v_proj.weight")
_FORWARD_THROUGH = {"Llama4ForConditionalGeneration": "language_model"}
"""Composite classes whose own forward fails without an image in transformers 5.24."""


@dataclass(frozen=True)
class Entry:
    """One tiny model and what is known of it; the fields are explained at the top of zoo.yaml."""

    name: str
    type: str
    config: Mapping[str, Any]
    class_name: str | None = None
    variant: str = ""
    layout: Layout = "split"
    changes: tuple[str, ...] = _SPLIT
    kv_keys: tuple[str, ...] = ("num_key_value_heads",)
    config_changes: tuple[str, ...] = ()
    legal: tuple[int, ...] = (4, 2, 1)
    tolerance: float = 1e-5
    sizes: bool = True
    composite: bool = False
    cache_all: bool = False
    ties: bool = True
    refusal: str | None = None
    _pattern: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "config_changes", self.config_changes or self.kv_keys)
        names = "|".join(re.escape(name).replace(r"\*", r"\d+") for name in self.changes)
        object.__setattr__(self, "_pattern", re.compile(names))

    @property
    def mqa(self) -> bool:
        """Whether the class can hold a single KV head."""
        return 1 in self.legal

    def is_changed(self, tensor: str) -> bool:
        """Whether a tensor on disk depends on the number of KV heads."""
        return self._pattern.fullmatch(tensor) is not None


def _read_entries(section: str) -> dict[str, Entry]:
    entries = {}
    for name, fields in _DOCUMENT[section].items():
        fields = dict(fields)
        for key in ("changes", "config_changes", "kv_keys", "legal"):
            if key in fields:
                fields[key] = tuple(fields[key])
        class_name = fields.pop("class", None)
        entry = {"type": name, "config": {}, **fields, "class_name": class_name}
        entries[name] = Entry(name=name, **entry)
    return entries


_DOCUMENT = yaml.safe_load(Path(__file__).with_name("zoo.yaml").read_text(encoding="utf-8"))

ZOO = _read_entries("convertible")
MHA_ONLY = _read_entries("mha_only")
REFUSED = _read_entries("refused")


def build(
    name: str,
    *,
    num_kv_heads: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tied: bool | None = None,
) -> PreTrainedModel:
    """Build the model of an entry, every parameter random, in eval mode with eager attention.

    Args:
        name: of an entry in ZOO, MHA_ONLY or REFUSED.
        num_kv_heads: one of the entry's legal numbers; by default the largest. Nothing to
            the classes in MHA_ONLY.
        seed: of the weights.
        dtype: of the weights.
        tied: `tie_word_embeddings`; by default what the class does.
    """
    entry = {**ZOO, **MHA_ONLY, **REFUSED}[name]
    kv_heads = entry.legal[0] if num_kv_heads is None else num_kv_heads
    config_class = CONFIG_MAPPING[entry.type]
    settings = _settings(entry, config_class, kv_heads, tied)
    config = config_class(**settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if entry.class_name is None:
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        else:
            model_class = getattr(transformers, entry.class_name)
            model = model_class._from_config(config, attn_implementation="eager")
        _perturb(model)
    return _cast(model, dtype).eval()


def logits(model: PreTrainedModel, seed: int = 0, *, length: int = 11) -> torch.Tensor:
    """Logits (2, T, vocabulary) on random tokens that depend on the seed alone, without a cache."""
    model = text_model(model)
    with torch.no_grad():
        return model(**inputs(model, seed, length=length), use_cache=False).logits


def text_model(model: PreTrainedModel) -> PreTrainedModel:
    """The module to call with text alone: the model itself, except where its class cannot."""
    through = _FORWARD_THROUGH.get(type(model).__name__)
    return model if through is None else getattr(model, through)


def inputs(model: PreTrainedModel, seed: int = 0, *, length: int = 11) -> dict[str, torch.Tensor]:
    """Random inputs of a forward pass: tokens, and what an encoder reads where there is one."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(_FIRST_WORD, _LAST_WORD, (2, length), generator=generator)
    if not getattr(model.config, "is_encoder_decoder", False):
        return {"input_ids": tokens}
    if model.main_input_name == "input_features":
        shape = (2, model.config.num_mel_bins, 2 * model.config.max_source_positions)
        sound = torch.randn(shape, generator=generator).to(model.dtype)
        return {"input_features": sound, "decoder_input_ids": tokens}
    source = torch.randint(_FIRST_WORD, _LAST_WORD, (2, length + 2), generator=generator)
    return {"input_ids": source, "decoder_input_ids": tokens}


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; NaN where either holds one."""
    return (a.double() - b.double()).abs().max().item()


def logits_close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> bool:
    """Whether two results agree everywhere; NaN never does."""
    return a.shape == b.shape and largest_difference(a, b) <= tolerance


def save(
    model: PreTrainedModel, folder: Path, *, shards: int = 1, dtype: torch.dtype | None = None
) -> Path:
    """Write a checkpoint of at least `shards` files (for 1: exactly one), and return its folder.

    Args:
        model: what to save; not modified.
        folder: where to.
        shards: how many files to aim at; a tensor is never split.
        dtype: of the weights on disk, by default the model's.
    """
    if dtype is not None and dtype != model.dtype:
        model = _cast(copy.deepcopy(model), dtype)
    size_bytes = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    limit = "50GB" if shards == 1 else math.ceil(size_bytes / shards)
    model.save_pretrained(folder, max_shard_size=limit)
    return folder


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors on disk, by name."""
    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118
    return shapes


def load_cleanly(folder: Path) -> PreTrainedModel:
    """Load with plain `from_pretrained`, class and type as in config.json; all keys must match.

    Raises:
        AssertionError: a key is missing, unexpected or mismatched, or another fault reported.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model_class = getattr(transformers, config["architectures"][0])
    model, report = model_class.from_pretrained(
        folder,
        dtype="auto",
        attn_implementation="eager",
        local_files_only=True,
        ignore_mismatched_sizes=True,  # to report all of them, not to accept any
        output_loading_info=True,
    )
    faults = {kind: sorted(map(str, keys)) for kind, keys in report.items() if keys}
    if faults:
        raise AssertionError(f"{folder} does not load cleanly: {faults}")
    return model.eval()


def _settings(entry: Entry, config_class: type, kv_heads: int, tied: bool | None) -> dict[str, Any]:
    settings = copy.deepcopy(dict(entry.config))
    if entry.sizes:
        settings = _common_sizes(config_class) | settings
    text = settings.get("text_config")
    if text is not None:
        settings["text_config"] = _common_sizes(CONFIG_MAPPING[text["model_type"]]) | text
    for key in entry.kv_keys:
        *path, last = key.split(".")
        level = settings
        for part in path:
            level = level[part]
        level[last] = kv_heads == 1 if last == "multi_query" else kv_heads
    if tied is not None:
        for level in (settings, settings.get("text_config")):
            if level is not None:
                level["tie_word_embeddings"] = tied
    return settings


def _common_sizes(config_class: type) -> dict[str, Any]:
    known = {each.name for each in dataclasses.fields(config_class)}
    return {key: value for key, value in SIZES.items() if key in known}


def _perturb(model: PreTrainedModel) -> None:
    """Add noise to everything: biases that start at 0 and gains at 1 would hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(_NOISE * torch.randn(parameter.shape))
        for name, buffer in model.named_buffers():
            if name.endswith("_bias"):  # the rest is computed from the config or from other buffers
                buffer.add_(_NOISE * torch.randn(buffer.shape))


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Change what a checkpoint holds, but not rotary tables, which loading makes in float32."""
    stored = set(model.state_dict())
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for name, buffer in model.named_buffers():
        if name in stored and buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)
    return model
