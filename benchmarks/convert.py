"""Conversion against a copy and against loading the model: time and memory of whole processes.

    python benchmarks/random_checkpoint.py /tmp/llama2-7b
    python benchmarks/random_checkpoint.py /tmp/llama2-7b-short --layers 8
    python benchmarks/convert.py /tmp/llama2-7b --short /tmp/llama2-7b-short --out /tmp/out

Runs are interleaved (one of each, then again), so that drift of the machine cancels; the source is
read once before each, so that a run finds it in the page cache where memory has room. Prints a
table and writes JSON beside the outputs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent


def measure(command: list[str]) -> dict[str, float]:
    """Run a process; return wall and CPU seconds and its peak resident bytes."""
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.monotonic() - started
    if status:
        raise SystemExit(f"failed: {' '.join(command)}")
    # Linux gives ru_maxrss in KiB.
    return {
        "wall_s": wall,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * 1024,
    }


def warm(folder: Path) -> None:
    """Read every file once."""
    for path in folder.iterdir():
        with path.open("rb") as stream:
            while stream.read(1 << 24):
                pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path)
    parser.add_argument("--short", type=Path, help="the same with fewer layers, to compare memory")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for outputs, removed after each run"
    )
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--without-peer", action="store_true", help="the peer holds the whole model in memory"
    )
    parser.add_argument("--settle", type=float, default=5.0, help="seconds to wait after each run")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / "output"
    heads = str(arguments.kv_heads)

    def convert(source: Path, *more: str) -> list[str]:
        words = [sys.executable, "-m", "gqaconvert", "convert", str(source), str(target)]
        return [*words, "--kv-heads", heads, *more]

    commands = {
        "cp -r": ["cp", "-r", str(arguments.source), str(target)],
        "gqaconvert": convert(arguments.source),
        "gqaconvert --workers 1": convert(arguments.source, "--workers", "1"),
    }
    if arguments.short:
        commands["gqaconvert, short"] = convert(arguments.short)
    if not arguments.without_peer:
        peer = str(HERE / "peer_mean_pool.py")
        commands["transformers"] = [
            sys.executable,
            peer,
            str(arguments.source),
            str(target),
            "--kv-heads",
            heads,
        ]
    commands["import torch"] = [sys.executable, "-c", "import torch"]
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in range(arguments.runs):
        for name, command in commands.items():
            warm(arguments.short if name.endswith("short") else arguments.source)
            rows[name].append(measure(command))
            shutil.rmtree(target, ignore_errors=True)
            os.sync()
            time.sleep(arguments.settle)
    base = statistics.median(row["wall_s"] for row in rows["cp -r"])
    print(
        f"{'':24}{'median wall s':>16}{'min':>8}{'max':>8}{'cpu s':>8}{'peak MB':>9}{'× cp -r':>9}"
    )
    for name, runs in rows.items():
        walls = [run["wall_s"] for run in runs]
        cpu = statistics.median(run["cpu_s"] for run in runs)
        peak = statistics.median(run["peak_bytes"] for run in runs)
        print(
            f"{name:24}{statistics.median(walls):16.2f}{min(walls):8.2f}{max(walls):8.2f}"
            f"{cpu:8.1f}{peak / 1e6:9.0f}{statistics.median(walls) / base:9.2f}"
        )
    settings = {
        "python": platform.python_version(),
        "machine": platform.platform(),
        "cores": os.cpu_count(),
    }
    result = {
        "source": arguments.source.name,
        "kv_heads": arguments.kv_heads,
        "settings": settings,
        "runs": rows,
    }
    (arguments.out / "convert.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
