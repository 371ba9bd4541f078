"""Run by torchrun in two processes over gloo; every function is one test, named on the command
line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import distributed
from transformers import LlamaConfig, LlamaForCausalLM

from gqaconvert.errors import RefusedError
from gqaconvert.settings.uptrain import LossSettings
from gqaconvert.training.batch import Batch
from gqaconvert.training.objective import Objective
from gqaconvert.training.sharding import gathered, process_mesh, shard, whole
from gqaconvert.training.state import RunFacts, load_state, save_state
from gqaconvert.training.world import World

CPU = torch.device("cpu")
NEXT_TOKEN = LossSettings(next_token=1.0, distill=0.0)


def build(seed: int, *, tied: bool = True) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=97, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def batch(rows: slice) -> Batch:
    ids = torch.arange(4 * 16).reshape(4, 16).mul(7).remainder(97)[rows]
    counted = torch.ones_like(ids, dtype=torch.bool)
    counted[:, 0] = False
    return Batch(ids, counted, None, torch.arange(4)[rows], {})


def train(
    objective: Objective, optimiser: torch.optim.Optimizer, rows: slice, processes: int
) -> torch.Tensor:
    sums = objective(batch(rows), normaliser=4 * 15.0, distill_weight=0.0)
    (sums.total * processes).backward()
    optimiser.step()
    optimiser.zero_grad()
    return sums.next_token.detach()


def trained_alone(seed: int, steps: int, *, tied: bool) -> tuple[LlamaForCausalLM, list[float]]:
    """The same training in one process, as the truth."""
    model = build(seed, tied=tied)
    objective = Objective(model, NEXT_TOKEN)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = [float(train(objective, optimiser, slice(0, 4), 1)) for _ in range(steps)]
    return model, losses


def divided_model_trains_as_a_whole_one(world: World, folder: Path) -> None:
    for tied in (True, False):
        expected, of_expected = trained_alone(0, 3, tied=tied)
        model = build(0, tied=tied)
        objective = Objective(model, NEXT_TOKEN)
        shard(model, process_mesh(CPU, 2), compute=None, root=objective)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
        mine = slice(2 * world.process_index, 2 * world.process_index + 2)
        for loss in of_expected:
            found = train(objective, optimiser, mine, 2).double()
            distributed.all_reduce(found)
            assert abs(float(found) - loss) < 1e-4 * loss, (float(found), loss)
        held = sum(p.to_local().numel() for p in model.parameters())
        assert held < 0.6 * sum(p.numel() for p in expected.parameters())
        names = dict(expected.named_parameters())
        for name, tensor in gathered(dict(model.named_parameters()), is_first=True):
            assert torch.allclose(tensor, names[name], atol=1e-5), name


def a_divided_state_is_read_by_one_process(world: World, folder: Path) -> None:
    model = build(0)
    objective = Objective(model, NEXT_TOKEN)
    shard(model, process_mesh(CPU, 2), compute=None, root=objective)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mine = slice(2 * world.process_index, 2 * world.process_index + 2)
    train(objective, optimiser, mine, 2)
    path = save_state(folder, model, optimiser, RunFacts(step=1), world, keep=1)
    train(objective, optimiser, mine, 2)
    # Every process reads it as one that is alone would, and takes the second step by itself.
    other = build(1)
    of_other = torch.optim.AdamW(other.parameters(), lr=1e-2)
    load_state(path, other, of_other, World(1, 0, False, CPU))
    train(Objective(other, NEXT_TOKEN), of_other, slice(0, 4), 1)
    for name, parameter in model.named_parameters():
        found = dict(other.named_parameters())[name]
        assert torch.allclose(whole(parameter.detach()), found, atol=1e-5), name


def weights_of_one_process_are_read_divided(world: World, folder: Path) -> None:
    expected = build(3)
    of_expected = torch.optim.AdamW(expected.parameters(), lr=1e-2)
    one = World(1, world.process_index, False, CPU)
    own = folder / str(world.process_index)
    own.mkdir()
    train(Objective(expected, NEXT_TOKEN), of_expected, slice(0, 4), 1)
    alone_here = World(1, 0, False, CPU)
    assert not one.is_first or world.is_first
    path = save_state(own, expected, of_expected, RunFacts(step=1), alone_here, keep=1)
    paths: list[object] = [str(path)]
    distributed.broadcast_object_list(paths, src=0)
    model = build(4)
    objective = Objective(model, NEXT_TOKEN)
    shard(model, process_mesh(CPU, 2), compute=None, root=objective)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    load_state(Path(str(paths[0])), model, optimiser, world)
    mine = slice(2 * world.process_index, 2 * world.process_index + 2)
    train(objective, optimiser, mine, 2)
    train(Objective(expected, NEXT_TOKEN), of_expected, slice(0, 4), 1)
    for name, parameter in model.named_parameters():
        truth = dict(expected.named_parameters())[name]
        assert torch.allclose(whole(parameter.detach()), truth, atol=1e-5), name


def errors_of_the_first_process_reach_all(world: World, folder: Path) -> None:
    def fail() -> None:
        raise RefusedError("taken", at="here", remedy="elsewhere")

    with pytest.raises(RefusedError) as caught:
        world.first_does(fail)
    assert str(caught.value) == "taken\nat: here\ntry: elsewhere"
    assert world.first_does(lambda: world.process_index) == 0


def main() -> None:
    distributed.init_process_group("gloo")
    world = World(2, distributed.get_rank(), True, CPU)
    for name in sys.argv[2:]:
        globals()[name](world, Path(sys.argv[1]) / name)
        if world.is_first:
            sys.stdout.write(f"passed {name}\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
