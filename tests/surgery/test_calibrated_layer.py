"""A whole layer: the round trip, refusals, reports."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from layer_zoo import (
    WIDTH,
    difference,
    halves,
    make_layer,
    make_statistics,
    mean_pooled,
    permute,
    repeat,
    scramble,
)

from gqaconvert.errors import CheckpointError, UsageError
from gqaconvert.surgery.calibrated import pool_layer, predict_layer
from gqaconvert.surgery.layer_heads import KeyFreedom, LayerStatistics

STATISTICS = make_statistics(21)
PLAIN = replace(STATISTICS, averaged=None, attended=None)


@pytest.mark.parametrize("rotary", [6, 4, 0])
@pytest.mark.parametrize("value_width", [4, 9])
@pytest.mark.parametrize("statistics", [STATISTICS, PLAIN], ids=["attention", "inputs"])
def test_round_trip(rotary: int, value_width: int, statistics: LayerStatistics) -> None:
    """Heads repeated, changed in every allowed way and moved are found again, in C alone."""
    base = make_layer(
        0, num_heads=16, num_kv_heads=2, value_width=value_width, freedom=halves(6, rotary)
    )
    heads = scramble(repeat(base, 4), 5)
    result, report = pool_layer(
        heads, statistics, num_kv_heads=2, method="svd", grouping="similarity"
    )
    assert result.key.shape == base.key.shape
    assert difference(heads, result) < 1e-9
    assert report.key_energy_lost < 1e-9
    assert report.value_energy_lost < 1e-9
    assert difference(heads, mean_pooled(heads, 2)) > 0.1
    adjacent, _ = pool_layer(heads, statistics, num_kv_heads=2, method="svd")
    assert difference(heads, adjacent) > 0.01


def test_float32_products_are_nearly_as_good() -> None:
    heads = scramble(repeat(make_layer(1, num_heads=8, num_kv_heads=2), 2), 6)
    result, _ = pool_layer(
        heads,
        STATISTICS,
        num_kv_heads=2,
        method="svd",
        grouping="similarity",
        precision="float32",
    )
    assert 1e-12 < difference(heads, result) < 1e-4


@pytest.mark.parametrize("method", ["svd", "procrustes"])
@pytest.mark.parametrize("grouping", ["adjacent", "similarity"])
def test_as_many_heads_come_back_as_they_are(method: str, grouping: str) -> None:
    heads = make_layer(2)
    result, report = pool_layer(
        heads,
        STATISTICS,
        num_kv_heads=4,
        method=method,  # type: ignore[arg-type]
        grouping=grouping,  # type: ignore[arg-type]
    )
    assert result is heads
    assert report.groups == ((0,), (1,), (2,), (3,))
    assert report.key_energy_lost == report.value_energy_lost == report.output_error == 0


def test_query_heads_move_with_their_groups() -> None:
    base = make_layer(3, num_heads=8, num_kv_heads=2)
    heads = permute(repeat(base, 2), [0, 2, 1, 3])
    result, report = pool_layer(
        heads, STATISTICS, num_kv_heads=2, method="svd", grouping="similarity"
    )
    assert report.groups == ((0, 2), (1, 3))
    assert difference(heads, result) < 1e-9
    stayed = replace(result, query=heads.query, output=heads.output)
    assert difference(heads, stayed) > 0.01


def test_procrustes_needs_no_statistics() -> None:
    heads = make_layer(4)
    blind, report = pool_layer(heads, None, num_kv_heads=2, method="procrustes")
    informed, _ = pool_layer(heads, STATISTICS, num_kv_heads=2, method="procrustes")
    assert report.output_error is None
    assert 0 < report.key_energy_lost < 1
    assert np.abs(blind.key - informed.key).max() > 1e-3


def test_the_metric_decides_what_is_kept() -> None:
    heads = make_layer(5)
    reports = {
        metric: pool_layer(heads, STATISTICS, num_kv_heads=1, method="svd", metric=metric)[1]
        for metric in ("plain", "attention")
    }
    assert reports["attention"].output_error < reports["plain"].output_error


def test_missing_moments_are_told() -> None:
    _, report = pool_layer(make_layer(6), PLAIN, num_kv_heads=2, method="svd")
    assert [note.split(" were ")[0] for note in report.notes] == ["values", "keys"]
    assert report.output_error is None
    _, plain = pool_layer(make_layer(6), PLAIN, num_kv_heads=2, method="svd", metric="plain")
    assert plain.notes == ()


@pytest.mark.parametrize("grouping", ["adjacent", "similarity"])
@pytest.mark.parametrize("method", ["svd", "procrustes"])
def test_predictions_are_what_pooling_reports(method: str, grouping: str) -> None:
    heads = make_layer(7, num_heads=8, num_kv_heads=8)
    options = {"method": method, "grouping": grouping}
    predicted = predict_layer(heads, STATISTICS, num_kv_heads=[8, 4, 2, 1], **options)  # type: ignore[arg-type]
    for count, report in predicted.items():
        assert report == pool_layer(heads, STATISTICS, num_kv_heads=count, **options)[1]  # type: ignore[arg-type]
    lost = [predicted[count].key_energy_lost for count in (8, 4, 2, 1)]
    assert lost == sorted(lost)
    assert lost[0] == 0


def test_similarity_loses_no_more_than_neighbours() -> None:
    for seed in range(5):
        heads = make_layer(seed, num_heads=8, num_kv_heads=8)
        lost = [
            sum(
                (report.key_energy_lost, report.value_energy_lost),
            )
            for grouping in ("similarity", "adjacent")
            for report in [
                pool_layer(
                    heads,
                    STATISTICS,
                    num_kv_heads=4,
                    method="svd",
                    grouping=grouping,  # type: ignore[arg-type]
                )[1]
            ]
        ]
        assert lost[0] <= lost[1] + 1e-12


@pytest.mark.parametrize("tokens", [1, 5])
def test_a_handful_of_tokens_is_survived(tokens: int) -> None:
    inputs = np.ones((tokens, WIDTH + 1))
    inputs[:, :-1] = np.random.default_rng(0).standard_normal((tokens, WIDTH))
    moments = inputs.T @ inputs / tokens
    few = LayerStatistics(moments, moments, moments, tokens)
    for grouping in ("adjacent", "similarity"):
        result, report = pool_layer(
            make_layer(8),
            few,
            num_kv_heads=2,
            method="svd",
            grouping=grouping,  # type: ignore[arg-type]
        )
        arrays = (result.query, result.key, result.value, result.output)
        assert all(np.isfinite(each).all() for each in arrays)
        assert max(np.abs(each).max() for each in arrays) < 1e4
        assert 0 <= report.value_energy_lost <= 1


def test_directions_that_no_token_used_are_kept_too() -> None:
    """Three tokens leave most directions open; heads that are one are still found to be."""
    inputs = np.concatenate(
        [np.random.default_rng(1).standard_normal((3, WIDTH)), np.ones((3, 1))], 1
    )
    few = LayerStatistics(inputs.T @ inputs / 3, None, None, 3)
    heads = scramble(repeat(make_layer(11, num_heads=8, num_kv_heads=1), 4), 7)
    result, _ = pool_layer(heads, few, num_kv_heads=1, method="svd")
    assert difference(heads, result) < 1e-4


def test_refusals() -> None:
    heads = make_layer(9)
    with pytest.raises(UsageError, match="worse than the mean"):
        pool_layer(heads, None, num_kv_heads=2, method="svd")
    with pytest.raises(UsageError, match="equal size"):
        pool_layer(heads, STATISTICS, num_kv_heads=3, method="svd")
    with pytest.raises(UsageError, match="equal size"):
        predict_layer(heads, STATISTICS, num_kv_heads=[2, 0], method="svd")
    broken = STATISTICS.inputs.copy()
    broken[3, 4] = np.nan
    for part in ("inputs", "averaged", "attended"):
        with pytest.raises(CheckpointError, match="not finite") as caught:
            pool_layer(heads, replace(STATISTICS, **{part: broken}), num_kv_heads=2, method="svd")
        assert caught.value.at == part
    output = heads.output.copy()
    output[0, 0, 0] = np.inf
    with pytest.raises(CheckpointError, match="weights"):
        pool_layer(replace(heads, output=output), STATISTICS, num_kv_heads=2, method="svd")
    small = replace(STATISTICS, inputs=np.eye(8))
    with pytest.raises(CheckpointError, match="7 inputs for a layer of 24"):
        pool_layer(heads, small, num_kv_heads=2, method="svd")


def test_dimensions_must_be_all_accounted_for() -> None:
    forgotten = KeyFreedom(np.array([[0, 3], [1, 4]]), np.array([5]))
    with pytest.raises(ValueError, match="0, 1, 3, 4, 5"):
        pool_layer(make_layer(10, freedom=forgotten), STATISTICS, num_kv_heads=2, method="svd")
