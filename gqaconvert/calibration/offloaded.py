"""Models larger than memory: their decoder layers stay on disk, and one at a time is loaded.

accelerate's hooks fetch weights whenever a module runs; `weights_held` lets them do so once for all
batches of a layer.
"""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from accelerate.hooks import AlignDevicesHook, SequentialHook, remove_hook_from_module
from transformers import AutoConfig, AutoModelForCausalLM

from gqaconvert.errors import GqaconvertError
from gqaconvert.modelling.classes import FORWARD_THROUGH, model_class, quiet_transformers
from gqaconvert.modelling.layers import find_layers

_SHARE_OF_MEMORY = 0.6
"""Weights that take more than this of the free memory stay on disk."""


def fits_in_memory(size_bytes: int, device: str) -> bool:
    """Whether weights of this size leave room for activations on a device.

    Args:
        size_bytes: of the weights as they will be held.
        device: "cpu" or "cuda".
    """
    if device == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        free = max(free, _available_bytes())
    return size_bytes <= _SHARE_OF_MEMORY * free


def load_offloaded(folder: Path, *, dtype: torch.dtype, device: str, aside: Path) -> Any:  # noqa: ANN401
    """Load a model whose decoder layers stay on disk, in eval mode.

    Args:
        folder: its checkpoint.
        dtype: of the weights when they are loaded.
        device: "cpu" or "cuda", where everything else is and layers run.
        aside: an empty folder for what cannot be used as it is on disk: .bin files, weights that
            transformers puts together from several tensors.

    Raises:
        GqaconvertError: transformers cannot load it.
    """
    logger = logging.getLogger("accelerate")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it says which weights are on disk
    try:
        with quiet_transformers():
            model: Any = model_class(folder).from_pretrained(
                folder,
                dtype=dtype,
                device_map=place_layers(folder, device),
                offload_folder=str(aside),
            )
    except (ValueError, ImportError) as error:
        raise GqaconvertError(
            f"transformers cannot load it with its layers on disk: {error}",
            at=str(folder),
            remedy="--no-stream, with as much memory as it has weights",
        ) from error
    finally:
        logger.setLevel(level)
    return getattr(model, FORWARD_THROUGH.get(type(model).__name__, ""), model).eval()


def place_layers(folder: Path, device: str) -> dict[str, str]:
    """Return a device map: decoder layers on disk, everything else on the device."""
    kind = model_class(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with init_empty_weights():
        build = kind.from_config if kind is AutoModelForCausalLM else kind._from_config
        model = build(config)
    through = FORWARD_THROUGH.get(type(model).__name__)
    path, layers = find_layers(getattr(model, through) if through else model)
    path = f"{through}.{path}" if through else path
    on_disk = {f"{path}.{number}" for number in range(len(layers))}
    placed = dict.fromkeys(on_disk, "disk")
    _place_rest(model, "", path, placed, device)
    return placed


def _place_rest(
    module: torch.nn.Module, here: str, layers: str, placed: dict[str, str], device: str
) -> None:
    """Put on the device what stands beside the list of layers, from the outside in."""
    for name, _ in (*module.named_parameters(here, False), *module.named_buffers(here, False)):
        placed[name] = device
    for name, child in module.named_children():
        path = f"{here}.{name}" if here else name
        if path == layers:
            continue
        if layers.startswith(f"{path}."):
            _place_rest(child, path, layers, placed, device)
        else:
            placed[path] = device


def plain_copy(layer: torch.nn.Module) -> torch.nn.Module:
    """Copy a layer whose weights are held, without the hooks that would fetch them."""
    copied = copy.deepcopy(layer)
    remove_hook_from_module(copied, recurse=True)
    return copied


@contextmanager
def weights_held(layer: torch.nn.Module) -> Iterator[None]:
    """Keep the weights of an offloaded layer on its device; nothing to do for any other layer."""
    held: list[tuple[Any, Any]] = []
    try:
        for module in layer.modules():
            if _offloads(module):
                fetching: Any = module
                fetching._hf_hook.pre_forward(fetching)
                held.append((fetching, fetching.__dict__["forward"]))
                fetching.__dict__["forward"] = fetching._old_forward
        yield
    finally:
        for fetching, forward in held:
            fetching.__dict__["forward"] = forward
            fetching._hf_hook.post_forward(fetching, None)


def _offloads(module: torch.nn.Module) -> bool:
    hook = getattr(module, "_hf_hook", None)
    hooks = hook.hooks if isinstance(hook, SequentialHook) else (hook,)
    return any(isinstance(each, AlignDevicesHook) and each.offload for each in hooks)


def _available_bytes() -> int:
    """Return what Linux calls available, which counts caches of files; 0 elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return 1024 * int(next(found, "0"))
