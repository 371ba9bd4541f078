"""Dividing a model among processes, layer by layer, and gathering it again (FSDP2).

torch's `fully_shard` works on a mesh of GPUs and, over gloo, of CPUs: the same functions serve
both, so what runs on a cluster is what the tests run.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from gqaconvert.modelling.layers import find_layers


def process_mesh(device: torch.device, num_processes: int) -> DeviceMesh:
    """One dimension over all processes."""
    return init_device_mesh(device.type, (num_processes,))


def shard(
    model: nn.Module, mesh: DeviceMesh, *, compute: torch.dtype | None, root: nn.Module
) -> None:
    """Divide a model's parameters among the processes of a mesh, in place.

    Each decoder layer is gathered when it runs and let go afterwards.

    Args:
        model: what holds the decoder layers.
        mesh: of processes; every process passes the same weights.
        compute: type of gathered weights; gradients are summed in float32. None for the weights'
            own.
        root: the module whose forward runs the model. What is outside the layers is gathered when
            it is called and stays whole until the backward pass.
    """
    policy = (
        MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        if compute is not None
        else MixedPrecisionPolicy()
    )
    for layer in find_layers(model)[1]:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(root, mesh=mesh, mp_policy=policy)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a divided tensor; every process must call it. Others come back as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gathered(
    state: dict[str, torch.Tensor], *, is_first: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield whole tensors on the CPU, one at a time, to the first process only.

    Args:
        state: names to tensors, divided or not; the same names in every process.
        is_first: whether this is the first process; the others yield nothing and must run through
            all the same, since gathering takes everyone.
    """
    for name, tensor in state.items():
        full = whole(tensor.detach())
        if is_first:
            yield name, full.cpu()
