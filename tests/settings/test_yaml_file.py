"""YAML: what is a number and what a word, where each key is, what is refused."""

from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gqaconvert.errors import UsageError
from gqaconvert.settings.yaml_file import parse_yaml, read_yaml, write_yaml


def value_of(text: str) -> object:
    content = parse_yaml(text, at="here")
    assert not content.faults
    return content.value


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("2e12", 2e12),
        ("2.0e12", 2e12),
        ("1E-4", 1e-4),
        (".5", 0.5),
        ("-3.", -3.0),
        ("17", 17),
        ("1_000_000", 1_000_000),
        ("012", 12),  # no octal
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
    ],
)
def test_numbers_and_the_like(written, meant):
    found = value_of(f"a: {written}")["a"]
    assert found == meant
    assert type(found) is type(meant)


@pytest.mark.parametrize(
    "word",
    ["no", "off", "yes", "12:30", "2024-01-01", "0x1f", "1__0", "e5", "none", "1e", "'2e12'"],
)
def test_words_stay_words(word):
    assert value_of(f"a: {word}") == {"a": word.strip("'")}


def test_every_key_and_element_has_its_line():
    content = parse_yaml("a:\n  b: 1\n  c:\n    - x: 1\n    -\n      y: 2\nd: {e: 1}\n", at="here")
    assert content.value == {"a": {"b": 1, "c": [{"x": 1}, {"y": 2}]}, "d": {"e": 1}}
    assert content.lines[("a",)] == 1
    assert content.lines[("a", "b")] == 2
    assert content.lines[("a", "c")] == 3
    assert content.lines[("a", "c", 0, "x")] == 4
    assert content.lines[("a", "c", 1, "y")] == 6
    assert content.lines[("d", "e")] == 7


def test_all_duplicates_are_found_with_both_lines():
    content = parse_yaml("a: 1\nb: {c: 1, c: 2}\na: 3\na: 4\n", at="here")
    assert list(map(str, content.faults)) == [
        "line 2: b.c: given twice, first on line 2",
        "line 3: a: given twice, first on line 1",
        "line 4: a: given twice, first on line 1",
    ]
    assert content.value == {"a": 1, "b": {"c": 1}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: [", "line 2: not YAML"),
        ("a: 1\n\tb: 2", "line 2: not YAML"),
        ("a: &x 1\nb: *x", "line 1: not YAML: anchors and aliases are not read"),
        ("a: *x", "line 1: not YAML: anchors"),
        ("a: 1\n---\nb: 1", "line 2: not YAML: but found another document"),
        ("a: \0", "not YAML: unacceptable character"),
        ("[" * 5000, "nested too deeply"),
    ],
)
def test_what_is_no_yaml_is_refused_with_its_line(text, says):
    with pytest.raises(UsageError) as refusal:
        parse_yaml(text, at="here")
    assert says in refusal.value.what
    assert refusal.value.at == "here"


@pytest.mark.parametrize(
    "text", ["a: !!python/name:os.system ''", "a: !mine {b: 1}", "? {b: 1}\n: 1"]
)
def test_tags_and_odd_keys_are_faults(text):
    (fault,) = parse_yaml(text, at="here").faults
    assert fault.place == "line 1"


def test_bytes_that_are_no_text_and_files_that_are_not_there(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"a: \xff\xfe\xfa")
    with pytest.raises(UsageError, match="not YAML"):
        read_yaml(path)
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_yaml(tmp_path / "y.yaml")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_yaml(tmp_path)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**15), 10**15)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Co"]), max_size=12)
    | st.sampled_from(["2e12", "no", "1_0", "12:30", "~", "0x1f", "null", " a", "a: b", "1."]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text("abcxyz", min_size=1), plain, max_size=4))
def test_what_is_written_reads_back_here_and_elsewhere(value):
    text = write_yaml(value)
    found = parse_yaml(text, at="here")
    assert found.value == value or (not value and found.value == {})
    assert not found.faults
    if "e" not in text:  # YAML 1.1 wants a point in 2e12
        assert yaml.safe_load(text) == value


def test_other_readers_of_yaml_are_left_alone():
    assert yaml.safe_load("a: 2e12\nb: no") == {"a": "2e12", "b": False}
    assert math.isclose(value_of("a: 2e12")["a"], 2e12)
