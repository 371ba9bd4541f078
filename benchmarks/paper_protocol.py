"""What `paper.py` runs: the protocol that all runs share, and the runs in order of importance.

A run is one number of KV heads, one start, one loss, one share of uptraining and one seed. Each has
a schedule of its own, so that every share is measured at the end of a full decay.
"""

from __future__ import annotations

from dataclasses import dataclass

MODEL, MHA = "tiny", 8
SOURCE, FITTED = "source", "svd + fit"
NEXT_TOKEN, DISTILLATION = "next token", "distillation"
LOSSES = {
    NEXT_TOKEN: {"next_token": 1.0, "distill": 0.0},
    DISTILLATION: {"next_token": 0.0, "distill": 1.0},
}


@dataclass(frozen=True)
class Protocol:
    """What all runs share; counts in tokens unless they say otherwise.

    Attributes:
        pretraining_tokens: of the bundled model; shares refer to it.
        lr: highest rate of AdamW; 5 % of the steps warm up, a cosine leads down to 0.
        windows: of `context` tokens, spread over the held-out text, that all are measured on.
        bench_contexts: tokens in the cache when decoding is timed: hardly any, and many.
    """

    pretraining_tokens: int
    context: int = 1024
    batch_tokens: int = 8192
    micro_batch: int = 2
    lr: float = 1.5e-3
    precision: str = "bf16"
    windows: int = 44
    calibration_tokens: int = 65536
    fit_steps: int = 96
    fit_windows: int = 128
    fit_context: int = 512
    bench_contexts: tuple[int, int] = (64, 1000)
    bench_batch: int = 32
    bench_tokens: int = 16
    bench_repeats: int = 7

    def steps(self, share: float) -> int:
        """Steps nearest to a share of pretraining; one at least."""
        return max(1, round(share * self.pretraining_tokens / self.batch_tokens))


def quick(protocol: Protocol) -> Protocol:
    """A stand-in that goes through everything in a minute or two; its figures mean nothing."""
    return Protocol(
        pretraining_tokens=25_600, context=64, batch_tokens=256, lr=protocol.lr,
        precision=protocol.precision, windows=4, calibration_tokens=2048, fit_steps=4,
        fit_windows=8, fit_context=64, bench_contexts=(16, 64), bench_batch=2, bench_tokens=2,
        bench_repeats=2,
    )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One point of the ablations."""

    kv_heads: int
    start: str
    share: float = 0.0
    loss: str = NEXT_TOKEN
    seed: int = 0

    @property
    def name(self) -> str:
        """A file name."""
        start = self.start.replace(" + ", "-")
        if not self.share:
            return f"kv{self.kv_heads}-{start}"
        loss = self.loss.replace(" ", "-")
        return f"kv{self.kv_heads}-{start}-{loss}-{100 * self.share:g}-seed{self.seed}"


STARTS = [
    Run(MHA, SOURCE),
    *(Run(heads, start) for heads in (4, 2, 1) for start in ("mean", "first", "random")),
    *(Run(heads, start) for heads in (4, 2, 1) for start in ("svd", FITTED)),
]
"""Measured without training."""

TRAININGS = [
    *(Run(heads, "mean", 0.05) for heads in (1, 2)),
    Run(MHA, SOURCE, 0.05),
    *(Run(1, start, 0.05) for start in ("first", "random")),
    *(Run(heads, "mean", share) for share in (0.01, 0.1) for heads in (1, 2)),
    Run(1, FITTED, 0.05),
    Run(1, "mean", 0.05, DISTILLATION),
    Run(2, FITTED, 0.05),
    *(Run(2, start, 0.05) for start in ("first", "random")),
    Run(1, "mean", 0.05, seed=1),
    *(Run(heads, "mean", 0.02) for heads in (1, 2)),
    Run(MHA, SOURCE, 0.1),
    *(Run(1, start, 0.01) for start in ("first", "random", FITTED)),
    Run(4, "mean", 0.05),
    Run(1, FITTED, 0.05, DISTILLATION),
    *(Run(2, start, 0.01) for start in ("first", "random", FITTED)),
    Run(2, FITTED, 0.05, DISTILLATION),
    Run(1, "svd", 0.01),
    Run(MHA, SOURCE, 0.01),
    Run(1, "first", 0.05, seed=1),
]
"""By importance, so that whatever stops them leaves the main result."""
