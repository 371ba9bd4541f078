"""The local fit: each layer's pooled attention learns to give what the source's gave.

Works on the real modules of source and converted model, called as the model calls them, so it needs
nothing of any class. `fit_model` takes two models in memory; `local_fit` does it layer by layer
while a checkpoint is converted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gqaconvert.calibration.block_fit import FitOptions, FitReport, fit_block
from gqaconvert.calibration.decoder_layers import LayerAttention, find_attention
from gqaconvert.calibration.hidden_states import HiddenStates
from gqaconvert.calibration.listening import listening, norm_before, output_of
from gqaconvert.calibration.walk import Visit, Walk


def fit_model(
    source: Any,  # noqa: ANN401
    converted: Any,  # noqa: ANN401
    batches: Sequence[torch.Tensor],
    options: FitOptions,
    *,
    progress: Callable[[int, int, FitReport], None] | None = None,
) -> dict[int, FitReport]:
    """Fit every attention block of a converted model in place.

    Args:
        source: the model it was made from, in memory, in eval mode.
        converted: of the same class, with fewer KV heads, on the same device.
        batches: token ids (B, T) of the calibration text, at least two.
        options: how.
        progress: called after each layer with its number, the number of layers, and its report.

    Raises:
        UnsupportedModelError: the class cannot be gone through layer by layer.
        UsageError: too few batches.
    """
    fitting = StreamFit(source, batches, options)
    attention = find_attention(converted)
    prefix = fitting.walk.path
    reports: dict[int, FitReport] = {}
    for number in range(len(fitting.walk.layers)):
        layer = converted.get_submodule(f"{prefix}.{number}")
        visit = fitting.reach(number)
        if number not in attention:
            fitting.skip(visit, layer)
            continue
        trained, report = fitting.fit(visit, layer, attention[number])
        _take_over(trained, layer)
        reports[number] = report
        if progress is not None:
            progress(number, len(fitting.walk.layers), report)
    return reports


class StreamFit:
    """Fits layers in order, next to a walk through the source.

    Args:
        source: the source model.
        batches: token ids (B, T).
        options: how.
    """

    def __init__(
        self,
        source: Any,  # noqa: ANN401
        batches: Sequence[torch.Tensor],
        options: FitOptions,
    ) -> None:
        self.walk = Walk(source, batches)
        self.options = options
        self._visits = iter(self.walk)
        self._attention = find_attention(source)
        self._own: HiddenStates | None = None
        if options.inputs == "converted":
            self._own = HiddenStates([self.walk.states.read(n) for n in range(len(batches))])

    def reach(self, number: int) -> Visit:
        """Go on to a layer; those in between are taken to be as in the source.

        Raises:
            ValueError: it was passed before.
        """
        for visit in self._visits:
            if visit.number == number:
                return visit
            self.skip(visit, visit.layer)
        raise ValueError(f"layer {number} was passed before")

    def skip(self, visit: Visit, layer: torch.nn.Module) -> None:
        """Pass a layer that is not fitted.

        Args:
            visit: of the source's layer.
            layer: the same in the converted model.
        """
        self._pass_source(visit)
        self._pass_converted(visit, layer)

    def fit(
        self, visit: Visit, layer: torch.nn.Module, attention: LayerAttention
    ) -> tuple[torch.nn.Module, FitReport]:
        """Fit the attention of one layer.

        Args:
            visit: of the source's layer.
            layer: the same in the converted model; not modified.
            attention: of the converted model.

        Returns:
            A copy of the layer in float32, fitted, and what was reached.
        """
        trained = copy.deepcopy(layer).to(self.walk.device).float().eval()
        inside = attention.path.removeprefix(f"{self.walk.path}.{visit.number}").removeprefix(".")
        module = trained.get_submodule(inside)
        targets = self._targets(visit, self._attention[visit.number].module)
        whole = self.options.trained == "layer"

        def forward(batch: int) -> torch.Tensor:
            hidden, call = self._entering(visit, batch).float(), visit.call(batch)
            if whole:
                return call.run(trained, hidden)
            return output_of(module, call, trained, hidden)

        parameters = self._parameters(trained, module, attention, visit)
        for parameter in trained.parameters():
            parameter.requires_grad_(any(parameter is chosen for chosen in parameters))
        report = fit_block(parameters, forward, targets.__getitem__, len(targets), self.options)
        self._pass_converted(visit, trained)
        return trained, report

    def _entering(self, visit: Visit, batch: int) -> torch.Tensor:
        if self._own is None:
            return visit.hidden(batch)
        return self._own.read(batch).to(self.walk.device)

    def _targets(self, visit: Visit, module: torch.nn.Module) -> list[torch.Tensor]:
        """Run the source's layer, and return what the fitted one should give for each batch."""
        targets = []
        with torch.no_grad():
            for batch in range(len(visit)):
                outputs: list[torch.Tensor] = []
                with listening(module, outputs.append):
                    left = visit.run(batch)
                wanted = left if self.options.trained == "layer" else outputs[0]
                if self._own is not None and self.options.trained != "layer":
                    # The residual stream after the block must be the source's.
                    lag = visit.hidden(batch).float() - self._entering(visit, batch).float()
                    wanted = (wanted.float() + lag).to(wanted.dtype)
                targets.append(wanted.cpu())
                visit.leave(batch, left)
        return targets

    def _pass_source(self, visit: Visit) -> None:
        with torch.no_grad():
            for batch in range(len(visit)):
                visit.leave(batch, visit.run(batch))

    def _pass_converted(self, visit: Visit, layer: torch.nn.Module) -> None:
        if self._own is None:
            return
        with torch.no_grad():
            for batch in range(len(visit)):
                hidden = self._own.read(batch).to(self.walk.device)
                with torch.autocast(hidden.device.type, torch.bfloat16, enabled=self.options.bf16):
                    left = visit.call(batch).run(layer, hidden)
                self._own.write(batch, left.to(hidden.dtype))
        self._own.advance()

    def _parameters(
        self,
        layer: torch.nn.Module,
        module: torch.nn.Module,
        attention: LayerAttention,
        visit: Visit,
    ) -> list[torch.nn.Parameter]:
        if self.options.trained == "layer":
            return list(layer.parameters())
        stems = set(attention.block.stems.values())
        chosen = [
            parameter
            for name, parameter in module.named_parameters(prefix=attention.path)
            if name.rpartition(".")[0] in stems
        ]
        if self.options.trained == "attention+norm":
            norm = norm_before(module, visit.call(0), layer, visit.hidden(0).float())
            chosen += [] if norm is None else list(norm.parameters())
        return chosen


def _take_over(trained: torch.nn.Module, layer: torch.nn.Module) -> None:
    """Give a layer the trained parameters, as new ones: it may share its own with the source."""
    for name, new in trained.named_parameters():
        if new.requires_grad:
            path, _, leaf = name.rpartition(".")
            module = layer.get_submodule(path)
            old = module.get_parameter(leaf)
            value = new.detach().to(old.dtype)
            module._parameters[leaf] = torch.nn.Parameter(value, requires_grad=old.requires_grad)
