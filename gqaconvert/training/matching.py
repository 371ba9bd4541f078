"""Compares what layers of student and teacher put out: hidden states and outputs of attention.

Hooks record them during a forward pass, and only then: an activation checkpoint that runs a layer
again in the backward pass is not recorded a second time, and nothing is kept between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import torch
from torch.autograd.function import once_differentiable

from gqaconvert.attention.specs import naming
from gqaconvert.errors import UsageError

_SMALLEST_SQUARE = 1e-12
_ATTENTION_CLASS = "Attention"
"""How the classes of attention modules end in all of transformers."""


class MatchedStates(NamedTuple):
    """Outputs in the order they were computed.

    Attributes:
        hidden: (B, T, M) after each decoder layer.
        attention: (B, T, M) of each attention module, its output projection included.
    """

    hidden: tuple[torch.Tensor, ...]
    attention: tuple[torch.Tensor, ...]


class StateRecorder:
    """Records outputs of modules while it is entered as a context.

    Its hooks stay in place between passes, since compiled layers do not notice new ones.

    Args:
        layers: modules whose outputs are hidden states.
        attention: modules whose outputs are attention's.
    """

    def __init__(
        self,
        layers: Sequence[torch.nn.Module] = (),
        attention: Sequence[torch.nn.Module] = (),
    ) -> None:
        self._active = False
        self._hidden: list[torch.Tensor] = []
        self._attention: list[torch.Tensor] = []
        self._hooks = [module.register_forward_hook(self._keep_hidden) for module in layers]
        self._hooks += [module.register_forward_hook(self._keep_attention) for module in attention]

    @classmethod
    def of(cls, model: Any, *, hidden: bool, attention: bool) -> Self:  # noqa: ANN401
        """Record a model's decoder layers, its attention modules, or both.

        Raises:
            UsageError: its class has none that are known.
        """
        layers = decoder_layers(model) if hidden or attention else []
        return cls(
            layers if hidden else (),
            attention_modules(model, layers) if attention else (),
        )

    def __enter__(self) -> Self:
        self.take()
        self._active = True
        return self

    def __exit__(self, *_: object) -> None:
        self._active = False

    def take(self) -> MatchedStates:
        """Return what was recorded, and forget it."""
        taken = MatchedStates(tuple(self._hidden), tuple(self._attention))
        self._hidden.clear()
        self._attention.clear()
        return taken

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _keep_hidden(self, _: torch.nn.Module, __: Any, output: Any) -> None:  # noqa: ANN401
        if self._active:
            self._hidden.append(_first(output))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _keep_attention(self, _: torch.nn.Module, __: Any, output: Any) -> None:  # noqa: ANN401
        if self._active:
            self._attention.append(_first(output))


def decoder_layers(model: Any) -> list[torch.nn.Module]:  # noqa: ANN401
    """Return the decoder layers of a language model, in order.

    Raises:
        UsageError: there is no list of as many layers as its config says.
    """
    expected = model.config.get_text_config().num_hidden_layers
    for name, module in model.named_modules():
        parts = name.split(".")
        if (
            isinstance(module, torch.nn.ModuleList)
            and len(module) == expected
            and parts[-1] in naming().layer_lists
            and not naming().towers & set(parts)
        ):
            return list(module)
    raise UsageError(
        f"no list of {expected} decoder layers in {type(model).__name__}",
        remedy="uptrain.loss.hidden: 0 and attention: 0",
    )


def attention_modules(
    model: Any,  # noqa: ANN401
    layers: Sequence[torch.nn.Module],
) -> list[torch.nn.Module]:
    """Return the outermost attention module of each layer that has one.

    Args:
        model: the model, for the error.
        layers: from `decoder_layers`.

    Raises:
        UsageError: no layer has one.
    """
    found = []
    for layer in layers:
        names: list[str] = []
        for name, module in layer.named_modules():
            inside = any(name.startswith(f"{outer}.") for outer in names)
            if type(module).__name__.endswith(_ATTENTION_CLASS) and not inside:
                names.append(name)
                found.append(module)
    if not found:
        raise UsageError(
            f"no attention modules in the layers of {type(model).__name__}",
            remedy="uptrain.loss.attention: 0",
        )
    return found


def matching_error(
    student: Sequence[torch.Tensor], teacher: Sequence[torch.Tensor], counted: torch.Tensor
) -> torch.Tensor:
    """Sum over counted positions of the squared error relative to the teacher's mean square.

    Each position is measured against the teacher's own square there, so that sums of several
    batches add up to that of one large batch.

    Args:
        student: (B, T, M) of each layer.
        teacher: the same of the teacher.
        counted: (B, T), bool.

    Returns:
        Scalar in float32: the mean over layers.

    Raises:
        UsageError: the two have other layers or widths.
    """
    shapes = [[tuple(state.shape) for state in states] for states in (student, teacher)]
    if shapes[0] != shapes[1] or not student:
        raise UsageError(
            f"states of the student, {_summary(shapes[0])}, do not match those of the teacher,"
            f" {_summary(shapes[1])}",
            remedy="uptrain.loss.hidden: 0 and attention: 0",
        )
    errors = [
        _RelativeError.apply(mine, theirs, counted)
        for mine, theirs in zip(student, teacher, strict=True)
    ]
    return torch.stack(errors).mean()


class _RelativeError(torch.autograd.Function):
    """Keeps the gradient in the student's type, and neither of the states."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        student: torch.Tensor,
        teacher: torch.Tensor,
        counted: torch.Tensor,
    ) -> torch.Tensor:
        kind = torch.promote_types(student.dtype, torch.float32)
        theirs = teacher.to(kind)
        square = theirs.square().mean(-1).clamp_min(_SMALLEST_SQUARE)
        difference = student.to(kind) - theirs
        weight = counted / square
        error = (difference.square().mean(-1) * weight).sum()
        if ctx.needs_input_grad[0]:
            difference.mul_(weight[..., None] * (2 / student.shape[-1]))
            ctx.save_for_backward(difference.to(student.dtype))
        return error

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, error: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        (gradient,) = ctx.saved_tensors
        return gradient * error.to(gradient.dtype), None, None


def _first(output: Any) -> torch.Tensor:  # noqa: ANN401
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _summary(shapes: Sequence[tuple[int, ...]]) -> str:
    kinds = " or ".join(map(str, dict.fromkeys(shapes)))
    return f"{len(shapes)} of {kinds}" if shapes else "none"
