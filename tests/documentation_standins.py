"""What stands in for the models and texts that the pages name.

A folder of a model's name wins over the Hub, so the commands of the pages run as written on these:
checkpoints with the heads of the real ones and next to nothing else, and, for verbs that read
configs and headers alone, ones with the real shapes whose weights are holes in a file.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import NUMPY, llama_config, llama_tensors, write_safetensors

import gqaconvert

REPOSITORY = Path(gqaconvert.__file__).resolve().parent.parent
_TINY = Path(gqaconvert.__file__).resolve().parent / "bundled" / "tiny"

SMALL: dict[str, tuple[int, int]] = {
    "MODEL": (16, 16),
    "llama2-7b": (32, 32),
    "smollm2": (9, 3),
    "smollm2-mha": (9, 9),
    "smollm2-mqa": (9, 1),
}
"""Query and KV heads of the models that commands run on, by the names the pages use."""

REAL: dict[str, dict[str, Any]] = {
    "llama2-7b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
    },
    "Qwen/Qwen2.5-0.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    },
}
"""The real shapes, for verbs that read no weights: as in the config.json of each."""

REFUSED: dict[str, dict[str, Any]] = {
    "TheBloke/Llama-2-7B-GPTQ": {
        **REAL["llama2-7b"],
        "quantization_config": {"quant_method": "gptq", "bits": 4},
    },
    "deepseek-ai/DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "vocab_size": 102400,
    },
    "bigscience/bloom-560m": {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": 1024,
        "n_layer": 24,
        "n_head": 16,
        "vocab_size": 250880,
    },
}
"""Models whose config alone is refused; their weights are a single tensor here."""

TEXTS = ("wikitext2-valid.txt", "wikitext2-test.txt", "corpus.txt")
"""Texts the pages name; each a few chapters of Python's own documentation here."""

_HEAD_DIM = 8
_TEXT_BYTES = 60_000


def furnish(folder: Path) -> None:
    """Put into a folder what a reader of the pages has: models, texts, recipes and configs."""
    shelf = folder / ".standins"
    for name, (heads, kv_heads) in SMALL.items():
        _write_small(shelf / "small" / name, heads, kv_heads)
    for name, config in REAL.items():
        _write_real(shelf / "real" / name, config)
    for name, config in REFUSED.items():
        (shelf / "real" / name).mkdir(parents=True)
        (shelf / "real" / name / "config.json").write_text(json.dumps(config, indent=2))
        one = {"model.norm.weight": np.zeros(8, NUMPY["F16"])}
        write_safetensors(shelf / "real" / name / "model.safetensors", one)
    for name in {*SMALL, *REAL, *REFUSED}:
        (folder / name).parent.mkdir(exist_ok=True)
        place_model(folder, name, real=name not in SMALL)
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    for number, name in enumerate(TEXTS):
        start = number * _TEXT_BYTES
        (folder / name).write_text(text[start : start + _TEXT_BYTES], encoding="utf-8")
    for name in ("recipes", "configs"):
        shutil.copytree(REPOSITORY / name, folder / name)
    recipe = (folder / "recipes" / "tiny-cpu.yaml").read_text(encoding="utf-8")
    (folder / "RECIPE").write_text(recipe, encoding="utf-8")


def place_models(folder: Path, *, real: bool) -> None:
    """Let the names of models mean their real shapes where there are any, or what can be run."""
    for name in SMALL:
        if (folder / name).is_symlink():  # not where a command has made it
            place_model(folder, name, real=real and name in REAL)


def place_model(folder: Path, name: str, *, real: bool) -> None:
    """Let one name mean one of the two."""
    link = folder / name
    link.unlink(missing_ok=True)
    link.symlink_to((folder / ".standins" / ("real" if real else "small") / name).resolve())


def _write_small(folder: Path, heads: int, kv_heads: int) -> None:
    folder.mkdir(parents=True)
    for path in _TINY.iterdir():
        if "token" in path.name:
            shutil.copy(path, folder)
    vocabulary = json.loads((_TINY / "config.json").read_text())["vocab_size"]
    shape: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": _HEAD_DIM}
    shape |= {"vocab": vocabulary, "tied": True}
    tensors = llama_tensors(**shape)
    small = {
        name: tensor if "norm" in name else (tensor * 0.1).astype(NUMPY["BF16"])
        for name, tensor in tensors.items()
    }
    write_safetensors(folder / "model.safetensors", small)
    config = llama_config(**shape) | {"max_position_embeddings": 32768}
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def _write_real(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    tag = {"float16": "F16", "bfloat16": "BF16"}[config["torch_dtype"]]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in _real_shapes(config):
        start, end = end, end + 2 * int(np.prod(tensor))
        header[name] = {"dtype": tag, "shape": list(tensor), "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + end)


def _real_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of a Llama's tensors, or of a Qwen's, which has biases."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = hidden // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * head_dim
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "mlp.down_proj.weight", (hidden, inner)
        yield prefix + "mlp.gate_proj.weight", (inner, hidden)
        yield prefix + "mlp.up_proj.weight", (inner, hidden)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        for part, rows in (("q", hidden), ("k", kv), ("v", kv), ("o", hidden)):
            yield f"{prefix}self_attn.{part}_proj.weight", (rows, hidden)
            if config["model_type"] == "qwen2" and part != "o":
                yield f"{prefix}self_attn.{part}_proj.bias", (rows,)
    yield "model.norm.weight", (hidden,)
