from pathlib import Path

import pytest

from gqaconvert.errors import CheckpointError
from gqaconvert.training.metrics import MetricsWriter, read_metrics


def steps(path: Path) -> list[int]:
    return [line["step"] for line in read_metrics(path)]


def write(path: Path, first: int, last: int, *, after: int) -> None:
    writer = MetricsWriter(path, after)
    for step in range(first, last + 1):
        writer.write({"step": step})
    writer.close()


def test_a_resumed_run_drops_what_came_after_its_state(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 7, after=0)
    write(path, 5, 9, after=4)
    assert steps(path) == list(range(1, 10))


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 7, after=0)
    write(path, 1, 2, after=0)
    assert steps(path) == [1, 2]


def test_a_torn_last_line_is_ignored_and_a_torn_middle_is_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert steps(path) == [1, 2]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n{"step": 4}\n')
    with pytest.raises(CheckpointError, match="cannot be read"):
        steps(path)
