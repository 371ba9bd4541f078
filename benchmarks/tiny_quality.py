"""What pooling alone costs the bundled model: held-out perplexity by method and KV heads.

    python benchmarks/tiny_quality.py --figure docs/figures/tiny_quality.svg

Prints a table and, on request, draws perplexity against the bytes of the KV cache.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from train_tiny import heldout_loss, pack
from transformers import AutoModelForCausalLM, AutoTokenizer

import gqaconvert
from gqaconvert.bundled.text import bundled_documents, fingerprint
from gqaconvert.checkpoint.sources import resolve_source

METHODS = {"mean": ("#0072b2", "o"), "first": ("#d55e00", "s"), "random": ("#7f7f7f", "^")}
"""Colours of Okabe and Ito, told apart by marker too."""


def perplexity(model: torch.nn.Module, tokens: object, context: int) -> float:
    return math.exp(heldout_loss(model, tokens, context, 10**9))  # type: ignore[arg-type]


def draw(
    rows: dict[str, dict[int, float]], source: float, kv_bytes: dict[int, int], path: Path
) -> None:
    mpl.rcParams["svg.hashsalt"] = "gqaconvert"  # the same bytes every time
    figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
    most = max(kv_bytes)
    for method, (colour, marker) in METHODS.items():
        heads = [most, *rows[method]]
        values = [source, *rows[method].values()]
        axes.plot([kv_bytes[h] for h in heads], values, color=colour, marker=marker, label=method)
    axes.axhline(source, color="#009e73", linestyle="--", label=f"source, {most} KV heads")
    axes.set_yscale("log")
    axes.set_yticks([20, 50, 100, 200, 300], ["20", "50", "100", "200", "300"])
    axes.minorticks_off()
    axes.set_xticks(
        list(kv_bytes.values()),
        [f"{size:,}\n{h} head{'s' * (h > 1)}" for h, size in kv_bytes.items()],
    )
    axes.set_xlabel("KV cache, bytes a token (bf16)")
    axes.set_ylabel("held-out perplexity")
    axes.set_title("Bundled model after pooling, before any training", fontsize=11)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    folder = resolve_source("tiny").folder
    heldout = bundled_documents("heldout")
    tokens = pack(AutoTokenizer.from_pretrained(folder), heldout)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    context = model.config.max_position_embeddings
    source = perplexity(model, tokens, context)
    legal = gqaconvert.inspect("tiny").legal_kv_heads
    print(f"held-out text {fingerprint(heldout)[:12]}, {len(tokens)} tokens, windows of {context}")
    print(f"{'source':8}{model.config.num_key_value_heads:>3} KV heads  {source:8.2f}")
    rows: dict[str, dict[int, float]] = {}
    for method in METHODS:
        rows[method] = {}
        for heads in legal:
            converted = gqaconvert.convert_model(model, num_kv_heads=heads, method=method)
            rows[method][heads] = perplexity(converted, tokens, context)
            print(f"{method:8}{heads:>3} KV heads  {rows[method][heads]:8.2f}", flush=True)
    if arguments.figure:
        found = gqaconvert.inspect("tiny")
        kv_bytes = {found.num_kv_heads: found.kv_bytes_per_token}
        kv_bytes |= {saving.kv_heads: saving.kv_bytes_per_token for saving in found.savings}
        draw(rows, source, kv_bytes, arguments.figure)


if __name__ == "__main__":
    main()
