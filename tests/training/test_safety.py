import math

import pytest

from gqaconvert.settings.uptrain import SafetySettings
from gqaconvert.training.safety import fault_of, note_norm, note_skip
from gqaconvert.training.state import RunFacts

SETTINGS = SafetySettings(spike_factor=10.0, spike_window=5, max_skipped=2)


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_steps_without_finite_gradient_are_never_taken(norm: float) -> None:
    assert fault_of(norm, RunFacts(), SETTINGS) == "gradient is not finite"


def test_spikes_are_told_from_the_median_once_it_is_known() -> None:
    facts = RunFacts()
    assert fault_of(1000.0, facts, SETTINGS) is None
    for norm in (1.0, 2.0, 3.0, 4.0, 500.0):
        note_norm(norm, facts, SETTINGS)
    assert fault_of(29.0, facts, SETTINGS) is None
    assert fault_of(31.0, facts, SETTINGS) == "gradient norm 31 is 10 times the usual"
    note_norm(1.0, facts, SETTINGS)
    assert facts.norms == [2.0, 3.0, 4.0, 500.0, 1.0]


def test_skips_are_counted_and_end_the_run_past_the_limit() -> None:
    facts = RunFacts()
    assert [note_skip(facts, SETTINGS) for _ in range(3)] == [False, False, True]
    note_norm(1.0, facts, SETTINGS)
    assert not note_skip(facts, SETTINGS)
    assert facts.skipped == 4
    assert facts.skipped_in_a_row == 1
