"""The rows of a report: each model of each run, with what is known of it from all files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gqaconvert.reporting.saved import (
    CONVERTED,
    ROLES,
    SOURCE,
    UPTRAINED,
    Measured,
    SavedRun,
    folder_name,
)

ROLE_NAMES = {SOURCE: "Source", CONVERTED: "Converted", UPTRAINED: "Uptrained"}


@dataclass(frozen=True)
class Subject:
    """One model of one run.

    Attributes:
        run: it belongs to.
        model: its name.
        role: what part it plays, None where that is not known.
    """

    run: SavedRun
    model: str
    role: str | None

    @property
    def title(self) -> str:
        """What to call it."""
        return ROLE_NAMES.get(self.role or "", self.model)

    @property
    def is_baseline(self) -> bool:
        """Whether the others of its run are compared with it."""
        return self.run.baseline is not None and folder_name(self.model) == folder_name(
            self.run.baseline
        )

    def measured(self, metric: str) -> Measured | None:
        """Return a measurement, None where it was not made."""
        return self.run.measured(self.model, metric)

    def value(self, metric: str) -> float | None:
        """Return a measured figure, None where it is not finite either."""
        found = self.measured(metric)
        return found.value if found is not None and math.isfinite(found.value) else None

    @property
    def facts(self) -> Mapping[str, Any]:
        """Of models.json; empty without."""
        return self.run.models.get(self.model, {})

    @property
    def bench_facts(self) -> Mapping[str, Any]:
        """Of `bench`; empty where it was not timed."""
        models = (self.run.bench or {"models": []})["models"]
        return next((each for each in models if each["name"] == self.model), {})

    @property
    def kv_heads(self) -> int | None:
        """Number of KV heads."""
        for facts, key in ((self.facts, "kv_heads"), (self.bench_facts, "num_kv_heads")):
            if isinstance(facts.get(key), int):
                return int(facts[key])
        if self.run.sweep is not None:
            for point in self.run.sweep["points"]:
                if point["model"] == self.model:
                    return int(point["kv_heads"])
        if self.run.manifest is None or self.role is None:
            return None
        counts = self.run.manifest["plan"]["kv_heads"]
        return int(counts["before" if self.role == SOURCE else "after"])

    @property
    def num_heads(self) -> int | None:
        """Number of query heads."""
        for facts in (self.facts, self.bench_facts):
            if isinstance(facts.get("num_heads"), int):
                return int(facts["num_heads"])
        return None if self.run.manifest is None else int(self.run.manifest["plan"]["num_heads"])

    @property
    def parameters(self) -> int | None:
        """Number of parameters on disk."""
        cache = self.measured("kv_cache")
        for facts in (self.facts, {} if cache is None else cache.detail, self.bench_facts):
            if isinstance(facts.get("parameters"), int):
                return int(facts["parameters"])
        return None

    @property
    def kv_bytes_per_token(self) -> float | None:
        """Bytes that one more token of one request adds to the cache."""
        cache = self.measured("kv_cache")
        if cache is not None:
            return cache.value
        given = self.facts.get("kv_bytes_per_token")
        if isinstance(given, int | float):
            return float(given)
        row = self.estimate
        return None if row is None else float(row["kv_bytes_per_token"])

    @property
    def estimate(self) -> Mapping[str, Any] | None:
        """The row of `estimate` for its KV heads: the longest context and one request at a time."""
        rows = [row for row in self.run.estimate if row["kv_heads"] == self.kv_heads]
        return max(rows, key=lambda row: (-row["batch"], row["context"]), default=None)

    @property
    def decoding(self) -> Mapping[str, Any] | None:
        """The row of `bench` at the longest context that all models were timed with."""
        rows = [
            row
            for row in (self.run.bench or {"rows": []})["rows"]
            if row["decode"] and row["tokens_per_s"] and row["cache_kind"] == "dynamic"
        ]
        least = min((row["batch"] for row in rows), default=1)
        rows = [row for row in rows if row["batch"] == least]
        models = {row["model"] for row in rows}
        shared = [
            context
            for context in {row["context"] for row in rows}
            if {row["model"] for row in rows if row["context"] == context} == models
        ]
        wanted = (self.model, max(shared, default=0))
        return next((row for row in rows if (row["model"], row["context"]) == wanted), None)


def subjects_of(run: SavedRun) -> list[Subject]:
    """All models of a run: by their roles, then the baseline, then in the order of files."""
    bench = [each["name"] for each in (run.bench or {"models": []})["models"]]
    roles = [run.roles[role] for role in ROLES if role in run.roles]
    first = [] if run.baseline is None else [run.baseline]
    names: dict[str, str] = {}
    for name in (*roles, *first, *run.models, *bench, *run.results):
        names.setdefault(folder_name(name), name)
    named = {name: role for role, name in run.roles.items()}
    order = dict.fromkeys(map(folder_name, (*roles, *first, *run.results, *run.models, *bench)))
    return [Subject(run, names[key], named.get(names[key])) for key in order]


def baseline_of(subjects: Sequence[Subject], subject: Subject) -> Subject | None:
    """Return the model that a subject is compared with, None where there is none."""
    return next((s for s in subjects if s.run is subject.run and s.is_baseline), None)


def with_role(subjects: Sequence[Subject], role: str) -> Subject | None:
    """Return the first model that plays a part."""
    return next((subject for subject in subjects if subject.role == role), None)
