"""Arithmetic of training, and the share of a GPU's peak that a speed comes to (MFU).

Two counts: what the mathematics needs, which MFU is about, and what the hardware does, which
includes computing activations again. Attention is causal in both: half of the square.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gqaconvert.kv_cache.hardware import accelerator_of_device
from gqaconvert.kv_cache.model_config import read_config
from gqaconvert.settings.uptrain import UptrainSettings
from gqaconvert.training.memory import runs_teacher
from gqaconvert.training.memory_parts import trained_parameters
from gqaconvert.training.model_facts import ModelFacts, model_facts

if TYPE_CHECKING:
    from gqaconvert.modelling.models import LoadedModel
    from gqaconvert.settings.recipe import Recipe
    from gqaconvert.training.world import World


@dataclass(frozen=True, slots=True)
class TrainingFlops:
    """Floating-point operations a token; a multiplication and an addition count as two.

    Attributes:
        model: of the student forward and backward, and of the teacher forward.
        hardware: of these and of activations computed again.
    """

    model: float
    hardware: float


def forward_flops(facts: ModelFacts, context: int, *, causal: bool = True) -> float:
    """Operations of a forward pass a token, the head included, embeddings and norms left out.

    Args:
        facts: of the model.
        context: tokens a sequence.
        causal: count only the keys a token may look at; else all of the sequence's.
    """
    return _linear(facts) + _attention(facts, context, causal=causal)


def training_flops_per_token(
    facts: ModelFacts,
    context: int,
    *,
    teacher: ModelFacts | None = None,
    checkpointing: bool = False,
    trained_share: float = 1.0,
) -> TrainingFlops:
    """Operations of a training step a token.

    Backward, every product of the forward pass has one for the gradient of its input, and one for
    that of its weight where it trains; in attention, both operands have gradients.

    Args:
        facts: of the student.
        context: tokens a sequence.
        teacher: a model that runs forward beside it.
        checkpointing: layers are computed again in the backward pass.
        trained_share: of the weights that train.
    """
    linear, attention = _linear(facts), _attention(facts, context, causal=True)
    model = (2 + trained_share) * linear + 3 * attention
    if teacher is not None:
        model += forward_flops(teacher, context)
    again = linear - 2 * facts.head_matrix + attention if checkpointing else 0
    return TrainingFlops(model, model + again)


def flops_of(
    settings: UptrainSettings, student: ModelFacts, teacher: ModelFacts | None
) -> TrainingFlops:
    """Operations a token of a recipe's training; the source's only where it runs."""
    return training_flops_per_token(
        student,
        settings.data.context,
        teacher=teacher if runs_teacher(settings) else None,
        checkpointing=settings.activation_checkpointing,
        trained_share=min(1.0, trained_parameters(settings, student) / student.parameters),
    )


def mfu(tokens_per_s: float, flops_per_token: float, device_name: str) -> float | None:
    """Return the share of a GPU's peak in bf16, None where the peak is not known.

    Args:
        tokens_per_s: of one device.
        flops_per_token: `TrainingFlops.model`.
        device_name: as `torch.cuda.get_device_name` gives it.
    """
    device = accelerator_of_device(device_name)
    if device is None or device.flops is None:
        return None
    return tokens_per_s * flops_per_token / device.flops


def speed_of(recipe: Recipe, loaded: LoadedModel, world: World) -> Callable[[float], float | None]:
    """Return what turns tokens/s of all devices into MFU; it gives None where that is not known.

    Args:
        recipe: with a section `uptrain`.
        loaded: the student.
        world: the processes.
    """
    settings = recipe.uptrain
    if world.device.type != "cuda" or settings is None or settings.precision == "fp32":
        return lambda _: None
    import torch

    config = read_config(loaded.folder)
    student = model_facts(config)
    if student is None:
        return lambda _: None
    # The teacher is the student before its conversion: the same but for K and V projections.
    per_token = flops_of(settings, student, student).model
    name = torch.cuda.get_device_name(world.device)
    return lambda tokens_per_s: mfu(tokens_per_s / world.num_processes, per_token, name)


def _linear(facts: ModelFacts) -> float:
    return 2.0 * (facts.active_matrices + facts.head_matrix)


def _attention(facts: ModelFacts, context: int, *, causal: bool) -> float:
    """Both products, with the keys and with the values, of every query head."""
    width = facts.num_heads * (facts.head_dim + facts.v_head_dim)
    keys = (_keys(context, window) if causal else context for window in facts.windows)
    return 2.0 * width * sum(keys)


def _keys(context: int, window: int | None) -> float:
    """Keys that a token looks at, on average over a sequence."""
    if window is None or window >= context:
        return (context + 1) / 2
    return window - window * (window - 1) / (2 * context)
