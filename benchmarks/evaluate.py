"""Perplexity in tokens a second, against a plain loop over transformers and against lm-eval.

    python benchmarks/evaluate.py tiny --context 512 --windows 16 --batch 1,4 --out evaluate.json

All read the same windows of the same model in one process, interleaved (one of each, then again) so
that drift of the machine cancels; their losses must agree. lm-eval's is the part of
`loglikelihood_rolling` that reads windows, given ours. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from gqaconvert.corpus.text import load_text
from gqaconvert.corpus.windows import strided_windows
from gqaconvert.evaluation.results import library_versions
from gqaconvert.evaluation.scoring import Reader, score
from gqaconvert.modelling.models import load_model


def plain_loop(model: Any, windows: list[Any]) -> float:  # noqa: ANN401
    """What everybody writes: one window at a time, all its logits, the loss of transformers."""
    total = 0.0
    with torch.no_grad():
        for window in windows:
            token_ids = torch.tensor([window.token_ids], device=model.device)
            loss = model(input_ids=token_ids, labels=token_ids).loss
            total += float(loss) * (len(window.token_ids) - 1)
    return total


def lm_eval_loop(engine: HFLM, windows: list[Any]) -> float:
    """Windows as `loglikelihood_rolling` makes them: a context of one token, and the rest."""
    requests = [((None, None), w.token_ids[:1], w.token_ids[1:]) for w in windows]
    return -sum(logprob for logprob, _ in engine._loglikelihood_tokens(requests, disable_tqdm=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--text", default="bundled")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--batch", default="1,4")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()

    loaded = load_model(arguments.model, dtype=arguments.dtype, device=arguments.device)
    text = load_text(arguments.text)
    windows = strided_windows(
        loaded.tokenizer, text, length=arguments.context, limit=arguments.windows
    )
    tokens = sum(len(window.token_ids) for window in windows)
    reader = Reader(loaded)

    def ours(batch: int) -> Callable[[], float]:
        return lambda: sum(
            float(each.nll.sum())
            for each in score(loaded, windows, batch_size=batch, reader=reader)
        )

    def theirs(batch: int) -> Callable[[], float]:
        engine = HFLM(
            pretrained=loaded.model,
            tokenizer=loaded.tokenizer,
            batch_size=batch,
            max_length=arguments.context,
        )
        return lambda: lm_eval_loop(engine, windows)

    contestants = {"plain loop, batch 1": lambda: plain_loop(loaded.model, windows)}
    for batch in (int(part) for part in arguments.batch.split(",")):
        contestants[f"lm-eval, batch {batch}"] = theirs(batch)
        contestants[f"gqaconvert, batch {batch}"] = ours(batch)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in contestants}
    losses = {}
    for run in range(arguments.runs + 1):  # the first warms up
        for name, measure in contestants.items():
            gc.collect()
            started, cpu_started = time.perf_counter(), time.process_time()
            losses[name] = measure()
            if run:
                seconds[name].append(time.perf_counter() - started)
                cpu_seconds[name].append(time.process_time() - cpu_started)
    base = statistics.median(seconds["plain loop, batch 1"])
    print(
        f"{'':24}{'tokens/s':>10}{'fastest':>10}{'× plain':>9}{'CPU s':>8}{'least':>8}"
        f"{'nats a token':>14}"
    )
    for name, runs in seconds.items():
        median = statistics.median(runs)
        loss = losses[name] / sum(window.num_scored for window in windows)
        print(
            f"{name:24}{tokens / median:10,.0f}{tokens / min(runs):10,.0f}{base / median:9.2f}"
            f"{statistics.median(cpu_seconds[name]):8.2f}{min(cpu_seconds[name]):8.2f}{loss:14.5f}"
        )
    spread = max(losses.values()) / min(losses.values()) - 1
    if spread > (1e-4 if arguments.dtype == "float32" else 1e-2):
        raise SystemExit(f"they disagree by {spread:.2g}")
    if arguments.out:
        result = {
            "model": loaded.name,
            "settings": {
                "text": text.name,
                "context": arguments.context,
                "windows": arguments.windows,
                "dtype": loaded.dtype,
                "device": arguments.device,
                "threads": torch.get_num_threads(),
                "cores": os.cpu_count(),
                "machine": platform.platform(),
            },
            "versions": library_versions("lm-eval"),
            "tokens": tokens,
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "nats": losses,
        }
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
