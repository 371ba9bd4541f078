"""The loop itself: steps, measurements on held-out text, saved states, and when to stop.

One step reads `batch_tokens`, in micro-batches on every process, and is exactly the step that one
process with one large batch would take: losses are sums, divided by the tokens that count over all
processes and micro-batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from gqaconvert.settings.recipe import Recipe
from gqaconvert.settings.uptrain import UptrainSettings
from gqaconvert.training.batch import Batch
from gqaconvert.training.folder import RunFolder
from gqaconvert.training.held_out import HeldOut
from gqaconvert.training.interruption import Interruption
from gqaconvert.training.metrics import MetricsWriter
from gqaconvert.training.objective import Objective
from gqaconvert.training.safety import fault_of, note_norm, note_skip
from gqaconvert.training.schedule import distill_weight, lr_scale
from gqaconvert.training.sharding import whole
from gqaconvert.training.state import RunFacts, save_state
from gqaconvert.training.stream import Batches
from gqaconvert.training.trainable import stage_at
from gqaconvert.training.world import World
from gqaconvert.training.wrapping import WrappedModel

Ending = Literal["finished", "target reached", "no longer falling", "interrupted", "unstable"]

Report = Callable[[Mapping[str, Any]], None]
"""Called with every line of the metrics."""

_PARTS = ("next_token", "distill", "hidden", "attention")


@dataclass
class Job:
    """Everything a loop works with.

    Attributes:
        recipe: with a section `uptrain`.
        world: the processes.
        folder: of the run.
        objective: the model with its loss, unwrapped.
        optimiser: of all its parameters.
        batches: what is read.
        held_out: what is measured on; None for nothing.
        facts: where the run stands.
        total_steps: of the whole budget.
        mfu: tokens/s → share of the hardware's peak; None where that is not known.
    """

    recipe: Recipe
    world: World
    folder: RunFolder
    objective: Objective
    optimiser: torch.optim.Optimizer
    batches: Batches
    held_out: HeldOut | None
    facts: RunFacts
    total_steps: int
    mfu: Callable[[float], float | None]

    @property
    def settings(self) -> UptrainSettings:
        """The section `uptrain`."""
        if self.recipe.uptrain is None:
            raise ValueError("the recipe trains nothing")
        return self.recipe.uptrain


class Loop:
    """Runs a job to its end.

    Args:
        job: what to do.
        reports: who hears of every line of the metrics, on the first process.
    """

    def __init__(self, job: Job, reports: tuple[Report, ...] = ()) -> None:
        self._job = job
        self._settings = job.settings
        self._reports = reports
        per_process = self._settings.batch_sequences // job.world.num_processes
        self._micro_batches = -(-per_process // self._settings.micro_batch)
        self._model = WrappedModel(job.objective, job.world, job.settings)
        self._metrics = (
            MetricsWriter(job.folder.metrics, job.facts.step) if job.world.is_first else None
        )

    def run(self, interruption: Interruption) -> Ending:
        """Train until the budget is spent or something ends it; every process must call it."""
        try:
            return self._run(interruption)
        finally:
            if self._metrics:
                self._metrics.close()

    def _run(self, interruption: Interruption) -> Ending:
        job, facts = self._job, self._job.facts
        every = self._settings.checkpoints.every_steps
        saved = facts.step if facts.step else -1
        self._model.enter_stage(facts.step, job.total_steps)
        if facts.step == 0 and job.held_out:
            self._measure()
        ending: Ending = "finished"
        while facts.step < job.total_steps:
            self._model.enter_stage(facts.step, job.total_steps)
            taken = self._step(interruption)
            if taken in ("interrupted", "unstable"):
                ending = taken
                break
            if job.held_out and self._measurement_is_due():
                self._measure()
                early = self._early_end()
                if early:
                    ending = early
                    break
            if every and facts.step % every == 0:
                self._save()
                saved = facts.step
        if saved != facts.step:
            self._save()
        return ending

    def _step(self, interruption: Interruption) -> Literal["taken", "interrupted", "unstable"]:
        job, facts, world = self._job, self._job.facts, self._job.world
        started, waited = time.perf_counter(), job.batches.wait_seconds
        micro = [next(job.batches) for _ in range(self._micro_batches)]
        counts = world.total(
            torch.tensor(
                [
                    sum(batch.num_counted for batch in micro),
                    sum(batch.token_ids.numel() for batch in micro),
                    float(interruption.wanted),
                ],
                dtype=torch.float64,
            )
        )
        if counts[2]:
            return "interrupted"  # what was just read is read again by whoever goes on
        counted, tokens = int(counts[0]), int(counts[1])
        # Dropout then depends on the step alone, not on what happened before a resume.
        torch.manual_seed(
            (self._settings.seed * 1_000_003 + facts.step) * 4_096 + world.process_index
        )
        losses = self._backward(micro, max(1, counted))
        gradients = [
            parameter.grad for parameter in job.objective.parameters() if parameter.grad is not None
        ]
        norm = float(whole(nn.utils.get_total_norm(gradients)))
        scale = lr_scale(self._settings.schedule, facts.step, job.total_steps)
        _, stage = stage_at(self._settings.stages, facts.step, job.total_steps)
        lr = self._settings.lr * scale * stage.lr_scale
        fault = fault_of(norm, facts, self._settings.safety)
        unstable = False
        if fault is None:
            if norm > self._settings.max_grad_norm:
                for gradient in gradients:
                    gradient.mul_(self._settings.max_grad_norm / norm)
            for group in job.optimiser.param_groups:
                group["lr"] = lr
            job.optimiser.step()
            note_norm(norm, facts, self._settings.safety)
        else:
            unstable = note_skip(facts, self._settings.safety)
        job.optimiser.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - started
        facts.step += 1
        facts.tokens += tokens
        facts.counted += counted
        facts.cursor = micro[-1].cursor
        facts.seconds += seconds
        totals = world.total(losses) / max(1, counted)
        weights = self._weights()
        self._write(
            {
                "kind": "step",
                "step": facts.step,
                "tokens": facts.tokens,
                "loss": sum(
                    weight * float(value) for weight, value in zip(weights, totals, strict=True)
                ),
                **{name: float(value) for name, value in zip(_PARTS, totals, strict=True)},
                "lr": lr,
                "grad_norm": norm,
                "stage": self._model.stage,
                "skipped": fault,
                "tokens_per_s": tokens / seconds,
                "mfu": job.mfu(tokens / seconds),
                "data_wait_s": job.batches.wait_seconds - waited,
                "seconds": facts.seconds,
            }
        )
        return "unstable" if unstable else "taken"

    def _backward(self, micro: list[Batch], counted: int) -> torch.Tensor:
        """Gradients of all micro-batches; sums of the losses' parts in this process, (4,)."""
        job = self._job
        weight = distill_weight(self._settings.loss, job.facts.step, job.total_steps)
        losses = torch.zeros(len(_PARTS), dtype=torch.float64)
        for number, batch in enumerate(micro):
            with self._model.synchronised(number == len(micro) - 1):
                sums = self._model(batch.to(job.world.device), counted, weight)
                # Gradients are averaged over processes, and should be added up.
                count = job.world.num_processes
                torch.autograd.backward(sums.total * count if count > 1 else sums.total)
            losses += torch.stack([getattr(sums, name).detach().double() for name in _PARTS]).cpu()
        return losses

    def _weights(self) -> tuple[float, ...]:
        loss, job = self._settings.loss, self._job
        distill = distill_weight(loss, job.facts.step - 1, job.total_steps)
        return (loss.next_token, distill, loss.hidden, loss.attention)

    def _measure(self) -> None:
        job = self._job
        if job.held_out is None:
            return
        training = job.objective.training
        job.objective.eval()
        loss = job.held_out.loss(self._model.cross_entropy)
        job.objective.train(training)
        job.facts.held_out.append((job.facts.step, loss))
        self._write(
            {
                "kind": "held_out",
                "step": job.facts.step,
                "tokens": job.facts.tokens,
                "held_out_loss": loss,
                "source_loss": job.facts.source_loss,
                "seconds": job.facts.seconds,
            }
        )

    def _measurement_is_due(self) -> bool:
        step, settings = self._job.facts.step, self._settings.held_out
        return step == self._job.total_steps or (
            settings is not None and step % settings.every_steps == 0
        )

    def _early_end(self) -> Ending | None:
        facts, settings = self._job.facts, self._settings.held_out
        if settings is None:
            return None
        losses = [loss for _, loss in facts.held_out]
        if (
            settings.target is not None
            and facts.source_loss is not None
            and losses[-1] <= facts.source_loss + settings.target
        ):
            return "target reached"
        if settings.patience is not None:
            lowest = losses.index(min(losses))
            if len(losses) - 1 - lowest >= settings.patience:
                return "no longer falling"
        return None

    def _save(self) -> None:
        job = self._job
        save_state(
            job.folder.states,
            job.objective.model,
            job.optimiser,
            job.facts,
            job.world,
            keep=self._settings.checkpoints.keep,
        )

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._metrics:
            self._metrics.write(line)
            for report in self._reports:
                report(line)
