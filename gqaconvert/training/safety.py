"""Which steps are taken: not those whose gradient is not finite, nor those that leap."""

from __future__ import annotations

import math
from statistics import median

from gqaconvert.settings.uptrain import SafetySettings
from gqaconvert.training.state import RunFacts


def fault_of(norm: float, facts: RunFacts, settings: SafetySettings) -> str | None:
    """Say why a step with a gradient of this norm should not be taken; None if it should.

    The norm is the same in every process, so all decide alike.

    Args:
        norm: of the gradients of the whole step, before clipping.
        facts: of the run.
        settings: of the recipe.
    """
    if not math.isfinite(norm):
        return "gradient is not finite"
    if len(facts.norms) >= settings.spike_window:
        usual = median(facts.norms)
        if norm > settings.spike_factor * usual:
            return f"gradient norm {norm:.3g} is {norm / usual:.0f} times the usual"
    return None


def note_norm(norm: float, facts: RunFacts, settings: SafetySettings) -> None:
    """Remember the norm of a step that was taken."""
    facts.norms = [*facts.norms, norm][-settings.spike_window :]
    facts.skipped_in_a_row = 0


def note_skip(facts: RunFacts, settings: SafetySettings) -> bool:
    """Remember a skipped step; say whether they are too many in a row."""
    facts.skipped += 1
    facts.skipped_in_a_row += 1
    return facts.skipped_in_a_row > settings.max_skipped
