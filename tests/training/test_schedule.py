"""The learning rate and the weight of distillation over a budget."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gqaconvert.settings.uptrain import LossSettings, ScheduleSettings
from gqaconvert.training.schedule import distill_weight, lr_scale

schedules = st.builds(
    ScheduleSettings,
    kind=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    warmup=st.floats(0, 0.5),
    decay=st.floats(0.01, 0.5),
    floor=st.floats(0, 1),
)


def scales(schedule, total):
    return [lr_scale(schedule, step, total) for step in range(total)]


@given(schedules, st.integers(1, 300))
def test_every_step_moves_at_a_rate_above_0_and_up_to_1(schedule, total):
    assert all(0 < scale <= 1 for scale in scales(schedule, total))


@given(schedules, st.integers(1, 300))
def test_it_rises_in_the_warm_up_and_never_after(schedule, total):
    values = scales(schedule, total)
    warmup = round(schedule.warmup * total)
    assert all(before < after for before, after in pairwise(values[:warmup]))
    assert all(before >= after - 1e-12 for before, after in pairwise(values[warmup:]))
    if warmup:
        assert values[0] == pytest.approx(1 / warmup)
        assert values[warmup - 1] == 1


@given(schedules, st.integers(100, 300))
def test_it_never_jumps(schedule, total):
    values = scales(schedule, total)
    warmup = round(schedule.warmup * total)
    falling = total - warmup
    if schedule.kind == "wsd":
        falling = min(falling, max(1, round(schedule.decay * total)))
    largest = max(1 / max(warmup, 1), 1.6 / (falling + 1))  # a cosine's steepest slope is π/2
    assert all(abs(after - before) <= largest + 1e-9 for before, after in pairwise(values))


@given(schedules, st.integers(1, 300))
def test_after_the_last_step_it_is_at_the_floor_and_stays(schedule, total):
    end = 1.0 if schedule.kind == "constant" else schedule.floor
    for step in (total, total + 1, 2 * total + 5):
        assert lr_scale(schedule, step, total) == pytest.approx(end)


def test_shapes_halfway_are_those_their_names_promise():
    def at(kind, step, **changes):
        schedule = ScheduleSettings(kind=kind, warmup=0.0, **changes)
        return lr_scale(schedule, step, 999)

    assert at("linear", 499) == pytest.approx(0.5)
    assert at("cosine", 499) == pytest.approx(0.5)
    assert at("cosine", 249) == pytest.approx(0.8536, abs=1e-4)
    assert at("cosine", 499, floor=0.2) == pytest.approx(0.6)
    assert at("constant", 998, floor=0.2) == 1
    assert at("wsd", 798, decay=0.2) == 1
    assert at("wsd", 899, decay=0.2) == pytest.approx(0.5, abs=0.01)


def test_one_step_is_made_at_a_rate_that_learns():
    assert lr_scale(ScheduleSettings(warmup=0.0), 0, 1) == pytest.approx(0.5)


def test_distillation_ends_at_its_share():
    loss = LossSettings(distill=2.0, distill_decay=0.25)
    weights = [distill_weight(loss, step, 5) for step in range(5)]
    assert weights == pytest.approx([2.0, 1.625, 1.25, 0.875, 0.5])
    assert distill_weight(loss, 9, 5) == pytest.approx(0.5)
    assert distill_weight(loss, 0, 1) == 2.0
    assert distill_weight(LossSettings(), 3, 5) == 1.0
