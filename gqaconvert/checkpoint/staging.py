"""Output folders that appear under their name only when finished: staged, journaled, renamed.

Knows nothing of what is written. A killed process leaves the staging folder, from which a later one
can go on; it can never leave a folder that looks finished.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gqaconvert.errors import GqaconvertError, RefusedError
from gqaconvert.units import format_bytes

JOURNAL = "journal.jsonl"
MANIFEST = "gqaconvert.json"
"""Written into every finished output; its presence marks a folder as one of ours."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def staging_path(out: Path) -> Path:
    """Return where `out` is prepared: beside it, since a rename stays within a file system."""
    return out.parent / f".{out.name}.partial"


class StagedFolder:
    """A folder in the making.

    Use as a context manager. Leaving it normally without `finish`, or with an error of this
    package, removes what was staged; an interruption or a failing disk keeps it for `--resume`.

    Args:
        out: final place.
        plan_digest: identity of the work; a journal with another one is refused on resume.
        resume: go on where an earlier run stopped.
        overwrite: replace a finished output of ours, and forget an unfinished one.

    Raises:
        RefusedError: `out` exists, an unfinished output is in the way, differs, or is being written
            by another process.
    """

    def __init__(self, out: Path, plan_digest: str, *, resume: bool, overwrite: bool) -> None:
        self.out = out
        self.path = staging_path(out)
        self.done: dict[str, dict[str, Any]] = {}
        self._overwrite = overwrite
        self._lock = threading.Lock()
        self._finished = False
        check_output(out, overwrite=overwrite)
        if self.path.exists() and not (resume or overwrite):
            raise RefusedError(
                "an unfinished conversion of this name exists",
                at=str(self.path),
                remedy="--resume to go on, --overwrite to start again",
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._journal = os.open(
            self.path / JOURNAL, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        try:
            self._claim()
            self._start(plan_digest, resume=resume)
        except BaseException:
            os.close(self._journal)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._finished and (error is None or isinstance(error, GqaconvertError)):
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._journal)

    def record(self, step: str, facts: Mapping[str, Any]) -> None:
        """Note that a step is done, from any thread; a torn last line is ignored on resume."""
        line = json.dumps({"step": step, **facts}) + "\n"
        with self._lock:
            os.write(self._journal, line.encode())
            self.done[step] = dict(facts)

    def finish(self) -> None:
        """Give the folder its final name, by one rename, once all it holds is on the device."""
        (self.path / JOURNAL).unlink()
        for path in sorted(self.path.rglob("*")):
            _fsync(path)  # else a power failure could leave the name and lose the bytes
        _fsync(self.path)
        previous = None
        if self._overwrite and self.out.exists():
            previous = self.out.parent / f".{self.out.name}.replaced"
            shutil.rmtree(previous, ignore_errors=True)
            self.out.rename(previous)
        self.path.rename(self.out)
        self._finished = True
        _fsync(self.out.parent)
        if previous is not None:
            shutil.rmtree(previous)

    def _claim(self) -> None:
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RefusedError(
                "another process is writing this output",
                at=str(self.path),
                remedy="wait for it, or choose another OUT",
            ) from error

    def _start(self, plan_digest: str, *, resume: bool) -> None:
        first = {"plan": plan_digest, "boot": _boot_id()}
        lines = _read_lines(self.path / JOURNAL)
        if resume and lines:
            if lines[0].get("plan") != plan_digest:
                raise RefusedError(
                    "the unfinished conversion had other options or another source",
                    at=str(self.path),
                    remedy="the options it was started with, or --overwrite to start again",
                )
            # After a crash of the machine, files may lack bytes that the journal calls written:
            # start again then.
            if lines[0].get("boot") == first["boot"]:
                self.done = {line.pop("step"): line for line in lines[1:] if "step" in line}
                return
        for path in self.path.iterdir():
            if path.name != JOURNAL:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.ftruncate(self._journal, 0)
        os.write(self._journal, (json.dumps(first) + "\n").encode())


def check_output(out: Path, *, overwrite: bool) -> None:
    """Refuse an output place that holds something.

    Raises:
        RefusedError: a file, a non-empty folder without `overwrite`, or one that this package did
            not write.
    """
    if not out.exists() and not out.is_symlink():
        return
    if not out.is_dir():
        raise RefusedError("output exists and is not a folder", at=str(out), remedy="another OUT")
    if not any(out.iterdir()):
        out.rmdir()
        return
    if not overwrite:
        raise RefusedError(
            "output folder is not empty", at=str(out), remedy="--overwrite, or another OUT"
        )
    if not (out / MANIFEST).is_file():
        raise RefusedError(
            f"output folder was not written by gqaconvert (it has no {MANIFEST}); it is kept",
            at=str(out),
            remedy="remove it yourself, or choose another OUT",
        )


def check_space(folder: Path, needed_bytes: int) -> None:
    """Refuse to start what the device cannot hold.

    Args:
        folder: the output's parent, which need not exist yet.
        needed_bytes: size of all that will be written.

    Raises:
        RefusedError: too little free space.
    """
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if needed_bytes > free:
        raise RefusedError(
            f"output needs {format_bytes(needed_bytes)} but only {format_bytes(free)} are free",
            at=str(folder),
            remedy=f"free {format_bytes(needed_bytes - free)}, or an OUT on another device",
        )


def _read_lines(path: Path) -> list[dict[str, Any]]:
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break  # the process died while writing this line
    return lines


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return "unknown"


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
