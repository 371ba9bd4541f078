"""Arguments and options that the verbs which take a recipe have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gqaconvert.cli.completion import complete_accelerate_config, complete_gpu, complete_recipe

RecipeName = Annotated[
    str,
    typer.Argument(
        help="A recipe's file, or the name of one that ships.", autocompletion=complete_recipe
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change a key of the recipe, such as uptrain.lr=1e-4."
    ),
]
RunOut = Annotated[Path | None, typer.Option(help="Folder of the run.", show_default="runs/NAME")]
AccelerateConfig = Annotated[
    str | None,
    typer.Option(
        help="Of training: cpu, single_gpu, ddp, fsdp2, multi_node, or a file of accelerate's.",
        autocompletion=complete_accelerate_config,
    ),
]
NumProcesses = Annotated[
    int | None, typer.Option(min=1, help="Training processes in all; on CPUs as well.")
]
PlannedGpu = Annotated[
    str | None,
    typer.Option(
        help="With --dry-run: a device that is not here, such as h100-80gb.",
        autocompletion=complete_gpu,
    ),
]
