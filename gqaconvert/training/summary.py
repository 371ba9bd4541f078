"""What a run came to: for `summary.json`, and for the card and manifest of the export."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from gqaconvert.modelling.models import LoadedModel
from gqaconvert.training.loop import Ending, Job
from gqaconvert.training.world import World


def summarise(job: Job, ending: Ending, loaded: LoadedModel, start: Path) -> dict[str, Any]:
    """What `summary.json` says of a run."""
    facts, world = job.facts, job.world
    losses = [loss for _, loss in facts.held_out]
    device = (
        torch.cuda.get_device_name(world.device)
        if world.device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    return {
        "recipe": job.recipe.name,
        "ending": ending,
        "start": start.name,
        "start_sha256": loaded.weights_sha256,
        "steps": facts.step,
        "of_steps": job.total_steps,
        "tokens": facts.tokens,
        "counted_tokens": facts.counted,
        "skipped_steps": facts.skipped,
        "seconds": facts.seconds,
        "tokens_per_s": facts.tokens / facts.seconds if facts.seconds else None,
        "source_loss": facts.source_loss,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "lowest_loss": min(losses) if losses else None,
        "held_out_text": job.held_out.name if job.held_out else None,
        "held_out_tokens": job.held_out.tokens if job.held_out else None,
        "held_out_sha256": job.held_out.sha256 if job.held_out else None,
        "devices": f"{world.kind}, {device}",
        "peak_memory_bytes": _peak_memory(world),
        "versions": {name: version(name) for name in ("torch", "transformers", "gqaconvert")},
        "python": platform.python_version(),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _name(path: str) -> str:
    return path if path.startswith("dataset:") else Path(path).name


def _peak_memory(world: World) -> int:
    """Bytes: of the device on CUDA, of the process elsewhere."""
    if world.device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(world.device))
    import resource

    # Linux counts in KiB, macOS in bytes.
    unit = 1 if platform.system() == "Darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def facts_of_training(job: Job, summary: Mapping[str, Any]) -> dict[str, Any]:
    """What the card and the manifest of the export say."""
    loss = job.settings.loss
    parts = {
        "next-token loss": loss.next_token,
        "distillation from the source": loss.distill,
        "matching of hidden states": loss.hidden,
        "matching of attention outputs": loss.attention,
    }
    wanted = (
        "recipe", "ending", "steps", "tokens", "counted_tokens", "skipped_steps", "seconds",
        "source_loss", "first_loss", "last_loss", "held_out_text", "held_out_tokens", "devices",
        "versions",
    )  # fmt: skip
    return {
        **{key: summary[key] for key in wanted},
        "batch_tokens": job.settings.batch_tokens,
        "objective": " and ".join(name for name, weight in parts.items() if weight),
        # Published with the model: no folder of this machine.
        "data": [[_name(each.path), each.weight] for each in job.settings.data.datasets],
    }
