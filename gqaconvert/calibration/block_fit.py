"""Trains one decoder layer's attention to give wanted outputs on given inputs; knows no model.

Nothing flows back through other layers, so the peak is one layer and its activations.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gqaconvert.errors import GqaconvertError, UsageError

Trained = Literal["attention", "attention+norm", "layer"]


@dataclass(frozen=True)
class FitOptions:
    """How a layer is fitted.

    Attributes:
        steps: of Adam for each layer.
        lr: highest learning rate, as a share of the root mean square of each weight.
        warmup: share of the steps in which it rises; a cosine takes it down to 0 after.
        betas: of Adam.
        held_out: share of the batches that tell when to stop, at least one.
        checks: how often the error on them is measured, spread over the steps.
        trained: "attention" for q, k, v, o; "attention+norm" for the gain of the norm before them
            too; "layer" for all weights of the layer, against its output.
        inputs: "source" for those of the source model; "converted" for those that the layers
            converted before leave, against the source's residual stream.
        bf16: compute in bfloat16, with weights in float32.
        seed: of the order of batches.
    """

    steps: int = 96
    lr: float = 3e-2
    warmup: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    held_out: float = 0.125
    checks: int = 4
    trained: Trained = "attention"
    inputs: Literal["source", "converted"] = "source"
    bf16: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.lr <= 0 or not 0 < self.held_out < 1:
            raise UsageError(
                f"a fit of {self.steps} steps at a rate of {self.lr:g} with"
                f" {self.held_out:.0%} held out makes no sense",
                remedy="--fit-steps 96",
            )


@dataclass(frozen=True)
class FitReport:
    """What fitting one layer did.

    Attributes:
        error_before: squared error of the output on held-out batches, relative to the output's
            mean square, before any step.
        error_after: the same of the state that was kept.
        kept_step: step after which that state was reached; 0 where no step helped.
        seconds: it took.
    """

    error_before: float
    error_after: float
    kept_step: int
    seconds: float


Forward = Callable[[int], torch.Tensor]
"""Batch number → what the layer makes of it, (B, T, M)."""


def fit_block(
    parameters: Sequence[torch.nn.Parameter],
    forward: Forward,
    target: Callable[[int], torch.Tensor],
    batches: int,
    options: FitOptions,
) -> FitReport:
    """Train parameters in place, and leave them as they were best on held-out batches.

    Args:
        parameters: in float32.
        forward: computes with them.
        target: batch number → what `forward` should give.
        batches: how many there are, at least two.
        options: how.

    Raises:
        UsageError: a single batch.
        GqaconvertError: outputs are not numbers.
    """
    if batches < 2:
        raise UsageError(
            "a fit needs two batches at least, one of them held out", remedy="more windows"
        )
    started = time.perf_counter()
    held = max(1, round(batches * options.held_out))
    held_out = range(batches - held, batches)
    optimiser = _optimiser(parameters, options)
    device = parameters[0].device
    error_before = best = _error(forward, target, held_out, device, options)
    kept_step, kept = 0, [parameter.detach().clone() for parameter in parameters]
    checks = {math.ceil(options.steps * (n + 1) / options.checks) for n in range(options.checks)}
    order = _order(batches - held, options)
    for step in range(1, options.steps + 1):
        _set_rate(optimiser, _schedule(step, options))
        batch = next(order)
        with _autocast(device, options):
            output = forward(batch)
        wanted = target(batch).to(output.device)
        loss = (output.float() - wanted.float()).square().sum() / wanted.float().square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if step in checks:
            error = _error(forward, target, held_out, device, options)
            if error < best:
                best, kept_step = error, step
                kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    return FitReport(error_before, best, kept_step, time.perf_counter() - started)


def _optimiser(
    parameters: Sequence[torch.nn.Parameter], options: FitOptions
) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = []
    for parameter in parameters:
        size = float(parameter.detach().square().mean().sqrt())
        groups.append({"params": [parameter], "scale": size or 1e-2})
    return torch.optim.Adam(groups, lr=options.lr, betas=options.betas)


def _set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = rate * group["scale"]


def _schedule(step: int, options: FitOptions) -> float:
    rising = max(1, round(options.steps * options.warmup))
    if step < rising:
        return options.lr * step / rising
    done = (step - rising) / max(1, options.steps - rising)
    return options.lr * 0.5 * (1 + math.cos(math.pi * done))


def _order(batches: int, options: FitOptions) -> Any:  # noqa: ANN401
    generator = torch.Generator().manual_seed(options.seed)
    while True:
        yield from torch.randperm(max(1, batches), generator=generator).tolist()


def _autocast(device: torch.device, options: FitOptions) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=options.bf16)


def _error(
    forward: Forward,
    target: Callable[[int], torch.Tensor],
    batches: range,
    device: torch.device,
    options: FitOptions,
) -> float:
    wrong = energy = 0.0
    with torch.no_grad(), _autocast(device, options):
        for batch in batches:
            output = forward(batch).float()
            wanted = target(batch).to(output.device).float()
            wrong += float((output - wanted).square().sum())
            energy += float(wanted.square().sum())
    if not math.isfinite(wrong) or energy == 0:
        raise GqaconvertError(
            "the layer's outputs are not numbers, or all zero", remedy="load the model in float32"
        )
    return wrong / energy
