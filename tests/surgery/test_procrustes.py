"""Turning heads towards each other."""

from __future__ import annotations

import numpy as np
import pytest

from gqaconvert.surgery.calibrated.procrustes import (
    matrix_turns,
    plane_turns,
    turned_heads,
    turned_planes,
    turned_planes_sum,
    turned_sum,
)
from gqaconvert.surgery.calibrated.svd import fit_shared


def complex_heads(seed: int, *shape: int) -> np.ndarray:
    noise = np.random.default_rng(seed)
    return noise.standard_normal(shape) + 1j * noise.standard_normal(shape)


def orthogonal(seed: int, width: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((width, width)))[0]


def test_phases_of_one_key_are_found() -> None:
    head = complex_heads(0, 1, 4, 20)  # (1, P, T)
    turns = np.exp(1j * np.random.default_rng(1).uniform(0, 6, (3, 4)))
    keys = head * turns[:, :, None]
    products = np.einsum("ipt,jpt->ijp", keys, keys.conj())
    found = plane_turns(products)
    assert np.abs(found) == pytest.approx(np.ones((3, 4)))
    assert turned_planes_sum(products, found) == pytest.approx(9 * np.sum(np.abs(head) ** 2))


def test_rotations_of_one_value_are_found() -> None:
    head = np.random.default_rng(0).standard_normal((5, 20))
    values = np.stack([orthogonal(seed, 5) @ head for seed in range(3)])
    products = np.einsum("idt,jet->ijde", values, values)
    turns = matrix_turns(products)
    assert turns @ turns.swapaxes(1, 2) == pytest.approx(np.stack([np.eye(5)] * 3), abs=1e-12)
    assert turned_sum(products, turns) == pytest.approx(9 * np.sum(head**2))


def test_turning_never_shortens_the_sum() -> None:
    for seed in range(5):
        keys = complex_heads(seed, 4, 3, 20)
        products = np.einsum("ipt,jpt->ijp", keys, keys.conj())
        untouched = turned_planes_sum(products, np.ones((4, 3), complex))
        assert turned_planes_sum(products, plane_turns(products)) > untouched
        values = keys.real
        products = np.einsum("idt,jet->ijde", values, values)
        turns = np.broadcast_to(np.eye(3), (4, 3, 3))
        assert turned_sum(products, matrix_turns(products)) > turned_sum(products, turns)


def test_the_average_of_turned_keys_stands_for_each() -> None:
    head = complex_heads(2, 1, 4, 20)
    turns = np.exp(1j * np.random.default_rng(3).uniform(0, 6, (3, 4)))
    keys = head * turns[:, :, None]
    gram = np.einsum("ipt,jpt->pij", keys, keys.conj())[:, :, None, :, None]
    importance = np.random.default_rng(4).uniform(1, 2, (4, 3, 1, 1)).astype(complex)
    shared = turned_planes(gram, importance)
    average = np.einsum("pri,ipt->prt", shared.basis[..., 0], keys)
    assert np.einsum("pi,pt->ipt", shared.maps[:, :, 0, 0], average[:, 0]) == pytest.approx(keys)
    assert shared.lost == pytest.approx(0, abs=1e-9 * shared.total)


def test_the_average_of_turned_values_stands_for_each() -> None:
    head = np.random.default_rng(5).standard_normal((5, 20))
    values = np.stack([orthogonal(seed, 5) @ head for seed in range(3)])
    gram = np.einsum("idt,jet->idje", values, values)
    shared = turned_heads(gram, np.stack([np.eye(5) * weight for weight in (1.0, 2.0, 3.0)]))
    average = np.einsum("rid,idt->rt", shared.basis, values)
    assert shared.maps @ average == pytest.approx(values)


def test_heads_count_by_their_importance() -> None:
    """Of two heads that cannot agree, the shared one is nearer to the one that matters."""
    values = np.random.default_rng(6).standard_normal((2, 4, 30))
    gram = np.einsum("idt,jet->idje", values, values)
    shared = turned_heads(gram, np.stack([np.eye(4), 9 * np.eye(4)]))
    average = np.einsum("rid,idt->rt", shared.basis, values)
    errors = np.sum((values - shared.maps @ average) ** 2, axis=(1, 2))
    assert errors[1] < errors[0] / 20


def test_turning_is_never_better_than_the_optimum() -> None:
    for seed in range(3):
        keys = complex_heads(seed, 3, 4, 25)
        gram = np.einsum("ipt,jpt->pij", keys, keys.conj())[:, :, None, :, None]
        importance = np.random.default_rng(seed).uniform(1, 2, (4, 3, 1, 1)).astype(complex)
        assert fit_shared(gram, importance).lost < turned_planes(gram, importance).lost


def test_keys_count_by_the_queries_that_meet_them() -> None:
    keys = complex_heads(7, 2, 4, 30)
    gram = np.einsum("ipt,jpt->pij", keys, keys.conj())[:, :, None, :, None]
    importance = np.broadcast_to([1.0, 9.0], (4, 2))[:, :, None, None].astype(complex)
    shared = turned_planes(gram, importance)
    average = np.einsum("pri,ipt->prt", shared.basis[..., 0], keys)[:, 0]
    errors = keys - np.einsum("pi,pt->ipt", shared.maps[:, :, 0, 0], average)
    sizes = np.sum(np.abs(errors) ** 2, axis=(1, 2))
    assert sizes[1] < sizes[0] / 20
