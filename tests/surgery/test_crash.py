"""Killed conversions never look finished, and a resume ends where an uninterrupted run ends."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import folder_bytes, write_llama

import gqaconvert
from gqaconvert.checkpoint.staging import JOURNAL, StagedFolder, staging_path
from gqaconvert.errors import GqaconvertError, RefusedError
from gqaconvert.surgery import execute

KILLS = 30


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write_llama(tmp_path / "in", shards=3, heads=8, kv_heads=8, layers=4, vocab=128)
    return tmp_path / "in"


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr("gqaconvert.surgery.execute.PIECE_BYTES", 4096)


class Run:
    """A conversion in a process of its own, slowed so that a kill can hit any part of it.

    Forked rather than started: thirty imports of the package take longer than the conversions.
    """

    def __init__(
        self, source: Path, out: Path, *, resume: bool = False, hold_s: float = 0.0
    ) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                self._convert(source, out, resume, hold_s)
                code = 0
            finally:
                os._exit(code)

    def _convert(self, source: Path, out: Path, resume: bool, hold_s: float) -> None:
        record, finish = StagedFolder.record, StagedFolder.finish

        def slow_record(staged, step, facts):
            record(staged, step, facts)
            time.sleep(0.004 if len(staged.done) > 1 else hold_s)

        def slow_finish(staged):
            time.sleep(0.05)
            finish(staged)
            time.sleep(0.05)

        StagedFolder.record, StagedFolder.finish = slow_record, slow_finish
        execute.PIECE_BYTES = 4096
        gqaconvert.convert(source, out, num_kv_heads=2, resume=resume, workers=2)

    def wait(self) -> int:
        """Exit code, or minus the signal that ended it."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def test_killed_at_random_moments_then_resumed_equals_an_uninterrupted_run(
    source, tmp_path, small_pieces
):
    gqaconvert.convert(source, tmp_path / "whole", num_kv_heads=2)
    expected = folder_bytes(tmp_path / "whole")
    started = time.monotonic()
    assert Run(source, tmp_path / "timed").wait() == 0
    duration = time.monotonic() - started
    rng = random.Random(0)
    kills = resumed_with_work_done = 0
    out = tmp_path / "out"
    while kills < KILLS:
        run = Run(source, out, resume=staging_path(out).exists())
        time.sleep(rng.random() * duration)
        os.kill(run.pid, signal.SIGKILL)
        kills += run.wait() == -signal.SIGKILL
        if out.exists():
            assert folder_bytes(out) == expected
            shutil.rmtree(out)
        elif staging_path(out).exists():
            journal = staging_path(out) / JOURNAL
            resumed_with_work_done += (
                journal.is_file() and len(journal.read_text().splitlines()) > 2
            )
    gqaconvert.convert(source, out, num_kv_heads=2, resume=True)
    assert folder_bytes(out) == expected
    assert resumed_with_work_done > 3, "kills came too early or too late to prove anything"


def interrupt_after(monkeypatch, steps: int, error: BaseException):
    """Let the `steps`-th piece of work fail."""
    record = StagedFolder.record

    def failing(self, step, facts):
        if len(self.done) >= steps:
            raise error
        record(self, step, facts)

    monkeypatch.setattr(StagedFolder, "record", failing)


class TestResume:
    def interrupted(self, source, out, monkeypatch):
        with monkeypatch.context() as patch:
            interrupt_after(patch, 5, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                gqaconvert.convert(source, out, num_kv_heads=2)
        assert staging_path(out).exists()
        assert not out.exists()

    def test_done_work_is_not_done_again(self, source, tmp_path, monkeypatch, small_pieces):
        self.interrupted(source, tmp_path / "out", monkeypatch)
        journal = (staging_path(tmp_path / "out") / JOURNAL).read_text().splitlines()
        done = {json.loads(line)["step"] for line in journal[1:]}
        assert done
        again = set()
        record = StagedFolder.record

        def noting(self, step, facts):
            again.add(step)
            record(self, step, facts)

        monkeypatch.setattr(StagedFolder, "record", noting)
        gqaconvert.convert(source, tmp_path / "out", num_kv_heads=2, resume=True)
        assert not done & again
        gqaconvert.convert(source, tmp_path / "whole", num_kv_heads=2)
        assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")

    def test_other_options_are_refused_and_the_work_is_kept(
        self, source, tmp_path, monkeypatch, small_pieces
    ):
        self.interrupted(source, tmp_path / "out", monkeypatch)
        for change in ({"num_kv_heads": 4}, {"method": "first"}, {"dtype": "float32"}):
            with pytest.raises(RefusedError, match="other options"):
                gqaconvert.convert(
                    source, tmp_path / "out", **({"num_kv_heads": 2} | change), resume=True
                )
        gqaconvert.convert(source, tmp_path / "out", num_kv_heads=2, resume=True)

    def test_a_changed_source_is_refused(self, source, tmp_path, monkeypatch, small_pieces):
        self.interrupted(source, tmp_path / "out", monkeypatch)
        config = source / "config.json"
        config.write_text(
            config.read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06')
        )
        with pytest.raises(RefusedError, match="another source"):
            gqaconvert.convert(source, tmp_path / "out", num_kv_heads=2, resume=True)

    def test_without_resume_an_unfinished_run_is_not_thrown_away(
        self, source, tmp_path, monkeypatch, small_pieces
    ):
        self.interrupted(source, tmp_path / "out", monkeypatch)
        with pytest.raises(RefusedError, match="unfinished"):
            gqaconvert.convert(source, tmp_path / "out", num_kv_heads=2)
        gqaconvert.convert(source, tmp_path / "out", num_kv_heads=2, overwrite=True)
        assert not staging_path(tmp_path / "out").exists()

    def test_a_journal_of_an_earlier_boot_is_not_trusted(
        self, source, tmp_path, monkeypatch, small_pieces
    ):
        self.interrupted(source, tmp_path / "out", monkeypatch)
        staged = staging_path(tmp_path / "out")
        for path in staged.glob("*.safetensors"):
            path.write_bytes(
                bytes(path.stat().st_size)
            )  # what a power failure can leave of unsynced files
        monkeypatch.setattr("gqaconvert.checkpoint.staging._boot_id", lambda: "another boot")
        gqaconvert.convert(source, tmp_path / "out", num_kv_heads=2, resume=True)
        gqaconvert.convert(source, tmp_path / "whole", num_kv_heads=2)
        assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


def test_a_failing_step_leaves_no_output_and_names_the_fault(
    source, tmp_path, monkeypatch, small_pieces
):
    interrupt_after(monkeypatch, 3, GqaconvertError("planted"))
    with pytest.raises(GqaconvertError, match="planted"):
        gqaconvert.convert(source, tmp_path / "out", num_kv_heads=2)
    assert list(tmp_path.iterdir()) == [source]


def test_a_full_device_keeps_the_work_for_a_resume(source, tmp_path, monkeypatch, small_pieces):
    with monkeypatch.context() as patch:
        interrupt_after(patch, 3, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        with pytest.raises(OSError, match="No space left"):
            gqaconvert.convert(source, tmp_path / "out", num_kv_heads=2)
    assert not (tmp_path / "out").exists()
    gqaconvert.convert(source, tmp_path / "out", num_kv_heads=2, resume=True)


def test_two_processes_do_not_write_one_output(source, tmp_path):
    process = Run(source, tmp_path / "out", hold_s=5)
    try:
        while not (staging_path(tmp_path / "out") / JOURNAL).exists():
            time.sleep(0.005)
        with pytest.raises(RefusedError, match="another process"):
            gqaconvert.convert(source, tmp_path / "out", num_kv_heads=2, resume=True)
        with pytest.raises(RefusedError, match="another process"):
            gqaconvert.convert(source, tmp_path / "out", num_kv_heads=2, overwrite=True)
    finally:
        assert process.wait() == 0
    gqaconvert.convert(source, tmp_path / "whole", num_kv_heads=2)
    assert folder_bytes(tmp_path / "out") == folder_bytes(tmp_path / "whole")


@pytest.fixture
def small_device(tmp_path: Path):
    """A tmpfs of 120 kB, where we may mount one."""
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=120k", "tmpfs", str(mount)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("mounting a tmpfs needs privileges")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_device_that_fills_up_gives_a_clear_error(source, small_device, monkeypatch):
    environment = dict(os.environ)
    command = [
        sys.executable,
        "-m",
        "gqaconvert",
        "convert",
        str(source),
        str(small_device / "out"),
        "--kv-heads",
        "2",
    ]
    refused = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert refused.returncode == 4
    assert "are free" in refused.stderr
    assert not list(small_device.iterdir())
    # Now the space vanishes after the check.
    late = "import gqaconvert.surgery.convert as convert\nconvert.check_space = lambda *a: None\n"
    late += "from gqaconvert.cli.main import main; main()"
    full = subprocess.run(
        [sys.executable, "-c", late, *command[3:]],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert full.returncode == 1
    assert full.stderr.startswith("error: No space left on device")
    assert "try: free space" in full.stderr
    assert "Traceback" not in full.stderr
    assert not (small_device / "out").exists()
