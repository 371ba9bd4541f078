"""Small layers for the mathematics of calibrated pooling, and what two layers must agree on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from gqaconvert.surgery.layer_heads import Floats, KeyFreedom, LayerHeads, LayerStatistics

WIDTH = 24
"""M of the layers here."""


def plane_angles(planes: int) -> Floats:
    """Radians that `function` turns each plane by from one token to the next."""
    return np.geomspace(1, 0.05, max(planes, 1))[:planes]


def halves(width: int, rotary: int | None = None) -> KeyFreedom:
    """Planes (i, i + rotary/2) of the first `rotary` dimensions, the rest free."""
    rotary = width if rotary is None else rotary
    first = np.arange(rotary // 2)
    return KeyFreedom(np.stack([first, first + rotary // 2], axis=1), np.arange(rotary, width))


def neighbours(width: int) -> KeyFreedom:
    """Planes (2i, 2i+1), as in GPT-J and Cohere."""
    first = 2 * np.arange(width // 2)
    return KeyFreedom(np.stack([first, first + 1], axis=1), np.arange(0))


def make_layer(
    seed: int,
    *,
    num_heads: int = 8,
    num_kv_heads: int = 4,
    width: int = 6,
    value_width: int = 5,
    bias: tuple[bool, bool, bool] = (True, True, True),
    freedom: KeyFreedom | None = None,
) -> LayerHeads:
    """Return random projections."""
    noise = np.random.default_rng(seed)
    shapes = ((num_heads, width), (num_kv_heads, width), (num_kv_heads, value_width))
    projections = [noise.standard_normal((*shape, WIDTH + 1)) for shape in shapes]
    for projection, stored in zip(projections, bias, strict=True):
        projection[..., -1] *= stored
    output = noise.standard_normal((WIDTH, num_heads, value_width))
    return LayerHeads(*projections, output, bias, freedom or halves(width))


def make_statistics(seed: int, tokens: int = 400) -> LayerStatistics:
    """Return moments of inputs with a mean and unequal directions, three of a kind."""
    noise = np.random.default_rng(seed)
    mixing = noise.standard_normal((WIDTH, WIDTH)) * np.geomspace(3, 0.05, WIDTH)

    def moments() -> Floats:
        inputs = noise.standard_normal((tokens, WIDTH)) @ mixing + noise.standard_normal(WIDTH)
        extended = np.concatenate([inputs, np.ones((tokens, 1))], axis=1)
        return extended.T @ extended / tokens

    return LayerStatistics(moments(), moments(), moments(), tokens)


def repeat(heads: LayerHeads, times: int) -> LayerHeads:
    """Return the same layer with every KV head stored `times` times."""
    key, value = (np.repeat(each, times, axis=0) for each in (heads.key, heads.value))
    return replace(heads, key=key, value=value)


def turn_plane(heads: LayerHeads, head: int, plane: int, factor: complex) -> LayerHeads:
    """Multiply a key in one plane, and its queries by what undoes it."""
    real, imaginary = heads.freedom.planes[plane]
    key, query = heads.key.copy(), heads.query.copy()
    _multiply(key[head], real, imaginary, factor)
    for reader in readers(heads, head):
        _multiply(query[reader], real, imaginary, 1 / np.conj(factor))
    return replace(heads, key=key, query=query)


def mix_free(heads: LayerHeads, head: int, matrix: Floats) -> LayerHeads:
    """Multiply a key in its free dimensions, and its queries by what undoes it."""
    free = heads.freedom.free
    key, query = heads.key.copy(), heads.query.copy()
    key[head, free] = matrix @ key[head, free]
    for reader in readers(heads, head):
        query[reader, free] = np.linalg.inv(matrix).T @ query[reader, free]
    return replace(heads, key=key, query=query)


def mix_value(heads: LayerHeads, head: int, matrix: Floats) -> LayerHeads:
    """Multiply a value, and the output columns that read it by what undoes it."""
    value, output = heads.value.copy(), heads.output.copy()
    value[head] = matrix @ value[head]
    for reader in readers(heads, head):
        output[:, reader] = output[:, reader] @ np.linalg.inv(matrix)
    return replace(heads, value=value, output=output)


def permute(heads: LayerHeads, order: list[int]) -> LayerHeads:
    """Move KV heads with the query heads that read them."""
    moved = [reader for head in order for reader in readers(heads, head)]
    return replace(
        heads,
        query=heads.query[moved],
        key=heads.key[order],
        value=heads.value[order],
        output=heads.output[:, moved],
    )


def scramble(heads: LayerHeads, seed: int) -> LayerHeads:
    """Change every head in all ways that leave the layer's function as it is."""
    noise = np.random.default_rng(seed)
    for head in range(heads.num_kv_heads):
        for plane in range(len(heads.freedom.planes)):
            factor = noise.uniform(0.3, 3) * np.exp(2j * np.pi * noise.uniform())
            heads = turn_plane(heads, head, plane, factor)
        free = len(heads.freedom.free)
        heads = mix_free(heads, head, noise.standard_normal((free, free)) + np.eye(free))
        width = heads.value.shape[1]
        heads = mix_value(heads, head, noise.standard_normal((width, width)) + np.eye(width))
    return permute(heads, list(noise.permutation(heads.num_kv_heads)))


def readers(heads: LayerHeads, head: int) -> range:
    """Return the query heads that read a KV head."""
    per_head = heads.num_heads // heads.num_kv_heads
    return range(head * per_head, (head + 1) * per_head)


def function(heads: LayerHeads, seed: int = 0, tokens: int = 12) -> Floats:
    """Return the attention's output on random inputs with rotary positions, (T, M)."""
    noise = np.random.default_rng(seed)
    inputs = np.concatenate([noise.standard_normal((tokens, WIDTH)), np.ones((tokens, 1))], 1)
    total = np.zeros((tokens, WIDTH))
    for reader in range(heads.num_heads):
        head = reader * heads.num_kv_heads // heads.num_heads
        query = _rotate(inputs @ heads.query[reader].T, heads.freedom)
        key = _rotate(inputs @ heads.key[head].T, heads.freedom)
        scores = np.where(np.tri(tokens, dtype=bool), query @ key.T * 0.02, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        total += weights @ (inputs @ heads.value[head].T) @ heads.output[:, reader].T
    return total


def difference(one: LayerHeads, other: LayerHeads) -> float:
    """Return how far two layers are apart in what they compute, relative to the first."""
    first, second = function(one), function(other)
    return float(np.linalg.norm(first - second) / np.linalg.norm(first))


def mean_pooled(heads: LayerHeads, num_kv_heads: int) -> LayerHeads:
    """Return the paper's pooling: adjacent heads averaged."""
    key, value = (
        each.reshape(num_kv_heads, -1, *each.shape[1:]).mean(axis=1)
        for each in (heads.key, heads.value)
    )
    return replace(heads, key=key, value=value)


def _multiply(rows: Floats, real: int, imaginary: int, factor: complex) -> None:
    turned = (rows[real] + 1j * rows[imaginary]) * factor
    rows[real], rows[imaginary] = turned.real, turned.imag


def _rotate(rows: Floats, freedom: KeyFreedom) -> Floats:
    """Turn the planes of rows (T, D) by their positions, each plane at a speed of its own."""
    rotated = rows.copy()
    known = freedom.angles
    speeds = plane_angles(len(freedom.planes)) if known is None else known
    for (real, imaginary), speed in zip(freedom.planes, speeds, strict=True):
        angles = np.arange(len(rows)) * speed
        turned = (rows[:, real] + 1j * rows[:, imaginary]) * np.exp(1j * angles)
        rotated[:, real], rotated[:, imaginary] = turned.real, turned.imag
    return rotated
