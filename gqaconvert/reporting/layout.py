"""Tables as they are laid out: rows in groups, footnote numbers, a tooltip to every figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gqaconvert.reporting.caches import CacheRow
from gqaconvert.reporting.numbers import NOTHING, finite_figure, plural
from gqaconvert.reporting.table import Cell, Column, Table
from gqaconvert.units import format_memory


@dataclass(frozen=True, slots=True)
class LaidCell:
    """A cell: what is read, what a pointer on it shows, and the number of its footnote."""

    text: str
    aside: str
    tooltip: str
    note: int | None


@dataclass(frozen=True, slots=True)
class LaidRow:
    """A row, with its heading and what stands small below it."""

    title: str
    below: str
    cells: tuple[LaidCell, ...]


@dataclass(frozen=True, slots=True)
class Heading:
    """The head of a column, with the number of the footnote that holds for all of it."""

    text: str
    unit: str
    note: int | None


@dataclass(frozen=True, slots=True)
class LaidTable:
    """A table ready to be written.

    Attributes:
        headings: of the columns.
        groups: name of a run, empty where there is one, and its rows.
        notes: footnotes, from number 1 on.
    """

    headings: tuple[Heading, ...]
    groups: tuple[tuple[str, tuple[LaidRow, ...]], ...]
    notes: tuple[str, ...]


def lay_out(table: Table) -> LaidTable:
    """Lay out the main table: a footnote that all of a column shares stands at its head."""
    notes = table.notes()
    numbers = {text: number for number, text in enumerate(notes, start=1)}
    shared = [_shared_note(column) for column in table.columns]
    headings = tuple(
        Heading(column.heading, column.unit, numbers.get(note))
        for column, note in zip(table.columns, shared, strict=True)
    )
    groups: dict[str, list[LaidRow]] = {}
    several = len({id(subject.run) for subject in table.subjects}) > 1
    for place, subject in enumerate(table.subjects):
        cells = tuple(
            _laid(column.cells[place], numbers, note)
            for column, note in zip(table.columns, shared, strict=True)
        )
        below = [subject.model] if subject.role else []
        if subject.kv_heads and subject.num_heads:
            below.append(f"{subject.num_heads} query, {plural(subject.kv_heads, 'KV head')}")
        elif subject.kv_heads:
            below.append(plural(subject.kv_heads, "KV head"))
        row = LaidRow(subject.title, ", ".join(below), cells)
        groups.setdefault(subject.run.name if several else "", []).append(row)
    return LaidTable(
        headings,
        tuple((name, tuple(rows)) for name, rows in groups.items()),
        tuple(_sentence(text) for text in notes),
    )


def lay_out_caches(rows: Sequence[CacheRow]) -> LaidTable:
    """Lay out the table of cache kinds."""
    seen = {row.one.detail["tokens_seen"] for row in rows}
    at = f"at {seen.pop():,} tokens" if len(seen) == 1 else "at the end"
    notes = list(dict.fromkeys(_without_kind(row) for row in rows))
    numbers = {text: number for number, text in enumerate(notes, start=1)}
    several = len({id(row.subject.run) for row in rows}) > 1
    groups: dict[str, list[LaidRow]] = {}
    described: set[str] = set()
    for row in rows:
        one, detail = row.one, row.one.detail
        origin, note = row.origin, numbers[_without_kind(row)]
        number = note if len(notes) > 1 else None
        cells = (
            LaidCell(finite_figure(one.value, one.stderr), "",
                     _exactly(one.value, one.stderr, origin), number),
            _ratio(row.times_ordinary, origin),
            LaidCell(format_memory(detail["cache_bytes"]), "", f"{detail['cache_bytes']} bytes."
                     f" {origin}", None),
            _ratio(row.share_of_source, origin),
            LaidCell(f"{detail['decode_tokens_per_s']:,.4g}", "",
                     f"{detail['decode_tokens_per_s']}. {origin}", None),
        )  # fmt: skip
        # What a kind keeps is said once.
        below = "" if row.kind in described else str(detail.get("keeps", ""))
        described.add(row.kind)
        name = (
            f"{row.kind} on {row.subject.title.lower() if row.subject.role else row.subject.model}"
        )
        groups.setdefault(row.subject.run.name if several else "", []).append(
            LaidRow(name, below, cells)
        )
    headings = (
        Heading("Perplexity", "through it", 1 if len(notes) == 1 else None),
        Heading("÷ ordinary cache", "of the same model", None),
        Heading("Cache", at, None),
        Heading("÷ source's", "ordinary cache", None),
        Heading("Decoding", "tokens/s", None),
    )
    return LaidTable(
        headings, tuple((name, tuple(rows)) for name, rows in groups.items()), tuple(notes)
    )


def _without_kind(row: CacheRow) -> str:
    """What a footnote says of all kinds at once."""
    return row.origin.replace(f" --cache {row.kind}", " --cache …")


def _sentence(text: str) -> str:
    ended = text if text.endswith((".", ":")) or "Command" in text else f"{text}."
    return ended if ended.startswith("lm-eval") else ended[:1].upper() + ended[1:]


def _ratio(value: float | None, origin: str) -> LaidCell:
    if value is None:
        return LaidCell(
            NOTHING, "", "not measured through an ordinary cache with the same settings", None
        )
    return LaidCell(f"{value:.3f}", "", f"{value}. {origin}", None)


def _shared_note(column: Column) -> str:
    """The footnote of all figures of a column; empty where they have several."""
    origins = {cell.origin for cell in column.cells if cell.value is not None}
    return origins.pop() if len(origins) == 1 else ""


def _laid(cell: Cell, numbers: Mapping[str, int], shared: str) -> LaidCell:
    text = cell.origin or cell.missing
    number = None if not text or text == shared else numbers[text]
    if cell.value is None:
        return LaidCell(cell.text, "", cell.missing, number)
    exact = _exactly(cell.value, cell.stderr, cell.origin, cell.detail)
    return LaidCell(cell.text, cell.aside, exact, number)


def _exactly(value: float, stderr: float | None, origin: str, detail: str = "") -> str:
    parts = [f"{value}"]
    if stderr is not None:
        parts.append(f"standard error {stderr}")
    if detail:
        parts.append(detail)
    return f"{'; '.join(parts)}. {origin}".strip()
