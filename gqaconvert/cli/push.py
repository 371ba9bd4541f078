"""`--push-to-hub` of the verbs that write a checkpoint: asked before the work, done after it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gqaconvert.cli.terminal import say
from gqaconvert.errors import UsageError
from gqaconvert.units import format_bytes

if TYPE_CHECKING:
    from gqaconvert.checkpoint.hub_upload import UploadTarget

PushToHub = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        help="Then upload the finished output to this repository of the Hugging Face Hub,"
        " owner/name or a name of your own; private unless --public.",
        show_default=False,
    ),
]
Public = Annotated[bool, typer.Option("--public", help="With --push-to-hub: everybody may see it.")]


def check_push(repo_id: str | None, *, public: bool, overwrite: bool) -> UploadTarget | None:
    """Ask the Hub whether the output may be uploaded, before there is one.

    Args:
        repo_id: None for no upload.
        public: let everybody see it.
        overwrite: replace a model that gqaconvert uploaded earlier.

    Returns:
        Where it goes; None for nowhere.
    """
    if repo_id is None:
        if public:
            raise UsageError(
                "it says who may see an upload, and there is none",
                at="--public",
                remedy="--push-to-hub ID, or leave --public out",
            )
        return None
    from gqaconvert.checkpoint.hub_upload import check_upload

    return check_upload(repo_id, public=public, overwrite=overwrite)


def push(folder: Path, target: UploadTarget, *, message: str) -> None:
    """Upload a finished output and say so."""
    from gqaconvert.checkpoint.hub_upload import files_to_upload, upload_checkpoint, upload_command

    files = files_to_upload(folder)
    say(
        f"uploading {len(files)} files, {format_bytes(sum(files.values()))}, to {target.describe()}"
    )
    try:
        for warning in upload_checkpoint(folder, target, message=message):
            say(f"note: {warning}")
    except KeyboardInterrupt:
        say(f"{folder} is whole; this uploads it: {upload_command(folder, target)}")
        raise
    say(f"uploaded: {target.url}")
