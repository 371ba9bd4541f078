"""Memory that training takes on each device, by part, before anything is loaded.

Pure arithmetic on a recipe and two configs. It says what a step needs at its largest moment, and,
where that is more than a device has, which changes of the recipe would fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gqaconvert.settings.uptrain import UptrainSettings
from gqaconvert.training.memory_parts import (
    GATHERED_LAYERS,
    ElementBytes,
    added_parameters,
    element_bytes,
    is_masked,
    logits_bytes,
    matched_a_token,
    norm_saved,
    saved_a_token,
    teacher_bytes,
    trained_parameters,
    trains_head,
    working_a_token,
)
from gqaconvert.training.model_facts import ModelFacts
from gqaconvert.units import format_memory, weight_type

CHUNK_TOKENS = {"cpu": 1024, "cuda": 1024}
"""Positions whose logits exist at one time where the recipe leaves it open, as in `losses`, which
needs torch."""

UNUSABLE_SHARE = 0.08
"""Of what is allocated: pieces too small to be used again, and what the allocator rounds up."""

CONTEXT_BYTES = 2**30
"""What a device is without before the first tensor: its context, kernels, communication buffers."""


@dataclass(frozen=True, slots=True)
class Devices:
    """The processes of a run, one a device.

    Attributes:
        num_processes: how many.
        sharded: FSDP2 divides weights, gradients, optimiser and teacher among them; else each has
            all of it (DDP).
        kind: what the devices are.
    """

    num_processes: int = 1
    sharded: bool = False
    kind: Literal["cpu", "cuda"] = "cuda"

    @property
    def divided_by(self) -> int:
        """Processes that share one copy of the weights."""
        return self.num_processes if self.sharded else 1


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one device; each part at its own largest.

    Attributes:
        settings: what was asked about.
        student: the model that trains.
        teacher: the one it learns from in the same process, or None.
        devices: the processes.
        device_bytes: memory of one; None where that is not known.
        weights: as they are kept.
        gathered: whole layers and embeddings under FSDP2, with their gradients; copies of weights
            in bfloat16 under autocast.
        gradients: of what trains.
        optimiser: AdamW's two averages.
        teacher_bytes: its weights and what is kept of its last run.
        activations: what one micro-batch leaves for the backward pass, with what that works with.
        logits: of one chunk, and the gradient of the head.
        unusable: `UNUSABLE_SHARE` of the rest, and `CONTEXT_BYTES`.
        total: at the largest moment of a step: less than the sum, since gradients of a first
            micro-batch grow as its activations go, and logits go before layers run backward.
    """

    settings: UptrainSettings
    student: ModelFacts
    teacher: ModelFacts | None
    devices: Devices
    device_bytes: int | None
    weights: int
    gathered: int
    gradients: int
    optimiser: int
    teacher_bytes: int
    activations: int
    logits: int
    unusable: int
    total: int

    @property
    def fits(self) -> bool:
        """Whether a device has that much; True where its memory is not known."""
        return self.device_bytes is None or self.total <= self.device_bytes

    def rows(self) -> list[tuple[str, str]]:
        """Parts and their sizes in words, for a table."""
        parts = (
            ("weights", self.weights),
            ("gathered and cast weights", self.gathered),
            ("gradients", self.gradients),
            ("optimiser", self.optimiser),
            ("teacher", self.teacher_bytes),
            ("activations", self.activations),
            ("logits", self.logits),
            ("context and fragments", self.unusable),
            ("at most at one time", self.total),
        )
        rows = [(name, format_memory(size)) for name, size in parts if size]
        if self.device_bytes is not None:
            rows.append(("device", format_memory(self.device_bytes)))
        return rows


def estimate_memory(
    settings: UptrainSettings,
    student: ModelFacts,
    teacher: ModelFacts | None = None,
    devices: Devices = Devices(),
    device_bytes: int | None = None,
) -> MemoryEstimate:
    """Estimate the memory of one device.

    Args:
        settings: the section `uptrain` of a recipe.
        student: the converted model.
        teacher: the source; read only when the recipe runs it beside the student.
        devices: the processes.
        device_bytes: memory of one.
    """
    size = element_bytes(settings, sharded=devices.sharded)
    teacher = teacher if runs_teacher(settings) else None
    teacher_size = weight_type(settings.teacher.dtype).size_bytes if teacher is not None else 0
    trained = trained_parameters(settings, student)
    per_device = settings.batch_sequences // devices.num_processes
    sequences = max(1, min(settings.micro_batch, per_device))
    tokens = sequences * settings.data.context
    accumulates = per_device > sequences
    gradients = _gradients(size, trained, devices, accumulates=accumulates)
    forward, backward = _gathered(settings, student, size, devices)
    kept, running = _activations(settings, student, size, tokens)
    # Last hidden states, those of them that count, and their gradient.
    final = tokens * (norm_saved(student, size) + 3 * size.stream * student.hidden_size)
    chunk = min(settings.loss.chunk_tokens or CHUNK_TOKENS[devices.kind], tokens)
    logits = logits_bytes(settings, student, size, chunk, teacher_size)
    taught = 0
    if teacher is not None:
        taught = teacher_bytes(settings.loss, teacher, teacher_size, tokens, devices.divided_by)
    parameters = student.parameters + added_parameters(settings, student)
    weights = size.weights * parameters // devices.divided_by
    optimiser = size.states * trained // devices.divided_by
    # Buckets of DDP are there all the time; else a first micro-batch starts without gradients.
    standing = gradients if accumulates or _has_buckets(devices) else 0
    of_head = size.gradients * student.head_matrix * trains_head(settings)
    # When the first layer runs backward, its gradients and those of the embeddings are to come.
    first = size.gradients * (student.layer + (student.embeddings if student.head else 0))
    nearly = gradients - min(gradients, first // devices.divided_by)
    largest_moment = max(
        standing + forward + kept + final + logits,  # the loss
        standing + backward + kept + running + of_head,  # the last layer runs backward
        nearly + backward + running,  # the first layer does
        gradients,  # the update
    )
    allocated = weights + optimiser + taught + largest_moment
    unusable = round(UNUSABLE_SHARE * allocated) + CONTEXT_BYTES
    return MemoryEstimate(
        settings=settings,
        student=student,
        teacher=teacher,
        devices=devices,
        device_bytes=device_bytes,
        weights=weights,
        gathered=max(forward, backward),
        gradients=gradients,
        optimiser=optimiser,
        teacher_bytes=taught,
        activations=kept + max(final, running),
        logits=logits,
        unusable=unusable,
        total=allocated + unusable,
    )


def runs_teacher(settings: UptrainSettings) -> bool:
    """Whether the source runs beside the student."""
    return settings.loss.needs_teacher and settings.teacher.cache is None


def _gradients(size: ElementBytes, trained: int, devices: Devices, *, accumulates: bool) -> int:
    """Bytes of gradients.

    DDP's buckets are the gradients, except that those of all micro-batches but the last are summed
    outside of them first.
    """
    copies = 2 if _has_buckets(devices) and accumulates else 1
    return copies * size.gradients * trained // devices.divided_by


def _has_buckets(devices: Devices) -> bool:
    return devices.num_processes > 1 and not devices.sharded


def _gathered(
    settings: UptrainSettings, student: ModelFacts, size: ElementBytes, devices: Devices
) -> tuple[int, int]:
    """Bytes of whole or cast weights in the forward pass and in the backward pass.

    Autocast keeps a copy of every matrix until the forward pass ends, and without checkpointing
    until its layer has run backward. FSDP2 holds the embeddings and the head from the first layer
    forward to the last one backward, and a few layers; backward also their gradients, which are
    summed over processes in float32.
    """
    if size.casts:
        forward = size.compute * (student.active_matrices + student.head_matrix)
        layer = size.compute * student.active_matrices // student.num_layers
        return forward, layer if settings.activation_checkpointing else forward
    if not devices.sharded:
        return 0, 0
    ends = student.embeddings + student.head
    forward = size.compute * (ends + GATHERED_LAYERS * student.layer)
    widest = max(ends, student.layer)
    return forward, forward + (size.compute + 4) * widest + size.compute * student.layer


def _activations(
    settings: UptrainSettings, student: ModelFacts, size: ElementBytes, tokens: int
) -> tuple[int, int]:
    """Bytes that exist from the forward pass on, and those of a layer that runs backward."""
    layer = tokens * saved_a_token(student, size, settings)
    working = tokens * working_a_token(student, size)
    matched = tokens * matched_a_token(settings.loss, student, size)
    mask = tokens * settings.data.context if is_masked(student, settings) else 0
    if settings.activation_checkpointing:
        inputs = tokens * size.stream * student.hidden_size * student.num_layers
        return inputs + matched + mask, layer + working
    return student.num_layers * layer + matched + mask, working
