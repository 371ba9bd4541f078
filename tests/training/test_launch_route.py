from pathlib import Path

import pytest

from gqaconvert.errors import UsageError
from gqaconvert.training.launch import OUTCOME, choose_route, leave_outcome, read_outcome
from gqaconvert.training.world import EXPECTED

FSDP2 = (
    "distributed_type: FSDP\nnum_processes: 8\nnum_machines: 1\nfsdp_config: {fsdp_version: 2}\n"
)


@pytest.fixture
def fsdp2(tmp_path: Path) -> Path:
    path = tmp_path / "fsdp2.yaml"
    path.write_text(FSDP2)
    return path


def test_processes_on_cpus_go_through_torchrun(fsdp2: Path) -> None:
    route = choose_route(fsdp2, 2, ["r.yaml"], num_gpus=0, num_cores=8)
    assert route is not None
    assert "torch.distributed.run" in route.command
    assert route.command[-3:] == ("-m", "gqaconvert.training", "r.yaml")
    assert route.environment["ACCELERATE_USE_CPU"] == "true"
    assert route.environment[EXPECTED] == "2:sharded"
    assert route.sharded


def test_processes_on_gpus_go_through_accelerate(fsdp2: Path) -> None:
    route = choose_route(fsdp2, None, ["r.yaml"], num_gpus=8, num_cores=8)
    assert route is not None
    assert "accelerate.commands.launch" in route.command
    assert str(fsdp2) in route.command
    assert route.environment == {EXPECTED: "8:sharded"}


def test_one_process_stays_within_this_one() -> None:
    assert choose_route(None, 1, [], num_gpus=0, num_cores=2) is None
    assert choose_route(None, None, [], num_gpus=1, num_cores=2) is None


def test_processes_without_config_are_copies() -> None:
    route = choose_route(None, 2, [], num_gpus=0, num_cores=2)
    assert route is not None
    assert not route.sharded
    assert route.environment[EXPECTED] == "2"


def test_a_config_for_gpus_is_refused_without_any(fsdp2: Path) -> None:
    with pytest.raises(UsageError, match="there is none here"):
        choose_route(fsdp2, None, [], num_gpus=0, num_cores=2)


def test_which_machine_this_is_comes_from_the_scheduler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "nodes.yaml"
    path.write_text(FSDP2.replace("num_machines: 1", "num_machines: 2"))
    monkeypatch.setenv("SLURM_NODEID", "1")
    monkeypatch.setenv("MASTER_ADDR", "node0")
    route = choose_route(path, 16, [], num_gpus=8, num_cores=8)
    assert route is not None
    command = " ".join(route.command)
    assert "--machine_rank 1" in command
    assert "--main_process_ip node0" in command


def test_a_broken_config_is_named(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("a: [")
    with pytest.raises(UsageError, match="cannot be read"):
        choose_route(path, 2, [], num_gpus=0, num_cores=2)


def test_exit_codes_reach_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "code"
    assert leave_outcome(130) == 130
    monkeypatch.setenv(OUTCOME, str(path))
    assert leave_outcome(0) == 0
    assert read_outcome(path) == 0
    assert leave_outcome(130) == 0
    assert read_outcome(path) == 130
    assert leave_outcome(4) == 4
    assert read_outcome(path) == 4
