"""The best shared head, against the definition of what it minimises."""

from __future__ import annotations

import numpy as np
import pytest

from gqaconvert.surgery.calibrated.svd import (
    Matrix,
    fit_shared,
    refit,
    residual_energy,
    square_root,
    weigh,
    weighted_error,
)


def problem(seed: int, *shape: int, complex_numbers: bool = False) -> tuple[Matrix, Matrix, Matrix]:
    """Return outputs y (..., s*D, T), their gram and importances (..., s, D, D)."""
    *lead, count, width = shape
    noise = np.random.default_rng(seed)

    def normal(*size: int) -> Matrix:
        real = noise.standard_normal(size)
        return real + 1j * noise.standard_normal(size) if complex_numbers else real

    outputs = normal(*lead, count * width, 40)
    outputs *= np.geomspace(4, 0.2, count * width)[:, None]
    gram = outputs @ np.swapaxes(outputs.conj(), -1, -2) / 40
    roots = normal(*lead, count, width, width)
    importance = roots @ np.swapaxes(roots.conj(), -1, -2)
    return outputs, gram.reshape(*lead, count, width, count, width), importance


@pytest.mark.parametrize("complex_numbers", [False, True])
def test_error_is_that_of_the_outputs(complex_numbers: bool) -> None:
    outputs, gram, importance = problem(0, 3, 4, complex_numbers=complex_numbers)
    shared = fit_shared(gram, importance)
    value = np.einsum("rid,idt->rt", shared.basis, outputs.reshape(3, 4, 40))
    lost = 0.0
    for head in range(3):
        error = outputs.reshape(3, 4, 40)[head] - shared.maps[head] @ value
        lost += np.einsum("dt,de,et->", error.conj(), importance[head], error).real / 40
    assert shared.lost == pytest.approx(lost)


@pytest.mark.parametrize("complex_numbers", [False, True])
def test_no_shared_head_loses_less(complex_numbers: bool) -> None:
    """Eckart-Young: what is lost is what the singular values beyond the rank hold."""
    outputs, gram, importance = problem(1, 3, 4, complex_numbers=complex_numbers)
    rooted = [square_root(importance[i]) @ outputs.reshape(3, 4, 40)[i] for i in range(3)]
    singular = np.linalg.svd(np.concatenate(rooted), compute_uv=False) ** 2 / 40
    shared = fit_shared(gram, importance)
    assert shared.lost == pytest.approx(singular[4:].sum())
    assert shared.total == pytest.approx(singular.sum())
    assert residual_energy(weigh(gram, importance)) == pytest.approx(shared.lost)


def test_problems_are_solved_side_by_side() -> None:
    _, gram, importance = problem(2, 5, 3, 1, complex_numbers=True)
    together = fit_shared(gram, importance)
    alone = [fit_shared(gram[p], importance[p]) for p in range(5)]
    assert together.lost == pytest.approx(sum(each.lost for each in alone))
    for number, each in enumerate(alone):
        mapped = each.maps @ each.basis.reshape(1, 3)
        assert together.maps[number] @ together.basis[number].reshape(1, 3) == pytest.approx(mapped)


def test_maps_are_least_squares() -> None:
    _, gram, importance = problem(3, 3, 4)
    basis = np.random.default_rng(0).standard_normal((4, 3, 4))
    maps = refit(gram, basis)
    best = weighted_error(gram, importance, basis, maps)
    for seed in range(5):
        nearby = maps + 0.01 * np.random.default_rng(seed).standard_normal(maps.shape)
        assert weighted_error(gram, importance, basis, nearby) > best


def test_the_shared_head_is_as_large_as_those_it_stands_for() -> None:
    _, gram, importance = problem(4, 3, 4)
    rows = fit_shared(gram, 1e6 * importance).basis.reshape(4, 12)
    products = gram.reshape(12, 12)
    assert np.diag(rows @ products @ rows.T) == pytest.approx([np.trace(products) / 12] * 4)


def test_heads_with_nothing_in_them_give_no_nan() -> None:
    _, gram, importance = problem(5, 3, 4)
    for shared in (
        fit_shared(np.zeros_like(gram), importance),
        fit_shared(gram, np.zeros_like(importance)),
    ):
        assert np.isfinite(shared.basis).all()
        assert np.isfinite(shared.maps).all()


def test_directions_that_hold_only_rounding_are_not_blown_up() -> None:
    """Heads of two live dimensions of four: the other two of the shared head mean nothing."""
    outputs, _, importance = problem(6, 3, 4)
    noise = np.random.default_rng(0)
    source = noise.standard_normal((2, 40))
    outputs = np.concatenate([noise.standard_normal((4, 2)) @ source for _ in range(3)])
    gram = (outputs @ outputs.T / 40).reshape(3, 4, 3, 4)
    shared = fit_shared(gram, importance)
    assert shared.lost == pytest.approx(0, abs=1e-9 * shared.total)
    assert np.abs(shared.basis).max() < 100
    assert np.abs(shared.maps).max() < 100


def test_no_dimensions_and_no_problems_are_fine() -> None:
    assert fit_shared(np.empty((3, 0, 3, 0)), np.empty((3, 0, 0))).lost == 0
    assert fit_shared(np.empty((0, 3, 1, 3, 1)), np.empty((0, 3, 1, 1))).total == 0
