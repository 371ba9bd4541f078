"""Means over tokens, and their error over windows."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from gqaconvert.evaluation.window_means import WindowMean


def _mean(windows):
    found = WindowMean()
    for values in windows:
        found.add(float(sum(values)), len(values))
    return found


def test_tokens_weigh_alike_whatever_their_window():
    assert _mean([[1.0], [4.0, 4.0, 4.0]]).mean == pytest.approx(3.25)


def test_error_of_windows_of_one_size_is_the_usual_one():
    windows = [[1.0, 3.0], [2.0, 8.0], [0.0, 1.0], [4.0, 4.0]]
    means = [statistics.mean(values) for values in windows]
    assert _mean(windows).stderr == pytest.approx(statistics.stdev(means) / 2)


def test_error_is_how_much_the_mean_varies_between_samples():
    draw = np.random.default_rng(0)

    def sample():
        # Tokens of a window share a level, so they are no independent draws.
        return [draw.normal(draw.normal(), 1, draw.integers(5, 60)) for _ in range(40)]

    means = [_mean(sample()).mean for _ in range(400)]
    errors = [_mean(sample()).stderr for _ in range(100)]
    assert statistics.mean(errors) == pytest.approx(statistics.stdev(means), rel=0.15)


def test_one_window_has_no_error():
    assert _mean([[1.0, 2.0]]).stderr is None
