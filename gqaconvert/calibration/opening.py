"""Opens the model to calibrate: whole or with its layers on disk, as the class it is converted as.

Statistics must be those of the class whose tensors are pooled: a model that is converted as another
class (GPT-NeoX as Phi, ...) is built as that one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import transformers
from accelerate import init_empty_weights
from transformers import AutoConfig

from gqaconvert.calibration.offloaded import fits_in_memory, load_offloaded
from gqaconvert.checkpoint.reader import Array, TensorReader
from gqaconvert.errors import GqaconvertError, UsageError
from gqaconvert.modelling.classes import FORWARD_THROUGH, model_class, quiet_transformers
from gqaconvert.surgery.source import SourceCheckpoint
from gqaconvert.units import weight_type


@contextmanager
def opened(
    source: SourceCheckpoint,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    stream: bool | None = None,
) -> Iterator[Any]:
    """Load a model to be gone through layer by layer, in eval mode.

    Args:
        source: its checkpoint.
        dtype: of the weights in memory: "auto" for that of the checkpoint (float32 for float16 on a
            CPU, which has no fast float16), or a name.
        device: "cpu" or "cuda".
        stream: leave decoder layers on disk and load one at a time; None to do so only where the
            weights would not fit.

    Raises:
        UsageError: no such type or device.
        GqaconvertError: transformers cannot load it.
    """
    if device not in ("cpu", "cuda"):
        raise UsageError(f"unknown device {device!r}", remedy="cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA device here", remedy="--device cpu")
    kind = _dtype(source, dtype, device)
    size_bytes = source.index.parameters * kind.itemsize
    if source.becomes:
        yield _built(source, kind, device)
    elif stream or (stream is None and not fits_in_memory(size_bytes, device)):
        with tempfile.TemporaryDirectory(prefix="gqaconvert-") as aside:
            yield load_offloaded(source.folder, dtype=kind, device=device, aside=Path(aside))
    else:
        yield _loaded(source.folder, kind, device)


def _loaded(folder: Path, dtype: torch.dtype, device: str) -> Any:  # noqa: ANN401
    try:
        with quiet_transformers():  # the attention is the class's default: sdpa where it has it
            model: Any = model_class(folder).from_pretrained(folder, dtype=dtype)
    except (ValueError, ImportError) as error:
        raise GqaconvertError(f"transformers cannot load it: {error}", at=str(folder)) from error
    model = getattr(model, FORWARD_THROUGH.get(type(model).__name__, ""), model)
    return model.eval().to(device)


def _built(source: SourceCheckpoint, dtype: torch.dtype, device: str) -> Any:  # noqa: ANN401
    """Build a model of the equivalent class from the tensors that it is read as."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(source.config_text, encoding="utf-8")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind = getattr(transformers, str(source.becomes))
    with TensorReader(source.folder, source.index.derived) as reader:
        state = {
            name: _to_torch(reader.read(tensor)).to(dtype)
            for name, tensor in source.index.tensors.items()
        }
    with quiet_transformers(), init_empty_weights(include_buffers=False):
        model = kind._from_config(config)
    _, unexpected = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if unexpected or left:
        raise GqaconvertError(
            f"the tensors do not fit {source.becomes}: {', '.join([*unexpected, *left][:3])}",
            at=str(source.folder),
        )
    return model.eval().to(device)


def _dtype(source: SourceCheckpoint, asked: str, device: str) -> torch.dtype:
    if asked != "auto":
        named: torch.dtype = getattr(torch, weight_type(asked).config_name)
        return named
    stored = {tensor.dtype for tensor in source.index.tensors.values()}
    if stored <= {"BF16"}:
        return torch.bfloat16
    if stored <= {"F16"} and device == "cuda":
        return torch.float16
    return torch.float32


def _to_torch(array: Array) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.ascontiguousarray(array))
