"""Where a figure comes from, in words: its command, its settings, what its error is."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from gqaconvert.reporting.numbers import listed, plural
from gqaconvert.reporting.saved import Measured, SavedRun, folder_name
from gqaconvert.units import format_memory

_SHORT = 12


def short_hash(text: str) -> str:
    """The first letters of a hash: enough to tell things apart."""
    return text[:_SHORT]


def made_by(run: SavedRun, verb: str, options: str) -> str:
    """Say which command made something: the stages of a run, or what its settings amount to.

    Args:
        run: it belongs to.
        verb: of the command line.
        options: what to call it with, where no stage is recorded.
    """
    stages = [name for name, stage in run.stages.items() if _verb(stage["command"]) == verb]
    if stages:
        return f"Command: stage{'s' * (len(stages) > 1)} {listed(stages)}, below."
    return f"Command, by its settings: {f'gqaconvert {verb} {options}'.strip()}"


def of_evaluation(run: SavedRun, one: Measured) -> str:
    """Say how a measurement of `evaluate` was made."""
    said = "; ".join(each for each in (_settings(one), _error(one)) if each)
    # A sweep saves no hash with a point; that is how its figures are told from those of `evaluate`.
    if run.sweep is not None and not one.weights_sha256:
        return f"{said}. {of_sweep(run)}"
    return f"{said}. {_evaluate(run, one)}"


def of_estimate(run: SavedRun, row: Mapping[str, Any]) -> str:
    """Say how an answer of `estimate` was worked out."""
    memory = row["memory_bytes"]
    where = "no memory size was asked about" if memory is None else f"on {format_memory(memory)}"
    dtype = f", {row['kv_dtype']} cache" if row.get("kv_dtype") else ""
    notes = [str(each) for each in row.get("notes", [])]
    meaning = next((each for each in notes if each.startswith("fit:")), "")
    text = (
        f"Worked out, not measured: {where}, {plural(row['context'], 'token')} a request{dtype};"
        " what memory allows, whatever length the model was trained for"
    )
    text += f"; {meaning.removeprefix('fit: ')}" if meaning else ""
    counts = list(dict.fromkeys(each["kv_heads"] for each in run.estimate))
    options = f"{_source(run)} --kv-heads {_commas(counts)}"
    options += "" if memory is None else f" --gpu {format_memory(memory).replace(' ', '')}"
    return f"{text}. {made_by(run, 'estimate', options)}"


def of_bench(run: SavedRun, row: Mapping[str, Any]) -> str:
    """Say how a row of `bench` was timed."""
    bench = run.bench or {}
    settings = bench["settings"]
    facts = next((each for each in bench["models"] if each["name"] == row["model"]), None)
    how = "" if facts is None else f", {facts['dtype']}, {facts['attn']} attention"
    text = (
        f"Decoding with {plural(row['context'], 'token')} in the cache ({row.get('fill')} content),"
        f" batch {row['batch']}{how}, on {where_measured(bench)}; median of"
        f" {plural(settings['repeats'], 'repeat')}"
    )
    names = " ".join(shlex.quote(each["name"]) for each in bench["models"])
    options = f"{names} --context {_commas(settings['contexts'])}"
    return f"{text}. {made_by(run, 'bench', options)}"


def of_sweep(run: SavedRun) -> str:
    """Say how the points of `sweep` were measured."""
    settings = (run.sweep or {}).get("settings", {})
    options = [
        f"--{key} {shlex.quote(str(settings[key]))}"
        for key in ("context", "windows")
        if settings.get(key) is not None
    ]
    options += ["--spread"] if settings.get("spread") else []
    return made_by(run, "sweep", " ".join([str((run.sweep or {}).get("source")), *options]))


def where_measured(bench: Mapping[str, Any]) -> str:
    """The machine that `bench` ran on."""
    machine = bench["machine"]
    if bench["device"] != "cpu" and machine.get("gpu"):
        return str(machine["gpu"])
    processor = machine.get("processor")
    return plural(machine["threads"], "CPU thread") + (f" of {processor}" if processor else "")


_COMPARED = ("context", "stride", "windows", "task", "limit", "fewshot", "dtype", "lengths")
"""Settings that decide whether two figures may be compared; the others change no result."""


def same_conditions(one: Measured, other: Measured) -> bool:
    """Whether two measurements of one metric may be compared: what was read, and how."""
    return not differing_settings(one, other)


def differing_settings(one: Measured, other: Measured) -> list[str]:
    """Say in which settings two measurements differ: "context 256 and 512"."""
    ours, theirs = one.settings, other.settings
    differing = [
        f"{key} {ours[key]} and {theirs[key]}"
        for key in _COMPARED
        if key in ours and key in theirs and ours[key] != theirs[key]
    ]
    if bool(ours.get("spread")) != bool(theirs.get("spread")):  # saved only where it is so
        differing.append("windows spread over the text and the first ones")
    if _text(one) != _text(other):
        names = [each.settings.get("text_name", each.settings.get("text")) for each in (one, other)]
        differing.insert(0, f"text {names[0]} and {names[1]}")
    return differing


def _text(one: Measured) -> str | None:
    """What was read: its hash, or its name where none was saved."""
    found = one.settings.get("text_sha256") or one.settings.get("text")
    return None if found is None else str(found)


def _settings(one: Measured) -> str:
    settings = dict(one.settings)
    for key in ("source_sha256", "text_sha256"):
        settings.pop(key, None)
    family = one.metric.partition("/")[0]
    where = ", ".join(f"{key} {settings[key]}" for key in ("dtype", "attn", "device")
                      if key in settings)  # fmt: skip
    if family == "kv_cache":
        element = one.detail.get("element")
        return f"By formula from the config, {element} cache" if element else "By formula"
    if family == "task":
        limit = settings.get("limit")
        which = "all examples" if limit is None else f"the first {limit} examples"
        shots = settings.get("fewshot")
        return (
            f"lm-eval task {settings.get('task')}, {which},"
            f" {'its own number of' if shots is None else shots} shots, {one.detail['score']},"
            f" {where}"
        )
    if family in ("perplexity", "divergence", "cache"):
        hashed = one.settings.get("text_sha256")
        text = f"{settings.get('text_name', settings.get('text'))}" + (
            f" (sha256 {short_hash(hashed)})" if hashed else ""
        )
        said = f"{plural(one.n, 'window')} of {settings.get('context')} tokens of {text}"
        said += ", spread over it" if settings.get("spread") else ""
        said += f", {where}" if where else ""
        if family == "cache":
            return f"{said}; decoded one by one after {settings.get('prefill')} read at once"
        if family == "divergence":
            exact = one.detail.get("method", "exact")
            return f"{said}; against {one.detail['source']}, {exact}"
        return said
    return ", ".join(f"{key} {value}" for key, value in settings.items())


def _error(one: Measured) -> str:
    if one.stderr is None:
        return ""
    of = {"task": "examples", "needle": "probes"}.get(one.metric.partition("/")[0], "windows")
    return f"± is the standard error over {one.n} {of}"


def _evaluate(run: SavedRun, one: Measured) -> str:
    settings = one.settings
    windows = "cache-windows" if one.metric.startswith("cache/") else "windows"
    options = [
        f"--{flag} {shlex.quote(str(settings[key]))}"
        for flag, key in (("text", "text"), ("context", "context"), (windows, "windows"),
                          ("tasks", "task"), ("limit", "limit"), ("cache", "kind"))
        if settings.get(key) is not None
    ]  # fmt: skip
    options += ["--spread"] if settings.get("spread") else []
    return made_by(run, "evaluate", shlex.join(_models(run)) + "".join(f" {o}" for o in options))


def _models(run: SavedRun) -> list[str]:
    """Names of all models that were evaluated, the baseline first, as `evaluate` takes them."""
    first = [] if run.baseline is None else [run.baseline]
    names: dict[str, str] = {}
    for name in (*first, *run.roles.values(), *run.results):
        names.setdefault(folder_name(name), name)
    return list(names.values())


def _verb(command: str) -> str:
    words = command.split()
    return words[1] if len(words) > 1 else ""


def _source(run: SavedRun) -> str:
    if run.manifest is not None:
        return shlex.quote(str(run.manifest["source"]["name"]))
    return shlex.quote(run.baseline or "MODEL")


def _commas(values: list[Any]) -> str:
    return ",".join(str(value) for value in values)
