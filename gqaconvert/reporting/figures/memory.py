"""Bytes of the KV cache against context, with the memory of devices as lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gqaconvert.figure_style import INK, LINES, format_tokens, memory_axis
from gqaconvert.reporting.figures.panels import ReportFigure, panel
from gqaconvert.reporting.looks import Looks
from gqaconvert.reporting.numbers import listed
from gqaconvert.reporting.origins import of_estimate
from gqaconvert.reporting.subjects import Subject
from gqaconvert.units import format_memory

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_GIB = 2**30
_USUAL = (16 * _GIB, 24 * _GIB, 80 * _GIB)
_FIRST = 256
_LONGEST = 2**27


def memory_figure(subjects: Sequence[Subject], looks: Looks) -> ReportFigure | None:
    """Draw a line for every size of cache, named after the models that have it.

    Args:
        subjects: models; those without a size are left out.
        looks: of the models.
    """
    known = [subject for subject in subjects if subject.kv_bytes_per_token]
    if not known:
        return None
    asked = sorted({
        int(subject.estimate["memory_bytes"]) for subject in known
        if subject.estimate and subject.estimate["memory_bytes"]
    })  # fmt: skip
    memories = asked or list(_USUAL)
    last = _last_context(known, memories[0])

    def draw(axes: Axes) -> None:
        _draw_lines(axes, known, looks, last)
        low, high = axes.get_ylim()
        for size in memories:
            # Without a question about memory, usual sizes; those far beyond the lines say nothing.
            if asked or size <= 2 * high:
                axes.axhline(size, color=INK, linewidth=1, linestyle=(0, (5, 2)))
                axes.annotate(
                    format_memory(size), (_FIRST, size), (2, 2), textcoords="offset points",
                    fontsize=8, va="bottom",
                )  # fmt: skip
        axes.set_ylim(low, max(high, 2 * memories[0]))

    sizes = [f"{format_memory(s.kv_bytes_per_token or 0)} a token ({s.title})" for s in known]
    return ReportFigure(
        name="memory",
        title="Memory of the KV cache",
        caption=(
            "Bytes of keys and values of one request against its context. A line that lies lower"
            " meets the memory of a device further to the right, so longer or more requests fit;"
            " weights and working memory come on top. "
            + ("Dashed: the memory that was asked about."
               if asked else "Dashed: usual sizes of device memory.")
        ),
        origin=_origin(known),
        panels=(
            panel(
                "memory", "KV cache of one request against context",
                f"Lines of KV cache bytes against context: {listed(sizes)}.", draw,
            ),
        ),
    )  # fmt: skip


def _draw_lines(axes: Axes, known: Sequence[Subject], looks: Looks, last: int) -> None:
    contexts = [2**power for power in range(int(math.log2(_FIRST)), int(math.log2(last)) + 1)]
    by_size: dict[float, list[Subject]] = {}
    for subject in known:
        by_size.setdefault(subject.kv_bytes_per_token or 0, []).append(subject)
    for number, (size, group) in enumerate(sorted(by_size.items(), reverse=True)):
        look = looks.of(group[0])
        name = listed(list(dict.fromkeys(looks.of(subject).name for subject in group)))
        points = _points(group[0], contexts, size)
        axes.plot(
            [tokens for tokens, _ in points], [amount for _, amount in points], color=look.colour,
            linestyle=LINES[number % len(LINES)], label=name,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    step = max(1, math.ceil(len(contexts) / 6))
    ticks = contexts[::step]
    axes.set_xticks(ticks, [format_tokens(tokens) for tokens in ticks])
    axes.minorticks_off()
    memory_axis(axes)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("KV cache of one request")


def _points(subject: Subject, contexts: Sequence[int], size: float) -> list[tuple[int, float]]:
    """Return context and bytes: proportional, or as estimated where windows keep it from that."""
    rows = [
        (row["context"], row["kv_bytes"] / row["batch"])
        for row in subject.run.estimate
        if row["kv_heads"] == subject.kv_heads
    ]
    if rows and any(abs(amount / (tokens * size) - 1) > 0.01 for tokens, amount in rows):
        return sorted(set(rows))
    return [(tokens, tokens * size) for tokens in contexts]


def _last_context(known: Sequence[Subject], memory: int) -> int:
    """A power of two somewhat beyond where the smallest cache meets the memory."""
    smallest = min(subject.kv_bytes_per_token or math.inf for subject in known)
    wanted = 2 ** math.ceil(math.log2(max(_FIRST * 4, memory / smallest)))
    return int(min(_LONGEST, wanted))


def _origin(known: Sequence[Subject]) -> str:
    for subject in known:
        if subject.estimate is not None:
            return of_estimate(subject.run, subject.estimate)
    return "Proportional to the bytes a token of the table above."
