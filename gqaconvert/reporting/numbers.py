"""How figures are written: with as many digits as their error leaves them."""

from __future__ import annotations

import math

NOTHING = "–"


def figure(value: float, stderr: float | None = None) -> str:
    """Write a figure with as many digits as its error leaves it: 22.6 ± 1.5."""
    if stderr is None and float(value).is_integer():
        return f"{value:,.0f}"
    scale = abs(stderr) if stderr else abs(value) / 100
    digits = 0 if scale >= 10 or not 0 < scale < float("inf") else 1
    while digits and scale < 1 and digits < 4:
        scale *= 10
        digits += 1
    plain = f"{value:,.{digits}f}"
    return plain if stderr is None else f"{plain} ± {stderr:,.{digits}f}"


def finite_figure(value: float, stderr: float | None = None) -> str:
    """Write a figure as `figure` does, and one beyond all bounds as a sign."""
    return figure(value, stderr) if math.isfinite(value) else "∞"


def share(value: float, stderr: float | None = None) -> str:
    """Write a share in percent: 17.4 ± 1.1 %."""
    return f"{100 * value:.1f}" + ("" if stderr is None else f" ± {100 * stderr:.1f}") + " %"


def times(ratio: float) -> str:
    """Write a ratio: ×10.2, or ÷4 where it is below one."""
    if ratio > 0 and not math.isinf(ratio):
        return f"×{_short(ratio)}" if ratio >= 1 else f"÷{_short(1 / ratio)}"
    return NOTHING


def _short(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 99.5 or abs(ratio - round(ratio)) < 5e-3 else f"{ratio:.3g}"


def duration(seconds: float) -> str:
    """Write a time: 8.2 s, 4 min 10 s, 3 h 20 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def plural(count: int, noun: str) -> str:
    """Write a count and what is counted: 1 head, 8 heads."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(words: list[str]) -> str:
    """Join words as a sentence does: a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
