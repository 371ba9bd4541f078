"""Where a run keeps its things."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from gqaconvert.checkpoint.staging import MANIFEST
from gqaconvert.errors import RefusedError

RUNS = Path("runs")
"""Folder of all runs, in the working directory."""


@dataclass(frozen=True)
class RunFolder:
    """The files of one run.

    Attributes:
        path: of the run.
    """

    path: Path

    @property
    def recipe(self) -> Path:
        """The recipe with everything filled in."""
        return self.path / "recipe.yaml"

    @property
    def converted(self) -> Path:
        """The conversion that is trained, where the recipe names no other start."""
        return self.path / "converted"

    @property
    def statistics(self) -> Path:
        """Second moments of the calibration text, where the recipe names one."""
        return self.path / "calibration.safetensors"

    @property
    def metrics(self) -> Path:
        """One JSON line a step, see `metrics`."""
        return self.path / "metrics.jsonl"

    @property
    def states(self) -> Path:
        """Saved states, see `state`."""
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        """The trained model."""
        return self.path / "model"

    @property
    def curve(self) -> Path:
        """Picture of the losses."""
        return self.path / "loss.png"

    @property
    def summary(self) -> Path:
        """What the run came to, as JSON."""
        return self.path / "summary.json"

    def clear(self, *, keep_conversion: bool = False) -> None:
        """Remove what an earlier run left here, and nothing else.

        Args:
            keep_conversion: leave the conversion that was trained.

        Raises:
            RefusedError: the exported model is not one of ours.
        """
        if self.export.exists() and not (self.export / MANIFEST).is_file():
            raise RefusedError(
                "the folder of the trained model holds something else; it is kept",
                at=str(self.export),
                remedy="remove it yourself, or choose another --out",
            )
        for file in (self.recipe, self.metrics, self.curve, self.summary):
            file.unlink(missing_ok=True)
        for folder in (self.states, self.export):
            shutil.rmtree(folder, ignore_errors=True)
        if not keep_conversion and (self.converted / MANIFEST).is_file():
            shutil.rmtree(self.converted)


def run_folder(out: str | Path | None, name: str) -> RunFolder:
    """Return the folder of a run: `out`, or `runs/NAME`."""
    return RunFolder(Path(out) if out is not None else RUNS / name)
