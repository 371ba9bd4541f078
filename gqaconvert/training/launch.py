"""Starts the processes of a run by the route that works on this machine.

On GPUs that is `accelerate launch`. On CPUs accelerate runs one process whatever is asked, while
torchrun gives real ones over gloo, and there both DDP and FSDP2 work.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import yaml

from gqaconvert.errors import UsageError
from gqaconvert.training.world import EXPECTED

OUTCOME = "GQACONVERT_OUTCOME"
"""Environment variable: the file in which a process leaves its exit code for the launcher, since
launchers turn every code but 0 into 1."""

_MODULE = "gqaconvert.training"


@dataclass(frozen=True)
class Route:
    """How to start the processes.

    Attributes:
        command: what to run.
        environment: variables to set.
        num_processes: in all.
        sharded: FSDP2 rather than DDP.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    num_processes: int
    sharded: bool


@dataclass(frozen=True)
class Wanted:
    """The processes somebody asks for, whether they can be had here or not.

    Attributes:
        num_processes: in all.
        num_machines: they are on.
        sharded: FSDP2 rather than DDP.
        on_cpu: rather than on GPUs.
    """

    num_processes: int
    num_machines: int
    sharded: bool
    on_cpu: bool


def read_wanted(config: Path | None, num_processes: int | None, *, num_gpus: int) -> Wanted:
    """Read what a config of accelerate asks for.

    Args:
        config: None for plain DDP, on GPUs if there are any here.
        num_processes: wanted; None for what the config says.
        num_gpus: on this machine.

    Raises:
        UsageError: the config cannot be read.
    """
    settings = _read(config) if config else {"use_cpu": num_gpus == 0}
    return Wanted(
        num_processes=num_processes or int(settings.get("num_processes") or 1),
        num_machines=int(settings.get("num_machines") or 1),
        sharded=str(settings.get("distributed_type")) == "FSDP",
        on_cpu=bool(settings.get("use_cpu")),
    )


def route_here(
    config: Path | None, num_processes: int | None, arguments: Sequence[str]
) -> Route | None:
    """Choose how to start a run on this machine; None for within this process.

    Args:
        config: of accelerate; None for plain DDP.
        num_processes: wanted; None for what the config says.
        arguments: of `python -m gqaconvert.training`.

    Raises:
        UsageError: as `choose_route`.
    """
    if config is None and (num_processes or 1) == 1:
        return None
    import torch

    return choose_route(
        config,
        num_processes,
        arguments,
        num_gpus=torch.cuda.device_count(),
        num_cores=os.cpu_count() or 1,
    )


def choose_route(
    config: Path | None,
    num_processes: int | None,
    arguments: Sequence[str],
    *,
    num_gpus: int,
    num_cores: int,
) -> Route | None:
    """Choose how to start a run; None for within this process.

    Args:
        config: of accelerate; None for plain DDP.
        num_processes: wanted; None for what the config says.
        arguments: of `python -m gqaconvert.training`.
        num_gpus: on this machine.
        num_cores: on this machine, shared among processes on CPUs.

    Raises:
        UsageError: a config that cannot be read, or processes that cannot be had here.
    """
    wanted = read_wanted(config, num_processes, num_gpus=num_gpus)
    on_cpu = wanted.on_cpu or num_gpus == 0
    count = wanted.num_processes
    if num_processes is None and on_cpu and not wanted.on_cpu and count > 1:
        raise UsageError(
            f"the config asks for {count} processes on GPUs, and there is none here",
            at=str(config),
            remedy="--num-processes 2 runs it on CPUs",
        )
    if wanted.num_machines > 1 and on_cpu:
        raise UsageError(
            "several machines without GPUs", at=str(config), remedy="--accelerate-config ddp"
        )
    if count == 1:
        return None
    if on_cpu:
        command = (
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(count), "-m", _MODULE, *arguments,
        )  # fmt: skip
        environment = {
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, num_cores // count))),
        }
    else:
        chosen = ("--config_file", str(config)) if config else ("--multi_gpu",)
        command = (
            sys.executable, "-m", "accelerate.commands.launch", *chosen,
            "--num_processes", str(count), *_machine_options(wanted.num_machines),
            "-m", _MODULE, *arguments,
        )  # fmt: skip
        environment = {}
    expected = f"{count}:sharded" if wanted.sharded else str(count)
    return Route(command, {**environment, EXPECTED: expected}, count, wanted.sharded)


def launch(route: Route) -> int:
    """Run all processes to their end and return the exit code.

    Ctrl-C and SIGTERM reach the training processes, which save and stop; a second one ends them.
    """
    with tempfile.TemporaryDirectory(prefix="gqaconvert-") as folder:
        outcome = Path(folder) / "exit-code"
        environment = {**os.environ, **route.environment, OUTCOME: str(outcome)}
        # A session of its own: launchers answer a Ctrl-C of the terminal by killing what saves.
        process = subprocess.Popen(route.command, env=environment, start_new_session=True)
        signals = 0

        def forward(number: int, _frame: FrameType | None) -> None:
            nonlocal signals
            signals += 1
            if signals > 1:
                process.terminate()
            else:
                _signal_workers(process.pid, signal.SIGTERM)

        before = {each: signal.signal(each, forward) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = process.wait()
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
            if process.poll() is None:
                process.terminate()
        return read_outcome(outcome) or code


def leave_outcome(exit_code: int) -> int:
    """Tell the launcher how this process ends; return the code to exit with.

    An interruption that all processes took together is no failure to torchrun and its like.
    """
    path = os.environ.get(OUTCOME)
    if path is None:
        return exit_code
    if exit_code:
        Path(path).write_text(str(exit_code), encoding="utf-8")
    return 0 if exit_code == 130 else exit_code


def read_outcome(path: Path) -> int:
    """Exit code left by a process; 0 where none was left."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0


def _signal_workers(launcher: int, number: int) -> None:
    """Send a signal to the training processes, not to what launched them."""
    for child in psutil.Process(launcher).children(recursive=True):
        try:
            command = child.cmdline()
        except psutil.NoSuchProcess:
            continue
        if _MODULE in command and "torch.distributed.run" not in command:
            child.send_signal(number)


def _read(config: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(
            f"the accelerate config cannot be read: {error}", at=str(config)
        ) from error
    if not isinstance(content, dict):
        raise UsageError("an accelerate config is a list of keys and values", at=str(config))
    return content


def _machine_options(num_machines: int) -> tuple[str, ...]:
    """Which machine of several this is, from what schedulers set."""
    if num_machines == 1:
        return ()
    options: list[str] = []
    for flag, names in (
        ("--machine_rank", ("MACHINE_RANK", "NODE_RANK", "SLURM_NODEID")),
        ("--main_process_ip", ("MASTER_ADDR",)),
        ("--main_process_port", ("MASTER_PORT",)),
    ):
        value = next((os.environ[name] for name in names if name in os.environ), None)
        if value is not None:
            options += [flag, value]
    return tuple(options)
