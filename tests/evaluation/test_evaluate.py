"""Evaluations: one table of several models, kept as it is made, going on where it was stopped."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import gqaconvert
from gqaconvert.checkpoint.sources import resolve_source
from gqaconvert.cli.main import app
from gqaconvert.errors import UsageError
from gqaconvert.evaluation.evaluate import evaluate
from gqaconvert.evaluation.results import ResultStore
from gqaconvert.evaluation.suite import Suite

SUITE = Suite(context=96, windows=3, kv_contexts=(32, 64))


@pytest.fixture(scope="module")
def pooled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pooled") / "tiny-gqa2"
    gqaconvert.convert("tiny", folder, num_kv_heads=2)
    return folder


def _run(models, folder, suite=SUITE, **options):
    events = []
    found = evaluate(models, suite=suite, results=folder, on_event=events.append, **options)
    return found, [(event.model, event.metric, event.outcome) for event in events]


def test_models_are_measured_alike_and_compared_with_the_baseline(pooled, tmp_path):
    found, events = _run([pooled], tmp_path, baseline="tiny")
    assert found.baseline == "tiny"
    assert events == [
        ("tiny", "kv_cache", "measured"),
        ("tiny", "perplexity", "measured"),
        ("tiny-gqa2", "kv_cache", "measured"),
        ("tiny-gqa2", "perplexity", "measured"),
        ("tiny-gqa2", "divergence", "measured"),
    ]
    tiny, gqa = (model.measurements for model in found.models)
    for metric in ("kv_cache", "perplexity"):
        assert tiny[metric].settings == gqa[metric].settings
    assert tiny["kv_cache"].value == 4 * gqa["kv_cache"].value == 4096
    for model in (tiny, gqa):
        for row in model["kv_cache"].detail["contexts"]:
            assert row["measured_bytes"] == row["formula_bytes"]
    assert gqa["perplexity"].value > 2 * tiny["perplexity"].value
    assert gqa["divergence"].detail["source"] == "tiny"
    stored = ResultStore(tmp_path).all()
    assert {name: set(metrics) for name, metrics in stored.items()} == {
        model.name: set(model.measurements) for model in found.models
    }


def test_first_of_several_is_the_baseline_and_one_alone_has_none(pooled, tmp_path):
    assert _run([pooled, "tiny"], tmp_path)[0].baseline == "tiny-gqa2"
    alone, events = _run(["tiny", "tiny"], tmp_path)
    assert alone.baseline is None
    assert [metric for _, metric, _ in events] == ["kv_cache", "perplexity"]


def test_what_was_measured_is_kept_until_something_differs(pooled, tmp_path):
    _run(["tiny", pooled], tmp_path)
    _, again = _run(["tiny", pooled], tmp_path)
    assert {outcome for _, _, outcome in again} == {"kept"}
    _, batched = _run(["tiny"], tmp_path, SUITE.model_copy(update={"batch": 3}))
    assert {outcome for _, _, outcome in batched} == {"kept"}  # changes no result
    _, longer = _run(["tiny"], tmp_path, SUITE.model_copy(update={"windows": 4}))
    assert longer == [("tiny", "kv_cache", "kept"), ("tiny", "perplexity", "measured")]
    _, rounded = _run(["tiny"], tmp_path, dtype="float32")
    assert {outcome for _, _, outcome in rounded} == {"measured"}


def test_other_weights_under_the_same_name_are_measured_anew(tmp_path):
    for heads in (4, 2):
        folder = tmp_path / str(heads) / "model"
        gqaconvert.convert("tiny", folder, num_kv_heads=heads)
        _, events = _run([folder], tmp_path / "results")
        assert {outcome for _, _, outcome in events} == {"measured"}


def test_a_killed_evaluation_goes_on_where_it_was(pooled, tmp_path):
    program = f"""
import os, signal
from gqaconvert.evaluation.evaluate import evaluate
from gqaconvert.evaluation.suite import Suite

def die(event):
    os.kill(os.getpid(), signal.SIGKILL)

evaluate(["tiny", {str(pooled)!r}], suite=Suite.model_validate({SUITE.model_dump()!r}),
         results={str(tmp_path)!r}, on_event=die)
"""
    died = subprocess.run([sys.executable, "-c", program], check=False)
    assert died.returncode == -signal.SIGKILL
    first = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert first == [tmp_path / "tiny" / "kv_cache.json"]
    written = first[0].stat().st_mtime_ns
    _, events = _run(["tiny", pooled], tmp_path)
    assert events[0] == ("tiny", "kv_cache", "kept")
    assert [outcome for _, _, outcome in events[1:]] == ["measured"] * 4
    assert first[0].stat().st_mtime_ns == written


def test_what_cannot_be_measured_says_why_and_the_others_go_on(tmp_path):
    suite = SUITE.model_copy(
        update={
            "tasks": ("no_such_task", str(tmp_path / "none.yaml")),
            "cache": ("dynamic", "offloaded", "sliding:32"),
            "cache_decode": 16,
        }
    )
    found, events = _run(["tiny"], tmp_path, suite, backend="vllm")
    (model,) = found.models
    assert set(model.unavailable) >= {"task/no_such_task", "task/none"}
    assert set(model.unavailable) <= {"task/no_such_task", "task/none", "cache/offloaded"}
    assert all(model.unavailable.values())
    assert "cache/sliding:32" in model.measurements
    assert "cache/dynamic" in model.measurements
    assert len(events) == len(model.measurements) + len(model.unavailable)
    _, again = _run(["tiny"], tmp_path, suite, backend="vllm")
    assert ("tiny", "task/no_such_task", "unavailable") in again  # tried again


def test_divergence_from_saved_tokens_needs_the_source_once(pooled, tmp_path):
    suite = SUITE.model_copy(update={"top_k": 32})
    exact, _ = _run(["tiny", pooled], tmp_path / "exact")
    found, _ = _run(["tiny", pooled], tmp_path / "saved", suite)
    saved = tmp_path / "saved" / ".sources" / "tiny" / "tokens.npy"
    written = saved.stat().st_mtime_ns
    shutil.rmtree(tmp_path / "saved" / "tiny-gqa2")
    _, events = _run(["tiny", pooled], tmp_path / "saved", suite)
    assert events[-1] == ("tiny-gqa2", "divergence", "measured")
    assert saved.stat().st_mtime_ns == written
    values = [each.models[1].measurements["divergence"].value for each in (found, exact)]
    assert 0.8 * values[1] < values[0] <= values[1]


def test_other_tokenizers_are_refused_before_anything_is_measured(tmp_path):
    other = tmp_path / "other"
    shutil.copytree(resolve_source("tiny").folder, other)
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:100]
    (other / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(UsageError, match="tokenizer differs") as refusal:
        _run(["tiny", other], tmp_path / "results")
    assert refusal.value.at == str(other)
    assert not (tmp_path / "results").exists()


def test_windows_longer_than_a_model_reads_are_refused(tmp_path):
    with pytest.raises(UsageError, match="made for 1024 tokens, not 2048"):
        _run(["tiny"], tmp_path, Suite(context=2048))


def test_two_models_of_one_name_are_refused(tmp_path):
    folder = tmp_path / "tiny"
    gqaconvert.convert("tiny", folder, num_kv_heads=2)
    with pytest.raises(UsageError, match="two models are called 'tiny'"):
        _run(["tiny", folder], tmp_path)


def test_command_prints_both_tables_and_the_rest_on_stderr(pooled, tmp_path):
    words = ["evaluate", str(pooled), "--baseline", "tiny", "--results", str(tmp_path / "r")]
    words += ["--context", "96", "--windows", "3", "--limit", "8", "--dtype", "float32"]
    words += ["--cache", "dynamic,quantised:int4,offloaded"]
    printed = CliRunner().invoke(app, words, catch_exceptions=False)
    assert printed.exit_code == 0
    lines = printed.stdout.splitlines()
    header = "model parameters disk KV a token measured perplexity bits a byte KL p99 top-1"
    assert lines[0].split()[: len(header.split())] == header.split()
    assert "continuation (chance 25 %)" in lines[0]
    assert lines[1].startswith("tiny ")
    assert "(baseline)" in lines[1]
    assert lines[2].startswith("tiny-gqa2 ")
    assert [line.split()[:2] for line in lines[5:]] == [
        ["tiny", "dynamic"],
        ["tiny", "quantised:int4"],
        ["tiny-gqa2", "dynamic"],
        ["tiny-gqa2", "quantised:int4"],
    ]
    assert "offloaded was not measured: " in printed.stderr
    assert "times the baseline's" in printed.stderr
    assert "perplexity" not in printed.stderr.partition("tiny: ")[0]

    as_json = CliRunner().invoke(app, [*words, "--json"], catch_exceptions=False)
    content = json.loads(as_json.stdout)
    assert [model["name"] for model in content["models"]] == ["tiny", "tiny-gqa2"]
    measured = content["models"][1]["measurements"]
    assert measured["perplexity"]["detail"]["by_position"]
    assert set(content["models"][1]["unavailable"]) == {"cache/offloaded"}
    assert "(kept from before)" in as_json.stderr
