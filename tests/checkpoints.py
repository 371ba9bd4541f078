"""Small Llama-shaped checkpoints, written with numpy and read with the safetensors library."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

NUMPY = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64}


def write_safetensors(
    path: Path, tensors: dict[str, np.ndarray], metadata: dict | None = None
) -> None:
    """Write arrays in order; bf16 arrays are ml_dtypes'."""
    tags = {np.dtype(kind): tag for tag, kind in NUMPY.items()} | {np.dtype(np.int64): "I64"}
    header: dict = {"__metadata__": metadata or {"format": "pt"}}
    offset = 0
    for name, array in tensors.items():
        header[name] = {
            "dtype": tags[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(
        struct.pack("<Q", len(raw)) + raw + b"".join(a.tobytes() for a in tensors.values())
    )


def llama_tensors(
    *,
    heads=4,
    kv_heads=4,
    head_dim=8,
    layers=2,
    vocab=32,
    dtype="BF16",
    tied=False,
    bias=False,
    seed=0,
) -> dict[str, np.ndarray]:
    """Random weights of a Llama, in the order transformers writes them."""
    rng = np.random.default_rng(seed)
    hidden, inner = heads * head_dim, 24

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32).astype(NUMPY[dtype])

    tensors = {} if tied else {"lm_head.weight": draw(vocab, hidden)}
    tensors["model.embed_tokens.weight"] = draw(vocab, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = draw(hidden)
        tensors[prefix + "mlp.down_proj.weight"] = draw(hidden, inner)
        tensors[prefix + "mlp.gate_proj.weight"] = draw(inner, hidden)
        tensors[prefix + "mlp.up_proj.weight"] = draw(inner, hidden)
        tensors[prefix + "post_attention_layernorm.weight"] = draw(hidden)
        for name, rows in (("k", kv_heads), ("o", None), ("q", heads), ("v", kv_heads)):
            shape = (hidden, heads * head_dim) if rows is None else (rows * head_dim, hidden)
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = draw(*shape)
            if bias:
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = draw(shape[0])
    tensors["model.norm.weight"] = draw(hidden)
    return tensors


def llama_config(
    *, heads=4, kv_heads=4, head_dim=8, layers=2, vocab=32, dtype="BF16", tied=False, bias=False
) -> dict:
    """The config.json that goes with `llama_tensors`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * head_dim,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-05,
        "attention_bias": bias,
        "tie_word_embeddings": tied,
        "torch_dtype": {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}[
            dtype
        ],
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def write_llama(folder: Path, *, shards=1, seed=0, **shape) -> dict[str, np.ndarray]:
    """Write a whole checkpoint with sidecars; return its tensors."""
    tensors = llama_tensors(seed=seed, **shape)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(llama_config(**shape), indent=2) + "\n")
    (folder / "generation_config.json").write_text('{"bos_token_id": 1,   "eos_token_id": 2}')
    (folder / "LICENSE").write_bytes(b"licence\r\ntext \xff\n")
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "README.md").write_text("---\nlicense: llama2\ntags:\n- chat\n---\n# Source card\n")
    names = list(tensors)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return tensors
    weight_map = {}
    for number in range(shards):
        part = names[number * len(names) // shards : (number + 1) * len(names) // shards]
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        write_safetensors(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    total = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return tensors


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Read a checkpoint with the safetensors library, following its index as transformers does."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors = {}
    for file in files:
        with safe_open(folder / file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 (safe_open is no mapping)
                tensors[name] = opened.get_tensor(name)
    return tensors


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """All files of a folder with their content."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
