"""Keys: every allowed change is absorbed, every forbidden one is not, and the best key is found."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from layer_zoo import (
    difference,
    halves,
    make_layer,
    make_statistics,
    mean_pooled,
    mix_free,
    neighbours,
    readers,
    repeat,
    turn_plane,
)

from gqaconvert.surgery.calibrated import pool_layer
from gqaconvert.surgery.calibrated.grams import layer_grams
from gqaconvert.surgery.calibrated.keys import fit_keys
from gqaconvert.surgery.layer_heads import Floats, KeyFreedom, LayerHeads

STATISTICS = make_statistics(7)


def pooled(heads: LayerHeads, num_kv_heads: int = 4, method: str = "svd") -> LayerHeads:
    return pool_layer(heads, STATISTICS, num_kv_heads=num_kv_heads, method=method)[0]  # type: ignore[arg-type]


def changed(heads: LayerHeads, seed: int) -> LayerHeads:
    """Scale and turn every key in every plane, and mix its free dimensions."""
    noise = np.random.default_rng(seed)
    for head in range(heads.num_kv_heads):
        for plane in range(len(heads.freedom.planes)):
            factor = complex(*noise.standard_normal(2)) + 0.3
            heads = turn_plane(heads, head, plane, factor)
        free = len(heads.freedom.free)
        heads = mix_free(heads, head, noise.standard_normal((free, free)) + np.eye(free))
    return heads


@pytest.mark.parametrize(
    "freedom",
    [
        halves(6),
        neighbours(6),
        halves(6, rotary=2),
        KeyFreedom(np.array([[3, 5]]), np.array([0, 1, 2, 4])),
        halves(6, rotary=0),
    ],
    ids=["halves", "neighbours", "partial", "scattered", "no positions"],
)
@pytest.mark.parametrize("times", [2, 8])
def test_keys_equal_up_to_allowed_changes_become_one(freedom: KeyFreedom, times: int) -> None:
    base = make_layer(0, num_heads=32 // times * 2, num_kv_heads=8 // times, freedom=freedom)
    base = replace(base, query=base.query / 4)
    heads = changed(repeat(base, times), 1)
    assert difference(repeat(base, times), heads) < 1e-9
    assert difference(heads, pooled(heads, 8 // times)) < 1e-9
    assert difference(heads, mean_pooled(heads, 8 // times)) > 0.01


def test_phases_alone_are_absorbed_by_procrustes_too() -> None:
    heads = repeat(make_layer(2), 2)
    for head in range(8):
        heads = turn_plane(heads, head, head % 3, np.exp(0.7j * head))
    assert difference(heads, pooled(heads, method="procrustes")) < 1e-9
    assert difference(heads, mean_pooled(heads, 4)) > 0.01


def reflect(keys: Floats) -> Floats:
    return keys * np.array([1, 1, 1, -1, 1, 1])[:, None]


def mix_planes(keys: Floats) -> Floats:
    return np.linalg.qr(np.random.default_rng(0).standard_normal((6, 6)))[0] @ keys


@pytest.mark.parametrize("forbidden", [reflect, mix_planes])
def test_forbidden_changes_are_not_absorbed(forbidden: object) -> None:
    """Undone in the queries they change the function, and no shared key can stand for both."""
    base = repeat(make_layer(3), 2)
    key, query = base.key.copy(), base.query.copy()
    for head in range(1, 8, 2):
        key[head] = forbidden(key[head])  # type: ignore[operator]
        for reader in readers(base, head):
            query[reader] = forbidden(query[reader])  # type: ignore[operator]
    heads = replace(base, key=key, query=query)
    assert difference(base, heads) > 0.01
    result, report = pool_layer(heads, STATISTICS, num_kv_heads=4, method="svd")
    assert report.key_energy_lost > 0.01
    assert difference(heads, result) > 0.01


def test_the_wrong_pairing_is_not_absorbed() -> None:
    heads = changed(repeat(make_layer(4, freedom=neighbours(6)), 2), 2)
    mistaken = replace(heads, freedom=halves(6))
    result, report = pool_layer(mistaken, STATISTICS, num_kv_heads=4, method="svd")
    assert report.key_energy_lost > 0.01
    assert difference(heads, replace(result, freedom=heads.freedom)) > 0.01


def test_the_optimum_of_every_plane_is_found() -> None:
    """Against the singular values of the weighted, stacked rows themselves."""
    heads = make_layer(5)
    result = fit_keys(layer_grams(heads, STATISTICS), [0, 1, 2, 3], "svd", 16)
    attended, inputs = STATISTICS.attended, STATISTICS.inputs
    assert attended is not None
    root = np.linalg.cholesky(attended)
    total = lost = 0.0
    for real, imaginary in heads.freedom.planes:
        rows = []
        for head in range(4):
            queries = heads.query[readers(heads, head)]
            weight = np.einsum("rdm,mn,rdn->d", queries, inputs, queries)
            row = (heads.key[head, real] + 1j * heads.key[head, imaginary]) @ root
            rows.append(row * np.sqrt(weight[real] + weight[imaginary]))
        energy = np.linalg.svd(np.stack(rows), compute_uv=False) ** 2
        total, lost = total + energy.sum() / 2, lost + energy[1:].sum() / 2
    assert result.total == pytest.approx(total, rel=1e-3)  # the ridge
    assert result.lost == pytest.approx(lost, rel=1e-3)


def test_keys_of_queries_that_are_louder_are_kept_better() -> None:
    heads = make_layer(6, num_heads=2, num_kv_heads=2)
    query = heads.query.copy()
    query[1] *= 20
    loud = replace(heads, query=query)
    shared = pooled(loud, 1)
    scores = [np.einsum("dm,dn->mn", each.query[1], each.key[-1]) for each in (loud, shared)]
    assert np.linalg.norm(scores[0] - scores[1]) < 0.1 * np.linalg.norm(scores[0])
    quiet = [np.einsum("dm,dn->mn", each.query[0], each.key[0]) for each in (loud, shared)]
    assert np.linalg.norm(quiet[0] - quiet[1]) > 0.5 * np.linalg.norm(quiet[0])


@pytest.mark.parametrize("rotary", [6, 2, 0])
@pytest.mark.parametrize("method", ["svd", "procrustes"])
def test_no_bias_appears_where_none_is_stored(rotary: int, method: str) -> None:
    heads = make_layer(7, bias=(True, False, True), freedom=halves(6, rotary))
    result = pooled(heads, 2, method)
    assert not result.key[..., -1].any()
    assert result.query[..., -1].any()
    without = pooled(make_layer(7, bias=(False, True, False), freedom=halves(6, rotary)), 2, method)
    assert not without.query[..., -1].any()
    assert not without.value[..., -1].any()


def test_shared_keys_are_as_large_as_the_source_s() -> None:
    heads = changed(make_layer(8), 3)
    key, query = heads.key * 1e-3, heads.query * 1e3
    result = pooled(replace(heads, key=key, query=query), 1)
    sizes = [
        np.sqrt(np.einsum("kdm,mn,kdn->k", k, STATISTICS.attended, k)) for k in (key, result.key)
    ]
    assert 0.2 < sizes[1].mean() / sizes[0].mean() < 5


def test_fixed_keys_are_averaged_and_queries_left_alone() -> None:
    freedom = replace(halves(6), fixed="a norm on every key head")
    heads = make_layer(9, freedom=freedom)
    result, report = pool_layer(heads, STATISTICS, num_kv_heads=2, method="svd")
    assert result.key == pytest.approx(mean_pooled(heads, 2).key)
    assert np.array_equal(result.query, heads.query)
    assert report.notes == ("keys were averaged as they are: a norm on every key head",)
    assert 0.1 < report.key_energy_lost < 0.9
    same = repeat(make_layer(9, freedom=freedom), 2)
    assert pool_layer(same, STATISTICS, num_kv_heads=4, method="svd")[1].key_energy_lost < 1e-9
