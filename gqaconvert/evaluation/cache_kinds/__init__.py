"""Cache kinds by name: ways to keep fewer bytes of a text than every key and value.

They need no surgery and stack with fewer KV heads. Each is a small cache of transformers' own form,
used by passing it to a model's forward as `cache`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable

from gqaconvert.errors import UsageError
from gqaconvert.evaluation.cache_kinds.dynamic import dynamic
from gqaconvert.evaluation.cache_kinds.h2o import h2o
from gqaconvert.evaluation.cache_kinds.kind import CacheKind, CacheUnavailable
from gqaconvert.evaluation.cache_kinds.offloaded import offloaded
from gqaconvert.evaluation.cache_kinds.quantised import BACKENDS, BITS, quantised
from gqaconvert.evaluation.cache_kinds.sinks import sinks
from gqaconvert.evaluation.cache_kinds.sliding import sliding
from gqaconvert.evaluation.cache_kinds.snapkv import snapkv
from gqaconvert.evaluation.cache_kinds.static import static

__all__ = ["FORMS", "CacheKind", "CacheUnavailable", "cache_kind"]

_COUNT = re.compile(r"[1-9][0-9]*")
_SINKS = re.compile(r"([0-9]+)\+([1-9][0-9]*)")
_SMALLEST_BUDGET = 2


def cache_kind(spec: str) -> CacheKind:
    """Return the kind that a name stands for.

    Args:
        spec: one of `FORMS`, such as "dynamic", "quantised:int4", "sliding:1024", "h2o:512" or
            "sinks:4+508".

    Raises:
        UsageError: no such kind, or an argument it does not take.
    """
    name, _, argument = spec.strip().partition(":")
    parse = _PARSERS.get(name)
    if parse is None:
        nearest = difflib.get_close_matches(name, _PARSERS, 1)
        guess = f"{nearest[0]}; " if nearest else ""
        raise UsageError(
            f"unknown cache kind {spec!r}", remedy=f"{guess}the kinds are {', '.join(FORMS)}"
        )
    kind = parse(argument)
    if kind is None:
        raise UsageError(
            f"{spec!r} does not name a cache kind",
            remedy=next(form for form in FORMS if form.partition(":")[0] == name),
        )
    return kind


FORMS = (
    "dynamic",
    "static",
    "quantised:int8|int4|int2[:own|quanto|hqq]",
    "sliding:TOKENS",
    "h2o:TOKENS",
    "snapkv:TOKENS",
    "sinks:TOKENS+TOKENS",
    "offloaded",
)
"""What can be asked for."""


def _plain(make: Callable[[], CacheKind]) -> Callable[[str], CacheKind | None]:
    return lambda argument: None if argument else make()


def _counted(make: Callable[[int], CacheKind], least: int) -> Callable[[str], CacheKind | None]:
    def parse(argument: str) -> CacheKind | None:
        known = _COUNT.fullmatch(argument) and int(argument) >= least
        return make(int(argument)) if known else None

    return parse


def _parse_quantised(argument: str) -> CacheKind | None:
    element, _, backend = argument.partition(":")
    backend = backend or "own"
    return quantised(element, backend) if element in BITS and backend in BACKENDS else None


def _parse_sinks(argument: str) -> CacheKind | None:
    match = _SINKS.fullmatch(argument)
    return sinks(int(match[1]), int(match[2])) if match else None


_PARSERS: dict[str, Callable[[str], CacheKind | None]] = {
    "dynamic": _plain(dynamic),
    "static": _plain(static),
    "quantised": _parse_quantised,
    "sliding": _counted(sliding, 1),
    "h2o": _counted(h2o, _SMALLEST_BUDGET),
    "snapkv": _counted(snapkv, _SMALLEST_BUDGET),
    "sinks": _parse_sinks,
    "offloaded": _plain(offloaded),
}
