"""A short distillation as the last stage of a conversion: the recipe-less use of `uptrain`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from gqaconvert.checkpoint.staging import check_output
from gqaconvert.settings.recipe import Recipe
from gqaconvert.training.folder import RunFolder
from gqaconvert.training.loop import Report
from gqaconvert.training.run import Uptraining, uptrain


@dataclass(frozen=True)
class Distillation:
    """How a converted model is trained against its source, briefly.

    Attributes:
        data: text, as in a recipe's `path`; never the one the result is evaluated on.
        steps: updates.
        context: tokens a sequence.
        batch_tokens: a step; a multiple of `context`.
        lr: highest learning rate; it warms up for a twentieth of the steps, then follows a cosine.
        precision: as in a recipe.
    """

    data: str
    steps: int
    context: int = 512
    batch_tokens: int = 1024
    lr: float = 2e-4
    precision: str = "bf16"


def distill(
    source: str | Path,
    converted: Path,
    out: Path,
    distillation: Distillation,
    *,
    revision: str | None = None,
    overwrite: bool = False,
    reports: tuple[Report, ...] = (),
) -> Uptraining:
    """Train all weights of a converted checkpoint on its source's predictions.

    The state is saved beside the output every hundred steps, so the same call goes on where an
    interrupted one stopped.

    Args:
        source: folder, alias or Hub id of the source model.
        converted: the checkpoint to train.
        out: output folder.
        distillation: text, steps and rates.
        revision: of a Hub source.
        overwrite: replace an earlier output, and forget an interrupted run.
        reports: who hears of every step.

    Returns:
        What the run came to; `out` is there unless it was interrupted.

    Raises:
        RefusedError: `out` is taken, or memory or disk does not suffice.
    """
    check_output(out, overwrite=overwrite)
    folder = RunFolder(out.parent / f".{out.name}.distillation")
    done = uptrain(
        _recipe(source, converted, distillation, revision, out.name),
        folder.path,
        resume=None if overwrite else "auto",
        overwrite=overwrite,
        reports=reports,
    )
    if done.ending == "interrupted":
        return done
    if out.exists():
        shutil.rmtree(out)  # `check_output` has seen that it is one of ours
    folder.export.rename(out)
    shutil.rmtree(folder.path)
    return done


def _recipe(
    source: str | Path,
    converted: Path,
    distillation: Distillation,
    revision: str | None,
    name: str,
) -> Recipe:
    sequences = max(1, distillation.batch_tokens // distillation.context)
    return Recipe.model_validate(
        {
            "version": 1,
            "source": {"model": str(source), "revision": revision},
            "convert": {"kv_heads": 1},  # done already: `start` says from where
            "uptrain": {
                "start": str(converted),
                "data": {
                    "datasets": [{"path": distillation.data}],
                    "context": distillation.context,
                },
                "loss": {"distill": 1.0},
                "budget": {"steps": distillation.steps},
                "batch_tokens": distillation.batch_tokens,
                "micro_batch": min(sequences, 2),
                "lr": distillation.lr,
                "precision": distillation.precision,
                "checkpoints": {"every_steps": 100, "keep": 1},
                "held_out": None,
            },
        }
    )
