"""Which colour and marker a model has, the same in every figure of a report.

In a report on one run a colour is a model; in one on several a colour is a run and the marker tells
source, converted and uptrained apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gqaconvert.figure_style import COLOURS, MARKERS, style
from gqaconvert.reporting.saved import ROLES
from gqaconvert.reporting.subjects import Subject


@dataclass(frozen=True, slots=True)
class Look:
    """How a model is drawn.

    Attributes:
        colour: of its lines and marks.
        marker: of its marks.
        name: in legends.
    """

    colour: str
    marker: str
    name: str


class Looks:
    """The looks of all models of a report.

    Args:
        subjects: all of them.
    """

    def __init__(self, subjects: Sequence[Subject]) -> None:
        self._runs = list(dict.fromkeys(subject.run.name for subject in subjects))
        self._models: dict[str, list[str]] = {}
        for subject in subjects:
            self._models.setdefault(subject.run.name, []).append(subject.model)

    @property
    def are_runs(self) -> bool:
        """Whether a colour stands for a run, not for a model."""
        return len(self._runs) > 1

    def of(self, subject: Subject) -> Look:
        """Return how a model is drawn."""
        models = self._models[subject.run.name]
        place = models.index(subject.model)
        if not self.are_runs:
            return Look(*style(place), subject.title.lower() if subject.role else subject.title)
        number = ROLES.index(subject.role) if subject.role in ROLES else place
        title = subject.title.lower() if subject.role else subject.title
        marker = MARKERS[number % len(MARKERS)]
        return Look(self.of_run(subject.run.name), marker, f"{subject.run.name}: {title}")

    def of_run(self, name: str) -> str:
        """Return the colour of a run."""
        return COLOURS[self._runs.index(name) % len(COLOURS)]
