"""Every command of README and docs runs, every output shown is real, every link leads somewhere.

Commands run in the order of their page in a folder of its own, in this process, on stand-ins for
the models (`documentation_standins`), shortened where they would take minutes
(`documentation_rules`, one table).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from documentation_checks import (
    check_blocks,
    check_commands,
    check_formulas,
    check_links,
    check_names,
    check_quotations,
    check_recipes,
)
from documentation_rules import rule_for
from documentation_running import commands_of, run_page
from documentation_standins import REPOSITORY

from gqaconvert.errors import UsageError

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
LINKED = [
    *PAGES,
    REPOSITORY / "CONTRIBUTING.md",
    REPOSITORY / "CHANGELOG.md",
    *(REPOSITORY / name for name in ("recipes/README.md", "configs/README.md")),
    REPOSITORY / "benchmarks" / "RESULTS.md",
]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@each_page
def test_commands_run_and_print_what_is_shown(page, tmp_path, monkeypatch):
    run_page(page, tmp_path, monkeypatch, slow=False)


@pytest.mark.slow
@each_page
def test_slow_commands_run_too(page, tmp_path, monkeypatch):
    if any(rule and rule.slow for rule in (rule_for(each.text) for each in commands_of(page))):
        run_page(page, tmp_path, monkeypatch, slow=True)


@each_page
def test_every_block_is_something_that_is_checked(page):
    check_blocks(page)


@each_page
def test_commands_that_are_not_run_are_known_and_their_scripts_exist(page):
    check_commands(page)


@each_page
def test_yaml_is_valid(page):
    check_recipes(page)


@each_page
def test_quotations_are_as_in_their_files(page):
    check_quotations(page)


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.relative_to(REPOSITORY).as_posix())
def test_links_lead_somewhere(page):
    check_links(page)


@each_page
def test_formulas_are_whole_on_a_line(page):
    check_formulas(page)


@each_page
def test_names_in_running_text_exist(page):
    check_names(page)


# --- each check must be able to fail ---

Check = Callable[[Path], None]

FAULTS: dict[str, tuple[Check | None, str, str]] = {
    "an option that is none": (
        None,
        "```\ngqaconvert inspect tiny --colour\n```",
        "No such option",
    ),
    "an option beside appended ones": (
        None,
        "```\ngqaconvert sweep tiny -x 2\n```",
        "No such option",
    ),
    "a command that fails": (
        None,
        "```\ngqaconvert convert tiny --kv-heads 3\n```",
        "be pooled into 3",
    ),
    "output of another model": (
        None,
        "```\n$ gqaconvert inspect tiny\nclass  Phi\n…\n```",
        "prints",
    ),
    "output that ends too early": (
        None,
        "```\n$ gqaconvert inspect tiny\nclass      LlamaForCausalLM (llama)\n```",
        "prints",
    ),
    "an error where there is none": (
        None,
        "```\n$ gqaconvert --version\nerror: …\n```",
        "exit code 0",
    ),
    "output of a command that is shortened": (
        None,
        "```\n$ gqaconvert calibrate tiny --data bundled\n…\n```",
        "must run as written",
    ),
    "a command in no list": (None, "```\npython convert.py\n```", "in no list"),
    "Python that fails": (None, "```python\nimport gqaconvert\ngqaconvert.pool()\n```", "pool"),
    "another program": (check_commands, "```bash\ncurl example.org\n```", "in no list"),
    "a script that is none": (check_commands, "```\npython benchmarks/none.py\n```", "none.py"),
    "a block of no kind": (check_blocks, "```\nwhatever this is\n```", "a block in no list"),
    "a key that is none": (
        check_recipes,
        "```yaml\nconvert: {kv_heads: 2, methods: svd}\n```",
        "method?",
    ),
    "YAML that is nothing": (check_recipes, "```yaml\nhello: 1\n```", "neither recipe nor suite"),
    "a quotation that is none": (
        check_quotations,
        "```yaml pyproject.toml\nhello\n```",
        "not in pyproject.toml",
    ),
    "a link to no file": (check_links, "[here](nowhere.md)", "nowhere.md"),
    "a picture that is missing": (check_links, "![curve](figures/none.svg)", "none.svg"),
    "an anchor that is none": (check_links, "# One\n\n[two](#two)", "#two"),
    "an option in running text": (check_names, "Use `--colour`.", "--colour"),
    "an option of another verb": (
        check_names,
        "Use `gqaconvert inspect MODEL --kv-heads 2`.",
        "--kv-heads",
    ),
    "a verb that is none": (check_names, "Use `gqaconvert pool MODEL`.", "pool"),
    "a file in running text": (check_names, "See `gqaconvert/none.py`.", "none.py"),
    "an alias that is none": (check_names, "Take `llama9-7b`.", "llama9-7b"),
    "a formula over two lines": (check_formulas, "With $a +\nb$.", r"With \$a"),
    "a formula with escapes": (check_formulas, "With $a\\,b$.", "With|a"),
}
"""What is wrong, the check that finds it (None: running the page), a page, and what is said."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_page_with_a_fault_fails(fault, tmp_path, monkeypatch):
    check, text, said = FAULTS[fault]
    page = tmp_path / "page.md"
    page.write_text(text + "\n", encoding="utf-8")
    check = check or partial(run_page, folder=tmp_path, monkeypatch=monkeypatch, slow=False)
    with pytest.raises((AssertionError, AttributeError, UsageError), match=said):
        check(page)
