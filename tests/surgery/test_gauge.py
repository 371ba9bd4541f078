"""What may be changed without changing the function, and what may not (surgery without pooling).

Permuting KV heads with their query heads, an invertible matrix on each V head undone in the output
projection, and one rotation a RoPE plane on K and Q leave every logit as it is; a rotation across
planes, a reflection inside one, or the other class's pairing of planes does not. This pins down the
layout and the pairing that `recognise` reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from zoo import build, largest_difference, logits

from gqaconvert.attention.geometry import Attention, AttentionBlock
from gqaconvert.attention.recognise import recognise
from gqaconvert.kv_cache.model_config import parse_config
from gqaconvert.surgery.in_memory import memory_index

KV_HEADS = 2
MODELS = ["llama", "qwen2", "mistral", "cohere", "glm", "ernie4_5", "gemma", "starcoder2", "phi"]
"""Both pairings, biases, partial rotary (glm, phi)."""

EXACT = 1e-5
"""Rounding: some classes turn queries and keys in float32 whatever the model's type."""

Heads = Callable[[torch.Tensor], torch.Tensor]


class Surgeon:
    """Changes the attention of a model in place, head by head."""

    def __init__(self, name: str) -> None:
        self.model = build(name, num_kv_heads=KV_HEADS, dtype=torch.float64)
        self.before = logits(self.model)
        config = parse_config(self.model.config.to_dict(), name)
        self.attention: Attention = recognise(memory_index(self.model.state_dict()).tensors, config)
        self.rotary = config.rope.partial_rotary_factor or 1.0

    def change(self) -> float:
        """Largest change of a logit, in standard deviations of the logits."""
        return largest_difference(logits(self.model), self.before) / float(self.before.std())

    def parameters(self, block: AttentionBlock, letter: str) -> list[torch.nn.Parameter]:
        """Weight and bias of a projection."""
        names = {"o": ("o_proj", "dense", "out_proj")}.get(letter, (f"{letter}_proj",))
        found = dict(self.model.named_parameters())
        return [
            found[f"{block.module}.{name}.{kind}"]
            for name in names
            for kind in ("weight", "bias")
            if f"{block.module}.{name}.{kind}" in found
        ]

    def map_rows(self, block: AttentionBlock, letter: str, change: Heads) -> None:
        """Replace the heads of a projection, (heads, head_dim, ...), by those of `change`."""
        for parameter in self.parameters(block, letter):
            rows = parameter.data
            heads = rows.reshape(-1, block.head_dim, *rows.shape[1:])
            parameter.data = change(heads.clone()).reshape(rows.shape)

    def map_columns(self, block: AttentionBlock, change: Heads) -> None:
        """The same for the output projection's columns, as (query heads, head_dim, hidden)."""
        weight = self.parameters(block, "o")[0]
        columns = weight.data.T.reshape(-1, block.head_dim, weight.shape[0])
        weight.data = change(columns.clone()).reshape(weight.shape[1], -1).T.contiguous()

    def rotate(self, angle: float, pairing: str) -> None:
        """Turn every plane of K and Q, which RoPE turns as well, by one angle."""
        for block in self.attention.blocks:
            width = int(block.head_dim * self.rotary)
            first, second = planes(width, pairing)

            def turn(
                heads: torch.Tensor, first: list[int] = first, second: list[int] = second
            ) -> torch.Tensor:
                left, right = heads[:, first].clone(), heads[:, second].clone()
                cosine, sine = math.cos(angle), math.sin(angle)
                heads[:, first] = cosine * left - sine * right
                heads[:, second] = sine * left + cosine * right
                return heads

            self.map_rows(block, "q", turn)
            self.map_rows(block, "k", turn)


def planes(width: int, pairing: str) -> tuple[list[int], list[int]]:
    if pairing == "halves":
        return list(range(width // 2)), list(range(width // 2, width))
    return list(range(0, width, 2)), list(range(1, width, 2))


@pytest.fixture(params=MODELS)
def surgeon(request) -> Surgeon:
    return Surgeon(request.param)


def test_permuting_kv_heads_with_their_query_heads(surgeon):
    for block in surgeon.attention.blocks:
        group_size = block.num_heads // KV_HEADS

        def swap_groups(heads: torch.Tensor, size: int = group_size) -> torch.Tensor:
            return torch.cat([heads[size:], heads[:size]])

        surgeon.map_rows(block, "q", swap_groups)
        surgeon.map_columns(block, swap_groups)
        for letter in "kv":
            surgeon.map_rows(block, letter, lambda heads: heads.flip(0))
    assert surgeon.change() < EXACT


def test_permuting_kv_heads_alone_is_another_function(surgeon):
    for block in surgeon.attention.blocks:
        for letter in "kv":
            surgeon.map_rows(block, letter, lambda heads: heads.flip(0))
    assert surgeon.change() > 1e-3


def test_an_invertible_matrix_on_values_undone_in_the_output(surgeon):
    torch.manual_seed(0)
    for block in surgeon.attention.blocks:
        size = block.head_dim
        matrix = torch.randn(size, size, dtype=torch.float64) + 3 * torch.eye(size)
        inverse = torch.linalg.inv(matrix)
        surgeon.map_rows(block, "v", lambda h, m=matrix: torch.einsum("ij,hj...->hi...", m, h))
        # Output columns act on values from the left: W_o ← W_o A⁻¹, so its transpose takes A⁻ᵀ.
        surgeon.map_columns(block, lambda h, m=inverse: torch.einsum("ji,hjm->him", m, h))
    assert surgeon.change() < EXACT


def test_a_rotation_of_every_rope_plane(surgeon):
    surgeon.rotate(0.7, surgeon.attention.rope)
    assert surgeon.change() < EXACT


def test_the_other_pairing_of_planes_is_another_function(surgeon):
    other = {"halves": "adjacent", "adjacent": "halves"}[surgeon.attention.rope]
    surgeon.rotate(0.7, other)
    assert surgeon.change() > 1e-4


def test_a_reflection_inside_a_plane_is_another_function(surgeon):
    for block in surgeon.attention.blocks:
        plane = planes(int(block.head_dim * surgeon.rotary), surgeon.attention.rope)[1]

        def reflect(heads: torch.Tensor, plane: list[int] = plane) -> torch.Tensor:
            left, right = heads[:, [0]].clone(), heads[:, plane[:1]].clone()
            heads[:, [0]], heads[:, plane[:1]] = right, left
            return heads

        surgeon.map_rows(block, "q", reflect)
        surgeon.map_rows(block, "k", reflect)
    assert surgeon.change() > 1e-4
