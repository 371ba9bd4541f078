"""Write a Llama-shaped checkpoint of random weights, any size, to measure speed and memory with.

    python benchmarks/random_checkpoint.py OUT --layers 32      # the shape of Llama-2-7B: 13.5 GB

Quality cannot be judged with it. Needs numpy only, and memory for one shard.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

from gqaconvert.checkpoint.index import SAFETENSORS_INDEX
from gqaconvert.checkpoint.shards import index_json, lay_out, shard_names, split_by_size
from gqaconvert.checkpoint.sidecars import write_json
from gqaconvert.checkpoint.tensors import StoredTensor

HIDDEN, INNER, HEADS, VOCABULARY = 4096, 11008, 32, 32000
_BLOCK_ELEMENTS = 1 << 25


def shapes(layers: int) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes in file order."""
    tensors = [("model.embed_tokens.weight", (VOCABULARY, HIDDEN))]
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        tensors += [(f"{prefix}self_attn.{p}_proj.weight", (HIDDEN, HIDDEN)) for p in "qkvo"]
        tensors += [(f"{prefix}mlp.{p}_proj.weight", (INNER, HIDDEN)) for p in ("gate", "up")]
        tensors.append((f"{prefix}mlp.down_proj.weight", (HIDDEN, INNER)))
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors += [(f"{prefix}{norm}.weight", (HIDDEN,)) for norm in norms]
    return [*tensors, ("model.norm.weight", (HIDDEN,)), ("lm_head.weight", (VOCABULARY, HIDDEN))]


def write(out: Path, layers: int, shard_bytes: int = 1_600_000_000) -> None:
    """Write the checkpoint shard by shard."""
    out.mkdir(parents=True)
    tensors = [StoredTensor(name, "BF16", shape, "", 0, 0) for name, shape in shapes(layers)]
    parts = split_by_size(tensors, shard_bytes)
    shards = [
        lay_out(name, part, {"format": "pt"})
        for name, part in zip(shard_names(len(parts)), parts, strict=True)
    ]
    rng = np.random.default_rng(0)
    # bf16 of N(0, 0.02): the upper half of a float32. One block is used again at random offsets.
    normal = rng.standard_normal(_BLOCK_ELEMENTS, dtype=np.float32) * np.float32(0.02)
    block = (normal.view(np.uint32) >> 16).astype(np.uint16)
    for shard in shards:
        with (out / shard.name).open("wb") as stream:
            stream.write(shard.header)
            for tensor in shard.tensors:
                left = tensor.size_bytes // 2
                while left:
                    start = int(rng.integers(0, 1 << 20))
                    part = block[start : start + min(left, _BLOCK_ELEMENTS - start)]
                    stream.write(part.data)
                    left -= len(part)
    write_json(out / SAFETENSORS_INDEX, index_json(shards, {}))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_args()
    write(arguments.out, arguments.layers)
    print(f"{arguments.out}: {sum(f.stat().st_size for f in arguments.out.iterdir()) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
