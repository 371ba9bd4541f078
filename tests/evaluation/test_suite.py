"""Suites: those that ship, and files of one's own."""

from __future__ import annotations

import pytest

from gqaconvert.errors import UsageError
from gqaconvert.evaluation.cache_kinds import cache_kind
from gqaconvert.evaluation.suite import load_suite, suite_files


def test_shipped_suites_load_and_name_real_things():
    assert {"quick", "standard"} <= set(suite_files())
    for name in suite_files():
        suite = load_suite(name)
        assert suite.context <= 1024  # what the bundled model reads
        for spec in suite.cache:
            cache_kind(spec)
    forms = {cache_kind(spec).name.partition(":")[0] for spec in load_suite("standard").cache}
    assert forms == {"dynamic", "static", "quantised", "sliding", "h2o", "snapkv", "sinks", "offloaded"}  # fmt: skip # noqa: E501
    assert load_suite("standard").needle is not None


def test_own_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("context: 64\nneedle: {lengths: [128]}\n")
    suite = load_suite(str(path))
    assert (suite.context, suite.windows) == (64, 16)
    assert suite.needle.lengths == (128,)


def test_all_faults_are_told_at_once_with_the_nearest_key(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("contxt: 64\nwindows: none\nneedle: {depth: 1}\n")
    with pytest.raises(UsageError) as refusal:
        load_suite(str(path))
    message = str(refusal.value)
    assert "contxt: no such key; context?" in message
    assert "windows: input should be a valid integer" in message
    assert "needle.depth: no such key" in message
    assert refusal.value.at == str(path)


@pytest.mark.parametrize("content", ["a: [", "- 1\n", ""])
def test_no_mapping_is_refused(tmp_path, content):
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(UsageError):
        load_suite(str(path))


def test_unknown_suite_names_those_there_are():
    with pytest.raises(UsageError, match="no suite 'quik'") as refusal:
        load_suite("quik")
    assert "quick, standard" in str(refusal.value.remedy)
