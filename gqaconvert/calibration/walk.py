"""Runs windows through a model one decoder layer at a time, with the hidden states kept between.

So only one layer's weights are needed at a time, and each layer's inputs are there in full. What a
layer is called with besides hidden states (rotary tables, masks, ...) is learnt by running the
model's own forward with every layer replaced for the moment by one that records its call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gqaconvert.calibration.decoder_layers import text_body
from gqaconvert.calibration.hidden_states import HiddenStates
from gqaconvert.calibration.offloaded import weights_held
from gqaconvert.errors import UnsupportedModelError
from gqaconvert.modelling.layers import find_layers

_TRIAL_TOKENS = 8
_HIDDEN = "hidden_states"


@dataclass(frozen=True)
class LayerCall:
    """How a model calls one of its decoder layers, the hidden states left out.

    Attributes:
        args: further positional arguments.
        kwargs: keyword arguments.
        by_name: hidden states are passed as `hidden_states=`, not first.
        outputs: length of the tuple that the layer returns; 0 where it returns hidden states alone.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_name: bool
    outputs: int

    def run(self, layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """Call a layer as the model would; returns its hidden states."""
        if self.by_name:
            output = layer(*self.args, **{**self.kwargs, _HIDDEN: hidden})
        else:
            output = layer(hidden, *self.args, **self.kwargs)
        result: torch.Tensor = output[0] if self.outputs else output
        return result

    def wrap(self, hidden: torch.Tensor) -> Any:  # noqa: ANN401
        """Return hidden states in the form in which the layer returns them."""
        return (hidden, *[None] * (self.outputs - 1)) if self.outputs else hidden


class Visit:
    """One decoder layer with all that enters it.

    Attributes:
        number: of the layer.
        layer: its module, its weights on the device until the next visit.
    """

    def __init__(self, walk: Walk, number: int) -> None:
        self.number = number
        self.layer = walk.layers[number]
        self._walk = walk

    def __len__(self) -> int:
        return len(self._walk.states)

    def hidden(self, batch: int) -> torch.Tensor:
        """Hidden states (B, T, M) that enter the layer, on the device."""
        return self._walk.states.read(batch).to(self._walk.device)

    def run(self, batch: int) -> torch.Tensor:
        """Run the layer on one batch and return the hidden states that leave it."""
        return self._walk.calls[batch][self.number].run(self.layer, self.hidden(batch))

    def call(self, batch: int) -> LayerCall:
        """How the model calls this layer on one batch."""
        return self._walk.calls[batch][self.number]

    def leave(self, batch: int, hidden: torch.Tensor) -> None:
        """Keep what leaves the layer, for the next one to enter."""
        self._walk.states.write(batch, hidden)


class Walk:
    """A model and batches of token ids, to be gone through layer by layer.

    Args:
        model: a causal language model of transformers in eval mode; weights in memory, or its
            layers offloaded by accelerate.
        batches: token ids (B, T).
        folder: where hidden states are kept; None for in memory.
        begin: layer to begin with, its inputs being in `folder`.
        turn: of the hidden states in `folder`.

    Raises:
        UnsupportedModelError: the class does not simply run one decoder layer after the other.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401
        batches: Sequence[torch.Tensor],
        *,
        folder: Path | None = None,
        begin: int = 0,
        turn: int = 0,
    ) -> None:
        self.model = model
        self.path, self.layers = find_layers(model)
        self.device = _device_of(model)
        self.begin = begin
        self._body = text_body(model)
        self._batches = batches
        self._forms: dict[type, int] = {}
        with torch.no_grad():
            self._check_chain(batches[0][:1, :_TRIAL_TOKENS])
            self.calls: list[list[LayerCall]] = []
            first = []
            for token_ids in batches:
                hidden, calls = self._record(token_ids)
                first.append(hidden.cpu())
                self.calls.append(_shared(calls, self.calls[0]) if self.calls else calls)
        self.states = HiddenStates(first, folder, turn=turn, keep=begin > 0)

    def __iter__(self) -> Iterator[Visit]:
        """Visit the layers in order; what `Visit.leave` was not given is computed."""
        for number in range(self.begin, len(self.layers)):
            with weights_held(self.layers[number]):
                visit = Visit(self, number)
                yield visit
            self.states.advance()

    def finish(self, batch: int) -> torch.Tensor:
        """Return what the body makes of the hidden states that left the last layer."""
        final = self.states.read(batch).to(self.device)
        _, _, output = self._run_body(self._batches[batch], [final] * len(self.layers))
        return output

    def _record(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, list[LayerCall]]:
        entered, calls, _ = self._run_body(token_ids, None)
        return entered[0], calls

    def _run_body(
        self, token_ids: torch.Tensor, leaving: Sequence[torch.Tensor] | None
    ) -> tuple[list[torch.Tensor], list[LayerCall], torch.Tensor]:
        """Run the model around its layers.

        Args:
            token_ids: (B, T).
            leaving: what each layer returns; its input by default.

        Returns:
            What entered each layer, how each was called, and what the body made of the last.
        """
        entered: list[torch.Tensor] = []
        calls: list[LayerCall] = []

        def take(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
            if number != len(calls):
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} does not run its decoder layers once and in order"
                )
            call, hidden = self._understand(number, args, kwargs)
            calls.append(call)
            entered.append(hidden)
            return call.wrap(hidden if leaving is None else leaving[number])

        with torch.no_grad(), _replaced(self.layers, take):
            output = self._body(
                input_ids=token_ids.to(self.device), use_cache=False, return_dict=True
            )
        if len(calls) != len(self.layers):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} ran {len(calls)} of {len(self.layers)} decoder layers"
            )
        return entered, calls, output[0]

    def _understand(
        self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[LayerCall, torch.Tensor]:
        layer = self.layers[number]
        if type(layer) not in self._forms:
            with weights_held(layer):
                output = type(layer).forward(layer, *args, **kwargs)
            self._forms[type(layer)] = len(output) if isinstance(output, tuple) else 0
        outputs = self._forms[type(layer)]
        if args:
            return LayerCall(args[1:], kwargs, False, outputs), args[0]
        rest = {name: value for name, value in kwargs.items() if name != _HIDDEN}
        return LayerCall((), rest, True, outputs), kwargs[_HIDDEN]

    def _check_chain(self, token_ids: torch.Tensor) -> None:
        """Prove, without running layers, that each takes what the one before returned, only that.

        Layers return noise, another in two runs: each must receive the noise of the one before it,
        and everything else it is called with must stay the same.
        """
        first, _ = self._record(token_ids)
        runs = []
        for seed in (1, 2):
            generator = torch.Generator().manual_seed(seed)
            noise = [torch.randn(first.shape, generator=generator).to(first) for _ in self.layers]
            entered, calls, _ = self._run_body(token_ids, noise)
            chained = all(
                torch.equal(got, sent) for got, sent in zip(entered[1:], noise[:-1], strict=True)
            )
            if not chained:
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} does more between its decoder layers than pass"
                    " hidden states on, so it cannot be gone through layer by layer"
                )
            runs.append(calls)
        for one, other in zip(*runs, strict=True):
            if not _same((one.args, one.kwargs), (other.args, other.kwargs)):
                raise UnsupportedModelError(
                    f"decoder layers of {type(self.model).__name__} take more from earlier layers"
                    " than hidden states, so they cannot be gone through one by one"
                )


@contextmanager
def _replaced(layers: Sequence[torch.nn.Module], take: Any) -> Iterator[None]:  # noqa: ANN401
    """Let `take(number, args, kwargs)` stand for the forward of each layer."""
    own = [layer.__dict__.get("forward") for layer in layers]  # accelerate puts one there

    def stand_in(number: int) -> Any:  # noqa: ANN401
        def forward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            return take(number, args, kwargs)

        return forward

    for number, layer in enumerate(layers):
        layer.__dict__["forward"] = stand_in(number)
    try:
        yield
    finally:
        for layer, forward in zip(layers, own, strict=True):
            del layer.__dict__["forward"]
            if forward is not None:
                layer.__dict__["forward"] = forward


def _device_of(model: Any) -> torch.device:  # noqa: ANN401
    embedding = model.get_input_embeddings().weight
    if embedding.device.type != "meta":
        device: torch.device = embedding.device
        return device
    return torch.device("cpu")


def _same(one: Any, other: Any) -> bool:  # noqa: ANN401
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other or one == other


def _shared(calls: list[LayerCall], first: list[LayerCall]) -> list[LayerCall]:
    """Let equal tensors of two batches be one, so that masks and tables are kept once."""
    return [
        LayerCall(_join(call.args, known.args), _join(call.kwargs, known.kwargs), call.by_name,
                  call.outputs)
        for call, known in zip(calls, first, strict=True)
    ]  # fmt: skip


def _join(one: Any, known: Any) -> Any:  # noqa: ANN401
    if isinstance(one, torch.Tensor):
        same = isinstance(known, torch.Tensor) and one.shape == known.shape
        return known if same and torch.equal(one, known) else one
    if isinstance(one, dict):
        return {key: _join(value, known.get(key)) for key, value in one.items()}
    if type(one) in (list, tuple) and type(known) is type(one) and len(one) == len(known):
        return type(one)(map(_join, one, known))
    return one
