"""The command line: collects the verbs, prints errors as three lines, sets exit codes.

Each verb has a file of its own; what it needs beyond options is imported when it runs, so that
`--help` is quick.
"""

from __future__ import annotations

import errno
import sys
import traceback

import typer

from gqaconvert.cli.bench import bench_command
from gqaconvert.cli.calibrate import calibrate_command
from gqaconvert.cli.convert import convert_command
from gqaconvert.cli.env import env_command
from gqaconvert.cli.estimate import estimate_command
from gqaconvert.cli.evaluate import evaluate_command
from gqaconvert.cli.expand import expand_command
from gqaconvert.cli.inspect import inspect_command
from gqaconvert.cli.recipes import recipes_app
from gqaconvert.cli.report import report_command
from gqaconvert.cli.run import run_command
from gqaconvert.cli.sweep import sweep_command
from gqaconvert.cli.terminal import settings
from gqaconvert.cli.uptrain import uptrain_command
from gqaconvert.cli.verify import verify_command
from gqaconvert.errors import GqaconvertError

_INTERRUPTED = 130

app = typer.Typer(
    name="gqaconvert",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Turn multi-head attention models into grouped-query ones; prove the gain and the cost.",
)
app.command("inspect")(inspect_command)
app.command("estimate")(estimate_command)
app.command("calibrate")(calibrate_command)
app.command("convert")(convert_command)
app.command("verify")(verify_command)
app.command("expand")(expand_command)
app.command("uptrain")(uptrain_command)
app.command("run")(run_command)
app.command("bench")(bench_command)
app.command("sweep")(sweep_command)
app.command("evaluate")(evaluate_command)
app.command("report")(report_command)
app.command("env")(env_command)
app.add_typer(recipes_app, name="recipes")


def _print_version(wanted: bool) -> None:
    if wanted:
        from gqaconvert import __version__

        typer.echo(f"gqaconvert {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    verbose: int = typer.Option(
        0, "-v", count=True, help="-vv shows tracebacks.", show_default=False
    ),
    _version: bool = typer.Option(
        False,
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version and stop.",
    ),
) -> None:
    settings.verbosity = max(settings.verbosity, verbose)


def main(command: list[str] | None = None) -> None:
    """Run the command line.

    Args:
        command: arguments; by default those of this process.

    Exits with 0 fine, 1 failed, 2 usage, 3 unsupported model, 4 refused, 130 interrupted.
    """
    # -v belongs to every verb, wherever it is written.
    command = sys.argv[1:] if command is None else command
    arguments = [argument for argument in command if argument not in ("-v", "-vv")]
    settings.verbosity = sum(len(a) - 1 for a in command if a in ("-v", "-vv"))
    try:
        app(args=arguments, prog_name="gqaconvert", standalone_mode=True)
    except GqaconvertError as error:
        sys.exit(_report(error, error.exit_code))
    except SystemExit as stop:
        if stop.code == _INTERRUPTED:  # typer's answer to Ctrl-C
            typer.echo(
                "interrupted; if an output was being written, --resume goes on with it", err=True
            )
        raise
    except OSError as error:
        sys.exit(_report(_from_system(error), 1))


def _from_system(error: OSError) -> GqaconvertError:
    remedies = {
        errno.ENOSPC: "free space, then repeat the command with --resume",
        errno.EDQUOT: "free space in your quota, then repeat the command with --resume",
        errno.EACCES: "a place you may read and write",
        errno.EROFS: "an OUT on a device that can be written",
    }
    return GqaconvertError(
        error.strerror or str(error),
        at=str(error.filename) if error.filename else None,
        remedy=remedies.get(error.errno or 0),
    )


def _report(error: GqaconvertError, code: int) -> int:
    if settings.verbosity >= 2:
        traceback.print_exception(error)
    typer.echo(f"error: {error}", err=True)
    return code
