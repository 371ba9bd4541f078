"""What a folder holds that a report can be made of: read once, checked, as plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gqaconvert.checkpoint.staging import MANIFEST as MANIFEST_FILE
from gqaconvert.errors import UsageError
from gqaconvert.reporting import shapes
from gqaconvert.reporting.shapes import parse, read_document, read_lines

SOURCE, CONVERTED, UPTRAINED = "source", "converted", "uptrained"
ROLES = (SOURCE, CONVERTED, UPTRAINED)
EXPORTS = {CONVERTED: "converted", UPTRAINED: "model"}
"""Role → folder of its checkpoint in a run folder."""

_LOOKED_FOR = (
    "pipeline.json, results/*/*.json, metrics.jsonl, bench.json, sweep.json, estimate.json,"
    " heads.json or converted/gqaconvert.json"
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One saved measurement, see `evaluation.results.Measurement`."""

    metric: str
    value: float
    stderr: float | None
    n: int
    unit: str
    settings: Mapping[str, Any]
    versions: Mapping[str, str]
    weights_sha256: str
    detail: Mapping[str, Any]


@dataclass(frozen=True)
class SavedRun:
    """All that a folder holds; what it does not hold is None or empty.

    Attributes:
        name: of the run, or of the folder.
        title: asked for in the recipe.
        command: that made all of it.
        roles: role → name of the model; where no roles are known, names stand for themselves.
        results: name of a model → metric → measurement.
        baseline: name of the model that others are compared with.
        models: name of a model → facts, of models.json.
        estimate: rows of `estimate --json`.
        heads: of `inspect --heads --json`.
        manifest: of the conversion.
        verify: checks of the output.
        metrics: lines of the training.
        summary: of the training.
        bench, sweep: their JSON.
        stages: stage → command, seconds, outcome.
        machine, versions: of the run.
    """

    name: str
    title: str | None = None
    command: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    results: Mapping[str, Mapping[str, Measured]] = field(default_factory=dict)
    baseline: str | None = None
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    estimate: tuple[Mapping[str, Any], ...] = ()
    heads: Mapping[str, Any] | None = None
    manifest: Mapping[str, Any] | None = None
    verify: Mapping[str, Any] | None = None
    metrics: tuple[Mapping[str, Any], ...] = ()
    summary: Mapping[str, Any] | None = None
    bench: Mapping[str, Any] | None = None
    sweep: Mapping[str, Any] | None = None
    stages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def measured(self, model: str, metric: str) -> Measured | None:
        """Return one measurement, None where it was not made."""
        return self.measurements(model).get(metric)

    def measurements(self, model: str) -> Mapping[str, Measured]:
        """Return all measurements of a model by metric."""
        return self.results.get(folder_name(model), {})

    def role_of(self, model: str) -> str | None:
        """Return what part a model plays, None where that is not known."""
        return next((role for role, name in self.roles.items() if name == model), None)


def read_run(folder: Path) -> SavedRun:
    """Read a run folder, or one of `evaluate`, `bench` or `sweep`.

    Raises:
        UsageError: no such folder, or nothing in it that a report could be made of.
        CheckpointError: a file in it is damaged.
    """
    if not folder.is_dir():
        raise UsageError("no such folder", at=str(folder), remedy="a folder that `run` has made")
    pipeline = _read(folder / "pipeline.json", shapes.PIPELINE) or {}
    manifest = _read(folder / "converted" / MANIFEST_FILE, shapes.MANIFEST)
    manifest = manifest or _read(folder / "model" / MANIFEST_FILE, shapes.MANIFEST)
    metrics = folder / "metrics.jsonl"
    run = {
        "estimate": tuple(_read(folder / "estimate.json", shapes.ESTIMATE) or ()),
        "heads": _read(folder / "heads.json", shapes.HEADS),
        "manifest": manifest,
        "verify": _read(folder / "verify.json", shapes.VERIFY),
        "summary": _read(folder / "summary.json", shapes.SUMMARY),
        "metrics": tuple(read_lines(metrics)) if metrics.is_file() else (),
        "bench": _first(folder, "bench", shapes.BENCH),
        "sweep": _first(folder, "sweep", shapes.SWEEP),
    }
    results = folder / "results"
    found = _results(results, strict=True) if results.is_dir() else {}
    if not found and not pipeline and not any(run.values()):
        found = _results(folder, strict=False)
        if not found:
            raise UsageError(
                "nothing here that a report could be made of",
                at=str(folder),
                remedy=f"a folder with {_LOOKED_FOR}",
            )
    baseline = _baseline(found, run["sweep"])
    if run["sweep"] and not found:
        found = _of_sweep(run["sweep"])
    roles = _roles(pipeline, manifest, found, baseline)
    return SavedRun(
        name=str(pipeline.get("name") or folder.resolve().name),
        title=pipeline.get("title"),
        command=pipeline.get("command"),
        roles=roles,
        results=found,
        baseline=roles.get(SOURCE, baseline),
        models=_models(folder / "models.json"),
        stages=pipeline.get("stages", {}),
        machine=pipeline.get("machine") or (run["bench"] or {}).get("machine") or {},
        versions=_versions(pipeline, found, run),
        **run,
    )


def folder_name(model: str) -> str:
    """Return the folder of a model's results, where a Hub id has no slash."""
    return model.replace("/", "-").replace(":", "-")


def _read(path: Path, shape: Any) -> Any:  # noqa: ANN401
    return read_document(path, shape) if path.is_file() else None


def _first(folder: Path, name: str, shape: Any) -> Any:  # noqa: ANN401
    """Read NAME/NAME.json, or NAME.json in a folder of its own."""
    return _read(folder / name / f"{name}.json", shape) or _read(folder / f"{name}.json", shape)


def _models(path: Path) -> dict[str, Mapping[str, Any]]:
    content = _read(path, shapes.MODELS) or {}
    return {facts["name"]: facts for facts in content.values()}


def _results(folder: Path, *, strict: bool) -> dict[str, dict[str, Measured]]:
    """Read `<model>/<metric>.json` files.

    Args:
        folder: of the results.
        strict: all files must be measurements; else those that are not are passed over.
    """
    found: dict[str, dict[str, Measured]] = {}
    for path in sorted(folder.glob("*/*.json")):
        if path.parent.name.startswith(".") or path.name.startswith("."):
            continue
        content = parse(path)
        if not strict and not (isinstance(content, dict) and "weights_sha256" in content):
            continue
        content = read_document(path, shapes.MEASUREMENT)
        detail = shapes.DETAILS.get(content["metric"].partition("/")[0])
        if detail:
            read_document(path, {"detail": detail})
        one = Measured(**{name: content[name] for name in Measured.__slots__})
        found.setdefault(path.parent.name, {})[one.metric] = one
    return found


def _of_sweep(sweep: Mapping[str, Any]) -> dict[str, dict[str, Measured]]:
    """Return what a sweep measured of whole models, as `evaluate` would have saved it."""
    found: dict[str, dict[str, Measured]] = {}
    for point in sweep["points"]:
        if point["kind"] == "cache":
            continue
        values = {
            "kv_cache": (point["kv_bytes"] or 0) / (point["kv_tokens"] or 1) or None,
            "perplexity": point.get("perplexity"),
            "divergence": point.get("kl"),
        }
        detail = {
            "top1_agreement": point.get("top1"),
            "top1_agreement_stderr": point.get("top1_stderr"),
            "source": sweep["source"],
            "element": sweep["settings"].get("kv_dtype"),
        }
        errors = {"perplexity": "perplexity_stderr", "divergence": "kl_stderr"}
        for metric, value in values.items():
            if value is not None:
                found.setdefault(point["model"], {})[metric] = Measured(
                    metric, value, point.get(errors.get(metric)), sweep["settings"].get("windows")
                    or 0, "", sweep["settings"], sweep.get("versions", {}), "", detail,
                )  # fmt: skip
    return found


def _baseline(
    results: Mapping[str, Mapping[str, Measured]], sweep: Mapping[str, Any] | None
) -> str | None:
    sources = {
        metrics["divergence"].detail["source"]
        for metrics in results.values()
        if "divergence" in metrics
    }
    if len(sources) == 1:
        return str(sources.pop())
    return None if sweep is None or results else str(sweep["source"])


def _roles(
    pipeline: Mapping[str, Any],
    manifest: Mapping[str, Any] | None,
    results: Iterable[str],
    baseline: str | None,
) -> dict[str, str]:
    """Return which model plays which part: as the run says, or as its folders tell."""
    if pipeline:
        return {role: pipeline["roles"][role] for role in ROLES if role in pipeline["roles"]}
    if manifest is None:
        return {}
    source = baseline or manifest["source"]["name"].rpartition("/")[2]
    guesses = {SOURCE: source, **EXPORTS}
    return {role: name for role, name in guesses.items() if folder_name(name) in set(results)}


def _versions(
    pipeline: Mapping[str, Any],
    results: Mapping[str, Mapping[str, Measured]],
    run: Mapping[str, Any],
) -> dict[str, str]:
    """Return versions of libraries: those of the run, then what each part has recorded."""
    parts = [pipeline.get("versions")]
    parts += [each.versions for metrics in results.values() for each in metrics.values()]
    parts += [(run[name] or {}).get("versions") for name in ("bench", "sweep", "summary")]
    found: dict[str, list[str]] = {}
    for versions in parts:
        for name, version in (versions or {}).items():
            seen = found.setdefault(name, [])
            if str(version) not in seen:
                seen.append(str(version))
    return {name: ", ".join(seen) for name, seen in sorted(found.items())}
