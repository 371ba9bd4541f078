r"""Perplexity against tokens of uptraining: by start, and by loss.

    python benchmarks/recovery.py SOURCE --start mean=FOLDER --start fitted=FOLDER \
        --train valid.txt --test test.txt --tokens 102400 --losses distill,next-token

Every run trains all weights with the same optimiser, batches and order of text; only start and loss
differ. Perplexity is measured on windows spread evenly over the test text. Runs are kept below
--out and go on where they stopped. Prints a table, writes JSON and draws a figure.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import torch

from gqaconvert.figure_style import COLOURS, LINES, MARKERS, new_figure
from gqaconvert.settings.recipe import Recipe
from gqaconvert.training.metrics import read_metrics
from gqaconvert.training.run import uptrain
from gqaconvert.units import format_count

LOSSES = {
    "distill": {"next_token": 0.0, "distill": 1.0},
    "next-token": {"next_token": 1.0, "distill": 0.0},
    "both": {"next_token": 0.5, "distill": 0.5},
}


def recipe_of(options: argparse.Namespace, name: str, start: str, loss: str) -> Recipe:
    every = max(1, options.measure_every // options.batch_tokens)
    return Recipe.model_validate(
        {
            "version": 1,
            "name": name,
            "source": {"model": options.source},
            "convert": {"kv_heads": 1},
            "uptrain": {
                "start": start,
                "data": {"datasets": [{"path": options.train}], "context": options.context},
                "loss": LOSSES[loss],
                "budget": {"tokens": options.tokens},
                "batch_tokens": options.batch_tokens,
                "micro_batch": options.micro_batch,
                "lr": options.lr,
                "precision": options.precision,
                "schedule": {"kind": options.schedule, "warmup": options.warmup},
                "held_out": {
                    "text": options.test,
                    "every_steps": every,
                    "windows": options.windows,
                },
                "checkpoints": {"every_steps": 4 * every, "keep": 1},
            },
        }
    )


def curve(path: Path) -> dict[int, float]:
    return {
        line["tokens"]: math.exp(line["held_out_loss"])
        for line in read_metrics(path)
        if line["kind"] == "held_out"
    }


def draw(runs: dict[str, dict[int, float]], source: float, path: Path) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    with new_figure(path, (7.0, 4.2)) as figure:
        axes = figure.add_subplot()
        for number, (name, points) in enumerate(runs.items()):
            trained = {tokens: value for tokens, value in points.items() if tokens}
            axes.plot(
                list(trained), list(trained.values()), LINES[number % len(LINES)],
                color=COLOURS[number], marker=MARKERS[number], markersize=4, label=name,
            )  # fmt: skip
        axes.axhline(source, color=COLOURS[-1], linestyle="--", label=f"source ({source:.1f})")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_count(value)))
        axes.set_xlabel("tokens trained on")
        axes.set_ylabel("perplexity of held-out text")
        axes.legend(frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source")
    parser.add_argument("--start", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--losses", default="distill")
    parser.add_argument("--tokens", type=int, default=102_400)
    parser.add_argument("--measure-every", type=int, default=25_600)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--schedule", default="cosine")
    parser.add_argument("--warmup", type=float, default=0.02)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path("runs/recovery"))
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    starts = dict(each.split("=", 1) for each in options.start)
    runs: dict[str, dict[int, float]] = {}
    facts: list[dict[str, Any]] = []
    for start, folder in starts.items():
        for loss in options.losses.split(","):
            name = f"{start}-{loss}"
            recipe = recipe_of(options, name, folder, loss)
            result = uptrain(recipe, options.out / name, resume="auto")
            runs[f"{start}, {loss}"] = curve(result.folder.metrics)
            facts.append(dict(result.summary))
    source = math.exp(facts[0]["source_loss"])
    points = sorted({tokens for run in runs.values() for tokens in run})
    print("| tokens | " + " | ".join(runs) + " |\n|---|" + "---|" * len(runs))
    for tokens in points:
        cells = [f"{run[tokens]:.1f}" if tokens in run else "" for run in runs.values()]
        print(f"| {tokens:,} | " + " | ".join(cells) + " |")
    rates = ", ".join(
        f"{name} {fact['tokens_per_s']:.0f}" for name, fact in zip(runs, facts, strict=True)
    )
    print(f"\nsource {source:.2f}; tokens/s: {rates}")
    options.out.mkdir(parents=True, exist_ok=True)
    content = {"source": source, "runs": runs, "facts": facts}
    (options.out / "recovery.json").write_text(json.dumps(content, indent=1))
    if options.figure:
        draw(runs, source, options.figure)


if __name__ == "__main__":
    main()
