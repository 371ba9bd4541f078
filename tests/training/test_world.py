import pytest
import torch

from gqaconvert.errors import UsageError
from gqaconvert.training.world import EXPECTED, World, check_world

LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no"}
"""What `accelerate launch` sets in any case."""


def world(num_processes: int = 1, *, sharded: bool = False) -> World:
    return World(num_processes, 0, sharded, torch.device("cpu"))


@pytest.mark.parametrize(
    ("came_up", "kind", "environment"),
    [
        (world(), "DistributedType.NO", {}),
        (world(), "DistributedType.NO", LAUNCHED),
        (world(2), "DistributedType.MULTI_CPU", {"WORLD_SIZE": "2"}),
        (world(2, sharded=True), "DistributedType.MULTI_CPU", {EXPECTED: "2:sharded"}),
        (world(8), "DistributedType.MULTI_GPU", {EXPECTED: "8", "WORLD_SIZE": "8"}),
        (
            world(8, sharded=True),
            "DistributedType.FSDP",
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "WORLD_SIZE": "8"},
        ),
    ],
)
def test_world_as_asked_for_is_taken(
    came_up: World, kind: str, environment: dict[str, str]
) -> None:
    check_world(came_up, kind, environment)


@pytest.mark.parametrize(
    ("came_up", "kind", "environment", "what"),
    [
        # accelerate launch --cpu --num_processes 2
        (world(), "DistributedType.NO", {**LAUNCHED, "MASTER_PORT": "29500"}, "started one"),
        # FSDP config with use_cpu: processes that know nothing of each other
        (
            world(),
            "DistributedType.NO",
            {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "WORLD_SIZE": "2"},
            "came up as DistributedType.NO",
        ),
        # FSDP on CPU through torchrun: falls back to DDP
        (
            world(2, sharded=True),
            "DistributedType.MULTI_CPU",
            {"ACCELERATE_USE_FSDP": "1", "FSDP_VERSION": "2", "WORLD_SIZE": "2"},
            "came up as DistributedType.MULTI_CPU",
        ),
        (world(), "DistributedType.NO", {EXPECTED: "2"}, "2 processes were asked for"),
        (world(4), "DistributedType.MULTI_GPU", {EXPECTED: "8:sharded"}, "and 4 came up"),
        (world(2), "DistributedType.FSDP", {"ACCELERATE_USE_FSDP": "true"}, "FSDP1"),
        (world(2), "DistributedType.DEEPSPEED", {"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed"),
    ],
)
def test_another_world_than_asked_for_is_refused(
    came_up: World, kind: str, environment: dict[str, str], what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        check_world(came_up, kind, environment)
