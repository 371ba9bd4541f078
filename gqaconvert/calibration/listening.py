"""Overhears modules while a layer runs: what they take, what they give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gqaconvert.calibration.walk import LayerCall


class _Reached(BaseException):
    """Unwinds a layer's forward once the wanted output is there; no error."""


@contextmanager
def listening(module: torch.nn.Module, take: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Give `take` the hidden states that a module returns, each time it runs."""

    def hook(_: torch.nn.Module, __: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
        take(output[0] if isinstance(output, tuple) else output)

    remove = module.register_forward_hook(hook).remove
    try:
        yield
    finally:
        remove()


def output_of(
    module: torch.nn.Module, call: LayerCall, layer: torch.nn.Module, hidden: torch.Tensor
) -> torch.Tensor:
    """Run a layer only until one of its modules returns, and return what that returns."""
    found: list[torch.Tensor] = []

    def take(output: torch.Tensor) -> None:
        found.append(output)
        raise _Reached

    with listening(module, take):
        try:
            call.run(layer, hidden)
        except _Reached:
            return found[0]
    raise ValueError("the layer does not run this module")


def norm_before(
    module: torch.nn.Module, call: LayerCall, layer: torch.nn.Module, hidden: torch.Tensor
) -> torch.nn.Module | None:
    """Return the module of a layer whose output is what `module` takes, None where none is."""
    given: dict[int, torch.nn.Module] = {}
    kept: list[torch.Tensor] = []  # so that no memory is used twice, and pointers tell apart
    entered: list[torch.Tensor] = []

    def remember(each: torch.nn.Module, _: tuple[Any, ...], output: Any) -> None:  # noqa: ANN401
        if isinstance(output, torch.Tensor):
            given[output.data_ptr()] = each
            kept.append(output)

    def enter(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        entered.append(args[0] if args else kwargs["hidden_states"])
        raise _Reached

    removers = [
        each.register_forward_hook(remember).remove
        for each in layer.modules()
        if each is not layer and not any(each is inside for inside in module.modules())
    ]
    removers.append(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
    try:
        with torch.no_grad():
            call.run(layer, hidden)
    except _Reached:
        pass
    finally:
        for remove in removers:
            remove()
    return given.get(entered[0].data_ptr()) if entered else None
