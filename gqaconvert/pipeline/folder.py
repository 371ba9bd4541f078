"""Where an experiment keeps its things: a run folder with everything before and after training."""

from __future__ import annotations

from pathlib import Path

from gqaconvert.training.folder import RunFolder, run_folder


class ExperimentFolder(RunFolder):
    """The files of one experiment, all of which `report` reads."""

    @property
    def record(self) -> Path:
        """Which stages are done, from what inputs; see `record`."""
        return self.path / "pipeline.json"

    @property
    def models(self) -> Path:
        """Sizes of the models, by role."""
        return self.path / "models.json"

    @property
    def estimate(self) -> Path:
        """Memory and requests that fit, before and after, as `estimate --json` prints them."""
        return self.path / "estimate.json"

    @property
    def heads(self) -> Path:
        """How alike the source's KV heads are, as `inspect --heads --json` prints it."""
        return self.path / "heads.json"

    @property
    def verification(self) -> Path:
        """The checks that the conversion passed."""
        return self.path / "verify.json"

    @property
    def results(self) -> Path:
        """Measurements, one file each."""
        return self.path / "results"

    @property
    def bench(self) -> Path:
        """Latencies."""
        return self.path / "bench"

    @property
    def sweep(self) -> Path:
        """Other conversions, to compare with."""
        return self.path / "sweep"

    @property
    def report(self) -> Path:
        """The report."""
        return self.path / "report"


def experiment_folder(out: str | Path | None, name: str) -> ExperimentFolder:
    """Return the folder of an experiment: `out`, or `runs/NAME`."""
    return ExperimentFolder(run_folder(out, name).path)
