"""Documents: what can be read, in which order, and what is refused where."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gqaconvert.bundled.text import bundled_documents
from gqaconvert.errors import GqaconvertError, UsageError
from gqaconvert.settings.uptrain import DatasetSettings
from gqaconvert.training import documents
from gqaconvert.training.documents import open_documents
from gqaconvert.training.mixture import Mixture
from gqaconvert.training.order import permutation
from gqaconvert.training.sources import OrderedSource


def _all(path, **settings):
    opened = open_documents(DatasetSettings(path=str(path), **settings))
    return [
        "".join(opened.read(number, piece) for piece in range(opened.num_pieces(number)))
        for number in range(len(opened))
    ]


def _table(path, rows, name="text"):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({name: rows, "n": list(range(len(rows)))}), path)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def test_bundled_text_is_the_training_split():
    assert _all("bundled") == [each.text for each in bundled_documents("train")]


def test_folder_holds_all_kinds_and_hides_what_is_hidden(tmp_path):
    (tmp_path / "b.txt").write_bytes("naïve\r\nline".encode())
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.md").write_text("deep")
    (tmp_path / "in" / "c.jsonl").write_text('{"text": "one"}\n\n{"text": "two\u2028"}')
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "d.txt").write_text("hidden")
    (tmp_path / "e.csv").write_text("other")
    _table(tmp_path / "f[1].parquet", ["three", None])
    assert _all(tmp_path) == ["naïve\nline", "deep", "one", "", "two\u2028", "three", ""]
    assert _all(tmp_path / "**" / "*.jsonl") == ["one", "", "two\u2028"]
    assert _all(tmp_path / "b.txt") == ["naïve\nline"]


def test_field_and_messages_choose_what_is_read(tmp_path):
    chat = [{"role": "user", "content": "Hi"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": "x", "talk": chat}) + "\n")
    assert _all(tmp_path / "a.jsonl", field="body") == ["x"]
    opened = open_documents(DatasetSettings(path=str(tmp_path / "a.jsonl"), messages="talk"))
    assert opened.read(0, 0) == chat
    _table(tmp_path / "a.parquet", [chat], "talk")
    opened = open_documents(DatasetSettings(path=str(tmp_path / "a.parquet"), messages="talk"))
    assert opened.read(0, 0) == chat


def test_data_set_by_name_is_read_from_its_training_split(tmp_path):
    for split in ("test", "train"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"text": f"of {split}"}) + "\n")
    assert _all(f"dataset:{tmp_path}") == ["of train"]
    assert _all(f"dataset:{tmp_path}:default:test") == ["of test"]


def test_rows_are_named_by_file_and_number(tmp_path):
    _table(tmp_path / "a.parquet", ["x", "y"])
    _table(tmp_path / "b.parquet", ["z"])
    (tmp_path / "c.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n')
    opened = open_documents(DatasetSettings(path=str(tmp_path)))
    assert [opened.at(number).removeprefix(f"{tmp_path}/") for number in range(len(opened))] == [
        "c.jsonl line 1",
        "c.jsonl line 2",
        "a.parquet row 1",
        "a.parquet row 2",
        "b.parquet row 1",
    ]


@given(
    st.lists(st.sampled_from(["a", "é", "終", "😀", "\n", "word "]), max_size=80),
    st.integers(8, 40),
)
def test_large_files_are_read_in_pieces_that_add_up(tmp_path_factory, parts, size):
    path = tmp_path_factory.mktemp("large") / "a.txt"
    path.write_text("".join(parts), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE_BYTES", size)
        patch.setattr(documents, "_LINE_END_BYTES", 7)
        opened = open_documents(DatasetSettings(path=str(path)))
        pieces = [opened.read(0, piece) for piece in range(opened.num_pieces(0))]
    assert "".join(pieces) == "".join(parts)
    assert len(pieces) == max(1, -(-path.stat().st_size // size))
    assert all(len(piece.encode()) <= size + 7 for piece in pieces)


def test_pieces_end_with_a_line_where_one_ends_soon(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a line of some words\n" * 40_000)
    opened = open_documents(DatasetSettings(path=str(path)))
    assert opened.num_pieces(0) == 4
    assert all(opened.read(0, piece).endswith("words\n") for piece in range(4))


@pytest.mark.parametrize(
    ("name", "content", "message", "place"),
    [
        ("a.txt", b"one\ntwo \xff\n", "not UTF-8", "a.txt line 2"),
        ("a.jsonl", b'{"text": "x"}\n{"txt": "x"}\n', "no string called 'text'", "line 2"),
        ("a.jsonl", b'{"text": "x"}\n{"text": null}\n', "no string called 'text'", "line 2"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text"', "not JSON", "line 3"),
        ("a.jsonl", b'{"text": "\xff"}\n', "not UTF-8", "line 1"),
        ("a.parquet", b"PAR", "not a parquet file", "a.parquet"),
        ("a.jsonl", b"", "no documents", "a.jsonl"),
        ("a.csv", b"x", "no .txt, .md, .jsonl or .parquet file", "a.csv"),
    ],
)
def test_bad_files_are_refused(tmp_path, name, content, message, place):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message) as refusal:
        _all(tmp_path / name)
    assert place in str(refusal.value.at)


@pytest.mark.parametrize("row", ['{"talk": "Hi"}', '{"talk": [{"content": "Hi"}]}', "[]"])
def test_rows_that_are_no_chats_are_refused(tmp_path, row):
    (tmp_path / "a.jsonl").write_text(row + "\n")
    with pytest.raises(UsageError, match="no list of messages called 'talk'") as refusal:
        _all(tmp_path / "a.jsonl", messages="talk")
    assert "line 1" in str(refusal.value.at)


def test_text_holds_no_chats(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    for path in (tmp_path / "a.txt", "bundled"):
        with pytest.raises(UsageError, match="holds no chats"):
            open_documents(DatasetSettings(path=str(path), messages="messages"))


def test_damaged_pages_of_a_table_are_refused(tmp_path):
    _table(tmp_path / "a.parquet", ["some text"] * 2000)
    content = bytearray((tmp_path / "a.parquet").read_bytes())
    content[4:200] = bytes(196)
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(GqaconvertError, match="datasets cannot load it"):
        open_documents(DatasetSettings(path=str(tmp_path)))


def test_missing_column_and_missing_files_are_refused(tmp_path):
    _table(tmp_path / "a.parquet", ["x"], "body")
    with pytest.raises(UsageError, match="no column 'text' among body, n"):
        open_documents(DatasetSettings(path=str(tmp_path)))
    with pytest.raises(UsageError, match="no such text"):
        open_documents(DatasetSettings(path=str(tmp_path / "*.txt")))


@given(st.integers(1, 200), st.integers(0, 5))
def test_order_is_a_permutation_that_changes_with_what_it_depends_on(size, seed):
    order = permutation(size, seed, 0).tolist()
    assert sorted(order) == list(range(size))
    assert order == permutation(size, seed, 0).tolist()
    if size > 20:
        assert order != permutation(size, seed, 1).tolist()


def test_order_is_the_same_for_ever():
    assert permutation(8, 0, 0).tolist() == [1, 0, 5, 6, 4, 2, 7, 3]


def test_first_places_are_taken_by_all_documents_alike():
    firsts = [int(permutation(10, seed, 0)[0]) for seed in range(2000)]
    assert all(140 < firsts.count(number) < 260 for number in range(10))


def test_sources_are_drawn_by_weight_and_read_through_before_again(tmp_path):
    for name, count in (("a", 7), ("b", 3)):
        rows = (json.dumps({"text": f"{name}{number}"}) for number in range(count))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    opened = [open_documents(DatasetSettings(path=str(tmp_path / f"{n}.jsonl"))) for n in "ab"]
    mixture = Mixture([OrderedSource(each, (0, 0, 0)) for each in opened], [1.0, 3.0], 5)
    drawn = [mixture.draw() for _ in range(2000)]
    assert 0.7 < sum(source for source, _ in drawn) / 2000 < 0.8
    texts = [[draw.read(0) for source, draw in drawn if source == wanted] for wanted in (0, 1)]
    for found, size in zip(texts, (7, 3), strict=True):
        epochs = [found[at : at + size] for at in range(0, len(found) - size, size)]
        assert all(len(set(epoch)) == size for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 3
