"""`run --dry-run`: which stages would be done, and what each would take."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from gqaconvert.cli.terminal import say, show_json, show_table
from gqaconvert.units import format_bytes, format_duration, format_memory

if TYPE_CHECKING:
    from gqaconvert.pipeline.experiment import Experiment
    from gqaconvert.pipeline.forecast import Forecast
    from gqaconvert.pipeline.run import Bounds


def show_plan(experiment: Experiment, bounds: Bounds, gpu: str | None, *, json: bool) -> None:
    """Print the stages of a run with time, disk and memory.

    Args:
        experiment: recipe and folder.
        bounds: stages asked for.
        gpu: a device that is not here.
        json: print JSON.

    Raises:
        RefusedError: the disk is too small, or another recipe's training is in the folder.
    """
    from gqaconvert.checkpoint.staging import check_space
    from gqaconvert.cli.uptrain_plan import planned_devices
    from gqaconvert.pipeline.forecast import forecast
    from gqaconvert.pipeline.run import prospects, refuse_other_training
    from gqaconvert.pipeline.speed import speed_of_device, speed_of_named

    refuse_other_training(experiment.recipe, experiment.folder)
    processes = experiment.processes
    devices, device_bytes = planned_devices(processes.accelerate_config, processes.count, gpu)
    speed = speed_of_named(gpu) if gpu else speed_of_device(experiment.device)
    stages = prospects(experiment, bounds)
    expected = forecast(experiment.recipe, speed, devices, device_bytes) or {}
    due = {stage.name: expected.get(stage.name) for stage, state, _ in stages if state == "to do"}
    total_s = _sum(each.seconds if each else None for each in due.values())
    disk = sum(each.disk_bytes for each in due.values() if each)
    memory = max((each.memory_bytes for each in due.values() if each), default=0)
    if json:
        show_json(
            {
                "folder": str(experiment.folder.path),
                "stages": [
                    {"name": stage.name, "state": state, "command": stage.command,
                     **_plain(due.get(stage.name)), "seconds_last_time": known and known.seconds}
                    for stage, state, known in stages
                ],
                "seconds": total_s, "disk_bytes": disk, "memory_bytes": memory,
                "speed": speed.basis if speed else None,
            }
        )  # fmt: skip
    else:
        rows = []
        for stage, state, known in stages:
            what = stage.left_out or stage.command
            if state == "kept" and known:
                what = f"{known.note}"
            rows.append([stage.name, state, *_cells(due.get(stage.name)), what])
        rows.append(["", "", _time(total_s), format_bytes(disk), format_memory(memory), ""])
        show_table(["stage", "", "time", "disk", "memory", ""], rows, (0, 1, 5))
        typer.echo("")
        if speed is None:
            say("note: no times: the speed of this device is not in the table of GPUs")
        else:
            say(f"note: times are rough, within a factor of about three; {speed.basis}")
        if not expected:
            say("note: the cost of this class cannot be reckoned from its config")
    if gpu is None:  # else this machine is not the one that is planned for
        check_space(experiment.folder.path, disk)


def _sum(parts: Any) -> float | None:  # noqa: ANN401
    known = [part for part in parts if part is not None]
    return sum(known) if known else None


def _cells(row: Forecast | None) -> list[str]:
    if row is None:
        return ["", "", ""]
    return [
        _time(row.seconds),
        format_bytes(row.disk_bytes) if row.disk_bytes else "",
        format_memory(row.memory_bytes),
    ]


def _time(seconds: float | None) -> str:
    return "?" if seconds is None else f"~{format_duration(seconds)}"


def _plain(row: Forecast | None) -> dict[str, Any]:
    if row is None:
        return {}
    return {
        "seconds": row.seconds,
        "disk_bytes": row.disk_bytes,
        "memory_bytes": row.memory_bytes,
    }
