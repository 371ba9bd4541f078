"""The learning rate and the weight of distillation at each step: pure functions of the step."""

from __future__ import annotations

import math

from gqaconvert.settings.uptrain import LossSettings, ScheduleSettings


def lr_scale(schedule: ScheduleSettings, step: int, total_steps: int) -> float:
    """Return the share of the highest learning rate at which a step is made.

    Warm-up rises in equal parts and reaches 1 at its last step. The floor is where the step after
    the last would be, so that no step is made at a rate of 0 when the floor is 0. "constant" stays
    at 1 and has no floor.

    Args:
        schedule: its kind and shares.
        step: from 0; past the budget, the rate stays where it ended.
        total_steps: of the budget.
    """
    warmup = round(schedule.warmup * total_steps)
    if step < warmup:
        return (step + 1) / warmup
    if schedule.kind == "constant":
        return 1.0
    falling = total_steps - warmup
    if schedule.kind == "wsd":
        falling = min(falling, max(1, round(schedule.decay * total_steps)))
    left = min(max(total_steps - step, 0) / (falling + 1), 1.0)
    if schedule.kind == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    return schedule.floor + (1 - schedule.floor) * left


def distill_weight(loss: LossSettings, step: int, total_steps: int) -> float:
    """Return the weight of the divergence from the source at a step.

    It falls linearly from `loss.distill` at the first step to its share `loss.distill_decay` at the
    last.
    """
    passed = min(step / (total_steps - 1), 1.0) if total_steps > 1 else 0.0
    return loss.distill * (1 - (1 - loss.distill_decay) * passed)
