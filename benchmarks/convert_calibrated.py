"""Time and memory of `svd` against `mean`, on a checkpoint of random weights and statistics.

    python benchmarks/random_checkpoint.py /tmp/llama2-7b-short --layers 4
    python benchmarks/convert_calibrated.py /tmp/llama2-7b-short --kv-heads 8 --out /tmp/out

Statistics are those of random inputs, which cost as much as real ones. Whole processes take turns.
Layers are pooled one after another, so a model of more layers takes as many times longer, and no
more memory. Prints a table.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gqaconvert.checkpoint.fingerprint import fingerprint_model
from gqaconvert.surgery.layer_heads import LayerStatistics
from gqaconvert.surgery.source import open_source
from gqaconvert.surgery.statistics import (
    StatisticsIdentity,
    TextIdentity,
    write_statistics,
)

KINDS = ("inputs", "averaged", "attended")
TOKENS = 4096


def moments(width: int, seed: int) -> LayerStatistics:
    """Second moments of random inputs of decaying scale, with the constant 1."""
    generator = np.random.default_rng(seed)
    scale = np.linspace(2.0, 0.1, width - 1, dtype=np.float32)
    drawn = generator.standard_normal((TOKENS, width - 1), dtype=np.float32) * scale
    inputs = np.concatenate([drawn, np.ones((TOKENS, 1), np.float32)], axis=1)
    moment = (inputs.T @ inputs / TOKENS).astype(np.float64)
    return LayerStatistics(moment, moment, moment, TOKENS)


def write(model: Path, path: Path) -> None:
    source = open_source(str(model))
    width = int(source.config.hidden_size or 0) + 1
    layers = len(source.attention.blocks)
    identity = StatisticsIdentity(
        model=source.label,
        model_type=source.config.model_type,
        source_fingerprint=source.index.fingerprint(),
        weights_sha256=fingerprint_model(source.folder),
        texts=(TextIdentity("random", "0" * 64, TOKENS),),
        tokens=TOKENS,
        context=512,
    )

    def pairs() -> Iterator[tuple[int, LayerStatistics]]:
        for layer in range(layers):
            yield layer, moments(width, layer)

    widths = {layer: dict.fromkeys(KINDS, width) for layer in range(layers)}
    write_statistics(path, identity, pairs(), widths=widths, overwrite=True)


def run(command: list[str], threads: int) -> tuple[float, float, float]:
    """Seconds, CPU seconds and peak bytes of a process."""
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    seconds = time.monotonic() - started
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024.0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--write", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "random.calibration.safetensors"
    if options.write:
        write(options.model, file)
        return
    # In a process of its own: those made later start with the peak memory of this one.
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "--write"], check=True)
    rows = {"mean": [], "svd": ["--calibration", str(file)]}  # type: ignore[var-annotated]
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in rows}
    for _ in range(options.runs):
        for name, arguments in rows.items():
            target = options.out / name
            shutil.rmtree(target, ignore_errors=True)
            command = [
                sys.executable, "-m", "gqaconvert", "convert", str(options.model), str(target),
                "--kv-heads", str(options.kv_heads), "--method", name, *arguments,
            ]  # fmt: skip
            found[name].append(run(command, options.threads))
            shutil.rmtree(target)
    layers = len(open_source(str(options.model)).attention.blocks)
    base = statistics.median(seconds for seconds, _, _ in found["mean"])
    print("| | median s | a layer | CPU s | peak MB | × mean |\n|---|---|---|---|---|---|")
    for name, runs in found.items():
        seconds = statistics.median(each[0] for each in runs)
        cpu, peak = (statistics.median(each[place] for each in runs) for place in (1, 2))
        print(
            f"| {name} | {seconds:.1f} | {seconds / layers:.2f} | {cpu:.1f} | {peak / 1e6:.0f}"
            f" | {seconds / base:.1f} |"
        )


if __name__ == "__main__":
    main()
