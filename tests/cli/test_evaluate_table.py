"""How figures of an evaluation are written."""

from __future__ import annotations

import math

import pytest

from gqaconvert.cli.evaluate_table import figure


@pytest.mark.parametrize(
    ("value", "stderr", "written"),
    [
        (22.5859, 1.4822, "22.6 ± 1.5"),
        (43712.13, 7576.9, "43,712 ± 7,577"),
        (0.4, 0.0347, "0.400 ± 0.035"),
        (2.459, 0.186, "2.46 ± 0.19"),
        (25.31, None, "25.31"),
        (8192.0, None, "8,192"),
        (512.0, None, "512"),
        (0.0, 0.0, "0 ± 0"),
        (math.inf, None, "inf"),
        (math.inf, math.inf, "inf ± inf"),
    ],
)
def test_digits_follow_the_error(value, stderr, written):
    assert figure(value, stderr) == written
