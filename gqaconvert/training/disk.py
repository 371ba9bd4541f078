"""Disk that a training run takes, before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from gqaconvert.settings.uptrain import UptrainSettings
from gqaconvert.training.memory_parts import element_bytes, trained_parameters
from gqaconvert.training.model_facts import ModelFacts
from gqaconvert.units import format_bytes, weight_type

_INDEX_BYTES = 4
_LOG_PROB_BYTES = 2


@dataclass(frozen=True, slots=True)
class DiskEstimate:
    """Bytes on disk.

    Attributes:
        converted: the checkpoint to start from, when the recipe makes it.
        states: saved states: those kept, and the one being written.
        export: the trained checkpoint.
        teacher_cache: log-probabilities of the source.
    """

    converted: int
    states: int
    export: int
    teacher_cache: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.converted + self.states + self.export + self.teacher_cache

    def rows(self) -> list[tuple[str, str]]:
        """Parts and their sizes in words, for a table."""
        parts = (
            ("converted checkpoint", self.converted),
            ("saved states", self.states),
            ("export", self.export),
            ("teacher's cache", self.teacher_cache),
            ("disk", self.total),
        )
        return [(name, format_bytes(size)) for name, size in parts if size]


def estimate_disk(
    settings: UptrainSettings, student: ModelFacts, source_dtype: str, total_steps: int
) -> DiskEstimate:
    """Estimate the disk space of a run; what lies on disk already is not taken off.

    Args:
        settings: the section `uptrain` of a recipe.
        student: the converted model.
        source_dtype: element type of the source, which "keep" means.
        total_steps: of the budget.
    """
    size = element_bytes(settings, sharded=False)
    trained = trained_parameters(settings, student)
    state = size.weights * student.parameters + size.states * trained
    source = weight_type(source_dtype).size_bytes
    keep = settings.export_dtype == "keep"
    export = source if keep else weight_type(settings.export_dtype).size_bytes
    cache = 0
    if settings.teacher.cache is not None and settings.loss.needs_teacher:
        tokens = total_steps * settings.batch_tokens
        cache = tokens * settings.teacher.cache_top_k * (_INDEX_BYTES + _LOG_PROB_BYTES)
    return DiskEstimate(
        converted=source * student.parameters if settings.start is None else 0,
        states=(settings.checkpoints.keep + 1) * state,
        export=export * student.parameters,
        teacher_cache=cache,
    )
