"""Makes and measures the runs of `paper.py`, and times decoding.

Finished ones are JSON files, and are not made again while everything they depend on is the same.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paper_protocol import FITTED, LOSSES, MHA, MODEL, SOURCE, Protocol, Run

from gqaconvert.calibration.block_fit import FitOptions
from gqaconvert.calibration.calibrate import calibrate
from gqaconvert.calibration.conversion import (
    CalibrationSource,
    LocalFitting,
    convert_calibrated,
)
from gqaconvert.corpus.text import load_text
from gqaconvert.corpus.windows import Window, spread, strided_windows
from gqaconvert.evaluation.bench import run_bench
from gqaconvert.evaluation.bench_results import BenchSettings
from gqaconvert.evaluation.cache_kinds import cache_kind
from gqaconvert.evaluation.scoring import score
from gqaconvert.evaluation.window_means import WindowMean
from gqaconvert.modelling.models import find_model, load_model
from gqaconvert.settings.recipe import Recipe
from gqaconvert.training.run import uptrain


class Laboratory:
    """Makes runs in a folder, or finds them there.

    Args:
        out: the folder.
        protocol: of all runs.
        commit: of the code, kept with what is made.
        tell: told what is being done.
    """

    def __init__(
        self, out: Path, protocol: Protocol, commit: str, tell: Callable[[str], None]
    ) -> None:
        self._out, self._protocol, self._commit, self._tell = out, protocol, commit, tell
        self._source = find_model(MODEL)
        self._text = load_text("bundled")
        self._windows: list[Window] = []
        settings: dict[str, Any] = {
            **asdict(protocol), "source": self._source.weights_sha256, "text": self._text.sha256,
        }  # fmt: skip
        self.protocol = self._identity = json.loads(json.dumps(settings))
        digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
        self._starts = out / f"starts-{digest[:8]}"
        self.text = {"name": self._text.name, "sha256": self._text.sha256}

    def found(self, name: str) -> dict[str, Any] | None:
        """What is known of a run, or of the timing; None where it is to be made."""
        path = self._out / "points" / f"{name}.json"
        content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        return dict(content) if content.get("protocol") == self._identity else None

    def make(self, run: Run) -> dict[str, Any]:
        """Train and measure, and keep what came out."""
        folder, seconds = self._start(run)
        trained: dict[str, Any] = {"steps": 0, "tokens": 0, "seconds": 0.0, "tokens_per_s": None}
        place = self._out / "training" / run.name
        if run.share:
            result = uptrain(self._recipe(run, folder), place, resume="auto")
            if result.ending != "finished":
                raise SystemExit(f"{run.name}: {result.ending}; the same command goes on")
            trained = {key: result.summary[key] for key in trained}
            folder = result.folder.export
        point = {**asdict(run), "name": run.name, "start_seconds": seconds, **trained}
        point |= self._measure(folder)
        shutil.rmtree(place, ignore_errors=True)
        return self._keep(run.name, point)

    def time(self, heads: tuple[int, ...], threads: int) -> dict[str, Any]:
        """Time decoding over numbers of KV heads, the models taking turns."""
        protocol = self._protocol
        folders = [self._start(Run(n, SOURCE if n == MHA else "mean"))[0] for n in heads]
        settings = BenchSettings(
            # A prefill is timed at the short context alone: the long one is left out as too slow.
            contexts=protocol.bench_contexts, batches=(protocol.bench_batch,),
            new_tokens=protocol.bench_tokens, repeats=protocol.bench_repeats, prefill_limit_s=0.0,
            threads=threads,
        )  # fmt: skip
        models = [load_model(folder, dtype="float32", attn="packed") for folder in folders]
        bench = run_bench(models, [cache_kind("static")], settings, progress=self._tell)
        counts = {fact.name: fact.num_kv_heads for fact in bench.models}
        read = {fact.name: fact.read_bytes for fact in bench.models}
        rows = [
            {
                "kv_heads": counts[row.model], "context": row.context, "batch": row.batch,
                "cache_bytes": row.cache_bytes, "read_bytes": read[row.model],
                **({} if row.decode is None else asdict(row.decode)),
            }
            for row in bench.rows
        ]  # fmt: skip
        content = {
            "rows": rows, "machine": dict(bench.machine), "threads": threads,
            "bandwidth": bench.bandwidth.bytes_per_s,
        }  # fmt: skip
        return self._keep("timing", content)

    @property
    def statistics_seconds(self) -> float:
        """What gathering the statistics took."""
        return self._gather()[1]

    def _keep(self, name: str, content: dict[str, Any]) -> dict[str, Any]:
        content = {**content, "commit": self._commit}
        path = self._out / "points" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_suffix(".partial")
        staged.write_text(json.dumps({**content, "protocol": self._identity}, indent=1))
        staged.replace(path)
        return content

    def _start(self, run: Run) -> tuple[Path, float]:
        """The model before training, and the seconds it took to make, statistics apart."""
        if run.start == SOURCE:
            return self._source.folder, 0.0
        protocol = self._protocol
        seed = run.seed if run.start == "random" else 0
        name = Run(run.kv_heads, run.start).name + (f"-seed{seed}" if seed else "")
        folder = self._starts / name
        clock = folder.with_suffix(".json")
        if folder.exists() and clock.exists():
            return folder, float(json.loads(clock.read_text()))
        calibration = fitting = None
        if run.start in ("svd", FITTED):
            calibration = CalibrationSource(str(self._gather()[0]), None)
        if run.start == FITTED:
            options = FitOptions(steps=protocol.fit_steps)
            fitting = LocalFitting(options, "bundled", protocol.fit_windows, protocol.fit_context)
        begun = time.monotonic()
        convert_calibrated(
            MODEL,
            folder,
            num_kv_heads=run.kv_heads,
            method="svd" if calibration else run.start,
            calibration=calibration,
            fitting=fitting,
            seed=seed,
            overwrite=True,
        )
        seconds = time.monotonic() - begun
        clock.write_text(json.dumps(seconds))
        return folder, seconds

    def _gather(self) -> tuple[Path, float]:
        """The statistics, and the seconds they took."""
        path = self._starts / "statistics.safetensors"
        clock = path.with_suffix(".json")
        if not path.exists() or not clock.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            protocol = self._protocol
            done = calibrate(
                MODEL, "bundled", out=path, tokens=protocol.calibration_tokens,
                context=protocol.fit_context, overwrite=True,
            )  # fmt: skip
            clock.write_text(json.dumps(done.seconds))
        return path, float(json.loads(clock.read_text()))

    def _recipe(self, run: Run, start: Path) -> Recipe:
        protocol = self._protocol
        return Recipe.model_validate(
            {
                "version": 1,
                "name": run.name,
                "source": {"model": MODEL, "pretraining_tokens": protocol.pretraining_tokens},
                "convert": {"kv_heads": run.kv_heads},
                "uptrain": {
                    "start": MODEL if run.start == SOURCE else str(start),
                    "data": {
                        "datasets": [{"path": "bundled"}],
                        "context": protocol.context,
                        "seed": run.seed,
                    },
                    "loss": LOSSES[run.loss],
                    "budget": {"steps": protocol.steps(run.share)},
                    "batch_tokens": protocol.batch_tokens,
                    "micro_batch": protocol.micro_batch,
                    "lr": protocol.lr,
                    "precision": protocol.precision,
                    "seed": run.seed,
                    "held_out": None,
                    "checkpoints": {"every_steps": 40, "keep": 1},
                },
            }
        )

    def _measure(self, folder: Path) -> dict[str, Any]:
        """Loss of every window, so that any two runs can be compared on the same text."""
        loaded, mean = load_model(folder, dtype="float32"), WindowMean()
        for scored in score(loaded, self._texts(loaded.tokenizer)):
            mean.add(float(scored.nll.double().sum()), len(scored.nll))
        return {
            "nll": mean.mean, "nll_stderr": mean.stderr, "totals": mean.totals,
            "counts": mean.counts,
        }  # fmt: skip

    def _texts(self, tokenizer: Any) -> list[Window]:  # noqa: ANN401
        if not self._windows:
            windows = strided_windows(tokenizer, self._text, length=self._protocol.context)
            self._windows = spread(windows, self._protocol.windows)
        return self._windows
