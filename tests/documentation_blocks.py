"""Reads a page of Markdown as a machine would: fenced blocks, commands in them, links, headings.

Knows the form of a page and nothing of gqaconvert.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ELISION = "…"
"""Stands for any number of lines on a line of its own, and for anything within one."""

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[\w+-]*) *(?P<title>.*)$")
_INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)", re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_SHELLS = ("", "bash", "sh", "shell", "console")


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        line: of its first line of content, from 1.
        language: after the fence; "" for none.
        title: what follows the language: the file that the block is quoted from.
        text: its content.
    """

    line: int
    language: str
    title: str
    text: str


@dataclass(frozen=True)
class Command:
    """One command of a shell block.

    Attributes:
        line: of the page, from 1.
        words: as a shell splits them, without comments.
        shown: the output printed under it, None where the page shows none.
    """

    line: int
    words: tuple[str, ...]
    shown: tuple[str, ...] | None = None

    @property
    def text(self) -> str:
        """The command on one line, for people and for rules."""
        return " ".join(self.words)


def read_blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page."""
    return [block for block, _ in _split(page.read_text(encoding="utf-8")) if block is not None]


def prose(page: Path) -> str:
    """Return what is not in fenced blocks."""
    return "".join(text for block, text in _split(page.read_text("utf-8")) if block is None)


def inline_code(page: Path) -> list[str]:
    """Return what stands between single backquotes, on one line each."""
    return [" ".join(code.split()) for code in _INLINE.findall(prose(page))]


def links(page: Path) -> list[str]:
    """Return the targets of links and pictures, but those of code."""
    return _LINK.findall(_INLINE.sub("", prose(page)))


def anchors(page: Path) -> set[str]:
    """Return the anchors GitHub gives the headings of a page."""
    found: dict[str, int] = {}
    names = set()
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower().replace("`", "")
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        count = found.get(slug, 0)
        found[slug] = count + 1
        names.add(f"{slug}-{count}" if count else slug)
    return names


def read_commands(block: Block, programs: frozenset[str]) -> list[Command] | None:
    """Return the commands of a block, None where it is no shell block.

    A block with lines that begin with "$ " shows output under its commands; in another one every
    line is a command.

    Args:
        block: of a page.
        programs: first words that make a line a command.
    """
    if block.language not in _SHELLS:
        return None
    lines = _joined(block)
    if any(line.startswith("$ ") for _, line in lines):
        return list(_session(lines))
    first = next((line for _, line in lines if line.strip()), "")
    if block.language == "" and first.split(" ")[0] not in programs:
        return None
    return [
        Command(number, words) for number, line in lines for words in _split_words(line) if words
    ]


def output_matches(shown: tuple[str, ...], printed: str) -> bool:
    """Whether output is what a page shows, elisions aside."""
    pattern = ""
    for line in shown:
        if line.strip() == ELISION:
            pattern += r"(?:[^\n]*\n)*?"
        else:
            pattern += r"[^\n]*".join(map(re.escape, line.rstrip().split(ELISION))) + r"\n"
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    return re.fullmatch(pattern, "".join(line + "\n" for line in lines)) is not None


def _split(text: str) -> Iterator[tuple[Block | None, str]]:
    """Yield blocks, and the lines between them as (None, line)."""
    inside: list[str] | None = None
    start, language, title, indent = 0, "", "", 0
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        fence = _FENCE.match(line.rstrip("\n"))
        if inside is None and fence:
            inside, start = [], number + 1
            language, title = fence["language"], fence["title"]
            indent = len(fence["indent"])
        elif inside is not None and line.strip() == "```":
            yield Block(start, language, title.strip(), "".join(inside)), ""
            inside = None
        elif inside is not None:
            inside.append(line[indent:] if line[:indent].isspace() else line)
        else:
            yield None, line
    if inside is not None:
        raise ValueError(f"the block at line {start} has no end")


def _joined(block: Block) -> list[tuple[int, str]]:
    """Return the lines of a block with those joined that end in a backslash."""
    lines: list[tuple[int, str]] = []
    goes_on = False
    for number, line in enumerate(block.text.splitlines(), block.line):
        if goes_on:
            lines[-1] = (lines[-1][0], lines[-1][1] + " " + line.strip())
        else:
            lines.append((number, line))
        goes_on = line.endswith("\\")
        if goes_on:
            lines[-1] = (lines[-1][0], lines[-1][1].rstrip().removesuffix("\\"))
    return lines


def _session(lines: list[tuple[int, str]]) -> Iterator[Command]:
    current: tuple[int, str] | None = None
    shown: list[str] = []
    for number, line in [*lines, (0, "$ ")]:
        if not line.startswith("$ "):
            shown.append(line)
            continue
        if current is not None:
            while shown and not shown[-1].strip():
                shown.pop()
            *before, last = _split_words(current[1])
            yield from (Command(current[0], words) for words in before)
            yield Command(current[0], last, tuple(shown))
        elif any(map(str.strip, shown)):
            raise ValueError(f"line {number}: output before the first command")
        current, shown = (number, line.removeprefix("$ ")), []


def _split_words(line: str) -> list[tuple[str, ...]]:
    """Split a line into its commands, at &&, and those into words."""
    commands: list[list[str]] = [[]]
    for word in shlex.split(line, comments=True):
        if word == "&&":
            commands.append([])
        else:
            commands[-1].append(word)
    return [tuple(words) for words in commands]
