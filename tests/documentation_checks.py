"""What is checked of a page without running anything: blocks, YAML, quotations, links, names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer
import yaml
from documentation_blocks import (
    Block,
    anchors,
    inline_code,
    links,
    prose,
    read_blocks,
    read_commands,
)
from documentation_rules import OTHER_BLOCKS, OTHER_OPTIONS, PROGRAMS, reason_not_run
from documentation_running import commands_of
from documentation_standins import REPOSITORY

from gqaconvert.checkpoint.sources import ALIASES
from gqaconvert.cli.main import app
from gqaconvert.evaluation.suite import Suite, make_suite
from gqaconvert.settings.loading import make_settings
from gqaconvert.settings.recipe import Recipe
from gqaconvert.settings.recipes import recipe_files
from gqaconvert.settings.uptrain import UptrainSettings

_MINIMAL = {
    "version": 1,
    "source": {"model": "tiny"},
    "convert": {"kv_heads": 2},
    "uptrain": {
        "data": {"datasets": [{"path": "bundled"}]},
        "budget": {"steps": 100},
        "batch_tokens": 131072,
        "lr": 2e-4,
    },
}
_PATH = re.compile(r"(?:gqaconvert|tests|docs|recipes|configs|benchmarks|scripts)/[\w./-]+\.\w+")
_ALIAS = re.compile(r"[a-z][a-z0-9.]*-[0-9.]+[bm](?:-[a-z0-9]+)*")


def check_blocks(page: Path) -> None:
    """Every block is something that is checked."""
    for block in read_blocks(page):
        if block.language in ("python", "yaml", "math") or block.title:
            continue
        if read_commands(block, PROGRAMS) is None:
            listed = [text for name, text in OTHER_BLOCKS if name == page.name]
            known = any(block.text.startswith(text) for text in listed)
            assert known, f"{page.name}:{block.line}: a block in no list: {block.text[:60]}"


def check_commands(page: Path) -> None:
    """Commands that are not run are known, and their scripts exist."""
    for command in commands_of(page):
        runs = command.words[0] == "gqaconvert" or reason_not_run(command.text)
        assert runs, f"{page.name}:{command.line}: {command.text}: in no list"
        for word in command.words:
            if _PATH.fullmatch(word) and word.endswith(".py"):
                assert (REPOSITORY / word).is_file(), f"{page.name}:{command.line}: {word}"


def check_recipes(page: Path) -> None:
    """YAML is a recipe, a part of one, or a suite."""
    for block in read_blocks(page):
        if block.language == "yaml" and not block.title:
            check_yaml(block, f"{page.name}:{block.line}")


def check_yaml(block: Block, place: str) -> None:
    """Check a recipe, a part of one, or a suite."""
    content = yaml.safe_load(block.text)
    if "version" in content:
        make_settings(Recipe, content, at=place)
    elif set(content) <= set(Recipe.model_fields):
        make_settings(Recipe, merged(_MINIMAL, content), at=place)
    elif set(content) <= set(UptrainSettings.model_fields):
        make_settings(Recipe, merged(_MINIMAL, {"uptrain": content}), at=place)
    else:
        assert set(content) <= set(Suite.model_fields), f"{place}: neither recipe nor suite"
        make_suite(content, place)


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return `below` with what `above` says."""
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        both = isinstance(value, dict) and isinstance(old, dict)
        result[key] = merged(old, value) if both else value
    return result


def check_quotations(page: Path) -> None:
    """Blocks that name a file are quoted from it."""
    for block in read_blocks(page):
        if not block.title:
            continue
        place = f"{page.name}:{block.line}"
        source = REPOSITORY / block.title
        assert source.is_file(), f"{place}: {block.title} does not exist"
        text = source.read_text(encoding="utf-8")
        for part in re.split(r"^\s*(?:# )?…\n", block.text, flags=re.MULTILINE):
            assert part in text, f"{place}: not in {block.title}:\n{part}"


def check_links(page: Path) -> None:
    """Links lead to files of the repository, and to headings."""
    for target in links(page):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page.name}: {target}"
        assert REPOSITORY in (file, *file.parents), f"{page.name}: {target} is not of here"
        if anchor:
            assert anchor in anchors(file), f"{page.name}: {target}"


def check_formulas(page: Path) -> None:
    """Formulas are whole on a line, without escapes that Markdown takes away."""
    for line in re.sub(r"`[^`]*`", "", prose(page)).splitlines():
        assert line.count("$") % 2 == 0, f"{page.name}: {line}"
        for formula in re.findall(r"\$[^$]+\$", line):  # Markdown takes these backslashes away
            assert not re.search(r"\\[^a-zA-Z]", formula), f"{page.name}: {formula}"


def check_names(page: Path) -> None:
    """Options, verbs, files, recipes and aliases in running text exist."""
    verbs = options_by_verb()
    options = OTHER_OPTIONS.union(*verbs.values())
    for code in inline_code(page):
        place = f"{page.name}: `{code}`"
        words = code.split()
        if words[0] == "gqaconvert" and len(words) > 1:
            verb = " ".join(words[1:3]) if words[1] == "recipes" else words[1]
            if not verb.startswith("-"):
                assert verb in verbs or words[1] in verbs, place
                options_here = verbs.get(verb, verbs.get(words[1], set()))
                unknown = set(re.findall(r"(?<!\S)--[\w-]+", code)) - options_here
                assert not unknown, f"{place}: {unknown}"
        else:
            unknown = set(re.findall(r"(?<!\S)--[\w-]+", code)) - options
            assert not unknown, f"{place}: {unknown}"
        if _PATH.fullmatch(code):
            assert (REPOSITORY / code).exists(), place
        if _ALIAS.fullmatch(code):
            stem = re.sub(r"-(gqa\d+|mqa|mha)$", "", code)
            assert stem in ALIASES or code in recipe_files(), place


def options_by_verb() -> dict[str, set[str]]:
    """Return the options of every verb, `recipes show` and the like among them."""
    group: Any = typer.main.get_command(app)
    common = {"--help", "--version", "--install-completion", "--show-completion"}
    verbs = {}
    for name, command in group.commands.items():
        below = getattr(command, "commands", {})
        for full, each in [(name, command), *((f"{name} {n}", c) for n, c in below.items())]:
            named = {option for parameter in each.params for option in parameter.opts}
            named |= {option for parameter in each.params for option in parameter.secondary_opts}
            verbs[full] = named | common
    return verbs
