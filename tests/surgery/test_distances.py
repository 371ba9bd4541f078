"""Slow planes mix as far as distances allow, and no further."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from layer_zoo import (
    difference,
    halves,
    make_layer,
    make_statistics,
    plane_angles,
    repeat,
    scramble,
)

from gqaconvert.surgery.calibrated import pool_layer
from gqaconvert.surgery.calibrated.distances import Turns, mean_turns, mix_planes
from gqaconvert.surgery.calibrated.grams import layer_grams
from gqaconvert.surgery.calibrated.keys import fit_keys
from gqaconvert.surgery.calibrated.svd import SharedHead, fit_shared
from gqaconvert.surgery.layer_heads import Floats, KeyFreedom, LayerHeads

STATISTICS = make_statistics(31)
SCATTERED = KeyFreedom(np.array([[0, 4], [5, 2]]), np.array([1, 3, 6]))


def rotation(freedom: KeyFreedom, angles: Floats, width: int, positions: float) -> Floats:
    """Return what RoPE multiplies a key by at a position."""
    matrix = np.eye(width)
    for (real, imaginary), angle in zip(freedom.planes, angles * positions, strict=True):
        matrix[real, real] = matrix[imaginary, imaginary] = np.cos(angle)
        matrix[imaginary, real], matrix[real, imaginary] = np.sin(angle), -np.sin(angle)
    return matrix


def explicit(freedom: KeyFreedom, angles: Floats, width: int, reach: int) -> list[Floats]:
    """Return the turn of a key on its way to a query, at every distance looked at."""
    return [rotation(freedom, angles, width, -distance) for distance in np.geomspace(1, reach, 512)]


@pytest.mark.parametrize("back", [False, True])
def test_means_are_those_of_rotations(back: bool) -> None:
    angles = np.array([0.3, 0.01])
    products = np.random.default_rng(0).standard_normal((2, 7, 7))
    expected = np.zeros((2, 7, 7))
    for turn in explicit(SCATTERED, angles, 7, 50):
        turn = turn.T if back else turn
        expected += turn @ products @ turn.T / 512
    assert mean_turns(SCATTERED, angles, 50).mean(products, back) == pytest.approx(expected)


def problem(
    angles: list[float], reach: int
) -> tuple[Floats, Floats, Turns, SharedHead, LayerHeads]:
    heads = make_layer(1, num_heads=6, num_kv_heads=3, width=7, freedom=SCATTERED)
    grams = layer_grams(heads, STATISTICS)
    start = fit_keys(grams, [0, 1, 2], "svd", reach).shared
    assert start is not None
    turns = mean_turns(SCATTERED, np.array(angles), reach)
    return grams.keys.among([0, 1, 2]), grams.queries, turns, start, heads


def test_lost_is_the_error_of_scores_with_positions() -> None:
    """Queries and keys turned as RoPE turns them, at their own positions."""
    angles, reach = np.array([0.3, 0.02]), 40
    gram, queries, turns, start, _ = problem(list(angles), reach)
    mixed = mix_planes(gram, queries, turns, start)
    at, lost, total = 100, 0.0, 0.0
    keys = gram.reshape(21, 21)
    rows = mixed.basis.reshape(7, 21)
    for distance in np.geomspace(1, reach, 512):
        query = rotation(SCATTERED, angles, 7, at)
        key = rotation(SCATTERED, angles, 7, at - distance)
        for head in range(3):
            pick = np.eye(21)[7 * head : 7 * head + 7]
            exact = query.T @ key @ pick
            error = exact - mixed.maps[head] @ query.T @ key @ rows
            total += np.sum(queries[head] * (exact @ keys @ exact.T)) / 512
            lost += np.sum(queries[head] * (error @ keys @ error.T)) / 512
    assert mixed.total == pytest.approx(total)
    assert mixed.lost == pytest.approx(lost)


def test_planes_that_stand_still_are_free() -> None:
    gram, queries, turns, start, _ = problem([1e-9, 1e-9], 10)
    best = fit_shared(gram, queries)
    mixed = mix_planes(gram, queries, turns, start)
    assert mixed.total == pytest.approx(best.total)
    assert best.lost <= mixed.lost < 1.1 * best.lost
    assert mixed.lost < 0.8 * start.lost


def test_planes_that_whirl_stay_apart() -> None:
    """Nothing is gained on one complex number a plane, and planes hold nothing of each other."""
    gram, queries, turns, start, _ = problem([2.0, 47.3], 10**6)
    turns = replace(
        turns, single=0 * turns.single, joint=0 * turns.joint, opposed=np.eye(2, dtype=complex)
    )
    mixed = mix_planes(gram, queries, turns, start)
    assert mixed.lost == pytest.approx(start.lost, rel=1e-3)
    product = np.abs(np.einsum("sab,bsc->ac", mixed.maps, mixed.basis))
    apart = product[np.ix_([0, 4], [5, 2, 1, 3, 6])]
    assert apart.max() < 1e-9 * product.max()


def test_mixing_only_helps_and_more_so_near_by() -> None:
    lost = []
    for reach in (2, 20, 200):
        gram, queries, turns, start, _ = problem([0.1, 0.02], reach)
        mixed = mix_planes(gram, queries, turns, start)
        lost.append(mixed.lost / mixed.total)
        assert mixed.lost < start.lost
    assert lost == sorted(lost)


@pytest.mark.parametrize("rotary", [6, 4])
def test_round_trip_with_angles(rotary: int) -> None:
    """What one complex number a plane explains is left as exact as it was."""
    freedom = replace(halves(6, rotary), angles=plane_angles(rotary // 2))
    base = make_layer(2, num_heads=16, num_kv_heads=2, freedom=freedom)
    heads = scramble(repeat(base, 4), 3)
    result, report = pool_layer(
        heads, STATISTICS, num_kv_heads=2, method="svd", grouping="similarity", reach=12
    )
    assert difference(heads, result) < 1e-9
    assert report.key_energy_lost < 1e-9


def test_a_start_that_loses_nothing_stays() -> None:
    base = make_layer(4, num_heads=12, num_kv_heads=1, freedom=halves(6, rotary=4))
    heads = scramble(repeat(base, 3), 5)
    grams = layer_grams(heads, STATISTICS)
    start = fit_keys(grams, [0, 1, 2], "svd", 9).shared
    assert start is not None
    turns = mean_turns(heads.freedom, plane_angles(2), 9)
    mixed = mix_planes(grams.keys.among([0, 1, 2]), grams.queries, turns, start)
    for head in range(3):
        for other in range(3):
            before = start.maps[head] @ start.basis[:, other]
            after = mixed.maps[head] @ mixed.basis[:, other]
            assert np.abs(after - before).max() < 1e-14 * np.abs(start.maps).max()


def test_known_angles_bring_attention_nearer() -> None:
    """On the attention's output at real positions, values left as they are."""
    freedom = replace(halves(6), angles=np.array([0.5, 0.01, 0.005]))
    for seed in range(4):
        heads = make_layer(seed, num_heads=4, num_kv_heads=4, freedom=freedom)
        heads = replace(heads, value=heads.value[[0] * 4])
        # Inputs of `function` are independent and even: their moments say so.
        even = replace(STATISTICS, inputs=np.eye(25), attended=np.eye(25), averaged=np.eye(25))
        unknown = replace(heads, freedom=halves(6))
        plain, _ = pool_layer(unknown, even, num_kv_heads=1, method="svd")
        mixed, _ = pool_layer(heads, even, num_kv_heads=1, method="svd", reach=12)
        assert difference(heads, mixed) < difference(heads, replace(plain, freedom=freedom))


def test_no_bias_appears_and_nothing_is_nan() -> None:
    freedom = replace(halves(6, 4), angles=plane_angles(2))
    heads = make_layer(5, bias=(False, False, True), freedom=freedom)
    key = heads.key.copy()
    key[:, [0, 2]] = 0  # a plane that no head uses
    key[:, 1] = 0  # half of another
    key[0] = 0  # and a whole head
    for keys in (key, 0 * key):
        result, _ = pool_layer(replace(heads, key=keys), STATISTICS, num_kv_heads=1, method="svd")
        assert np.isfinite(result.key).all()
        assert np.isfinite(result.query).all()
        assert not result.key[..., -1].any()
        assert not result.query[..., -1].any()


def test_shared_planes_are_as_large_as_the_source_s() -> None:
    gram, queries, turns, start, _ = problem([0.1, 0.02], 20)
    rows = mix_planes(gram, queries, turns, start).basis.reshape(7, 21)
    energy = np.diag(rows @ gram.reshape(21, 21) @ rows.T)
    wanted = np.einsum("idid->d", gram) / 3
    for plane in SCATTERED.planes:
        assert energy[plane].mean() == pytest.approx(wanted[plane].mean())
    assert energy[SCATTERED.free] == pytest.approx(wanted[SCATTERED.free])


def test_angles_must_be_as_many_as_planes() -> None:
    freedom = replace(halves(6), angles=np.ones(2))
    with pytest.raises(ValueError, match="angles for 3 planes"):
        pool_layer(make_layer(6, freedom=freedom), STATISTICS, num_kv_heads=1, method="svd")
