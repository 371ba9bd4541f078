"""Training speed and memory, against transformers' Trainer on the same model, text and batches.

    python benchmarks/uptrain.py MODEL --text TEXT --context 512 --micro-batch 2 --steps 6 --runs 3

Every run is a process of its own, so that peaks of memory are its own; contenders take turns, so
that drift of the machine cancels. The first steps of a run warm up and are left out. Contenders:

- `trainer`: transformers' Trainer, next-token loss, AdamW, the same precision;
- `next-token`: our loop, the same loss;
- `distill`: our loop, forward KL from the source (MODEL itself unless --source names another);
- `distill-whole`: the same with all logits of a micro-batch at once.

Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

CONTENDERS = ("trainer", "next-token", "distill", "distill-whole")
WARM_UP = 2


def recipe_of(options: argparse.Namespace, contender: str) -> dict[str, Any]:
    distill = contender.startswith("distill")
    whole = contender == "distill-whole"
    return {
        "version": 1,
        "name": contender,
        "source": {"model": options.source or options.model},
        "convert": {"kv_heads": 1},
        "uptrain": {
            "start": options.model,
            "data": {
                "datasets": [{"path": options.text}],
                "context": options.context,
                "workers": 1,
            },
            "loss": {
                "next_token": 0.0 if distill else 1.0,
                "distill": 1.0 if distill else 0.0,
                "chunk_tokens": options.micro_batch * options.context if whole else None,
            },
            "budget": {"steps": WARM_UP + options.steps},
            "batch_tokens": options.micro_batch * options.context * options.accumulation,
            "micro_batch": options.micro_batch,
            "lr": 2e-4,
            "precision": options.precision,
            "attention": options.attn,
            "compile": options.compile,
            "held_out": None,
            "schedule": {"kind": "constant", "warmup": 0.0},
        },
    }


def run_ours(options: argparse.Namespace, contender: str) -> dict[str, float]:
    from gqaconvert.settings.recipe import Recipe
    from gqaconvert.training.metrics import read_metrics
    from gqaconvert.training.run import uptrain

    with tempfile.TemporaryDirectory() as folder:
        result = uptrain(Recipe.model_validate(recipe_of(options, contender)), Path(folder) / "run")
        lines = [each for each in read_metrics(result.folder.metrics) if each["kind"] == "step"]
        # Of the process on CPUs, of the device on CUDA; read before the export is compared.
        peak = result.summary["peak_memory_bytes"]
    times = [later["seconds"] - before["seconds"] for before, later in pairwise(lines)]
    tokens = lines[-1]["tokens"] / len(lines)
    return {
        "tokens_per_s": tokens / statistics.median(times[WARM_UP - 1 :]),
        "peak_bytes": peak,
        "loss": lines[0]["next_token"],
        "data_wait_s": sum(each["data_wait_s"] for each in lines[WARM_UP:]),
        "mfu": lines[-1]["mfu"] or 0.0,
    }


def run_trainer(options: argparse.Namespace) -> dict[str, float]:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from gqaconvert.modelling.models import load_model
    from gqaconvert.settings.uptrain import DataSettings
    from gqaconvert.training.stream import open_batches

    loaded = load_model(options.model, dtype="float32", attn=options.attn)
    settings = DataSettings.model_validate(recipe_of(options, "trainer")["uptrain"]["data"])
    rows: list[torch.Tensor] = []
    count = (WARM_UP + options.steps) * options.micro_batch * options.accumulation
    with open_batches(
        settings, loaded.tokenizer, batch_sequences=options.micro_batch,
        micro_batch=options.micro_batch, process_index=0, num_processes=1,
    ) as batches:  # fmt: skip
        while len(rows) < count:
            rows += list(next(batches).token_ids)
    dataset = [{"input_ids": row, "labels": row} for row in rows]
    times: list[float] = []
    losses: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:  # noqa: ANN401
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter())

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:  # noqa: ANN401
            if "loss" in logs:
                losses.append(float(logs["loss"]))

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=options.micro_batch,
            gradient_accumulation_steps=options.accumulation, max_steps=WARM_UP + options.steps,
            learning_rate=2e-4, lr_scheduler_type="constant", bf16=options.precision == "bf16",
            use_cpu=not torch.cuda.is_available(), save_strategy="no", report_to="none",
            logging_steps=1, max_grad_norm=1.0, disable_tqdm=True, torch_compile=options.compile,
        )  # fmt: skip
        from torch.utils.data import SequentialSampler

        class InOrder(Trainer):  # type: ignore[misc]
            def _get_train_sampler(self, *_: Any) -> Any:  # noqa: ANN401
                return SequentialSampler(dataset)

        InOrder(
            model=loaded.model, args=arguments, train_dataset=dataset, callbacks=[Clock()]
        ).train()  # type: ignore[arg-type]
    steps = [later - before for before, later in pairwise(times)]
    tokens = options.micro_batch * options.context * options.accumulation
    peak = (
        torch.cuda.max_memory_allocated()
        if torch.cuda.is_available()
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    return {
        "tokens_per_s": tokens / statistics.median(steps[WARM_UP - 1 :]),
        "peak_bytes": float(peak),
        "loss": losses[0],
        "data_wait_s": 0.0,
        "mfu": 0.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--source")
    parser.add_argument("--text", default="bundled")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6, help="timed ones")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--attn", default="sdpa")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--contenders", default=",".join(CONTENDERS))
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        ours = options.worker != "trainer"
        print(json.dumps(run_ours(options, options.worker) if ours else run_trainer(options)))
        return
    contenders = options.contenders.split(",")
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for run in range(options.runs):
        for name in contenders:
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--worker", name],
                env=environment, check=True, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            results[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"run {run + 1} {name}: {results[name][-1]}", file=sys.stderr)
    base = results.get("trainer") or results[contenders[0]]
    print("| | tokens/s | min | max | × | peak GB | first loss |\n|---|---|---|---|---|---|---|")
    for name, runs in results.items():
        rates = [each["tokens_per_s"] for each in runs]
        # Runs of one round are neighbours in time: their ratio is the fairest.
        ratio = statistics.median(
            a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(runs, base, strict=True)
        )
        peak = statistics.median(each["peak_bytes"] for each in runs)
        print(
            f"| {name} | {statistics.median(rates):.0f} | {min(rates):.0f} | {max(rates):.0f}"
            f" | {ratio:.2f} | {peak / 1e9:.2f} | {runs[0]['loss']:.4f} |"
        )
    if options.out:
        machine = {"platform": platform.platform(), "threads": options.threads}
        libraries = {name: version(name) for name in ("torch", "transformers", "accelerate")}
        options.out.write_text(
            json.dumps({"machine": machine, "libraries": libraries, "results": results}, indent=1)
        )


if __name__ == "__main__":
    main()
