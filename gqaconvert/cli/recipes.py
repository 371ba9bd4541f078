"""`gqaconvert recipes`: list, print, copy and check what can be run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gqaconvert.cli.completion import complete_recipe
from gqaconvert.cli.recipe_options import Overrides, RecipeName
from gqaconvert.cli.terminal import say, show_json, show_table
from gqaconvert.errors import RefusedError, UsageError

recipes_app = typer.Typer(
    no_args_is_help=True, help="List, print, copy and check recipes: one YAML, one experiment."
)


@recipes_app.command("list")
def list_command(
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
) -> None:
    """List the recipes that come with gqaconvert."""
    from gqaconvert.settings.recipes import recipe_files
    from gqaconvert.units import format_count

    rows = [_describe(path) for path in recipe_files().values()]
    if as_json:
        show_json(rows)
        return
    show_table(
        ["recipe", "source", "KV heads", "method", "tokens", "steps"],
        [
            [
                *(str(row[key]) for key in ("name", "source", "kv_heads", "method")),
                *(format_count(row["tokens"]), str(row["steps"])),
            ]
            for row in rows
        ],
        left=(0, 1, 3),
    )
    say("gqaconvert recipes copy NAME gives a start for your own")


@recipes_app.command("show")
def show_command(
    recipe: RecipeName,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print what runs, with every default.")
    ] = False,
    overrides: Overrides = None,
) -> None:
    """Print a recipe as it is written, or as it runs."""
    from gqaconvert.settings.recipes import find_recipe, load_recipe, resolved_yaml

    if resolved or overrides:
        typer.echo(resolved_yaml(load_recipe(recipe, overrides or ())), nl=False)
    else:
        typer.echo(find_recipe(recipe).read_text(encoding="utf-8"), nl=False)


@recipes_app.command("copy")
def copy_command(
    recipe: RecipeName,
    destination: Annotated[
        Path | None,
        typer.Argument(metavar="DEST", help="File or folder.  [default: NAME.yaml here]"),
    ] = None,
) -> None:
    """Copy a recipe, to make it your own."""
    from gqaconvert.settings.recipes import find_recipe

    source = find_recipe(recipe)
    target = destination or Path()
    if target.is_dir():
        target /= source.name
    try:
        with target.open("xb") as file:
            file.write(source.read_bytes())
    except FileExistsError as error:
        raise RefusedError(
            "a file of that name exists", at=str(target), remedy="another DEST, or remove it"
        ) from error
    say(f"wrote {target}; gqaconvert run {target} runs it")


@recipes_app.command("validate")
def validate_command(
    recipes: Annotated[
        list[str],
        typer.Argument(metavar="RECIPE...", help="Files or names.", autocompletion=complete_recipe),
    ],
    overrides: Overrides = None,
) -> None:
    """Check recipes and print all faults of all of them, with their lines."""
    from gqaconvert.settings.budget import total_steps, total_tokens
    from gqaconvert.settings.recipes import load_recipe
    from gqaconvert.units import format_count

    faulty = 0
    for spec in recipes:
        try:
            recipe = load_recipe(spec, overrides or ())
        except UsageError as error:
            faulty += 1
            say(f"error: {error}")
            continue
        steps = total_steps(recipe)
        trained = f"{format_count(total_tokens(recipe))} tokens in {steps} steps"
        typer.echo(f"{spec}: valid; {trained if steps else 'nothing is trained'}")
    if faulty:
        raise typer.Exit(UsageError.exit_code)


@recipes_app.command("schema")
def schema_command() -> None:
    """Print the form of a recipe as JSON schema, for editors."""
    from gqaconvert.settings.recipes import recipe_schema

    show_json(recipe_schema())


def _describe(path: Path) -> dict[str, Any]:
    from gqaconvert.settings.budget import total_steps, total_tokens
    from gqaconvert.settings.recipes import load_recipe, recipe_summary

    recipe = load_recipe(path)
    return {
        "name": recipe.name,
        "summary": recipe_summary(path),
        "source": recipe.source.model,
        "kv_heads": recipe.convert.kv_heads,
        "method": recipe.convert.method,
        "tokens": total_tokens(recipe),
        "steps": total_steps(recipe),
        "path": str(path),
    }
