"""The local fit as a step of a conversion: follows the source layer by layer as layers are pooled.

Heads come in and go out in the form that calibrated methods work on; in between they are put into
an attention module of the converted class, which is trained beside the source's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from gqaconvert.attention.recognise import recognise
from gqaconvert.calibration.block_fit import FitOptions, FitReport
from gqaconvert.calibration.decoder_layers import LayerAttention, find_attention
from gqaconvert.calibration.fit import StreamFit
from gqaconvert.calibration.offloaded import plain_copy
from gqaconvert.calibration.opening import opened
from gqaconvert.calibration.walk import Visit
from gqaconvert.calibration.windows import calibration_text, spread_windows, token_batches
from gqaconvert.checkpoint.reader import Array
from gqaconvert.corpus.windows import fingerprint_windows
from gqaconvert.errors import RefusedError, UsageError
from gqaconvert.kv_cache.model_config import parse_config
from gqaconvert.modelling.models import load_tokenizer
from gqaconvert.surgery.in_memory import empty_converted, memory_index, to_numpy
from gqaconvert.surgery.layer_heads import LayerHeads, LayerReport
from gqaconvert.surgery.layer_pooling import layer_arrays
from gqaconvert.surgery.layer_tensors import read_heads
from gqaconvert.surgery.options import ConversionOptions
from gqaconvert.surgery.plan import ConversionPlan
from gqaconvert.surgery.planning import plan_conversion
from gqaconvert.surgery.source import open_source


class LocalFit:
    """What `convert(refine=...)` takes; a context manager that holds the source model.

    The source is opened when the first layer comes, not before.

    Args:
        model: the source of the conversion: folder, alias, Hub id or `tiny`.
        data: as in `calibration_text`; never the one the result is evaluated on.
        options: how layers are fitted; only attention can be trained here.
        windows: of the text that are read, spread evenly over it.
        context: tokens a window.
        batch: windows a step.
        device: "cpu" or "cuda".
        dtype: of the source's weights and hidden states.
        stream: keep decoder layers on disk; None to decide by memory.
        revision: branch, tag or commit of a Hub model.
        progress: called after each layer with its number, the number of layers, and its report.

    Raises:
        UsageError: counts or options that make no sense.
    """

    def __init__(
        self,
        model: str | Path,
        data: str,
        options: FitOptions,
        *,
        windows: int = 128,
        context: int = 512,
        batch: int = 4,
        device: str = "cpu",
        dtype: str = "auto",
        stream: bool | None = None,
        revision: str | None = None,
        progress: Callable[[int, int, FitReport], None] | None = None,
    ) -> None:
        if options.trained != "attention":
            raise UsageError(
                f"a conversion changes attention alone, so {options.trained} cannot be trained",
                remedy="fit_model, on models in memory",
            )
        self._source = open_source(model, revision)
        text = calibration_text(data)
        tokenizer = load_tokenizer(self._source.folder)
        chosen = spread_windows(tokenizer, text, tokens=windows * context, context=context)
        self._batches = token_batches(chosen, batch)
        if len(self._batches) < 2:
            raise UsageError(
                f"{len(chosen)} windows are a single batch of {batch}, and some are held out",
                at=text.name,
                remedy="a longer text, or a smaller batch",
            )
        self.options = options
        facts = [asdict(options), fingerprint_windows(chosen), batch, dtype]
        digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        self.identity = f"local fit, {options.steps} steps, {len(chosen)} windows: {digest}"
        self._opening: dict[str, Any] = {"device": device, "dtype": dtype, "stream": stream}
        self._progress = progress
        self._reports: dict[int, FitReport] = {}
        self._stack = ExitStack()
        self._workshop: _Workshop | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._workshop = None
        self._stack.close()

    def __call__(
        self, layer: int, source: LayerHeads, pooled: LayerHeads, report: LayerReport
    ) -> LayerHeads:
        """Fit one layer; those before it have been fitted, passed, or have no attention."""
        if pooled.num_kv_heads == source.num_kv_heads:
            return pooled
        shop = self._open(pooled.num_kv_heads)
        visit = shop.fitting.reach(layer)
        start = shop.build(visit, pooled, report)
        trained, self._reports[layer] = shop.fitting.fit(visit, start, shop.attention[layer])
        if self._progress is not None:
            self._progress(layer, len(shop.fitting.walk.layers), self._reports[layer])
        return replace(shop.read(layer, trained), has_bias=pooled.has_bias)

    def facts(self, layer: int) -> Mapping[str, Any]:
        """Return the errors of a fitted layer, for the conversion's report."""
        return {"fit": asdict(self._reports[layer])} if layer in self._reports else {}

    def passed(self, layer: int, pooled: LayerHeads) -> None:
        """Take note of a layer that an earlier run fitted.

        Raises:
            RefusedError: later layers need its hidden states, and its heads alone do not say how
                its other tensors were moved.
        """
        if self.options.inputs == "source":
            return
        shop = self._open(pooled.num_kv_heads)
        if shop.moves_more_than_heads(layer):
            raise RefusedError(
                "a fit on converted inputs of this class cannot be taken up in the middle",
                at=f"layer {layer}",
                remedy="--overwrite to start again, or --fit-inputs source",
            )
        visit = shop.fitting.reach(layer)
        groups = tuple((number,) for number in range(pooled.num_kv_heads))
        shop.fitting.skip(visit, shop.build(visit, pooled, LayerReport(groups, 0.0, 0.0, None)))

    def _open(self, num_kv_heads: int) -> _Workshop:
        if self._workshop is None:
            model = self._stack.enter_context(opened(self._source, **self._opening))
            fitting = StreamFit(model, self._batches, self.options)
            self._workshop = _Workshop(model, fitting, num_kv_heads)
        return self._workshop


class _Workshop:
    """Builds layers of the converted class around pooled heads, and takes heads out of them."""

    def __init__(self, model: Any, fitting: StreamFit, num_kv_heads: int) -> None:  # noqa: ANN401
        self.fitting = fitting
        self._plan = _plan(model, num_kv_heads)
        self._layers = {layer.block.layer: layer for layer in self._plan.layers}
        self._shell = empty_converted(model, self._plan)
        self.attention: dict[int, LayerAttention] = find_attention(self._shell)

    def moves_more_than_heads(self, number: int) -> bool:
        """Whether tensors beside q, k, v and o depend on how heads were grouped."""
        layer = self._layers[number]
        norms = any(tensor.role == "key_norm" for tensor in layer.block.head_tensors)
        return norms or bool(layer.freedom.companions)

    def build(self, visit: Visit, heads: LayerHeads, report: LayerReport) -> torch.nn.Module:
        """Return the source's layer with attention of the converted class, holding these heads."""
        layer = self._layers[visit.number]
        prefix = f"{self.fitting.walk.path}.{visit.number}."
        inside = layer.block.module.removeprefix(prefix)
        built = plain_copy(visit.layer)
        source = built.get_submodule(inside)
        arrays = layer_arrays(self._plan, layer, heads, report, _reader(source, layer.block.module))
        module = self._shell.get_submodule(layer.block.module)
        for name, parameter in list(source.named_parameters()):
            array = arrays.get(f"{layer.block.module}.{name}")
            value = parameter.detach() if array is None else _to_torch(array).to(parameter.device)
            _put(module, name, torch.nn.Parameter(value))
        for name, buffer in source.named_buffers():
            path, _, leaf = name.rpartition(".")
            module.get_submodule(path)._buffers[leaf] = buffer
        path, _, leaf = inside.rpartition(".")
        setattr(built.get_submodule(path), leaf, module)
        return built

    def read(self, number: int, layer: torch.nn.Module) -> LayerHeads:
        """Take the heads out of a layer that `build` made."""
        planned, block = self._layers[number], self.attention[number].block
        inside = block.module.removeprefix(f"{self.fitting.walk.path}.{number}.")
        read = _reader(layer.get_submodule(inside), block.module)
        return read_heads(block, planned.freedom, planned.outputs, read)


def _plan(model: Any, num_kv_heads: int) -> ConversionPlan:  # noqa: ANN401
    """Plan the conversion of a model in memory, whose names may differ from those on disk."""
    index = memory_index(model.state_dict())
    config = parse_config(model.config.to_dict(), f"{type(model).__name__}.config")
    # Which heads share is what reports say; here it only matters that layers are pooled as a whole.
    # Planned so that every tensor that may move with the query heads is read and written.
    options = ConversionOptions(
        num_kv_heads, "svd", grouping="similarity", statistics_digest="memory"
    )
    return plan_conversion(index, config, recognise(index.tensors, config), options)


def _reader(module: torch.nn.Module, path: str) -> Callable[[str], Array]:
    state = module.state_dict()

    def read(name: str) -> Array:
        return to_numpy(state[name.removeprefix(f"{path}.")])

    return read


def _put(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter) -> None:
    path, _, leaf = name.rpartition(".")
    module.get_submodule(path)._parameters[leaf] = parameter


def _to_torch(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.float32))
