"""Saved measurements: found again only where nothing differs, and never half written."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from gqaconvert.errors import CheckpointError
from gqaconvert.evaluation.results import Measurement, ResultStore, library_versions

FOUND = Measurement(
    metric="cache/quantised:int4",
    value=12.5,
    stderr=0.25,
    n=8,
    unit="",
    settings={"context": 512, "kinds": ["a", "b"], "stride": None},
    versions=library_versions(),
    weights_sha256="abc",
    detail={"tokens": 4088},
)


def test_a_measurement_comes_back_as_it_was(tmp_path):
    store = ResultStore(tmp_path / "results")
    path = store.put("tiny", FOUND)
    assert path == tmp_path / "results" / "tiny" / "cache-quantised-int4.json"
    assert store.get("tiny", FOUND.metric, FOUND.settings, "abc") == FOUND
    assert store.all() == {"tiny": {FOUND.metric: FOUND}}
    assert set(json.loads(path.read_text())) >= {"value", "stderr", "n", "settings", "versions"}


def test_tuples_in_settings_are_lists_on_disk(tmp_path):
    store = ResultStore(tmp_path)
    store.put("tiny", dataclasses.replace(FOUND, settings={"lengths": (1, 2)}))
    assert store.get("tiny", FOUND.metric, {"lengths": (1, 2)}, "abc") is not None


@pytest.mark.parametrize(
    ("model", "metric", "settings", "sha256"),
    [
        ("other", FOUND.metric, FOUND.settings, "abc"),
        ("tiny", "perplexity", FOUND.settings, "abc"),
        ("tiny", "cache/quantised-int4", FOUND.settings, "abc"),  # of the same file
        ("tiny", FOUND.metric, {**FOUND.settings, "context": 256}, "abc"),
        ("tiny", FOUND.metric, {"context": 512}, "abc"),
        ("tiny", FOUND.metric, FOUND.settings, "abd"),
    ],
)
def test_what_differs_is_not_found(tmp_path, model, metric, settings, sha256):
    store = ResultStore(tmp_path)
    store.put("tiny", FOUND)
    assert store.get(model, metric, settings, sha256) is None


def test_a_failed_write_leaves_what_was_there(tmp_path):
    store = ResultStore(tmp_path)
    path = store.put("tiny", FOUND)
    with pytest.raises(TypeError):
        store.put("tiny", dataclasses.replace(FOUND, detail={"bad": object()}))
    assert store.get("tiny", FOUND.metric, FOUND.settings, "abc") == FOUND
    assert list(path.parent.iterdir()) == [path]


def test_names_of_one_file_name_do_not_meet(tmp_path):
    store = ResultStore(tmp_path)
    assert store.path("a b", "m") != store.path("a-b", "m")
    assert store.path("..", "m").resolve().is_relative_to(tmp_path)
    assert len(store.path("x" * 500, "m").parent.name) < 100


def test_a_damaged_file_is_named(tmp_path):
    store = ResultStore(tmp_path)
    path = store.put("tiny", FOUND)
    path.write_text(path.read_text()[:40])
    with pytest.raises(CheckpointError, match="not a measurement") as error:
        store.get("tiny", FOUND.metric, FOUND.settings, "abc")
    assert error.value.at == str(path)


def test_infinity_survives(tmp_path):
    store = ResultStore(tmp_path)
    endless = dataclasses.replace(FOUND, value=float("inf"))
    store.put("tiny", endless)
    assert store.all()["tiny"][FOUND.metric] == endless


def test_reading_results_needs_no_torch():
    program = (
        "import sys; import gqaconvert.evaluation.results;"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
