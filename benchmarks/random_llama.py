"""Write a Llama of random weights with the bundled model's tokenizer: to train, or to time.

    python benchmarks/random_llama.py OUT --layers 16 --hidden 2048 --heads 32 --vocabulary 32000

The default is a model of one billion parameters. Unlike `random_checkpoint.py` its weights are
initialised as for training, and it has a tokenizer, so that recipes can read text with it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gqaconvert.checkpoint.sources import resolve_source
from gqaconvert.modelling.models import load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=0, help="0 for 8/3 of the hidden size")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=0, help="0 for as many as heads")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    tokenizer = load_tokenizer(Path(str(resolve_source("tiny").folder)))
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.inner or -(-options.hidden * 8 // 3 // 256) * 256,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads or options.heads,
        vocab_size=options.vocabulary,
        max_position_embeddings=options.context,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=options.vocabulary <= 4096,
        dtype="bfloat16",
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(f"{options.out}: {model.num_parameters():,} parameters")


if __name__ == "__main__":
    main()
