"""What people do without this package: load the model with transformers, mean-pool, save.

The baseline of `benchmarks/convert.py`.

    python benchmarks/peer_mean_pool.py SOURCE OUT --kv-heads 8
"""

from __future__ import annotations

import argparse

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--kv-heads", type=int, required=True)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.source, dtype="auto")
    config, wanted = model.config, arguments.kv_heads
    for layer in model.model.layers:
        for name in ("k_proj", "v_proj"):
            old = getattr(layer.self_attn, name)
            heads = old.weight.data.view(
                wanted, config.num_key_value_heads // wanted, config.head_dim, -1
            )
            new = torch.nn.Linear(
                old.in_features, wanted * config.head_dim, bias=False, dtype=old.weight.dtype
            )
            new.weight.data.copy_(heads.float().mean(1).reshape(wanted * config.head_dim, -1))
            setattr(layer.self_attn, name, new)
    config.num_key_value_heads = wanted
    model.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
