"""torch's `fully_shard` and distributed states, in two real processes over gloo."""

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = (
    "divided_model_trains_as_a_whole_one",
    "a_divided_state_is_read_by_one_process",
    "weights_of_one_process_are_read_divided",
    "errors_of_the_first_process_reach_all",
)


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("two")
    for name in TESTS:
        (folder / name).mkdir()
    script = Path(__file__).with_name("two_processes.py")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         str(script), str(folder), *TESTS],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    return done.stdout + done.stderr


@pytest.mark.distributed
@pytest.mark.parametrize("name", TESTS)
def test_two_processes(output: str, name: str) -> None:
    assert f"passed {name}" in output, output[-4000:]
