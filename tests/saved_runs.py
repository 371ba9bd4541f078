"""Run folders as `run` leaves them, small, written through the forms of whoever writes them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from gqaconvert.evaluation.bandwidth import Bandwidth
from gqaconvert.evaluation.bench_bounds import ModelFacts
from gqaconvert.evaluation.bench_results import (
    Bench,
    BenchRow,
    BenchSettings,
    Knee,
    Timing,
    save_bench,
)
from gqaconvert.evaluation.results import Measurement, ResultStore
from gqaconvert.evaluation.sweep_results import Sweep, SweepPoint, save_sweep

SETTINGS = {
    "text": "bundled", "text_sha256": "7" * 64, "context": 256, "stride": 256, "windows": 4,
    "dtype": "auto", "device": "cpu", "attn": "sdpa",
}  # fmt: skip
MODELS = {"tiny": ("a" * 64, 8), "converted": ("b" * 64, 2), "model": ("c" * 64, 2)}
PERPLEXITY = {"tiny": 17.25, "converted": 176.5, "model": 25.75}
KV_BYTES = {"tiny": 4096, "converted": 1024, "model": 1024}


def measurement(model: str, metric: str, value: float, stderr: float | None, **more: Any):
    return Measurement(
        metric=metric,
        value=value,
        stderr=stderr,
        n=4,
        unit="",
        settings=more.get("settings", SETTINGS),
        versions={"torch": "2.15.0"},
        weights_sha256=MODELS[model][0],
        detail=more.get("detail", {}),
    )


def write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def write_results(folder: Path) -> None:
    store = ResultStore(folder)
    for model, value in PERPLEXITY.items():
        store.put(model, measurement(model, "perplexity", value, value / 16))
        store.put(
            model,
            measurement(
                model, "kv_cache", KV_BYTES[model], None,
                detail={"element": "bf16", "parameters": 3_000_000 + KV_BYTES[model]},
            ),
        )  # fmt: skip
        task = {"task": "continuation", "limit": 10, "fewshot": None, "dtype": "auto"}
        store.put(
            model,
            measurement(
                model, "task/continuation", 0.5, 0.125, settings=task,
                detail={"score": "acc_norm", "chance": 0.25},
            ),
        )  # fmt: skip
        for kind, times, share in (("dynamic", 1.0, 1.0), ("quantised:int4", 1.25, 0.5)):
            store.put(
                model,
                measurement(
                    model, f"cache/{kind}", value * times, 1.0,
                    settings={**SETTINGS, "windows": 2, "prefill": 192, "kind": kind},
                    detail={
                        "kind": kind, "keeps": f"all, {kind}", "tokens_seen": 255,
                        "cache_bytes": int(255 * KV_BYTES[model] * share),
                        "decode_tokens_per_s": 512.0,
                    },
                ),
            )  # fmt: skip
        if model != "tiny":
            store.put(
                model,
                measurement(
                    model, "divergence", 0.75, 0.0625,
                    settings={**SETTINGS, "source_sha256": "a" * 64, "top_k": 0},
                    detail={
                        "top1_agreement": 0.625, "top1_agreement_stderr": 0.03125,
                        "source": "tiny", "method": "exact",
                    },
                ),
            )  # fmt: skip


def write_bench(folder: Path) -> None:
    rows, facts = [], []
    for model in ("tiny", "converted"):
        sha, heads = MODELS[model]
        facts.append(ModelFacts(
            name=model, num_heads=8, num_kv_heads=heads, attention="GQA", parameters=3_000_000,
            weights_bytes=6_000_000, read_bytes=1_000_000, dtype="bfloat16", attn="sdpa",
            weights_sha256=sha,
        ))  # fmt: skip
        for context in (128, 512):
            step = 0.002 + context * heads * 1e-6
            rows.append(BenchRow(
                label=model, model=model, cache_kind="dynamic", context=context, batch=1,
                decode=Timing(step, 0.9 * step, 1.1 * step, 0.0, (step,)), fill="random",
                tokens_per_s=1 / step, bound_tokens_per_s=4000.0, share_of_bound=0.1,
                cache_bytes=context * KV_BYTES[model],
            ))  # fmt: skip
    bench = Bench(
        BenchSettings((128, 512), repeats=2),
        "cpu",
        {"processor": "Test Processor", "cores": 2, "threads": 1, "gpu": None, "system": "Linux"},
        {"torch": "2.15.0"},
        Bandwidth(3.6e10, 3.7e10, 3.9e10, 2**28, 2**25, 1, "cpu"),
        tuple(facts),
        rows,
        [Knee("tiny", 1, 244), Knee("converted", 1, None)],
        ["a note of the bench"],
    )
    save_bench(bench, folder)


def write_sweep(folder: Path) -> None:
    def point(kind, model, heads, quality, **more):
        return SweepPoint(
            key=model, kind=kind, model=model, kv_heads=heads,
            method=None if kind == "source" else "mean", cache_kind="dynamic",
            kv_bytes=255 * 512 * heads, kv_tokens=255, perplexity=16 / quality,
            perplexity_stderr=1.0, quality=quality, **more,
        )  # fmt: skip

    points = [
        point("source", "tiny", 8, 1.0),
        point("conversion", "tiny-kv4-mean", 4, 0.5, kl=1.5, kl_stderr=0.1, top1=0.25),
        point("conversion", "tiny-kv1-mean", 1, 0.125, kl=2.5, kl_stderr=0.1, top1=0.125),
    ]
    settings = {"text_name": "bundled", "text": "7" * 64, "context": 256, "windows": 4}
    save_sweep(Sweep("tiny", settings, {"torch": "2.15.0"}, points), folder)


def manifest(method: str = "mean", source: str = "tiny", **more: Any) -> dict[str, Any]:
    return {
        "format": 1,
        "source": {"name": source, "revision": None},
        "plan": {
            "options": {"num_kv_heads": 2, "method": method}, "num_heads": 8,
            "kv_heads": {"before": 8, "after": 2},
        },
        **more,
    }  # fmt: skip


def heads(layers: int = 4, count: int = 8) -> dict[str, Any]:
    def likeness(layer: int) -> dict[str, Any]:
        matrix = [[1.0 if i == j else 0.01 * (i + j + layer) for j in range(count)]
                  for i in range(count)]  # fmt: skip
        pooled = [{"kv_heads": 2, "raw": 0.25 + 0.01 * layer, "aligned": 0.5}]
        return {"raw": matrix, "aligned": matrix, "chance": 0.0625, "pooled": pooled}

    rows = [
        {"layer": n, "module": f"layers.{n}", "kv_heads": count, "keys": likeness(n),
         "values": likeness(n)}
        for n in range(layers)
    ]  # fmt: skip
    return {"format": 1, "model": "tiny", "num_heads": 8, "layers": rows, "notes": []}


def estimate() -> list[dict[str, Any]]:
    return [
        {
            "kv_heads": count, "context": 1024, "batch": 1, "kv_dtype": "bf16",
            "kv_bytes": 1024 * 512 * count, "kv_bytes_per_token": 512 * count,
            "memory_bytes": 24 * 2**30, "left_for_kv_bytes": 20 * 2**30,
            "concurrent_requests": 40_960 // count, "longest_context": 41_943_040 // count,
            "notes": ["fit: memory ÷ KV of one request"],
        }
        for count in (8, 2)
    ]  # fmt: skip


def metrics() -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for step in range(9):
        if step:
            lines.append({"kind": "step", "step": step, "tokens": 4096 * step, "loss": 3.0,
                          "next_token": 5.0 - 0.2 * step, "skipped": None})  # fmt: skip
        if step % 4 == 0:
            loss = math.log(176.5) - 0.2 * step
            lines.append({"kind": "held_out", "step": step, "tokens": 4096 * step,
                          "held_out_loss": loss, "source_loss": math.log(17.25)})  # fmt: skip
    return lines


def write_run(folder: Path, name: str = "small", title: str = "A small run") -> Path:
    """A whole run: convert, verify, uptrain, evaluate, bench, sweep, estimate, inspect."""
    write_results(folder / "results")
    write_bench(folder / "bench")
    write_sweep(folder / "sweep")
    write_json(folder / "heads.json", heads())
    write_json(folder / "estimate.json", estimate())
    write_json(folder / "verify.json", {
        "checks": [{"name": "untouched tensors are the source's", "covered": "30 tensors"}],
        "seconds": 1.5,
    })  # fmt: skip
    write_json(folder / "models.json", {
        role: {"name": model, "parameters": 3_000_000 + KV_BYTES[model],
               "weights_bytes": 6_000_000, "kv_heads": MODELS[model][1], "num_heads": 8,
               "kv_bytes_per_token": KV_BYTES[model], "dtype": "bfloat16"}
        for role, model in zip(("source", "converted", "uptrained"), MODELS, strict=True)
    })  # fmt: skip
    write_json(folder / "summary.json", {
        "recipe": name, "ending": "finished", "start": "converted", "start_sha256": "b" * 64,
        "steps": 8, "tokens": 32768, "seconds": 12.5, "devices": "one process, 1 CPU thread",
        "skipped_steps": 0, "held_out_text": "bundled", "held_out_tokens": 8184,
        "versions": {"torch": "2.15.0"},
    })  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics()))
    write_json(folder / "pipeline.json", {
        "format": 1, "name": name, "title": title, "command": f"gqaconvert run {name}",
        "machine": {"cores": 2, "threads": 1}, "versions": {"gqaconvert": "0.1.0"},
        "roles": {"source": "tiny", "converted": "converted", "uptrained": "model"},
        "stages": {
            "convert": _stage("gqaconvert convert tiny converted --kv-heads 2"),
            "evaluate": _stage(
                "gqaconvert evaluate tiny converted model --results results", "two models"
            ),
            "bench": _stage("gqaconvert bench tiny converted"),
            "report": _stage("gqaconvert report run"),
        },
    })  # fmt: skip
    for checkpoint in ("converted", "model"):
        write_json(folder / checkpoint / "gqaconvert.json", manifest())
        (folder / checkpoint / "README.md").write_text(
            "---\nlicense: mit\ntags:\n- gqaconvert\n---\n\n# tiny with 2 KV heads\n\nMade so.\n\n"
            "## Card of the source model\n\nIts own words.\n"
        )
    return folder


def _stage(command: str, note: str = "") -> dict[str, Any]:
    return {"inputs": "0", "started": "2026-01-01T00:00:00Z", "seconds": 2.5, "command": command,
            "outcome": "done", "note": note}  # fmt: skip
