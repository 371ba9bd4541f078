"""Changes a model by what its attention leaves free, so that it computes the same in other numbers.

Independent of how the package pools: it uses the heads as read and the freedom as recognised alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel
from zoo import inputs, text_model

from gqaconvert.attention.freedom import BlockFreedom, block_freedom
from gqaconvert.attention.geometry import Attention, AttentionBlock
from gqaconvert.attention.recognise import recognise
from gqaconvert.kv_cache.model_config import parse_config
from gqaconvert.surgery.in_memory import memory_index
from gqaconvert.surgery.layer_heads import LayerHeads, LayerStatistics
from gqaconvert.surgery.layer_tensors import (
    mean_rows,
    move_rows,
    query_order,
    read_heads,
    write_heads,
)


@dataclass
class OpenModel:
    """A model whose attention can be read and replaced, block by block."""

    model: PreTrainedModel
    attention: Attention
    blocks: list[tuple[AttentionBlock, BlockFreedom]]

    def read(self, name: str) -> np.ndarray:
        return self.model.state_dict()[name].numpy()

    def heads(self, block: AttentionBlock, freedom: BlockFreedom) -> LayerHeads:
        return read_heads(block, freedom, self.model.state_dict(), self.read)

    def put(self, arrays: dict[str, np.ndarray]) -> None:
        state = self.model.state_dict()
        with torch.no_grad():
            for name, array in arrays.items():
                state[name].copy_(torch.from_numpy(np.array(array)))

    def put_heads(self, block: AttentionBlock, heads: LayerHeads) -> None:
        self.put(write_heads(heads, block, self.attention, self.model.state_dict()))


def open_model(model: PreTrainedModel) -> OpenModel:
    config = parse_config(model.config.to_dict(), "model")
    index = memory_index(model.state_dict())
    attention = recognise(index.tensors, config)
    blocks = [
        (block, block_freedom(block, attention, config, index.tensors))
        for block in attention.blocks
    ]
    return OpenModel(model, attention, blocks)


def scramble(opened: OpenModel, seed: int = 0, *, move: bool = True) -> int:
    """Change every calibratable block by all it leaves free; return how many there were."""
    rng = np.random.default_rng(seed)
    count = 0
    for block, freedom in opened.blocks:
        if not freedom.is_calibratable:
            continue
        heads = opened.heads(block, freedom)
        if not freedom.keys_fixed:
            heads = scramble_keys(heads, rng)
        if not freedom.values_fixed:
            heads = scramble_values(heads, rng)
        if move and freedom.heads_fixed is None:
            heads = move_heads(opened, block, freedom, heads, rng)
        opened.put_heads(block, heads)
        count += 1
    return count


def scramble_keys(heads: LayerHeads, rng: np.random.Generator) -> LayerHeads:
    """One complex number a head and RoPE plane, an invertible matrix on what has no position."""
    query, key = heads.query.copy(), heads.key.copy()
    left, right = heads.freedom.planes.T
    free = heads.freedom.free
    for number in range(heads.num_kv_heads):
        factors = rng.uniform(0.6, 1.6, len(left)) * np.exp(2j * np.pi * rng.random(len(left)))
        matrix = invertible(len(free), rng)
        turned = (key[number, left] + 1j * key[number, right]) * factors[:, None]
        key[number, left], key[number, right] = turned.real, turned.imag
        key[number, free] = matrix @ key[number, free]
        for each in readers(heads, number):
            turned = (query[each, left] + 1j * query[each, right]) / factors.conj()[:, None]
            query[each, left], query[each, right] = turned.real, turned.imag
            query[each, free] = np.linalg.inv(matrix).T @ query[each, free]
    return replace(heads, query=query, key=key)


def scramble_values(heads: LayerHeads, rng: np.random.Generator) -> LayerHeads:
    """An invertible matrix on each value head, undone in the output projection."""
    value, output = heads.value.copy(), heads.output.copy()
    for number in range(heads.num_kv_heads):
        matrix = invertible(value.shape[1], rng)
        value[number] = matrix @ value[number]
        for each in readers(heads, number):
            output[:, each] = output[:, each] @ np.linalg.inv(matrix)
    return replace(heads, value=value, output=output)


def move_heads(
    opened: OpenModel,
    block: AttentionBlock,
    freedom: BlockFreedom,
    heads: LayerHeads,
    rng: np.random.Generator,
) -> LayerHeads:
    """Shuffle KV heads with their query heads, and all that belongs to these."""
    places = [(int(number),) for number in rng.permutation(heads.num_kv_heads)]
    if len(places) > 1 and places == sorted(places):
        places = places[1:] + places[:1]
    order = query_order(places, heads.num_heads)
    sources = [number for (number,) in places]
    count = heads.num_heads
    opened.put({n: move_rows(opened.read(n), places, count) for n in freedom.companions})
    norms = [tensor.name for tensor in block.head_tensors if tensor.role == "key_norm"]
    opened.put({n: mean_rows(opened.read(n), places, len(places)) for n in norms})
    return replace(
        heads,
        query=heads.query[order],
        key=heads.key[sources],
        value=heads.value[sources],
        output=heads.output[:, order],
    )


def spread(values: torch.Tensor) -> float:
    """Standard deviation of logits, those left out that a class sets to the lowest number."""
    return float(values[values.abs() < 1e3].std())


def readers(heads: LayerHeads, number: int) -> range:
    """Query heads that read KV head `number`."""
    size = heads.num_heads // heads.num_kv_heads
    return range(number * size, (number + 1) * size)


def invertible(size: int, rng: np.random.Generator) -> np.ndarray:
    """A matrix that mixes everything and is no larger than float32 can undo."""
    turn = np.linalg.qr(rng.normal(size=(size, size)))[0]
    return turn * rng.uniform(0.6, 1.6, size)


def gather_inputs(opened: OpenModel, batches: int = 12) -> dict[int, LayerStatistics]:
    """E[x xᵀ] of what goes into each attention block, over random tokens."""
    sums: dict[int, np.ndarray] = {}
    counts: dict[int, int] = {}
    hooks = []
    for block, freedom in opened.blocks:
        if block.layer is None or not freedom.is_calibratable:
            continue
        stem = block.stems.get("q", block.stems.get("qkv"))

        def record(module, arguments, layer=block.layer):
            rows = arguments[0].detach().double().reshape(-1, arguments[0].shape[-1])
            rows = torch.cat([rows, torch.ones(len(rows), 1, dtype=rows.dtype)], 1).numpy()
            sums[layer] = sums.get(layer, 0) + rows.T @ rows
            counts[layer] = counts.get(layer, 0) + len(rows)

        hooks.append(opened.model.get_submodule(stem).register_forward_pre_hook(record))
    model = text_model(opened.model)
    with torch.no_grad():
        for seed in range(batches):
            model(**inputs(model, 100 + seed, length=24), use_cache=False)
    for hook in hooks:
        hook.remove()
    return {
        layer: LayerStatistics(total / counts[layer], None, None, counts[layer])
        for layer, total in sums.items()
    }
