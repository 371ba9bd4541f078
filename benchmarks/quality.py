r"""Quality by method of conversion, from the mean to distillation, beside seconds and memory.

    python benchmarks/quality.py SMOLLM2 --kv-heads 1 --calibrate valid.txt --test test.txt \
        --out runs/quality --figure docs/figures/smollm2_methods.svg

Every row is one command, run as a process of its own below --out; what exists there is measured and
not made again. Perplexity, divergence from the source and agreement of the likeliest token are
measured on windows spread evenly over the test text, in the type of --dtype. The calibration text
is never the test text. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gqaconvert.figure_style import COLOURS, new_figure

if TYPE_CHECKING:
    from gqaconvert.corpus.windows import Window
    from gqaconvert.evaluation.divergence import LiveSource
    from gqaconvert.modelling.models import LoadedModel


def rows_of(options: argparse.Namespace) -> dict[str, list[str]]:
    """Name of a row → options of `convert`, after a calibration with the name it needs."""
    text = ["--calibration", options.calibrate, "--tokens", str(options.tokens)]
    fit = ["--fit-steps", str(options.fit_steps), "--fit-windows", str(options.fit_windows)]
    distill = ["--distill-steps", str(options.distill_steps)]
    rows = {
        "mean": ["--method", "mean"],
        "first": ["--method", "first"],
        "random": ["--method", "random"],
        "procrustes": ["--method", "procrustes", *text],
        "svd": ["--method", "svd", *text],
        "svd, similarity": ["--method", "svd", "--grouping", "similarity", *text],
        "svd + distillation": ["--method", "svd", *text, *distill],
        "svd + fit": ["--method", "svd", *text, *fit],
        "svd + fit + distillation": ["--method", "svd", *text, *fit, *distill],
    }
    chosen = options.rows.split(";") if options.rows else list(rows)
    return {name: rows[name] for name in chosen}


def make(options: argparse.Namespace, name: str, arguments: list[str]) -> dict[str, Any]:
    """Convert in a process of its own; seconds and peak memory of it."""
    folder = options.out / name.replace(" + ", "-").replace(", ", "-")
    facts = options.out / f"{folder.name}.json"
    if folder.exists() and facts.exists():
        return {"folder": folder, **json.loads(facts.read_text())}
    command = [
        sys.executable, "-m", "gqaconvert", "convert", options.model, str(folder),
        "--kv-heads", str(options.kv_heads), *arguments,
    ]  # fmt: skip
    started = time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": str(options.threads)})
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    measured = {
        "seconds": time.monotonic() - started,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
        "command": ["gqaconvert", *command[3:]],
    }
    facts.write_text(json.dumps(measured))
    return {"folder": folder, **measured}


def measure(
    loaded: LoadedModel, windows: list[Window], source: LiveSource | None
) -> dict[str, float]:
    from gqaconvert.evaluation.divergence import measure_divergence
    from gqaconvert.evaluation.perplexity import measure_perplexity
    from gqaconvert.evaluation.scoring import Reader

    reader = Reader(loaded)
    perplexity = measure_perplexity(loaded, windows, settings={}, reader=reader)
    found = {"perplexity": perplexity.value, "stderr": perplexity.stderr or 0.0}
    if source is not None:
        divergence = measure_divergence(loaded, windows, source, settings={}, reader=reader)
        found |= {"kl": divergence.value, "top1": divergence.detail["top1_agreement"]}
    return found


def draw(table: dict[str, dict[str, Any]], path: Path) -> None:
    names = [name for name in table if name != "source"]
    with new_figure(path, (7.0, 3.4)) as figure:
        axes = figure.add_subplot()
        values = [table[name]["perplexity"] for name in names][::-1]
        source = table["source"]["perplexity"]
        # Points, not bars: a logarithmic axis has no zero for bars to stand on.
        places = range(len(names))
        axes.hlines(places, source, values, color=COLOURS[0], linewidth=1.0, alpha=0.5)
        axes.plot(values, places, "o", color=COLOURS[0])
        axes.axvline(source, color=COLOURS[-1], linestyle="--")
        axes.set_yticks(list(places), names[::-1])
        axes.set_ylim(-0.6, len(names) - 0.3)
        for place, value in zip(places, values, strict=True):
            label = f"{value:,.0f}" if value > 100 else f"{value:.1f}"
            axes.annotate(label, (value, place), (6, 4), textcoords="offset points", fontsize=8)
        axes.set_xscale("log")
        axes.set_xlim(source / 2, max(values) * 6)
        axes.set_xlabel(f"perplexity of held-out text (dashed: source, {source:.1f})")
        axes.grid(visible=False, axis="y")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--kv-heads", type=int, default=1)
    parser.add_argument("--calibrate", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--fit-steps", type=int, default=96)
    parser.add_argument("--fit-windows", type=int, default=128)
    parser.add_argument("--distill-steps", type=int, default=100)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int, default=48)
    parser.add_argument("--dtype", default="float32", help="in which all are measured")
    parser.add_argument("--rows", help="names separated by ;")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, default=Path("runs/quality"))
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    made = {name: make(options, name, arguments) for name, arguments in rows_of(options).items()}
    # Only now: a process starts with the peak memory of the one that makes it.
    import torch

    from gqaconvert.corpus.text import load_text
    from gqaconvert.corpus.windows import spread, strided_windows
    from gqaconvert.evaluation.divergence import LiveSource
    from gqaconvert.evaluation.scoring import Reader
    from gqaconvert.modelling.models import load_model

    torch.set_num_threads(options.threads)
    source = load_model(options.model, dtype=options.dtype)
    text = load_text(options.test)
    windows = spread(
        strided_windows(source.tokenizer, text, length=options.context), options.windows
    )
    live = LiveSource(source, Reader(source))
    table: dict[str, dict[str, Any]] = {"source": measure(source, windows, None)}
    for name, facts in made.items():
        loaded = load_model(facts["folder"], dtype=options.dtype)
        table[name] = measure(loaded, windows, live) | {**facts, "folder": facts["folder"].name}
        print(f"{name}: {table[name]['perplexity']:.2f}", file=sys.stderr)
    print("| | perplexity | KL | top-1 | seconds | peak GB |\n|---|---|---|---|---|---|")
    for name, row in table.items():
        cells = [f"{row['perplexity']:,.1f} ± {row['stderr']:,.1f}"]
        cells += [f"{row['kl']:.3f}", f"{100 * row['top1']:.1f} %"] if "kl" in row else ["", ""]
        if "seconds" in row:
            cells += [f"{row['seconds']:.0f}", f"{row['peak_bytes'] / 1e9:.1f}"]
        else:
            cells += ["", ""]
        print(f"| {name} | " + " | ".join(cells) + " |")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    content = {"table": table, "test": text.sha256, "windows": len(windows), "measuring": peak}
    (options.out / "quality.json").write_text(json.dumps(content, indent=1))
    if options.figure:
        draw(table, options.figure)


if __name__ == "__main__":
    main()
