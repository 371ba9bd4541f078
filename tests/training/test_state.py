from pathlib import Path

import pytest
import torch
from torch import nn

from gqaconvert.errors import CheckpointError, RefusedError, UsageError
from gqaconvert.training.state import (
    RunFacts,
    find_state,
    load_state,
    read_facts,
    save_state,
    saved_states,
)
from gqaconvert.training.world import World

ALONE = World(1, 0, False, torch.device("cpu"))


def trained(seed: int, *, frozen: bool = False) -> tuple[nn.Module, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[0].weight.requires_grad_(not frozen)
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        step(model, optimiser)
    return model, optimiser


def step(model: nn.Module, optimiser: torch.optim.AdamW) -> None:
    model(torch.ones(1, 4)).square().sum().backward()
    optimiser.step()
    optimiser.zero_grad()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_loaded_state_goes_on_as_the_saved_one(tmp_path: Path, frozen: bool) -> None:
    model, optimiser = trained(0, frozen=frozen)
    path = save_state(tmp_path, model, optimiser, RunFacts(step=3), ALONE, keep=1)
    other, of_other = trained(1, frozen=frozen)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.1)
    for resumed in (of_other, fresh):
        load_state(path, other, resumed, ALONE)
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
    step(model, optimiser)
    step(other, fresh)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_facts_come_back(tmp_path: Path) -> None:
    facts = RunFacts(
        step=7, tokens=70, cursor={"epoch": 1}, norms=[1.0, 2.0], held_out=[(0, 3.0)],
        source_loss=2.5, recipe={"lr": 0.1},
    )  # fmt: skip
    path = save_state(tmp_path, *trained(0), facts, ALONE, keep=1)
    read = read_facts(path)
    assert (read.step, read.cursor, read.norms) == (7, {"epoch": 1}, [1.0, 2.0])
    assert [tuple(each) for each in read.held_out] == [(0, 3.0)]


def test_the_newest_states_are_kept(tmp_path: Path) -> None:
    for number in (5, 10, 100):
        save_state(tmp_path, *trained(0), RunFacts(step=number), ALONE, keep=2)
    assert [path.name for path in saved_states(tmp_path)] == ["step-00000010", "step-00000100"]


def test_an_unfinished_state_is_never_found(tmp_path: Path) -> None:
    good = save_state(tmp_path, *trained(0), RunFacts(step=5), ALONE, keep=2)
    (tmp_path / ".step-00000010.partial").mkdir()
    assert find_state(tmp_path, "auto") == good


def test_going_on_is_never_assumed(tmp_path: Path) -> None:
    assert find_state(tmp_path, None) is None
    assert find_state(tmp_path, "auto") is None
    path = save_state(tmp_path, *trained(0), RunFacts(step=5), ALONE, keep=2)
    with pytest.raises(RefusedError, match="already been trained to step 5"):
        find_state(tmp_path, None)
    assert find_state(tmp_path, str(path)) == path
    with pytest.raises(UsageError, match="no saved state"):
        find_state(tmp_path, str(tmp_path / "step-00000009"))


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    path = save_state(tmp_path, *trained(0), RunFacts(step=5), ALONE, keep=2)
    tensors = next((path / "tensors").glob("*.distcp"))
    tensors.write_bytes(tensors.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_state(path, *trained(1), ALONE)
    (path / "facts.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_facts(path)
