"""Train the bundled tiny model, from nothing but the text that every Python has.

    python benchmarks/train_tiny.py OUT --minutes 40

Writes an ordinary Llama checkpoint (bf16), its tokenizer and `training_log.jsonl`. The bundled copy
came from this script; `RESULTS.md` says when and with which figures.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from gqaconvert.bundled.text import Document, bundled_documents, fingerprint

VOCABULARY = 2048
END = "<|endoftext|>"


def train_tokenizer(documents: list[Document]) -> PreTrainedTokenizerFast:
    """Byte-level BPE: any text can be encoded, whatever it holds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def pack(tokenizer: PreTrainedTokenizerFast, documents: list[Document]) -> np.ndarray:
    """All documents in one row of token ids, each opened by the end-of-text token."""
    pieces = []
    for document in documents:
        pieces.append(
            np.array(
                [tokenizer.eos_token_id, *tokenizer.encode(document.text, add_special_tokens=False)]
            )
        )
    return np.concatenate(pieces).astype(np.int64)


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, tokens: np.ndarray, context: int, windows: int) -> float:
    """Mean next-token loss in nats over the first `windows` windows, side by side."""
    model.eval()
    count = min(windows, len(tokens) // context)
    total = 0.0
    for index in range(count):
        ids = torch.from_numpy(tokens[index * context : (index + 1) * context])[None]
        with torch.autocast("cpu", torch.bfloat16):
            total += model(input_ids=ids, labels=ids).loss.item()
    model.train()
    return total / count


def optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.05),
        torch.optim.AdamW(rest, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--minutes", type=float, default=40.0, help="the learning rate reaches zero at this time"
    )
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    rng = np.random.default_rng(arguments.seed)

    train, heldout = bundled_documents("train"), bundled_documents("heldout")
    tokenizer = train_tokenizer(train)
    train_tokens, heldout_tokens = pack(tokenizer, train), pack(tokenizer, heldout)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=arguments.context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    arguments.out.mkdir(parents=True)
    log = (arguments.out / "training_log.jsonl").open("w")

    def record(**row: object) -> None:
        log.write(json.dumps(row) + "\n")
        log.flush()
        print(json.dumps(row), flush=True)

    record(
        parameters=sum(p.numel() for p in model.parameters()),
        train_tokens=len(train_tokens),
        heldout_tokens=len(heldout_tokens),
        train_sha256=fingerprint(train),
        heldout_sha256=fingerprint(heldout),
        python=platform.python_version(),
        torch=torch.__version__,
    )
    steppers = optimizers(model)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in steppers]
    start, step, seen, recent = time.monotonic(), 0, 0, []
    while (share := (time.monotonic() - start) / (60 * arguments.minutes)) < 1.0:
        scale = min(1.0, (step + 1) / 100) * min(1.0, (1.0 - share) / 0.6)
        for optimizer, rates in zip(steppers, peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * scale
        starts = rng.integers(0, len(train_tokens) - arguments.context, arguments.batch)
        ids = torch.from_numpy(np.stack([train_tokens[s : s + arguments.context] for s in starts]))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in steppers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step, seen = step + 1, seen + ids.numel()
        recent.append(loss.item())
        if step % 100 == 0:
            value = heldout_loss(model, heldout_tokens, arguments.context, 24)
            record(
                step=step,
                tokens=seen,
                seconds=round(time.monotonic() - start, 1),
                lr_scale=round(scale, 3),
                train_loss=round(float(np.mean(recent[-100:])), 4),
                heldout_loss=round(value, 4),
            )
    final = heldout_loss(model, heldout_tokens, arguments.context, 10**9)
    record(
        steps=step,
        tokens=seen,
        heldout_loss_all=round(final, 4),
        heldout_perplexity=round(math.exp(final), 3),
    )
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    log.close()


if __name__ == "__main__":
    main()
