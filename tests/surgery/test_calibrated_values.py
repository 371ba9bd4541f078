"""Values: any invertible change is absorbed, and the best shared value is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from layer_zoo import (
    difference,
    make_layer,
    make_statistics,
    mean_pooled,
    mix_value,
    readers,
    repeat,
)

from gqaconvert.surgery.calibrated import pool_layer
from gqaconvert.surgery.layer_heads import LayerHeads

STATISTICS = make_statistics(11)


def pooled(heads: LayerHeads, num_kv_heads: int = 4, method: str = "svd") -> LayerHeads:
    return pool_layer(heads, STATISTICS, num_kv_heads=num_kv_heads, method=method)[0]  # type: ignore[arg-type]


def changed(heads: LayerHeads, seed: int, orthogonal: bool = False) -> LayerHeads:
    noise, width = np.random.default_rng(seed), heads.value.shape[1]
    for head in range(heads.num_kv_heads):
        matrix = noise.standard_normal((width, width)) + np.eye(width)
        heads = mix_value(heads, head, np.linalg.qr(matrix)[0] if orthogonal else matrix)
    return heads


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("times", [2, 4])
def test_values_equal_up_to_a_matrix_become_one(bias: bool, times: int) -> None:
    base = make_layer(0, num_heads=16, num_kv_heads=8 // times, bias=(True, True, bias))
    heads = changed(repeat(base, times), 1)
    assert difference(repeat(base, times), heads) < 1e-9
    result = pooled(heads, 8 // times)
    assert difference(heads, result) < 1e-9
    assert result.value[..., -1].any() == bias
    assert difference(heads, mean_pooled(heads, 8 // times)) > 0.01


def test_rotations_are_absorbed_by_procrustes_too() -> None:
    heads = changed(repeat(make_layer(1), 2), 2, orthogonal=True)
    assert difference(heads, pooled(heads, method="procrustes")) < 1e-9
    scaled = changed(repeat(make_layer(1), 2), 2)
    assert difference(scaled, pooled(scaled, method="procrustes")) > 0.01


def output_error(source: LayerHeads, result: LayerHeads) -> float:
    """Expected squared error of every query head's output by itself, over its square."""
    error = total = 0.0
    for reader in range(source.num_heads):
        maps = [
            each.output[:, reader] @ each.value[reader * each.num_kv_heads // each.num_heads]
            for each in (source, result)
        ]
        for sums, matrix in ((0, maps[0]), (1, maps[0] - maps[1])):
            energy = float(np.sum(matrix @ STATISTICS.averaged * matrix))
            total, error = (total + energy, error) if sums == 0 else (total, error + energy)
    return error / total


@pytest.mark.parametrize("method", ["svd", "procrustes"])
@pytest.mark.parametrize("metric", ["plain", "attention"])
def test_the_report_tells_the_error_of_the_output(method: str, metric: str) -> None:
    heads = make_layer(2, value_width=6)
    result, report = pool_layer(
        heads,
        STATISTICS,
        num_kv_heads=2,
        method=method,  # type: ignore[arg-type]
        metric=metric,  # type: ignore[arg-type]
    )
    assert report.output_error == pytest.approx(output_error(heads, result), rel=1e-3)
    if metric == "attention":
        assert report.value_energy_lost == pytest.approx(report.output_error)


def test_no_value_nearby_is_better() -> None:
    heads = make_layer(3)
    result = pooled(heads, 2)
    best = output_error(heads, result)
    noise = np.random.default_rng(0)
    for scale in (1e-2, 1e-3):
        for name in ("value", "output"):
            whole = getattr(result, name)
            moved = whole + scale * np.abs(whole).mean() * noise.standard_normal(whole.shape)
            assert output_error(heads, replace(result, **{name: moved})) > best
    assert best < output_error(heads, pooled(heads, 2, "procrustes"))


def test_values_that_the_output_hardly_reads_are_given_up() -> None:
    heads = make_layer(4, num_heads=2, num_kv_heads=2)
    output = heads.output.copy()
    output[:, 1] *= 1e-3
    faint = replace(heads, output=output)
    result = pooled(faint, 1)
    kept = [each.output[:, 0] @ each.value[0] for each in (faint, result)]
    assert np.linalg.norm(kept[0] - kept[1]) < 1e-2 * np.linalg.norm(kept[0])


def test_a_head_that_nothing_reads_gives_no_nan() -> None:
    heads = make_layer(5)
    output = heads.output.copy()
    output[:, readers(heads, 0)] = 0
    for method in ("svd", "procrustes"):
        result = pooled(replace(heads, output=output), 1, method)
        assert all(np.isfinite(each).all() for each in (result.value, result.output, result.key))


def test_shared_values_are_as_large_as_the_source_s() -> None:
    heads = make_layer(6)
    heads = replace(heads, value=heads.value * 1e-3, output=heads.output * 1e3)
    result = pooled(heads, 1)
    sizes = [
        np.sqrt(np.einsum("kdm,mn,kdn->", v, STATISTICS.averaged, v) / v.shape[0])
        for v in (heads.value, result.value)
    ]
    assert sizes[1] == pytest.approx(sizes[0], rel=1e-3)
